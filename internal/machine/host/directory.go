package host

import (
	"io/fs"
	"os"
	"path/filepath"

	"plimsoll/internal/base/files"
)

// directory is os.DirFS restricted to regular files and directories. A user may name any directory as the root of a
// machine.
type directory struct {
	fs.FS
	path string
}

func (d directory) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	path := filepath.Join(d.path, name)
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return d.FS.Open(name)
	}
	file, _, err := files.Open(path)
	return file, err
}

// ReadFile is a short cut, as the kernel's files are many and small.
func (d directory) ReadFile(name string) ([]byte, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "read", Path: name, Err: fs.ErrInvalid}
	}
	return files.ReadKernel(filepath.Join(d.path, name))
}
