package main

import (
	"io"
	"os"

	"plimsoll/fault"
)

// create opens the file that a flag names, for writing. A file that stdout or stderr already goes to, as /dev/stdout
// does, is shared instead of truncated: truncation would lose what they have written.
func create(flag, name string) (io.WriteCloser, error) { return createWith(0, flag, name) }

// createLog is create for a file that is written line by line: every write goes to the end of the file.
func createLog(flag, name string) (io.WriteCloser, error) { return createWith(os.O_APPEND, flag, name) }

func createWith(mode int, flag, name string) (io.WriteCloser, error) {
	if there, err := os.Stat(name); err == nil {
		for _, open := range []*os.File{os.Stdout, os.Stderr} {
			if info, err := open.Stat(); err == nil && os.SameFile(there, info) {
				return shared{open}, nil
			}
		}
	}
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|mode, 0o666)
	if err != nil {
		return nil, &fault.Input{What: flag, Err: err}
	}
	return file, nil
}

// shared is a file that Close leaves open.
type shared struct{ io.Writer }

func (shared) Close() error { return nil }
