package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// ToDisk brings a file or a folder to the disk. A test notes what it has brought there.
var ToDisk = (*os.File).Sync

// SyncFolder makes the names in a folder safe.
func SyncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(ToDisk(folder), folder.Close())
}

// SyncFolders makes the names in a folder safe, and those in the folders in it.
func SyncFolders(path string) error {
	return filepath.WalkDir(path, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		return SyncFolder(path)
	})
}
