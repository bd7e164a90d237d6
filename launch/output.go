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

// longestLine is the length at which a line without an end is cut.
const longestLine = 64 << 10

// labelled writes full lines with a label before each. Several writers share one output
// and its lock.
type labelled struct {
	lock  *sync.Mutex
	out   io.Writer
	label string
	rest  []byte // the beginning of a line that has not ended
	whole []byte // lines that go out with the next write

	logf   func(format string, values ...any)
	reader *os.File
	copied chan struct{} // closed when all has been written
}

// pipe makes the pipe that a rank writes to, and starts to copy from it.
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
		case err != nil && !errors.Is(err, syscall.EPIPE): // the rank gets EPIPE itself
			l.logf("the output of %s is closed, as it cannot be written: %v", strings.Trim(l.label, "[] "), err)
		}
		l.flush()
	}()
	return writer, nil
}

// expire is called when the rank has ended. Processes that it left behind may hold its
// output open, but not for ever.
func (l *labelled) expire() { _ = l.reader.SetReadDeadline(time.Now().Add(time.Second)) } // fails if all was read

// drain writes what is in the pipe by now. The rank may have written it while the
// reader of our output was slow.
func (l *labelled) drain() {
	held, err := unix.IoctlGetInt(int(l.reader.Fd()), unix.TIOCINQ)
	if err == nil && l.reader.SetReadDeadline(time.Time{}) == nil {
		_, _ = io.CopyN(l, l.reader, int64(held))
	}
}

// Write ends lines where a terminal would begin to write over them. Progress bars
// return the carriage; after a label they would run into the lines of other ranks. An
// error closes the pipe that the rank writes to. So the rank gets the error that it
// would have got without a label.
//
// All lines that end in the data go out in one write.
func (l *labelled) Write(data []byte) (int, error) {
	l.rest = append(l.rest, data...)
	rest := l.rest
	for {
		line, next, ended := firstLine(rest)
		if !ended {
			break
		}
		// A progress bar may begin with a carriage return.
		if bar := next == 1 && rest[0] == '\r'; !bar {
			l.add(line)
		}
		rest = rest[next:]
	}
	l.rest = l.rest[:copy(l.rest, rest)]
	if err := l.send(); err != nil {
		return 0, err
	}
	return len(data), nil
}

// firstLine returns the first line of the text without its end, and where the next one
// begins. It cuts lines that are too long.
func firstLine(text []byte) (line []byte, next int, ended bool) {
	end := bytes.IndexAny(text[:min(len(text), longestLine+1)], "\n\r")
	switch {
	case end < 0 && len(text) < longestLine:
		return nil, 0, false
	case end < 0:
		return text[:longestLine], longestLine, true
	case text[end] == '\n':
		return text[:end], end + 1, true
	case end+1 == len(text): // a newline may follow
		return nil, 0, false
	case text[end+1] == '\n':
		return text[:end], end + 2, true
	default:
		return text[:end], end + 1, true
	}
}

// add queues a line for the next write.
func (l *labelled) add(line []byte) {
	l.whole = append(append(append(l.whole, l.label...), line...), '\n')
}

// send writes the queued lines.
func (l *labelled) send() error {
	if len(l.whole) == 0 {
		return nil
	}
	l.lock.Lock()
	defer l.lock.Unlock()
	_, err := l.out.Write(l.whole)
	l.whole = l.whole[:0]
	return err
}

// flush writes a last line that has no end.
func (l *labelled) flush() {
	if rest := bytes.TrimSuffix(l.rest, []byte{'\r'}); len(rest) > 0 {
		l.add(rest)
		_ = l.send()
	}
	l.rest = nil
}
