//go:build linux

package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/csv"
	"encoding/json"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/pflag"
)

// hostileTexts act on a terminal, hide, turn the direction of a text, are a formula in a spreadsheet, and are a person,
// a page, a picture and an issue in Markdown and HTML.
var hostileTexts = []string{
	"\x1b]0;title\x07\x1b[31m\u009b31m\u0085\x7f\r",
	"\u202e\u2066\u200b\u200d\u2028\u2029\u00ad\ufeff\U000e0041",
	"=cmd|' /C calc'!A0\u200f\x1b[2J",
	"\u202a <img src=x onerror=alert(1)> ![x](https://evil.test) @everyone #123 </script><script>alert(1)</script>",
	"title\n" + forgedVerdict + " of it\r",
}

// forgedVerdict is a line that only plimsoll may say.
const forgedVerdict = "fits: all"

// hostileRuns is how many documents each command line reads in each format.
func hostileRuns() int {
	if testing.Short() {
		return 2
	}
	return 40
}

// TestHostileDocuments puts hostile texts into the names and values of documents, into their lines and the names of
// their files. No verb shows any of them as it is, in any format.
func TestHostileDocuments(t *testing.T) {
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	made, ran, reached := madeDocuments(t), 0, 0
	formats := strings.NewReplacer(" --json", "", " --markdown", "", " --html OUT", "")
	for _, m := range mutatedLines {
		if strings.Contains(m.line, "--apply") { // copies files of the user as they are
			continue
		}
		m.line = formats.Replace(m.line)
		verb, _, err := rootCommand().Find(strings.Fields(m.line))
		if err != nil {
			t.Fatal(err)
		}
		for _, format := range []string{"", "markdown", "json", htmlFormat} {
			h := hostileReader{mutated: m, format: format, folder: t.TempDir()}
			if name := h.flag(); name != "" && verb.Flags().Lookup(name) == nil {
				continue
			}
			t.Run(format+" "+strings.ReplaceAll(m.line, "/", "_"), func(t *testing.T) { h.run(t, made) })
			ran, reached = ran+h.ran, reached+h.reached
		}
	}
	t.Logf("%d documents were read, and hostile texts reached %d results", ran, reached)
	if reached == 0 {
		t.Error("no result has anything of a hostile text: the test looks at nothing")
	}
}

// hostileReader is a command line with a format that reads hostile documents.
type hostileReader struct {
	mutated
	format, folder string
	ran, reached   int
}

func (h *hostileReader) run(t *testing.T, made string) {
	list, hash := h.sources(t, made), fnv.New64a()
	_, _ = hash.Write([]byte(h.line))
	for i := range hostileRuns() {
		random := rand.New(rand.NewPCG(hash.Sum64(), uint64(i)))
		s := list[random.IntN(len(list))]
		path, own, text := s.copied(t, h.folder)
		path = filepath.Join(filepath.Dir(path), [2]string{"", "\x1b[31m\u202e\u009b=name"}[i%2]+filepath.Base(path))
		if err := os.WriteFile(path, spoil(random, text), 0o600); err != nil {
			t.Fatal(err)
		}
		h.read(t, path, h.arguments(t, made, path, own, filepath.Join(h.folder, "out")))
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
}

// read runs the command line, and checks what it shows and what it writes for others to see.
func (h *hostileReader) read(t *testing.T, path string, arguments []string) {
	t.Helper()
	out := filepath.Join(h.folder, "out")
	if err := os.RemoveAll(out); err != nil {
		t.Fatal(err)
	}
	command := parsedCommand(t, arguments)
	if name := h.flag(); name != "" {
		value := h.format
		if name == htmlFormat {
			value = out
		}
		if err := command.Flags().Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	var stdout, stderr bytes.Buffer
	command.Root().SetOut(&stdout)
	command.Root().SetErr(&stderr)
	ended(command, runsParsed(command))
	h.ran++
	written, err := os.ReadFile(out) // is missing, or a folder, with most verbs
	if err != nil {
		written = nil
	}
	of := h.line + " --format " + h.format + " with " + strconv.Quote(path)
	checkShown(t, of+": stderr", stderr.String())
	if strings.Contains(stderr.String(), "\n"+forgedVerdict) {
		t.Errorf("%s: stderr has a line that a name has made: %s", of, stderr.String())
	}
	h.check(t, of+": stdout", stdout.Bytes())
	h.check(t, of+": the file", written)
	if reaches.Match(slices.Concat(stdout.Bytes(), stderr.Bytes(), written)) {
		h.reached++
	}
}

// flag is the flag that asks for the format, or "".
func (h *hostileReader) flag() string {
	switch h.format {
	case "", htmlFormat:
		return h.format
	}
	return "format"
}

var (
	// reaches finds the parts of hostile texts that may be shown.
	reaches = regexp.MustCompile(`title|cmd\||evil\.test|=name`)
	// binaryFormats are not for people: names in them are looked for as they are.
	binaryFormats = regexp.MustCompile(`--to (perfetto|pprof|dcp|torch|deepspeed|megatron)`)
	// marked are results in which a tag is more than a text, and tag is one that no backslash makes a text.
	marked = regexp.MustCompile(`--to html.*: |--format html .*: the file$|--format markdown .*: stdout$`)
	tag    = regexp.MustCompile(`(?:^|[^\\])<(?:img src=x|script>alert)`)
)

// check looks at a result.
func (h *hostileReader) check(t *testing.T, of string, text []byte) {
	t.Helper()
	if bytes.HasPrefix(text, []byte{0x1f, 0x8b}) {
		text = unzipped(t, text)
	}
	if !binaryFormats.MatchString(h.line) {
		checkShown(t, of, string(text))
	}
	if at := tag.FindIndex(text); at != nil && marked.MatchString(of) {
		t.Errorf("%s has a tag: %.300q", of, text[max(0, at[0]-100):])
	}
	for _, raw := range []string{"\x1b]0;", "\x1b[", "\u202e", "\u202a", "\u2066", "\u200b", "\u009b31m"} {
		if bytes.Contains(text, []byte(raw)) {
			t.Errorf("%s has %q: %.300q", of, raw, near(string(text), raw))
		}
	}
	if h.format == "" && bytes.Contains(text, []byte("\n"+forgedVerdict)) {
		t.Errorf("%s has a line that a name has made: %.300q", of, near(string(text), forgedVerdict))
	}
	if strings.Contains(h.line, "--to csv") {
		checkNoFormula(t, of, text)
	}
}

// checkShown refuses characters that have no picture. Only tabs and line breaks may be there.
func checkShown(t *testing.T, of, text string) {
	t.Helper()
	for i, r := range text {
		if r == utf8.RuneError || r != '\n' && r != '\t' &&
			unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) {
			t.Errorf("%s has %U: %.300q", of, r, text[max(0, i-100):min(len(text), i+100)])
			return
		}
	}
}

// near returns what stands around the first occurrence of a text.
func near(text, part string) string {
	at := strings.Index(text, part)
	return text[max(0, at-100):min(len(text), at+100)]
}

func checkNoFormula(t *testing.T, of string, text []byte) {
	t.Helper()
	rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil {
		t.Errorf("%s: %v", of, err)
	}
	for _, cell := range slices.Concat(rows...) {
		if _, err := strconv.ParseFloat(cell, 64); err != nil && strings.IndexAny(cell, "=+-@") == 0 {
			t.Errorf("%s has the formula %q", of, cell)
		}
	}
}

func unzipped(t *testing.T, text []byte) []byte {
	t.Helper()
	reader, err := gzip.NewReader(bytes.NewReader(text))
	if err == nil {
		text, err = io.ReadAll(reader)
	}
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// spoil puts a hostile text into a document: into some of its values and keys, and between the words of its lines. In
// documents that are no text it takes the place of as many letters.
func spoil(random *rand.Rand, text []byte) []byte {
	text = slices.Clone(text)
	if bytes.IndexByte(text, 0) >= 0 {
		return spoilBinary(random, text)
	}
	for range 1 + random.IntN(4) {
		hostile := hostileTexts[random.IntN(len(hostileTexts))]
		quoted := quotes.FindAllIndex(text, -1)
		if len(quoted) > 0 && random.IntN(8) > 0 {
			at := quoted[random.IntN(len(quoted))]
			text = slices.Insert(text, at[0]+1, inJSON(hostile)...)
			continue
		}
		places := blanks.FindAllIndex(text, -1)
		if len(places) == 0 {
			return append(text, hostile...)
		}
		text = slices.Insert(text, places[random.IntN(len(places))][0]+1, []byte(hostile)...)
	}
	return text
}

var (
	quotes  = regexp.MustCompile(`"(?:[^"\\\n]|\\.)*"`)
	blanks  = regexp.MustCompile(`[ \n]`)
	letters = regexp.MustCompile(`[a-z_/.]{8,}`)
)

// spoilBinary replaces letters, so that all lengths stay as they are.
func spoilBinary(random *rand.Rand, text []byte) []byte {
	found := letters.FindAllIndex(text, -1)
	if len(found) == 0 {
		return text
	}
	for range 1 + random.IntN(8) {
		at := found[random.IntN(len(found))]
		hostile := hostileTexts[random.IntN(len(hostileTexts))]
		for !utf8.ValidString(hostile[:min(len(hostile), at[1]-at[0])]) {
			hostile = hostile[1:]
		}
		copy(text[at[0]:at[1]], hostile)
	}
	return text
}

// inJSON returns a text as it is within a string of JSON.
func inJSON(text string) []byte {
	quoted, err := json.Marshal(text)
	if err != nil {
		panic(err) // a string
	}
	return quoted[1 : len(quoted)-1]
}

// TestHostileProfileOfAService has a service read mutated and hostile host profiles when a trainer opens its state. The
// service does without a profile that it cannot read, shows nothing of it as it is, and goes on.
func TestHostileProfileOfAService(t *testing.T) {
	path := filepath.Join(t.TempDir(), "host.json")
	makeHostProfile(t, path)
	text := readSource(t, path)
	refused := 0
	for i := range hostileRuns() {
		random := rand.New(rand.NewPCG(11, uint64(i)))
		changed := [2][]byte{mutate(random, text), spoil(random, text)}[i%2]
		if err := os.WriteFile(path, changed, 0o600); err != nil {
			t.Fatal(err)
		}
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			var stderr bytes.Buffer
			t.Cleanup(func() { // when the service has ended
				checkShown(t, "serve", stderr.String())
				if strings.Contains(stderr.String(), "goroutine ") {
					t.Error(stderr.String())
				}
				if strings.Contains(stderr.String(), "the host profile is not used") {
					refused++
				}
			})
			_, open := servingTo(t, &stderr, "--host-profile", path)
			if err := open().Close(); err != nil {
				t.Error(err)
			}
		})
	}
	if refused == 0 {
		t.Error("the service has read no profile that it refuses")
	}
}

// TestHostileArguments gives every verb hostile texts as values of its flags, and as an argument. What they make a verb
// say shows none of them as it is.
func TestHostileArguments(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir()) // for what a verb writes to a name that it takes
	texts := hostileTexts
	if testing.Short() {
		texts = texts[:2]
	}
	ran := 0
	for _, c := range verbs(rootCommand()) {
		verb, _ := strings.CutPrefix(c.CommandPath(), "plimsoll ")
		check := func(t *testing.T, flag string, arguments func(text string) []string) {
			t.Helper()
			reached := cmp.Or(reaching[verb+" "+flag], reaching[verb])
			reached = strings.NewReplacer("../..", root, "OUT", filepath.Join(t.TempDir(), "out")).Replace(reached)
			for _, text := range texts {
				line := slices.Concat(strings.Fields(verb), arguments(text), strings.Fields(reached))
				stdout, stderr, code := runs(line...)
				if ran++; code == exitInternal {
					t.Errorf("%q: exit code %d, %s", line, code, stderr)
				}
				checkShown(t, strconv.Quote(strings.Join(line, " ")), stdout+stderr)
				if strings.Contains("\n"+stdout+"\n"+stderr, "\n"+forgedVerdict) {
					t.Errorf("%q makes a line of its own: %s%s", line, stdout, stderr)
				}
			}
		}
		t.Run(verb, func(t *testing.T) { check(t, "", func(text string) []string { return []string{text} }) })
		c.Flags().VisitAll(func(f *pflag.Flag) {
			t.Run(verb+" "+f.Name, func(t *testing.T) {
				check(t, f.Name, func(text string) []string { return []string{"--" + f.Name + "=" + text} })
			})
		})
	}
	if ran < 500 {
		t.Errorf("only %d command lines ran", ran)
	}
}

// hostileName is the name of a program, a process and a parameter.
const hostileName = "=h\x1b]0;title\x07\u202e\u009b31m\u200b@everyone"

// TestHostileProcess watches and runs a program with a hostile name that prints hostile lines, and reads its recording.
func TestHostileProcess(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	at := func(name string) string { return filepath.Join(folder, name) }
	script := "#!/bin/sh\nprintf '%s\\n' 'torch.OutOfMemoryError: CUDA out of memory. " + hostileTexts[0] +
		"'\nexit 3\n"
	if err := os.WriteFile(at(hostileName), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	run := exec.Command(program(t), "run", "--nproc", "1", "--record", at("run.jsonl"), "--report", at("report.json"),
		"--", at(hostileName))
	said, err := run.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(said)
	if err != nil {
		t.Fatal(err)
	}
	if err := run.Wait(); run.ProcessState.ExitCode() != 3 {
		t.Fatalf("%v\n%s", err, text)
	}
	checkShown(t, "the messages of run", string(text))
	for _, name := range []string{"run.jsonl", "report.json"} {
		text, err := os.ReadFile(at(name))
		if err != nil || !bytes.Contains(text, []byte("title")) {
			t.Fatalf("%s: %v, or it does not name the program", name, err)
		}
		checkShown(t, name, string(text))
	}
	for _, line := range []string{"explain", "compare", "export --to html", "export --to csv", "export --to prometheus",
		"watch --once --replay", "explain --json", "explain --markdown", "compare --json", "compare --markdown"} {
		stdout, stderr, _ := runs(append(strings.Fields(line), at("run.jsonl"))...)
		checkShown(t, line, stdout+stderr)
	}
}

// TestHostileTitle watches a process that has given itself a hostile title.
func TestHostileTitle(t *testing.T) {
	t.Parallel()
	sleeping := exec.Command("sleep", "600")
	sleeping.Args[0] = hostileName
	if err := sleeping.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = sleeping.Process.Kill()
		_ = sleeping.Wait()
	}()
	for _, format := range []string{"text", "markdown", "json"} {
		stdout, stderr, code := runs("watch", strconv.Itoa(sleeping.Process.Pid), "--once", "--format", format)
		if code != exitDone {
			t.Errorf("exit code %d, %s", code, stderr)
		}
		checkShown(t, format, stdout+stderr)
	}
}

// TestHostileParameters inspects, verifies and converts a checkpoint whose parameters have hostile names.
func TestHostileParameters(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), hostileName)
	rename := "model.norm.weight=" + strings.TrimPrefix(hostileName, "=")
	_, said, code := runs("checkpoint", "convert", "../../examples/checkpoints", folder, "--rename", rename)
	if code != exitDone {
		t.Fatal(said)
	}
	for _, line := range []string{"inspect", "inspect --json", "inspect --markdown", "verify"} {
		stdout, stderr, code := runs(append(append([]string{"checkpoint"}, strings.Fields(line)...), folder)...)
		if code != exitDone || !strings.Contains(stdout, "title") {
			t.Errorf("%s: exit code %d, %s", line, code, stderr)
		}
		checkShown(t, line, stdout+stderr)
	}
	for _, arguments := range [][]string{
		{"--rename", strings.TrimPrefix(hostileName, "=") + "=model.embed_tokens.weight"}, {"--rename", hostileName},
		{"--rename", hostileName + "=\x1b[2J"}, {"--to", "megatron", "--like", "../../examples/megatron"},
	} {
		stdout, stderr, code := runs(append([]string{"checkpoint", "convert", folder, filepath.Join(t.TempDir(), "o")},
			arguments...)...)
		if code != exitInput {
			t.Errorf("%q: exit code %d", arguments, code)
		}
		checkShown(t, strings.Join(arguments, " "), stdout+stderr)
	}
}
