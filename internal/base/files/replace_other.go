//go:build !windows

package files

import (
	"path/filepath"

	"github.com/google/renameio/v2"
)

// Pending is a new file that takes the place of an older one when it is complete.
type Pending = renameio.PendingFile

// NewPending begins a file beside the one whose place it takes, not among the system's temporary files. There the
// leftover of a crash is found.
func NewPending(path string) (*Pending, error) {
	file, err := renameio.NewPendingFile(path, renameio.WithPermissions(0o644), beside(path))
	return file, naming(path, err)
}

// Replace writes a file: completely or not at all.
func Replace(path string, text []byte) error {
	return naming(path, renameio.WriteFile(path, text, 0o644, beside(path)))
}

func beside(path string) renameio.Option { return renameio.WithTempDir(filepath.Dir(path)) }
