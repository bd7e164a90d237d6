package main

import (
	"io"
	"os"

	"plimsoll/fault"
)

// create opens the file that a flag names, for writing. A file that stdout or stderr already goes to, as /dev/stdout
// does, is shared instead of truncated: truncation would lose what they have written.
func create(flag, name string) (io.WriteCloser, error) {
	if there, err := os.Stat(name); err == nil {
		for _, open := range []*os.File{os.Stdout, os.Stderr} {
			if info, err := open.Stat(); err == nil && os.SameFile(there, info) {
				return shared{open}, nil
			}
		}
	}
	file, err := os.Create(name)
	if err != nil {
		return nil, &fault.Input{What: flag, Err: err}
	}
	return file, nil
}

// shared is a file that Close leaves open.
type shared struct{ io.Writer }

func (shared) Close() error { return nil }
