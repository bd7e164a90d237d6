package report

import (
	"slices"
	"testing"
)

// TestWrappedIndentation keeps the indentation of a text in all of its lines.
func TestWrappedIndentation(t *testing.T) {
	for text, want := range map[string][]string{
		"one two three":      {"one two", "three"},
		"  one two three":    {"  one two", "  three"},
		"    one two three":  {"    one", "    two", "    three"},
		"                 x": {"    x"},
		"   ":                {"   "},
	} {
		if have := wrapped(text, 9); !slices.Equal(have, want) {
			t.Errorf("%q: %q, expected %q", text, have, want)
		}
	}
}
