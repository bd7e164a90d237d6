package report

import (
	"bytes"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestScreenOf(t *testing.T) {
	for _, test := range []struct {
		environment []string
		want        Screen
	}{
		{nil, Screen{}},
		{[]string{"COLUMNS=100", "LANG=de_DE.UTF-8"}, Screen{Width: 100}},
		{[]string{"COLUMNS=3"}, Screen{Width: leastWidth}},
		{[]string{"COLUMNS=wide", "LANG=C.UTF-8"}, Screen{}},
		{[]string{"LANG=C"}, Screen{ASCII: true}},
		{[]string{"LANG=C", "LC_ALL=C.UTF-8"}, Screen{}},
		{[]string{"LANG=C.UTF-8", "LC_CTYPE=POSIX"}, Screen{ASCII: true}},
	} {
		if got := ScreenOf(&bytes.Buffer{}, test.environment); got != test.want {
			t.Errorf("%q: %+v, want %+v", test.environment, got, test.want)
		}
	}
}

// TestPagesFitTheScreen: no line of any page is wider than the screen, and nothing is lost but how it is broken.
func TestPagesFitTheScreen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		page := drawnPage(t)
		page.Screen = Screen{Width: rapid.IntRange(leastWidth, 130).Draw(t, "width")}
		for line := range strings.Lines(page.text()) {
			if n := widthOf(strings.TrimSuffix(line, "\n")); n > page.Screen.Width {
				t.Fatalf("a line of %d columns on a screen of %d:\n%s", n, page.Screen.Width, page.text())
			}
		}
	})
}
