package watch

import (
	"io"

	"plimsoll/samples"
)

// file is the file of a recording. It is given up at the first error: the job goes on without it.
type file struct {
	to   *samples.Writer // nil if there is none
	logf func(format string, values ...any)
}

func newFile(to io.Writer, logf func(format string, values ...any)) *file {
	if to == nil {
		return &file{}
	}
	return &file{samples.NewWriter(to), logf}
}

func (f *file) write(record *samples.Record) {
	if f.to == nil {
		return
	}
	if err := f.to.Write(record); err != nil {
		f.to = nil
		f.logf("the recording ends here, as it cannot be written: %v; the job goes on", err)
	}
}
