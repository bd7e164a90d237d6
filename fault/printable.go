package fault

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
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
		lines[i] = shorten(Escape(line))
	}
	return strings.Join(lines, "\n")
}

// Escape returns a text that changes neither the terminal nor the order of what is read. It escapes control characters
// except tabs and line breaks, and characters that have no picture of their own: those that change the direction of a
// text (Trojan Source, CVE-2021-42574), joiners, and separators of lines. In a string of JSON or JavaScript an escape
// means the same character.
func Escape(text string) string {
	if strings.IndexFunc(text, isHidden) < 0 && utf8.ValidString(text) {
		return text
	}
	var b strings.Builder
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRuneInString(text[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case isHidden(r) && r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		case isHidden(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		i += size
	}
	return b.String()
}

// isHidden reports whether a character acts on the text around it, and has no picture.
func isHidden(r rune) bool {
	return r != '\t' && r != '\n' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)
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
