// Package safe makes text from outside safe to show: names of files, models and processes, lines of logs, values of
// configurations. What is shown has no characters that act on a terminal or on the text around them, and no secrets,
// since people paste it into issues.
package safe

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Text returns a text that is safe to show, in any format: in a string of JSON or JavaScript an escape means the same
// character.
func Text(text string) string { return Escaped(redact(text)) }

// Line is Text in one line: a line break is shown and not made, so that a name makes no line of its own.
func Line(text string) string { return strings.ReplaceAll(Text(text), "\n", `\n`) }

// Escaped escapes control characters except tabs and line breaks, and characters that have no picture of their own:
// those that change the direction of a text (Trojan Source, CVE-2021-42574), joiners, and separators of lines.
func Escaped(text string) string {
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
	if ' ' <= r && r <= '~' {
		return false // most characters, without looking into tables
	}
	return r != '\t' && r != '\n' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)
}
