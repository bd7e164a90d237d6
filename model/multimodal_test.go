package model

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestMultimodal compares multimodal models with the modules of transformers 5:
//
//	python3 testdata/parameters.py --held testdata/multimodal/*.json > testdata/multimodal.golden
func TestMultimodal(t *testing.T) {
	text, err := os.ReadFile("testdata/multimodal.golden")
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for line := range strings.Lines(string(text)) {
		name, want, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "#" {
			continue
		}
		compared++
		m, err := Load(filepath.Join("testdata/multimodal", name+".json"))
		if err != nil {
			t.Error(err)
		} else if got := facts(m.FuseExperts()); got != want {
			t.Errorf("%s:\n got %s\nwant %s", name, got, want)
		}
	}
	if files, err := filepath.Glob("testdata/multimodal/*.json"); err != nil || len(files) != compared {
		t.Errorf("compared %d of %d files: %v", compared, len(files), err)
	}
}
