package files

import (
	"errors"
	"io/fs"
)

// naming has an error name the file that was asked for, and not the one that is written beside it.
func naming(path string, err error) error {
	if failed := (*fs.PathError)(nil); errors.As(err, &failed) {
		failed.Path = path
	}
	return err
}
