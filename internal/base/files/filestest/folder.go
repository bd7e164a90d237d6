package filestest

import (
	"os"
	"path/filepath"
	"testing"
)

// InNewFolder returns a function that writes a file into a new folder and returns its path.
func InNewFolder(t testing.TB) func(name, text string) string {
	folder := t.TempDir()
	return func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
}
