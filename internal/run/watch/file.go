//go:build linux

package watch

import "plimsoll/internal/base/samples"

// file is the file of a recording. It is given up at the first error: the job goes on without it.
type file struct {
	to      *samples.Writer // nil if there is none
	observe func(*samples.Record)
	logf    func(format string, values ...any)
}

func newFile(c *Config) *file {
	f := &file{observe: c.Observe, logf: c.Logf}
	if c.File != nil {
		f.to = samples.NewWriter(c.File)
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
		f.to = nil
		f.logf("the recording ends here, as it cannot be written: %v; the job goes on", err)
	}
}
