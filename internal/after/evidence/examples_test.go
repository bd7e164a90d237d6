package evidence

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
)

var update = flag.Bool("update", false, "write the facts of the examples anew")

const (
	exampleFile = "testdata/examples.txtar"
	factsFile   = "testdata/examples.facts"
)

// examples returns the texts of the archive, by name.
func examples(t testing.TB) []txtar.File {
	t.Helper()
	archive, err := txtar.ParseFile(exampleFile)
	if err != nil {
		t.Fatal(err)
	}
	return archive.Files
}

// readText reads a text.
func readText(t testing.TB, name string, text []byte) *Source {
	t.Helper()
	source, err := Read(name, bytes.NewReader(text))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return source
}

// factsOf writes the facts of a source, one a line.
func factsOf(s *Source, lines bool) string {
	var b strings.Builder
	for _, f := range s.Findings {
		if lines {
			fmt.Fprintf(&b, "%d ", f.Number)
		}
		if f.Rank != NoRank {
			fmt.Fprintf(&b, "rank %d ", f.Rank)
		}
		fmt.Fprintf(&b, "%T%+v\n", f.Fact, f.Fact)
	}
	return strings.ReplaceAll(b.String(), "evidence.", "")
}

// TestExamples holds the facts of every example against the golden file, and every pattern to an example.
func TestExamples(t *testing.T) {
	files := examples(t)
	var b strings.Builder
	for _, f := range files {
		s := readText(t, f.Name, f.Data)
		fmt.Fprintf(&b, "-- %s --\n%s\n%s", f.Name, s.Kind, factsOf(s, true))
	}
	if *update {
		if err := os.WriteFile(factsFile, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(factsFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("facts differ (-want +got); -update writes them anew:\n%s", diff)
	}
}

// TestEveryPatternHasAnExample: the pattern matches its example before any other.
func TestEveryPatternHasAnExample(t *testing.T) {
	files := examples(t)
	x := patternIndex()
	for _, p := range x.patterns {
		found := false
		for _, f := range files {
			if f.Name != p.name && !strings.HasPrefix(f.Name, p.name+": ") {
				continue
			}
			found = true
			matched := false
			for line := range strings.Lines(string(f.Data)) {
				text := clean(strings.TrimRight(line, "\n"), 1)
				var hits []int
				x.find([]byte(text.string), &hits)
				for _, hit := range hits {
					m := x.patterns[hit].in(text.string)
					if m != nil && (!x.patterns[hit].picky || x.patterns[hit].fact(m) != nil) {
						matched = matched || x.patterns[hit] == p
						break
					}
				}
			}
			joined := strings.ReplaceAll(string(f.Data), "\n", "")
			if !matched && !(p.wrapped && p.joined.MatchString(joined)) {
				t.Errorf("%s: its example %q is read by another pattern, or by none", p.name, f.Name)
			}
		}
		if !found {
			t.Errorf("%s has no example", p.name)
		}
	}
}
