package host

import (
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// directory is os.DirFS with a short cut. The files of the kernel are many,
// small and never waited for; os.ReadFile asks for their size and hands each
// to the poller first, which takes longer than to read them.
type directory struct {
	fs.FS
	path string
}

func (d directory) ReadFile(name string) ([]byte, error) {
	fail := func(err error) ([]byte, error) { return nil, &fs.PathError{Op: "read", Path: name, Err: err} }
	if !fs.ValidPath(name) {
		return fail(fs.ErrInvalid)
	}
	file, err := unix.Open(filepath.Join(d.path, name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(file)
	data := make([]byte, 0, 512)
	for {
		n, err := unix.Read(file, data[len(data):cap(data)])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fail(err)
		case n == 0:
			return data, nil
		default:
			data = data[:len(data)+n]
			if len(data) == cap(data) {
				data = append(data, make([]byte, len(data))...)[:len(data)]
			}
		}
	}
}
