package evidence

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp/syntax"
	"slices"
	"testing"
)

// TestPatternsFindWhatTheirExpressionsFind over all lines of recorded failures, whole and cut.
func TestPatternsFindWhatTheirExpressionsFind(t *testing.T) {
	looked, matched := 0, 0
	check := func(line []byte) {
		var hits []int
		patternIndex().find(line, &hits)
		for _, hit := range hits {
			p := patternIndex().patterns[hit]
			looked++
			got, want := p.find(string(line)), p.compiled.FindStringSubmatchIndex(string(line))
			if matched += min(1, len(want)); !slices.Equal(got, want) {
				t.Errorf("%s: found at %v, want %v: %.300q", p.name, got, want, line)
			}
		}
	}
	folders := []string{"../../../examples", "../../../cmd/plimsoll/testdata/failures", "testdata",
		"../explain/testdata"}
	for _, folder := range folders {
		err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return err
			}
			text, err := os.ReadFile(path)
			for line := range bytes.Lines(text) {
				line = bytes.TrimSuffix(line[:min(len(line), longestMatched)], []byte("\n"))
				check(line)
				check(line[:len(line)*2/3])
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if t.Logf("%d texts, %d matches", looked, matched); matched < 1000 || looked-matched < 1000 {
		t.Error("too few texts match, or too few do not")
	}
}

// TestExpressionsAreFast: package regexp takes five times as long for an expression of more instructions.
func TestExpressionsAreFast(t *testing.T) {
	const most = 500
	for _, p := range patternIndex().patterns {
		parsed, err := syntax.Parse(p.expression, syntax.Perl)
		if err != nil {
			t.Fatal(err)
		}
		program, err := syntax.Compile(parsed.Simplify())
		if err != nil {
			t.Fatal(err)
		}
		if n := len(program.Inst); n > most {
			t.Errorf("%s has %d instructions, expected at most %d", p.name, n, most)
		}
	}
}
