package launch

import (
	"bytes"
	"io"
	"sync"
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
}

// Write never fails: a rank that prints to a closed terminal is to go on.
func (l *labelled) Write(data []byte) (int, error) {
	l.rest = append(l.rest, data...)
	for {
		end := bytes.IndexAny(l.rest, "\n\r") + 1 // progress bars return the carriage
		if end == 0 {
			if len(l.rest) < longestLine {
				return len(data), nil
			}
			end = longestLine
		}
		l.line(l.rest[:end])
		l.rest = l.rest[:copy(l.rest, l.rest[end:])]
	}
}

func (l *labelled) line(line []byte) {
	whole := append([]byte(l.label), line...)
	if last := line[len(line)-1]; last != '\n' && last != '\r' {
		whole = append(whole, '\n')
	}
	l.lock.Lock()
	defer l.lock.Unlock()
	l.out.Write(whole)
}

// flush writes what has no end of line.
func (l *labelled) flush() {
	if len(l.rest) > 0 {
		l.line(l.rest)
		l.rest = nil
	}
}
