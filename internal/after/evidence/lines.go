package evidence

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// longestLine is how much of a line is read. The rest of the line is left out.
const longestLine = 256 << 10

// lineReader splits a text into lines. A carriage return begins a line of its own with the same number: a progress bar
// is written over and over.
type lineReader struct {
	from   *bufio.Reader
	number int
	buffer []byte
	inside bool // of a line of the file
}

// next returns the next line without its end, and its number in the file from 1. The line is valid until the next
// call. At the end of the file the error is io.EOF.
func (l *lineReader) next() ([]byte, int, error) {
	if !l.inside {
		l.number, l.inside = l.number+1, true
	}
	number := l.number
	l.buffer = l.buffer[:0]
	for read := false; ; read = true {
		if _, err := l.from.Peek(1); err != nil {
			if read && errors.Is(err, io.EOF) {
				return l.buffer, number, nil
			}
			return nil, 0, err
		}
		part, _ := l.from.Peek(l.from.Buffered())
		end := bytes.IndexAny(part, "\r\n") // one pass: many bars may come before the end of a line
		ends := end >= 0
		if ends {
			part, end = part[:end], l.pass(part, end)
		}
		whole := ends && len(l.buffer) == 0
		if !whole {
			l.buffer = append(l.buffer, part[:min(len(part), longestLine-len(l.buffer))]...)
			part = l.buffer
		}
		if !ends {
			_, _ = l.from.Discard(l.from.Buffered())
			continue
		}
		_, _ = l.from.Discard(end + 1)
		return part, number, nil
	}
}

// pass goes past a carriage return or a newline of a text. It returns the place of the last character of the two.
func (l *lineReader) pass(text []byte, end int) int {
	if text[end] == '\r' && end+1 < len(text) && text[end+1] == '\n' {
		end++
	}
	l.inside = text[end] == '\r'
	return end
}

func newLineReader(from *bufio.Reader) *lineReader { return &lineReader{from: from} }
