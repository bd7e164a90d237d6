package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/show/report"
)

// private is the mode of new files. Plans, reports and recordings tell what a job is and what it prints.
const private = 0o600

// create opens the file that a flag names, for writing. A file that stdout or stderr already goes to, as /dev/stdout
// does, is shared instead of truncated: truncation would lose what they have written.
func create(flag, name string) (io.WriteCloser, error) {
	return createWith(flag, name, func() (*os.File, error) {
		return os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, private)
	})
}

// createLog is create for a regular file to which every write appends.
func createLog(flag, name string) (io.WriteCloser, error) {
	return createWith(flag, name, func() (*os.File, error) {
		file, _, err := files.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, private)
		return file, err
	})
}

func createWith(flag, name string, open func() (*os.File, error)) (io.WriteCloser, error) {
	if there, err := os.Stat(name); err == nil {
		if output := outputTo(there); output != nil {
			return shared{output}, nil
		}
	}
	file, err := open()
	if err != nil {
		return nil, &fault.Input{What: flag, Err: err}
	}
	return file, nil
}

// outputTo returns stdout or stderr if it goes to a file, or nil.
func outputTo(there os.FileInfo) *os.File {
	for _, open := range []*os.File{os.Stdout, os.Stderr} {
		if info, err := open.Stat(); err == nil && os.SameFile(there, info) {
			return open
		}
	}
	return nil
}

// writeDocument writes a JSON document to the file that a flag names.
func writeDocument(flag, name string, document any) error {
	return writeFile(flag, name, func(w io.Writer) error { return report.WriteJSON(w, document) })
}

// writeFile has a function write the file that a flag names. A file that is there keeps its content unless the new one
// is complete, also on a full disk.
func writeFile(flag, name string, write func(io.Writer) error) error {
	if there, err := os.Stat(name); inBrowser || err == nil && (!there.Mode().IsRegular() || outputTo(there) != nil) {
		return writeThrough(flag, name, write)
	}
	target, err := filepath.EvalSymlinks(name) // the file that a link names is replaced, and not the link
	if err != nil {
		target = name
	}
	file, err := files.NewPending(target)
	if err != nil {
		return &fault.Input{What: flag, Err: err}
	}
	err = file.Chmod(modeOf(target))
	if err == nil {
		err = write(file)
	}
	if err == nil {
		err = file.CloseAtomicallyReplace()
	}
	if err = errors.Join(err, file.Cleanup()); err != nil {
		return &fault.Input{What: flag + ": " + name + " is left as it was", Err: err}
	}
	return nil
}

// modeOf returns the mode of a file that is replaced, or that of new files.
func modeOf(name string) os.FileMode {
	if there, err := os.Stat(name); err == nil {
		return there.Mode().Perm()
	}
	return private
}

// writeThrough writes what cannot be replaced: a device, a pipe, the file that stdout goes to, and that of a page.
func writeThrough(flag, name string, write func(io.Writer) error) error {
	file, err := create(flag, name)
	if err != nil {
		return err
	}
	if err := errors.Join(write(file), file.Close()); err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	return nil
}

// shared is a file that Close leaves open.
type shared struct{ io.Writer }

func (shared) Close() error { return nil }
