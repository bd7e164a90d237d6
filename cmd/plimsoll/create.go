package main

import (
	"io"
	"os"

	"plimsoll/fault"
)

// create opens a file that a flag names, to write it. One that stdout or stderr
// goes to already, as /dev/stdout does, is written like those: made anew it
// would lose what they have written.
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

// shared is a file that stays open.
type shared struct{ io.Writer }

func (shared) Close() error { return nil }
