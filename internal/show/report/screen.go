package report

import (
	"io"
	"os"
	"strconv"
	"strings"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/colorprofile"
	"golang.org/x/term"
)

// Screen is what shows the text of a page. The zero Screen is a file or a pipe: it takes lines of any length.
type Screen struct {
	Width int  // columns, 0 for any
	Color bool // the colors of the terminal's own palette, which is made for its background
	ASCII bool // no other characters
	Table bool // a table of all figures in place of bars
	Long  bool // all that is known, in place of a screenful

	Terminal bool // somebody looks at it
}

// leastWidth is the width that text is made for at least.
const leastWidth = 40

// ScreenOf returns the screen behind an output. Where that is no terminal, COLUMNS in the environment gives the width.
func ScreenOf(out io.Writer, environment []string) Screen {
	variables := map[string]string{}
	for _, v := range environment {
		name, value, _ := strings.Cut(v, "=")
		variables[name] = value
	}
	s := Screen{Color: colorprofile.Detect(out, environment) > colorprofile.ASCII, ASCII: !hasUnicode(variables)}
	if n, err := strconv.Atoi(variables["COLUMNS"]); err == nil && n > 0 {
		s.Width = max(n, leastWidth)
	}
	if file, isFile := out.(*os.File); isFile && term.IsTerminal(int(file.Fd())) {
		s.Terminal = true
		s.ASCII = s.ASCII || variables["TERM"] == "dumb" || strings.HasPrefix(variables["TERM"], "vt")
		if n, _, err := term.GetSize(int(file.Fd())); err == nil && n > 0 {
			s.Width = max(n, leastWidth)
		}
	}
	return s
}

// hasUnicode reports whether the locale has more than ASCII. Containers often have no locale at all, and terminals that
// understand UTF-8.
func hasUnicode(variables map[string]string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if locale := variables[name]; locale != "" {
			return locale != "C" && locale != "POSIX"
		}
	}
	return true
}

// asASCII maps what reports are drawn with, character by character, so that columns stay where they are.
var asASCII = strings.NewReplacer("─", "-", "│", "|", "┌", "+", "┐", "+", "└", "+", "┘", "+", "├", "+", "┤", "+",
	"┬", "+", "┴", "+", "┼", "+", "╭", "+", "╮", "+", "╰", "+", "╯", "+", "█", "#", "…", "~", "×", "x", "µ", "u")

// Tone is what a verdict means to its reader.
type Tone int

// The tones of verdicts.
const (
	Plainly Tone = iota
	Good
	Warning
	Bad
)

// tones are letters on a color: they are read on dark and on light terminals.
var tones = map[Tone]lipgloss.Style{
	Plainly: lipgloss.NewStyle().Bold(true),
	Good:    lipgloss.NewStyle().Bold(true).Foreground(lipgloss.Black).Background(lipgloss.Green),
	Warning: lipgloss.NewStyle().Bold(true).Foreground(lipgloss.Black).Background(lipgloss.Yellow),
	Bad:     lipgloss.NewStyle().Bold(true).Foreground(lipgloss.BrightWhite).Background(lipgloss.Red),
}

// toneOf returns the tone of a verdict that is good or bad.
func toneOf(good bool) Tone {
	if good {
		return Good
	}
	return Bad
}

// class is the tone's class in HTML.
func (t Tone) class() string {
	return map[Tone]string{Plainly: "plain", Good: "good", Warning: "warning", Bad: "bad"}[t]
}
