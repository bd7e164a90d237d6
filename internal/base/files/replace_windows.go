package files

import (
	"errors"
	"os"
	"path/filepath"
)

// Pending is a new file that takes the place of an older one when it is complete.
type Pending struct {
	*os.File
	path string
}

// NewPending begins a file beside the one whose place it takes.
func NewPending(path string) (*Pending, error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"*")
	return &Pending{file, path}, naming(path, err)
}

// CloseAtomicallyReplace closes the file and gives it its name.
func (p *Pending) CloseAtomicallyReplace() error {
	if err := errors.Join(p.Sync(), p.Close()); err != nil {
		return err
	}
	return os.Rename(p.Name(), p.path)
}

// Cleanup removes a file that was not completed.
func (p *Pending) Cleanup() error {
	_ = p.Close() // it may be closed
	if err := os.Remove(p.Name()); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Replace writes a file: completely or not at all.
func Replace(path string, text []byte) error {
	file, err := NewPending(path)
	if err != nil {
		return err
	}
	if _, err = file.Write(text); err == nil {
		err = file.CloseAtomicallyReplace()
	}
	return errors.Join(err, file.Cleanup())
}
