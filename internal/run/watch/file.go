//go:build linux

package watch

import "plimsoll/internal/base/samples"

// file is the file of a recording. It is given up at the first error: the job goes on without it.
type file struct {
	to      *samples.Writer // nil if there is none
	ring    *Ring           // where to writes, if that is a ring
	observe func(*samples.Record)
	logf    func(format string, values ...any)
}

func newFile(c *Config) *file {
	f := &file{observe: c.Observe, logf: c.Logf}
	if c.File != nil {
		f.to = samples.NewWriter(c.File)
		f.ring, _ = c.File.(*Ring)
	}
	return f
}

func (f *file) write(record *samples.Record) {
	if f.observe != nil {
		f.observe(record)
	}
	if f.to == nil {
		return
	}
	if err := f.to.Write(record); err != nil {
		f.giveUp(err)
	}
}

// isFull reports whether the file is a ring that is to be written anew.
func (f *file) isFull() bool { return f.to != nil && f.ring != nil && f.ring.isFull() }

func (f *file) giveUp(err error) {
	f.to = nil
	if f.ring == nil { // the user has asked for it
		f.logf("the recording ends here, as it cannot be written: %v; the job goes on", err)
	}
}
