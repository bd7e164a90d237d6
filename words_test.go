package plimsoll

import (
	"go/ast"
	"go/token"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// longestSentence is in words, as in the documents.
const longestSentence = 40

// unclear are words and turns that a message must not have, and what to write instead.
var unclear = []struct {
	words   *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`(?i)\bwas expected, and\b|\bwas expected$`), `"expected A, found B"`},
	{regexp.MustCompile(`(?i)\bcannot be found out\b|\bis not known from\b`), `who cannot find out what`},
	{regexp.MustCompile(`(?i)\bcould not be had\b|\bfor want of\b`), `"had no memory for", "OOM killer"`},
	{regexp.MustCompile(`(?i)\bbroken off\b`), `"interrupted", "unfinished"`},
	{regexp.MustCompile(`(?i)\bis there twice\b`), `"is listed twice"`},
	{regexp.MustCompile(`(?i)\bas nobody\b|\bwhich none\b|\bwhoever\b|\bthat which\b`), `the actor's name`},
	{regexp.MustCompile(`(?i)\bis said to\b|\b(was|were) said\b`), `who says it`},
	{regexp.MustCompile(`(?i)\btook along\b`), `"also ended"`},
	{regexp.MustCompile(`(?i)\btrains? otherwise\b`), `"changes the training"`},
	{regexp.MustCompile(`(?i)\bends before, in\b`), `"would stop earlier, in"`},
	{regexp.MustCompile(`(?i)\bgive yours to\b|\btakes it, with\b`), `"set yours with", "give it to"`},
	{regexp.MustCompile(`(?i); farthest:`), `"largest difference"`},
	{regexp.MustCompile(`(?i)\bof them in part\b`), `what they have`},
	{regexp.MustCompile(`(?i)\ban? person did it\b|\bby itself, and none\b`), `who sent the signal`},
	{regexp.MustCompile(`(?i)\bmemory came at\b`), `who gave the memory`},
	{regexp.MustCompile(`(?i)\bhalf added\b`), `"an accumulation is half done"`},
	{regexp.MustCompile(`(?i)\bthere is no choice\b|\bin the way\b`), `what was reached, or is not needed`},
}

// TestMessagesAreClear reads all strings of the program that have several words. Their
// sentences are short, and they have no words that stop a reader.
func TestMessagesAreClear(t *testing.T) {
	found := 0
	sentence := regexp.MustCompile(`[.;:!?]\s|\n`)
	for _, source := range goFiles(t) {
		if source.isTest() {
			continue
		}
		ast.Inspect(source.tree, func(n ast.Node) bool {
			expression, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text, ok := joined(expression)
			if !ok {
				return true
			}
			if strings.Count(text, " ") < 2 {
				return false
			}
			found++
			for _, s := range sentence.Split(text, -1) {
				if words := len(strings.Fields(s)); words > longestSentence {
					t.Errorf("%v: a sentence has %d words, expected at most %d: %s", positions.Position(n.Pos()), words,
						longestSentence, s)
				}
			}
			for _, u := range unclear {
				if words := u.words.FindString(text); words != "" {
					t.Errorf("%v: %q is unclear: write %s", positions.Position(n.Pos()), words, u.instead)
				}
			}
			return false
		})
	}
	if found < 1000 {
		t.Errorf("found %d messages, expected 1000 or more", found)
	}
}

// joined returns a string that is written in several literals. Other operands leave "…".
func joined(e ast.Expr) (text string, ok bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			text, err := strconv.Unquote(e.Value)
			return text, err == nil
		}
	case *ast.BinaryExpr:
		left, isLeft := joined(e.X)
		right, isRight := joined(e.Y)
		if e.Op != token.ADD || !isLeft && !isRight {
			return "", false
		}
		return left + right, true
	case *ast.ParenExpr:
		return joined(e.X)
	}
	return "…", false
}
