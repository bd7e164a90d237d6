package model

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBlockClasses holds the classes of blocks to those of transformers, and every model to have some:
//
//	python3 testdata/blocks.py catalog/*.json testdata/variants/*.json testdata/published/*.json \
//	    testdata/*multimodal/*.json > testdata/blocks.golden
func TestBlockClasses(t *testing.T) {
	text, err := os.ReadFile("testdata/blocks.golden")
	if err != nil {
		t.Fatal(err)
	}
	want, seen := map[string]string{}, map[string]bool{}
	for line := range strings.Lines(string(text)) {
		key, classes, _ := strings.Cut(strings.TrimSpace(line), " ")
		want[key] = classes
	}
	delete(want, "#")
	for _, path := range configs(t) {
		m, err := loaded(path)
		if err != nil {
			t.Fatal(err)
		}
		key, got := m.Architecture+"/"+m.textType, strings.Join(m.BlockClasses(), " ")
		seen[key] = true
		if classes, of := want[key]; of && got != classes {
			t.Errorf("%s: %s, want %s", key, got, classes)
		}
		if got == "" && m.Type != "baichuan" {
			t.Errorf("%s: %s has no classes of blocks", path, key)
		}
	}
	for key := range want {
		if !seen[key] {
			t.Errorf("%s is in blocks.golden and nowhere else", key)
		}
	}
	for _, a := range architectures {
		if _, ok := blockClasses[a.modelType]; !ok && !seenType(seen, a.name) && a.modelType != "baichuan" {
			t.Errorf("%s: no model shows its classes of blocks, and %s has no row", a.name, a.modelType)
		}
	}
}

// seenType reports whether a model of an architecture was loaded.
func seenType(seen map[string]bool, architecture string) bool {
	for key := range seen {
		if strings.HasPrefix(key, architecture+"/") {
			return true
		}
	}
	return false
}

// configs returns the names of the catalog and the configurations of testdata.
func configs(t *testing.T) []string {
	t.Helper()
	paths := Catalog()
	for _, folder := range []string{"variants", "published", "multimodal", "ranged-multimodal", "remote"} {
		files, err := filepath.Glob("testdata/" + folder + "/*.json")
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", folder, err)
		}
		paths = append(paths, files...)
	}
	return paths
}
