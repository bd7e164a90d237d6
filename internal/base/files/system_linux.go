package files

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"
)

// nonblocking is the flag with which a file is opened without waiting for another process.
const nonblocking = unix.O_NONBLOCK

// errNotRegular is for ReadKernel, whose callers do not show it.
var errNotRegular = errors.New("expected a regular file")

// ReadKernel reads a file of /proc or /sys, or a copy of one. The kernel
// generates these files while they are read and reports their size as 0. They
// are many and small and never block, so ReadKernel bypasses [os.File]:
// registering a file with the poller takes longer than reading it. Errors are
// of type *fs.PathError.
func ReadKernel(path string) ([]byte, error) {
	fail := func(err error) ([]byte, error) { return nil, &fs.PathError{Op: "read", Path: path, Err: err} }
	file, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(file)
	var info unix.Stat_t
	switch err := unix.Fstat(file, &info); {
	case err != nil:
		return fail(err)
	case info.Mode&unix.S_IFMT != unix.S_IFREG:
		return fail(errNotRegular)
	case info.Size > kernelLimit:
		return fail(&TooLarge{kernelLimit})
	}
	text := make([]byte, 0, 512)
	for {
		n, err := unix.Read(file, text[len(text):cap(text)])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fail(err)
		case n == 0:
			return text, nil
		default:
			text = text[:len(text)+n]
			if len(text) > kernelLimit {
				return fail(&TooLarge{kernelLimit})
			}
			if len(text) == cap(text) {
				text = append(text, make([]byte, len(text))...)[:len(text)]
			}
		}
	}
}
