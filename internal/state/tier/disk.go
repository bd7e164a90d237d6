package tier

import (
	"errors"

	"plimsoll/internal/base/ledger"
)

// Disk is what files are on: the file systems of this host, or in tests one that loses power. Paths that do not exist
// are errors of [io/fs.ErrNotExist].
type Disk interface {
	// Create makes a file of a size, without writing it. The file must not exist.
	Create(path string, size int64) (File, error)
	// Open opens a file, and returns its size.
	Open(path string) (file File, size int64, err error)
	Rename(from, to string) error
	Remove(path string) error
	// SyncFolder brings the names in a folder to the disk.
	SyncFolder(path string) error
	// Room returns what is free in the file system of a folder, and a number that tells file systems apart.
	Room(folder string) (free ledger.Bytes, system uint64, err error)
}

// File is an open file that is read and written by direct I/O.
type File interface {
	Name() string
	ReadAt(p []byte, offset int64) (int, error)
	WriteAt(p []byte, offset int64) (int, error)
	// Sync returns when everything that was written is on the disk.
	Sync() error
	Close() error
}

// ErrNoDirect says that a file system does not read and write past the page cache.
var ErrNoDirect = errors.New("the file system does not support direct I/O (O_DIRECT)")
