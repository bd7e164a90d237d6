//go:build linux

package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// longestLine is the length at which a line without an end is cut.
const longestLine = 64 << 10

// lastOutput is how long the output of a rank may take after its end. Processes that it left behind may hold its output
// open, but not for ever.
const lastOutput = time.Second

// output copies what a rank prints, from a pipe to an output of ours. Several ranks print lines with labels. A single
// rank's bytes stay as they are.
type output struct {
	rank   int
	to     io.Writer
	flush  func() // writes a last line that has no end
	logf   func(format string, values ...any)
	reader *os.File
	copied chan struct{} // closed when all has been written
}

// outputLock keeps lines in one piece: stdout and stderr are often one terminal.
var outputLock sync.Mutex

// connect gives a rank its stdout and stderr. It returns the ends of pipes that only the rank needs.
func (j *Job) connect(p *process) (writers []*os.File, err error) {
	single := len(j.Ranks) == 1
	pipe := func(stream string, out io.Writer) (io.Writer, error) {
		if single && !j.copies(out) {
			return out, nil
		}
		o := &output{rank: p.rank.Number, to: out, flush: func() {}, logf: j.Logf}
		if !single {
			l := &labelled{lock: &outputLock, out: out, label: fmt.Sprintf("[rank %d] ", p.rank.Number)}
			o.to, o.flush = l, l.flush
		}
		writer, err := o.pipe(j.relay.tap(p.rank.Number, stream))
		if err != nil {
			return nil, err
		}
		writers, p.outputs = append(writers, writer), append(p.outputs, o)
		j.outputs = append(j.outputs, o)
		return writer, nil
	}
	if p.command.Stdout, err = pipe("stdout", j.Stdout); err != nil {
		return writers, err
	}
	if single && isSameFile(j.Stdout, j.Stderr) { // the order of what is printed to both stays
		p.command.Stderr = p.command.Stdout
		return writers, nil
	}
	p.command.Stderr, err = pipe("stderr", j.Stderr)
	return writers, err
}

// copies reports whether a single rank prints through a pipe. Where our output is a terminal, the rank has it.
func (j *Job) copies(out io.Writer) bool {
	file, isFile := out.(*os.File)
	if j.CopyOutput || !isFile {
		return true
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err != nil
}

func isSameFile(a, b io.Writer) bool {
	var infos [2]os.FileInfo
	for i, out := range []io.Writer{a, b} {
		file, isFile := out.(*os.File)
		if !isFile {
			return false
		}
		var err error
		if infos[i], err = file.Stat(); err != nil {
			return false
		}
	}
	return os.SameFile(infos[0], infos[1])
}

// pipe makes the pipe that a rank writes to, and starts to copy from it. The tap gets all bytes, too.
func (o *output) pipe(tap io.Writer) (writer *os.File, err error) {
	if o.reader, writer, err = os.Pipe(); err != nil {
		return nil, err
	}
	o.copied = make(chan struct{})
	from := io.TeeReader(o.reader, tap)
	go func() {
		defer close(o.copied)
		defer o.reader.Close()
		_, err := io.Copy(onlyWriter{o.to}, from)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			o.drain(from)
		case err != nil && !errors.Is(err, syscall.EPIPE): // the rank gets EPIPE itself
			o.logf("the output of rank %d is closed, as it cannot be written: %v", o.rank, err)
		}
		o.flush()
	}()
	return writer, nil
}

// onlyWriter hides that a file has other ways to be copied to.
type onlyWriter struct{ io.Writer }

// drain writes what is in the pipe by now. The rank may have written it while the reader of our output was slow.
func (o *output) drain(from io.Reader) {
	held, err := unix.IoctlGetInt(int(o.reader.Fd()), unix.TIOCINQ)
	if err == nil && o.reader.SetReadDeadline(time.Time{}) == nil {
		_, _ = io.CopyN(o.to, from, int64(held))
	}
}

// finishOutputs returns when all that the ranks have printed is written.
func (j *Job) finishOutputs() {
	for _, o := range j.outputs {
		_ = o.reader.SetReadDeadline(time.Now().Add(lastOutput)) // fails if all was read
	}
	for _, o := range j.outputs {
		<-o.copied
	}
}

// labelled writes full lines with a label before each. Several writers share one output and its lock.
type labelled struct {
	lock  *sync.Mutex
	out   io.Writer
	label string
	rest  []byte // the beginning of a line that has not ended
	whole []byte // lines that go out with the next write
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
