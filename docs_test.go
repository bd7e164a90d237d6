package plimsoll

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/jdkato/prose/summarize"
	"github.com/jdkato/prose/tokenize"
)

const (
	meanWords = 17 // of the sentences of a document, at most
	mostWords = 40 // of any sentence
	leastEase = 50 // of a document, by Flesch: 60 to 70 is plain English, below 50 is difficult
)

var (
	notProse   = regexp.MustCompile("(?s)```.*?```|<!--.*?-->")
	noSentence = regexp.MustCompile(`^(\s*\||#|\s*$)`) // a row of a table, a heading or an empty line
	listItem   = regexp.MustCompile(`^\s*([*-]|\d+\.)\s`)
	link       = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	codeSpan   = regexp.MustCompile("`[^`]*`")
	// sentenceEnd is the end of a sentence and the first character of the next.
	sentenceEnd = regexp.MustCompile(`[.!?:;]\s+[A-Z*(]`)
)

// sentences returns the sentences of a Markdown document, with an X for every code
// span. Code blocks, tables and headings have none. A list item is a paragraph.
func sentences(markdown string) []string {
	var paragraphs []string
	open := false // whether the next line goes on with the last paragraph
	for line := range strings.Lines(notProse.ReplaceAllString(markdown, "")) {
		if noSentence.MatchString(line) {
			open = false
			continue
		}
		item := listItem.FindString(line)
		text := strings.TrimSpace(line[len(item):])
		if open && item == "" {
			paragraphs[len(paragraphs)-1] += " " + text
		} else {
			paragraphs = append(paragraphs, text)
		}
		open = true
	}
	var all []string
	for _, p := range paragraphs {
		p = link.ReplaceAllString(p, "$1")
		p = codeSpan.ReplaceAllString(p, "X")
		for _, end := range slices.Backward(sentenceEnd.FindAllStringIndex(p, -1)) {
			p = p[:end[0]+1] + "\n" + p[end[1]-1:]
		}
		all = append(all, strings.Split(p, "\n")...)
	}
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

// measure returns the mean number of words of the sentences, and the sentences
// that are too long.
func measure(sentences []string) (mean float64, long []string) {
	words := 0
	for _, s := range sentences {
		n := len(strings.Fields(s))
		words += n
		if n > mostWords {
			long = append(long, s)
		}
	}
	return float64(words) / float64(max(len(sentences), 1)), long
}

// readingEase returns Flesch's reading ease of sentences: 206.835 - 1.015 words a sentence - 84.6 syllables a word
// (Flesch, A New Readability Yardstick, 1948).
func readingEase(sentences []string) float64 {
	document := summarize.Document{
		Content:           strings.Join(sentences, "\n\n"),
		WordTokenizer:     wordTokenizer(),
		SentenceTokenizer: sentenceTokenizer(),
	}
	document.Initialize()
	return document.FleschReadingEase()
}

// The tokenizers are those of [summarize.NewDocument]. That of sentences reads what it has learned when it is made.
var (
	wordTokenizer     = sync.OnceValue(tokenize.NewWordBoundaryTokenizer)
	sentenceTokenizer = sync.OnceValue(tokenize.NewPunktSentenceTokenizer)
)

// TestDocsArePlain limits the length of the sentences and of the words of every document.
func TestDocsArePlain(t *testing.T) {
	documents := []string{"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}
	for _, folder := range []string{"docs", "experiments"} {
		err := filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
			if filepath.Ext(path) == ".md" {
				documents = append(documents, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range documents {
		t.Run(name, func(t *testing.T) {
			all := sentences(read(t, name))
			if len(all) == 0 {
				t.Fatal("no sentence was found")
			}
			mean, long := measure(all)
			if mean > meanWords {
				t.Errorf("%d sentences of %.1f words on average, at most %d are plain", len(all), mean, meanWords)
			}
			if ease := readingEase(all); ease < leastEase {
				t.Errorf("a reading ease of %.0f, at least %d is plain", ease, leastEase)
			}
			for _, s := range long {
				t.Errorf("a sentence of %d words, at most %d are plain: %s", len(strings.Fields(s)), mostWords, s)
			}
			for _, line := range wideProse(read(t, name)) {
				t.Errorf("line %d has more than %d columns", line, widestLine)
			}
		})
	}
}

// wideProse returns the numbers of lines that are too wide and are no code, table or heading.
func wideProse(markdown string) (wide []int) {
	inCode := false
	for i, line := range strings.Split(markdown, "\n") {
		trimmed := strings.TrimSpace(line)
		if strings.HasPrefix(trimmed, "```") {
			inCode = !inCode
		}
		isProse := !inCode && !strings.HasPrefix(line, "    ") && trimmed != "" &&
			!strings.ContainsAny(trimmed[:1], "|#<`!")
		if isProse && utf8.RuneCountInString(line) > widestLine {
			wide = append(wide, i+1)
		}
	}
	return wide
}

func TestWideProse(t *testing.T) {
	words := strings.Repeat("word ", 25)
	for _, c := range []struct {
		name, markdown string
		want           []int
	}{
		{"prose", "short\n" + words, []int{2}},
		{"a list item", "* " + words, []int{1}},
		{"code", "```\n" + words + "\n```\n\n    " + words, nil},
		{"tables and headings", "| " + words + "|\n# " + words, nil},
	} {
		if got := wideProse(c.markdown); !slices.Equal(got, c.want) {
			t.Errorf("%s: lines %d, want %d", c.name, got, c.want)
		}
	}
}

func TestDocsSentences(t *testing.T) {
	for _, c := range []struct {
		name, markdown string
		want           []string
	}{
		{"none", "", nil},
		{"two", "One thought.\nAnother\nthought!\n", []string{"One thought.", "Another thought!"}},
		{
			"not before a small letter", "It takes 1.5 GiB, e.g. here; no more.",
			[]string{"It takes 1.5 GiB, e.g. here; no more."},
		},
		{
			"every mark", "Why? So: But; Yes! It is. (Or not.)",
			[]string{"Why?", "So:", "But;", "Yes!", "It is.", "(Or not.)"},
		},
		{"code spans", "It ends. `plimsoll run. Now` starts.", []string{"It ends.", "X starts."}},
		{"links", "See [the docs. Or not](a.md).", []string{"See the docs.", "Or not."}},
		{"paragraphs", "without an end\n\nand another", []string{"without an end", "and another"}},
		{"list items", "These:\n* one\n  line\n- two\n3. three", []string{"These:", "one line", "two", "three"}},
		{"emphasis", "It ends. **Bold** begins.", []string{"It ends.", "**Bold** begins."}},
		{"headings", "# A heading\ntext", []string{"text"}},
		{"tables", "before\n| a cell. Another |\n|---|\nafter", []string{"before", "after"}},
		{"code blocks", "before\n\n```console\n$ plimsoll. No\n```\n\nafter", []string{"before", "after"}},
		{"comments", "before <!-- a\ncomment --> after", []string{"before  after"}},
	} {
		if got := sentences(c.markdown); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// TestDocsMeasure shows documents that TestDocsArePlain refuses.
func TestDocsMeasure(t *testing.T) {
	words := func(n int) string { return "A" + strings.Repeat(" b", n-1) + ". " }
	for _, c := range []struct {
		name, markdown string
		mean           float64
		long           int
	}{
		{"at the limits", words(17), 17, 0},
		{"mean too long", words(17) + words(18), 17.5, 0},
		{"longest sentence", words(40) + words(2), 21, 0},
		{"sentence too long", words(41) + words(1) + words(3), 15, 1},
		{"a list does not join", strings.Repeat("* "+words(9)+"\n", 6), 9, 0},
		{"no end is one sentence", strings.Repeat("nine words and no end in them at all\n", 5), 45, 1},
		{"nothing", "", 0, 0},
	} {
		if mean, long := measure(sentences(c.markdown)); mean != c.mean || len(long) != c.long {
			t.Errorf("%s: mean %g, %d too long, want %g and %d", c.name, mean, len(long), c.mean, c.long)
		}
	}
}

// TestReadingEase holds the measure against texts that are known to be easy and difficult.
func TestReadingEase(t *testing.T) {
	easy := readingEase([]string{"The cat sat on the mat.", "It was a warm day, and the sun shone."})
	hard := readingEase([]string{"Instrumentation of heterogeneous infrastructure necessitates prioritization.",
		"Characterization of allocation irregularities facilitates diagnosability."})
	if easy < 90 || hard > leastEase {
		t.Errorf("an easy text has %.0f, a difficult one %.0f", easy, hard)
	}
}
