// Package files opens files that users and other programs name. It never
// blocks, and never reads more than the caller can use.
//
// A path may name anything. Opening a FIFO blocks until another process writes
// to it. A device such as /dev/zero never ends. A sparse file claims any size
// without using the disk. Therefore the package opens files without blocking,
// accepts only regular files, and limits the size of every document.
package files

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// NotRegular is the error for a path that does not name a regular file.
type NotRegular struct{ Mode fs.FileMode }

func (e *NotRegular) Error() string {
	return "it is " + kind(e.Mode) + ", expected a regular file"
}

func kind(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeNamedPipe != 0:
		return "a pipe"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return "no file" // such as an epoll or a timer in /proc/PID/fd
}

// TooLarge is the error for a file above the limit of its kind of document.
type TooLarge struct{ Limit int64 }

func (e *TooLarge) Error() string {
	return fmt.Sprintf("it has more than %d bytes, the limit", e.Limit)
}

// Open opens a regular file for reading. It follows symbolic links. Errors are
// of type *fs.PathError.
func Open(path string) (*os.File, fs.FileInfo, error) { return OpenFile(path, os.O_RDONLY, 0) }

// descriptors are the files that a shell has opened for a command, as it does for "<(journalctl -k)".
const descriptors = "/dev/fd/"

// OpenPipe opens a pipe that the shell has made for the command. It returns nil for any other file: nobody may ever
// write to a pipe with a name of its own.
func OpenPipe(path string) (*os.File, error) {
	if !strings.HasPrefix(path, descriptors) {
		return nil, nil
	}
	if info, err := os.Stat(path); err != nil || info.Mode()&fs.ModeNamedPipe == 0 {
		return nil, nil
	}
	return os.Open(path)
}

// OpenFile is os.OpenFile for regular files only.
//
// It checks the path before opening it, as opening alone triggers some devices.
// It checks the open file again, in case another took its place in between.
func OpenFile(path string, flags int, mode fs.FileMode) (*os.File, fs.FileInfo, error) {
	info, err := os.Stat(path)
	switch {
	case err == nil && !info.Mode().IsRegular():
		return nil, nil, notRegular(path, info)
	case err != nil && !(flags&os.O_CREATE != 0 && errors.Is(err, fs.ErrNotExist)):
		return nil, nil, inOneWording(err)
	}
	file, err := os.OpenFile(path, flags|nonblocking, mode)
	if err != nil {
		return nil, nil, inOneWording(err)
	}
	info, err = file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = notRegular(path, info)
	}
	if err == nil && isStream(info) {
		err = &fs.PathError{Op: "open", Path: path, Err: errStream}
	}
	if err != nil {
		_ = file.Close()
		return nil, nil, err
	}
	return file, info, nil
}

// errStream is for a file whose reader waits for ever, although it says that it is a regular one.
var errStream = errors.New("it is a stream without an end, expected a regular file: save what it has in one, as " +
	"dmesg > dmesg.txt does")

// streams are files of the kernel whose readers wait for the next line, and take the lines from other readers.
var streams = []string{"/proc/kmsg", "/sys/kernel/tracing/trace_pipe", "/sys/kernel/debug/tracing/trace_pipe"}

func isStream(info fs.FileInfo) bool {
	return info.Size() == 0 && slices.ContainsFunc(streams, func(path string) bool {
		stream, err := os.Stat(path)
		return err == nil && os.SameFile(stream, info)
	})
}

// wordings are what is said of common causes on every system. Linux says the same.
var wordings = []struct {
	cause error
	text  string
}{
	{fs.ErrNotExist, "no such file or directory"},
	{fs.ErrPermission, "permission denied"},
	{fs.ErrExist, "file exists"},
}

// inOneWording gives a common cause the wording that it has on Linux.
func inOneWording(err error) error {
	var at *fs.PathError
	if !errors.As(err, &at) {
		return err
	}
	for _, w := range wordings {
		if errors.Is(at.Err, w.cause) && at.Err.Error() != w.text {
			return &fs.PathError{Op: at.Op, Path: at.Path, Err: &worded{at.Err, w.text}}
		}
	}
	return err
}

// worded is a cause in other words.
type worded struct {
	cause error
	text  string
}

func (w *worded) Error() string { return w.text }
func (w *worded) Unwrap() error { return w.cause }

func notRegular(path string, info fs.FileInfo) error {
	return &fs.PathError{Op: "open", Path: path, Err: &NotRegular{info.Mode()}}
}

// TakeAccess gives a file the mode of another, and its owner where this process may do that.
func TakeAccess(file *os.File, from string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	takeOwner(file, info)
	return file.Chmod(info.Mode().Perm())
}

// Texts are texts that stand for files which are not written yet, by path. Nil has none.
type Texts map[string][]byte

// Read returns the text that stands for a file, or else reads the file.
func (t Texts) Read(path string, limit int64) ([]byte, error) {
	if text, found := t[path]; found {
		return text, nil
	}
	path, _ = SplitFunction(path)
	return Read(path, limit)
}

// SplitFunction returns the path of a source of Python and the function in it that a path such as recipe.py:FUNCTION
// names. For others it returns the path itself.
func SplitFunction(path string) (file, function string) {
	if found := ofFunction.FindStringSubmatch(path); found != nil {
		return found[1], found[2]
	}
	return path, ""
}

var ofFunction = lazyregexp.New(`^(.+\.py):([A-Za-z_]\w*)$`)

// Read reads a regular file of at most limit bytes. Errors are of type
// *fs.PathError.
func Read(path string, limit int64) ([]byte, error) {
	file, info, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return ReadOpen(file, info, limit)
}

// ReadOpen reads the rest of an open file. It refuses a file that is too large
// before it allocates memory for it.
func ReadOpen(file *os.File, info fs.FileInfo, limit int64) ([]byte, error) {
	tooLarge := &fs.PathError{Op: "read", Path: file.Name(), Err: &TooLarge{limit}}
	if info.Size() > limit {
		return nil, tooLarge
	}
	text := make([]byte, 0, info.Size()+1) // one byte more, to find the end without growing
	for {
		n, err := file.Read(text[len(text):cap(text)])
		text = text[:len(text)+n]
		switch {
		case err == io.EOF:
			return text, nil
		case err != nil:
			return nil, err
		case int64(len(text)) > limit: // the file has grown meanwhile
			return nil, tooLarge
		case len(text) == cap(text):
			text = append(text, 0)[:len(text)]
		}
	}
}

// kernelLimit is far above any file of /proc or /sys that Plimsoll reads. The
// mount table of a host with 10,000 containers has 3 MB.
const kernelLimit = 16 << 20
