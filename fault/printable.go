package fault

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A longer line is shortened to its beginning and end: where the fault is, and
// what was expected.
const (
	longestLine = 1500
	lineBegins  = 1000
	lineEnds    = 400
)

// Printable makes a message safe for a terminal. Messages quote names and
// values of files, which may be of any length and contain control sequences.
func Printable(message string) string {
	lines := strings.Split(message, "\n")
	for i, line := range lines {
		lines[i] = shorten(escape(line))
	}
	return strings.Join(lines, "\n")
}

// escape escapes control characters as Go does in quoted strings.
func escape(line string) string {
	var b strings.Builder
	for i := 0; i < len(line); {
		r, size := utf8.DecodeRuneInString(line[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, line[i])
		case r != '\t' && unicode.IsControl(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		i += size
	}
	return b.String()
}

func shorten(line string) string {
	if len(line) <= longestLine {
		return line
	}
	begin, end := lineBegins, len(line)-lineEnds
	for !utf8.RuneStart(line[begin]) {
		begin--
	}
	for !utf8.RuneStart(line[end]) {
		end++
	}
	return fmt.Sprintf("%s ... (%d bytes are left out) ... %s", line[:begin], end-begin, line[end:])
}
