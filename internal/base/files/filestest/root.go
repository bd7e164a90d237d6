package filestest

import (
	"bytes"
	"os"
	"path/filepath"
)

// Root returns the folder of the repository: the nearest folder above the working directory whose go.mod is that of
// the program. Modules inside of it have a go.mod of their own. It returns "." where there is none.
func Root() string {
	folder, err := os.Getwd()
	for err == nil && folder != filepath.Dir(folder) {
		if text, missing := os.ReadFile(filepath.Join(folder, "go.mod")); missing == nil &&
			bytes.HasPrefix(text, []byte("module plimsoll\n")) {
			return folder
		}
		folder = filepath.Dir(folder)
	}
	return "."
}
