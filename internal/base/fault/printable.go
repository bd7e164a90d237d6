package fault

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"plimsoll/internal/base/safe"
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
		lines[i] = shorten(safe.Text(line))
	}
	return strings.Join(lines, "\n")
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
