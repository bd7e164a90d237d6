package checkpoint

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
)

// How a file or folder is locked, and flags with which one is opened.
const (
	together      = unix.LOCK_SH
	alone         = unix.LOCK_EX
	atOnce        = unix.LOCK_NB
	directoryOnly = unix.O_DIRECTORY
	noLink        = unix.O_NOFOLLOW
)

func flock(file *os.File, how int) error { return unix.Flock(int(file.Fd()), how) }

// swap exchanges two folders in one instant.
func swap(one, other string) error {
	return unix.Renameat2(unix.AT_FDCWD, one, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE)
}

// removeFolder removes a folder if it is empty. os.Remove would also remove a file.
func removeFolder(path string) error { return unix.Rmdir(path) }

// allocate takes the room of the first bytes of a file.
func allocate(file *os.File, bytes int64) error { return unix.Fallocate(int(file.Fd()), 0, 0, bytes) }

// freeBlocks returns the size of a block of the file's file system, and how many of them are free.
func freeBlocks(file *os.File) (block, free int64, err error) {
	var found unix.Statfs_t
	err = unix.Fstatfs(int(file.Fd()), &found)
	return found.Bsize, int64(found.Bavail), err
}

// sizeOnDisk returns the room that a regular file takes, and 0 for anything else.
func sizeOnDisk(path string) ledger.Bytes {
	const block = 512 // of st_blocks
	var stat unix.Stat_t
	if unix.Lstat(path, &stat) != nil || stat.Mode&unix.S_IFMT != unix.S_IFREG {
		return 0
	}
	return ledger.Bytes(stat.Blocks * block)
}

// readSoon and forget advise the kernel; a file system may ignore that. Forgetting 0 bytes means all of the file.
func readSoon(file *os.File, offset, bytes int64) {
	_ = unix.Fadvise(int(file.Fd()), offset, bytes, unix.FADV_WILLNEED)
}

func forget(file *os.File, offset, bytes int64) {
	_ = unix.Fadvise(int(file.Fd()), offset, bytes, unix.FADV_DONTNEED)
}

func startWriting(file *os.File, offset, bytes int64) error {
	return syncRange(file, offset, bytes, unix.SYNC_FILE_RANGE_WRITE)
}

func awaitWriting(file *os.File, offset, bytes int64) error {
	return syncRange(file, offset, bytes,
		unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
}

// syncRange only begins early: the fsync of the file makes data safe. File systems without sync_file_range do without.
func syncRange(file *os.File, offset, bytes int64, flags int) error {
	err := unix.SyncFileRange(int(file.Fd()), offset, bytes, flags)
	if err == nil || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) ||
		errors.Is(err, unix.ESPIPE) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return fmt.Errorf("sync_file_range: %w", err)
}
