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
}

var (
	loose = layout{names: 18}
	dense = layout{names: 11, width: screen - 12}
)

func (p *Page) text() string {
	l := loose
	if p.Dense {
		l = dense
	}
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
func (l layout) lines(value string) []string {
	if l.width == 0 {
		return []string{value}
	}
	lines := strings.Split(text.WrapSoft(value, l.width), "\n")
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

func (p Paragraph) text(layout) string { return string(p) + "\n" }

func (c conclusion) text(layout) string {
	text := c.verdict + "\n"
	for _, hint := range c.hints {
		text += "  " + hint + "\n"
	}
	return text
}
