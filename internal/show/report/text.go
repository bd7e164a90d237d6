package report

import (
	"fmt"
	"strings"

	"github.com/jedib0t/go-pretty/v6/list"
	"github.com/jedib0t/go-pretty/v6/text"

	"plimsoll/internal/base/safe"
)

// screen is the width of dense text.
const screen = 120

// layout is the arrangement of facts in text.
type layout struct {
	names int // columns of the name
	width int // columns of the value, 0 for one line of any length
	page  int // columns of all else, 0 for lines of any length
	color bool
	ascii bool
	table bool // in place of bars
}

// terminal is the width of narrow text.
const terminal = 80

var (
	loose  = layout{names: 18}
	dense  = layout{names: 11, width: screen - 12}
	narrow = layout{names: 11, width: terminal - 12, page: terminal}
)

// screenful is how many lines a brief page has at most.
const screenful = 24

// mostDetail is what Brief is asked for first.
const mostDetail = 12

// brief returns the text of the most detailed brief page that is no longer than a screen.
func (p *Page) brief() (text string) {
	for detail := mostDetail; detail >= 0; detail-- {
		page := p.Brief(detail)
		page.Screen, page.Narrow = p.Screen, true
		if text = page.text(); strings.Count(text, "\n") <= screenful {
			break
		}
	}
	return text
}

func (p *Page) text() string {
	if p.Brief != nil && !p.Screen.Long && !p.Screen.Table && (p.Screen.Terminal || !p.Piped) {
		return p.brief()
	}
	l := loose
	switch {
	case p.Narrow:
		l = narrow
	case p.Dense:
		l = dense
	}
	l = l.on(p.Screen)
	var sections []string
	for _, section := range p.blocks() {
		var b strings.Builder
		for _, block := range section {
			b.WriteString(block.text(l))
		}
		if b.Len() > 0 {
			sections = append(sections, b.String())
		}
	}
	whole := strings.Join(sections, "\n")
	if l.ascii {
		whole = asASCII.Replace(whole)
	}
	return whole
}

// on returns the layout for a screen.
func (l layout) on(s Screen) layout {
	l.color, l.ascii, l.table = s.Color, s.ASCII, s.Table
	if s.Width > 0 {
		l.page = s.Width
		if l.width = s.Width - l.names - 1; s.Width < terminal {
			l.names, l.width = 1, s.Width-2 // values stand below their names
		}
	}
	return l
}

func (f Facts) text(l layout) string {
	var b strings.Builder
	for _, fact := range f {
		name := oneLine(fact.Name)
		if l.page > 0 && len(fact.Values) > 0 && widthOf(name) > l.names { // values stand below it
			b.WriteString(strings.Join(wrapped(name, l.page), "\n") + "\n")
			name = ""
		}
		for _, value := range fact.Values {
			for _, line := range l.lines(value) {
				fmt.Fprintf(&b, "%-*s %s\n", l.names, name, line)
				name = ""
			}
		}
	}
	return b.String()
}

// lines returns a value in lines of the layout's width.
func (l layout) lines(value string) []string { return wrapped(value, l.width) }

// oneLine returns a text whose line breaks are shown and not made: a name with one would make lines of its own. It
// escapes what has no picture, so that a layout counts the columns that are shown, and ends no color of a name.
func oneLine(value string) string { return safe.Escaped(strings.ReplaceAll(value, "\n", `\n`)) }

// wrapped breaks a text into lines of up to width characters; 0 is any. All of them have the indentation of the text.
func wrapped(value string, width int) []string {
	value = oneLine(value)
	if width == 0 {
		return []string{value}
	}
	words := strings.TrimLeft(value, " ")
	indentation := value[:min(len(value)-len(words), width/2)]
	width -= len(indentation)
	lines := strings.Split(text.WrapSoft(breakPaths(words, width), width), "\n")
	for i, line := range lines {
		lines[i] = indentation + strings.TrimSpace(line)
	}
	return lines
}

// breakPaths breaks words that are longer than a line behind a slash, where they have one in the line.
func breakPaths(value string, width int) string {
	words := strings.Split(value, " ")
	for i, word := range words {
		var parts []string
		for widthOf(word) > width {
			slash := strings.LastIndex(word[:min(width, len(word))], "/")
			if slash <= 0 {
				break
			}
			parts, word = append(parts, word[:slash+1]), word[slash+1:]
		}
		words[i] = strings.Join(append(parts, word), "\n")
	}
	return strings.Join(words, " ")
}

func (t Tree) text(l layout) string {
	w := list.NewWriter()
	w.SetStyle(list.StyleConnectedLight)
	t.write(w, l.page-indent)
	return w.Render() + "\n"
}

// indent is the width of what is before an item of a tree.
const indent = 3

// write writes the items in lines of up to width characters.
func (t Tree) write(w list.Writer, width int) {
	for _, node := range t {
		w.AppendItem(strings.Join(wrapped(node.Text, max(width, 0)), "\n"))
		w.Indent()
		node.Children.write(w, width-indent)
		w.UnIndent()
	}
}

func (l List) text(at layout) string {
	var b strings.Builder
	for _, item := range l {
		b.WriteString("  " + strings.Join(wrapped(item, max(at.page-4, 0)), "\n    ") + "\n")
	}
	return b.String()
}

func (p Paragraph) text(l layout) string {
	return strings.Join(wrapped(string(p), l.page), "\n") + "\n"
}

func (c conclusion) text(l layout) string {
	lines := wrapped(c.verdict, l.page)
	if l.color {
		head, _, _ := strings.Cut(lines[0], ":")
		lines[0] = tones[c.tone].Render(head) + strings.TrimPrefix(lines[0], head)
	}
	return strings.Join(lines, "\n") + "\n" + List(c.hints).text(l)
}
