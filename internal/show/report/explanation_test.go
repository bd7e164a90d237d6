package report

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/after/explain"
)

// TestShortExplanation: whatever an explanation has, its short form fits on a terminal. It begins with the answer, and
// says where the rest is.
func TestShortExplanation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		words := func(name string) string {
			return strings.TrimSpace(strings.Repeat("some words of it ", rapid.IntRange(1, 40).Draw(t, name)))
		}
		e := &explain.Explanation{Cause: explain.Cause{Resource: explain.GPU, Text: "Rank 3 ran out of GPU memory"},
			Confidence: explain.Certain}
		for i := range rapid.IntRange(0, 9).Draw(t, "items") {
			e.Evidence = append(e.Evidence, explain.Evidence{File: "log", Line: i, Says: words("says")})
			e.Notes = append(e.Notes, words("note"))
			e.Collect = append(e.Collect, explain.Collect{Command: fmt.Sprint("dmesg ", i), Why: words("why")})
		}
		whole, short := ExplanationPage(e).text(), ShortExplanationPage(e).text()
		if n := strings.Count(short, "\n"); n > 24 {
			t.Fatalf("%d lines:\n%s", n, short)
		}
		for line := range strings.Lines(short) {
			if len(strings.TrimRight(line, "\n")) > 80 {
				t.Fatalf("the line is too long: %q", line)
			}
		}
		if !strings.HasPrefix(short, e.Cause.Text) || (short == whole) == strings.Contains(short, moreByLong) {
			t.Fatalf("short:\n%s\nwhole:\n%s", short, whole)
		}
		if len(e.Evidence) > 0 && !strings.Contains(short, "log: ") {
			t.Fatalf("no evidence is shown:\n%s", short)
		}
	})
}
