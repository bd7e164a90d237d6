package report

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/after/explain"
)

// TestExplanationsOfTheCorpusAreOneScreen explains every case of the corpus as people see it: 24 lines of 80 columns,
// which begin with the answer.
func TestExplanationsOfTheCorpusAreOneScreen(t *testing.T) {
	files, _ := filepath.Glob("../../after/explain/testdata/corpus/*/*.txtar")
	if len(files) < 900 {
		t.Fatalf("%d cases, expected 900 or more", len(files))
	}
	for _, file := range files {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var in explain.Inputs
		for _, f := range archive.Files {
			if f.Name == "expect.json" || f.Name == "make.json" {
				continue
			}
			if source, err := evidence.Read(f.Name, bytes.NewReader(f.Data)); err == nil {
				in.Sources = append(in.Sources, source)
			}
		}
		e := explain.Explain(in)
		text := ShortExplanationPage(e).text()
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		for _, line := range lines {
			if len([]rune(line)) > 80 {
				t.Errorf("%s: the line is too long: %q", file, line)
			}
		}
		if first, _, _ := strings.Cut(e.Cause.Text, " "); len(lines) > 24 || !strings.HasPrefix(text, first) {
			t.Errorf("%s: %d lines:\n%s", file, len(lines), text)
		}
	}
}
