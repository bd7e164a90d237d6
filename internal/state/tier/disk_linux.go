package tier

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
)

// HostDisk is the file systems of this host.
type HostDisk struct{}

type hostFile struct{ *os.File }

// Create makes a file. The file system takes the room at once, and writes nothing: zeros are read from what was never
// written. File systems that cannot do that take the room when it is written.
func (HostDisk) Create(path string, size int64) (File, error) {
	file, err := openDirect(path, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return nil, err
	}
	err = unix.EINTR
	for errors.Is(err, unix.EINTR) {
		err = unix.Fallocate(int(file.Fd()), 0, 0, size)
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = file.Truncate(size)
	}
	if err != nil {
		err = fmt.Errorf("%s: taking the room of %v: %w", path, ledger.Bytes(size), err)
		return nil, errors.Join(err, file.Close(), os.Remove(path))
	}
	return hostFile{file}, nil
}

// Open opens a file.
func (HostDisk) Open(path string) (File, int64, error) {
	file, err := openDirect(path, os.O_RDWR)
	if err != nil {
		return nil, 0, err
	}
	info, err := file.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, file.Close())
	}
	return hostFile{file}, info.Size(), nil
}

func openDirect(path string, flags int) (*os.File, error) {
	file, _, err := files.OpenFile(path, flags|unix.O_DIRECT|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, unix.EINVAL) {
		if flags&os.O_CREATE != 0 {
			_ = os.Remove(path) // some file systems refuse the flag after they have made the file
		}
		return nil, fmt.Errorf("%s: %w", path, ErrNoDirect)
	}
	return file, err
}

// Sync brings data, and what is needed to find it, to the disk.
func (f hostFile) Sync() error {
	for {
		if err := unix.Fdatasync(int(f.Fd())); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Rename renames a file.
func (HostDisk) Rename(from, to string) error { return os.Rename(from, to) }

// Remove removes a file.
func (HostDisk) Remove(path string) error { return os.Remove(path) }

// SyncFolder brings the names in a folder to the disk.
func (HostDisk) SyncFolder(path string) error { return files.SyncFolder(path) }

// Room returns what this user may take of the file system.
func (HostDisk) Room(folder string) (ledger.Bytes, uint64, error) {
	var info unix.Stat_t
	if err := unix.Stat(folder, &info); err != nil {
		return 0, 0, &os.PathError{Op: "stat", Path: folder, Err: err}
	}
	if info.Mode&unix.S_IFMT != unix.S_IFDIR {
		return 0, 0, &os.PathError{Op: "stat", Path: folder, Err: unix.ENOTDIR}
	}
	var found unix.Statfs_t
	if err := unix.Statfs(folder, &found); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: folder, Err: err}
	}
	return ledger.Bytes(found.Bsize) * ledger.Bytes(found.Bavail), info.Dev, nil
}

// Lock locks folders for this process until the function that it returns is called: two services must not write the
// same files.
func Lock(folders []string) (release func(), err error) {
	var locked []*os.File
	release = func() {
		for _, folder := range locked {
			_ = folder.Close()
		}
	}
	for _, path := range folders {
		folder, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
		if err == nil {
			locked = append(locked, folder)
			err = unix.EINTR
			for errors.Is(err, unix.EINTR) {
				err = unix.Flock(int(folder.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			}
		}
		if err != nil {
			release()
		}
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			return nil, fmt.Errorf("%s: another service or rehearsal has its tier here, or the folder was given "+
				"twice; give each one its own", path)
		case err != nil:
			return nil, err
		}
	}
	return release, nil
}
