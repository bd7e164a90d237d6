package fault

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestPrintable(t *testing.T) {
	for message, want := range map[string]string{
		"":                            "",
		"a.json:1:2: what\n  hint: x": "a.json:1:2: what\n  hint: x",
		"\tnäme \"日本\"":               "\tnäme \"日本\"",
		"ll\x1b]0;title\x07\x1b[2J":   `ll\u001b]0;title\u0007\u001b[2J`,
		"c1 \u009b31m, back\rspace":   `c1 \u009b31m, back\u000dspace`,
		"not UTF-8: \xff\x9b":         `not UTF-8: \xff\x9b`,
		"\n\n":                        "\n\n",
		"right \u202eto\u2066 left":   `right \u202eto\u2066 left`,
		"no\u200bwidth\ufeff":         `no\u200bwidth\ufeff`,
		"line\u2028 paragraph\u2029":  `line\u2028 paragraph\u2029`,
		"tag \U000e0041":              `tag \udb40\udc41`,
	} {
		if got := Printable(message); got != want {
			t.Errorf("%q is printed as %q, want %q", message, got, want)
		}
	}
}

// TestPrintableIsShort checks that a shortened message keeps the place of the
// fault and the expectation.
func TestPrintableIsShort(t *testing.T) {
	for _, long := range []string{
		strings.Repeat("k", 900_000), strings.Repeat("日", 300_000), strings.Repeat("\x1b", 10_000),
	} {
		got := Printable("a.json:1:2: no key " + long + ": expected another\n  hint: remove it")
		lines := strings.Split(got, "\n")
		if len(lines) != 2 || len(lines[0]) > longestLine || !utf8.ValidString(got) {
			t.Errorf("%d lines, the first of %d bytes", len(lines), len(lines[0]))
		}
		for _, want := range []string{"a.json:1:2: no key ", " bytes are left out) ... ", ": expected another",
			"\n  hint: remove it"} {
			if !strings.Contains(got, want) {
				t.Errorf("%.200q ... lacks %q", got, want)
			}
		}
	}
}
