package plimsoll

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestMechanismsHaveTheirTests looks up the tests that docs/mechanisms.md names.
func TestMechanismsHaveTheirTests(t *testing.T) {
	page, err := os.ReadFile("docs/mechanisms.md")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(string(page), -1) {
		named[m[1]] = true
	}
	if len(named) < 10 {
		t.Errorf("the page names %d tests", len(named))
	}
	err = filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for name := range named {
			if strings.Contains(string(text), "func "+name+"(t *testing.T)") {
				delete(named, name)
			}
		}
		return err
	})
	if err != nil || len(named) > 0 {
		t.Errorf("there are no tests %v (%v)", named, err)
	}
}
