package launch

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// longestLine is where a line is cut that does not end.
const longestLine = 64 << 10

// labelled writes whole lines with a label before each. Several share one
// output and its lock.
type labelled struct {
	lock  *sync.Mutex
	out   io.Writer
	label string
	rest  []byte // of a line that has not ended

	say    func(format string, values ...any)
	reader *os.File
	copied chan struct{} // closed when all has been written
}

// pipe makes the pipe that a rank writes to, and copies from it.
func (l *labelled) pipe() (writer *os.File, err error) {
	if l.reader, writer, err = os.Pipe(); err != nil {
		return nil, err
	}
	l.copied = make(chan struct{})
	go func() {
		defer close(l.copied)
		defer l.reader.Close()
		_, err := io.Copy(l, l.reader)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			l.drain()
		case err != nil && !errors.Is(err, syscall.EPIPE): // which the rank learns as it is
			l.say("the output of %s cannot be written, and is closed: %v", strings.Trim(l.label, "[] "), err)
		}
		l.flush()
	}()
	return writer, nil
}

// expire is called when the rank has ended. What it leaves behind may hold its
// output open, but not for ever.
func (l *labelled) expire() { _ = l.reader.SetReadDeadline(time.Now().Add(time.Second)) } // fails if all was read

// drain writes what is in the pipe by now: the rank may have written it while
// whoever reads our output did not.
func (l *labelled) drain() {
	held, err := unix.IoctlGetInt(int(l.reader.Fd()), unix.TIOCINQ)
	if err == nil && l.reader.SetReadDeadline(time.Time{}) == nil {
		_, _ = io.CopyN(l, l.reader, int64(held))
	}
}

// Write ends lines where a terminal would begin to write over them: progress
// bars return the carriage, and in a label's line would run into those of other
// ranks. An error closes the pipe that the rank writes to, so that the rank
// learns what it would have learned without a label.
func (l *labelled) Write(data []byte) (int, error) {
	l.rest = append(l.rest, data...)
	for {
		end := bytes.IndexAny(l.rest, "\n\r")
		next := end + 1
		switch {
		case end < 0 && len(l.rest) < longestLine:
			return len(data), nil
		case end < 0 || end > longestLine:
			end, next = longestLine, longestLine
		case l.rest[end] == '\r' && next == len(l.rest):
			return len(data), nil // perhaps a new line follows
		case l.rest[end] == '\r' && l.rest[next] == '\n':
			next++
		case l.rest[end] == '\r' && end == 0:
			l.rest = l.rest[:copy(l.rest, l.rest[next:])]
			continue // a progress bar that begins with it
		}
		err := l.line(l.rest[:end])
		l.rest = l.rest[:copy(l.rest, l.rest[next:])]
		if err != nil {
			return 0, err
		}
	}
}

func (l *labelled) line(line []byte) error {
	whole := append(append([]byte(l.label), line...), '\n')
	l.lock.Lock()
	defer l.lock.Unlock()
	_, err := l.out.Write(whole)
	return err
}

// flush writes what has no end of line.
func (l *labelled) flush() {
	if rest := bytes.TrimSuffix(l.rest, []byte{'\r'}); len(rest) > 0 {
		_ = l.line(rest)
	}
	l.rest = nil
}
