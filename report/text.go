package report

import (
	"fmt"
	"strings"

	"github.com/jedib0t/go-pretty/v6/list"
	"github.com/jedib0t/go-pretty/v6/text"
)

// screen is the width of dense text.
const screen = 120

// layout is the arrangement of facts in text.
type layout struct {
	names int // columns of the name
	width int // columns of the value, 0 for one line of any length
	page  int // columns of paragraphs and lists, 0 for lines of any length
	color bool
}

// terminal is the width of narrow text.
const terminal = 80

var (
	loose  = layout{names: 18}
	dense  = layout{names: 11, width: screen - 12}
	narrow = layout{names: 11, width: terminal - 12, page: terminal}
)

func (p *Page) text() string {
	l := loose
	switch {
	case p.Narrow:
		l = narrow
	case p.Dense:
		l = dense
	}
	l.color = p.Color
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
	return strings.Join(sections, "\n")
}

func (f Facts) text(l layout) string {
	var b strings.Builder
	for _, fact := range f {
		name := fact.Name
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

// wrapped breaks a text into lines of up to width characters; 0 is any.
func wrapped(value string, width int) []string {
	if width == 0 {
		return []string{value}
	}
	lines := strings.Split(text.WrapSoft(value, width), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(line)
	}
	return lines
}

func (t Tree) text(layout) string {
	w := list.NewWriter()
	w.SetStyle(list.StyleConnectedLight)
	t.write(w)
	return w.Render() + "\n"
}

func (t Tree) write(w list.Writer) {
	for _, node := range t {
		w.AppendItem(node.Text)
		w.Indent()
		node.Children.write(w)
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

func (c conclusion) text(layout) string {
	text := c.verdict + "\n"
	for _, hint := range c.hints {
		text += "  " + hint + "\n"
	}
	return text
}
