package report

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/extension"
	"golang.org/x/net/html"
	"pgregory.net/rapid"
)

// TestMarkdownIsRead has a parser of GitHub's Markdown read pages of any text: the reader must see that text, in the
// cell, item or line where it was put.
func TestMarkdownIsRead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawnPage(t)
		var out, rendered bytes.Buffer
		if err := p.Write(&out, Markdown); err != nil {
			t.Fatal(err)
		}
		if err := goldmark.New(goldmark.WithExtensions(extension.GFM)).Convert(out.Bytes(), &rendered); err != nil {
			t.Fatal(err)
		}
		document, err := html.Parse(&rendered)
		if err != nil {
			t.Fatal(err)
		}
		var got outline
		got.read(document, 0)
		if want := outlineOf(p); strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Fatalf("read\n%s\nwant\n%s\nfrom\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"), out.String())
		}
	})
}

// drawnPage returns a page with all that Markdown might take for its own.
func drawnPage(t *rapid.T) *Page {
	line := rapid.Custom(func(t *rapid.T) string {
		text := rapid.StringOfN(rapid.RuneFrom([]rune("ab01 \t|\\`*_~<>&[]()#+-=.:!$é×…")), 1, 12, -1).Draw(t, "text")
		if strings.TrimSpace(text) == "" {
			return "blank"
		}
		return text
	})
	lines := func(least int) []string { return rapid.SliceOfN(line, least, 3).Draw(t, "lines") }
	table := &Table{Style: rapid.SampledFrom([]Style{Ruled, Plain, Listed}).Draw(t, "style")}
	for _, title := range lines(1) {
		kind := rapid.SampledFrom([]Kind{Words, Label, Bytes, Number, Share}).Draw(t, "kind")
		table.Columns = append(table.Columns, Column{Title: title, Kind: kind})
	}
	for range rapid.IntRange(1, 3).Draw(t, "rows") {
		row := []any{}
		for range table.Columns {
			row = append(row, line.Draw(t, "cell"))
		}
		table.add(row...)
	}
	facts := Facts{{line.Draw(t, "name"), lines(0)}, {line.Draw(t, "name") + strings.Repeat("x", 9), lines(1)}}
	tree := Tree{{line.Draw(t, "node"), Tree{{line.Draw(t, "node"), nil}}}, {line.Draw(t, "node"), nil}}
	return &Page{
		Title:    line.Draw(t, "title"),
		Sections: []Section{{facts}, {tree, Paragraph(line.Draw(t, "paragraph")), table}},
		Verdict:  line.Draw(t, "verdict"),
		Hints:    lines(0),
	}
}

// outline is what a reader sees: a line for every list, item, row and paragraph.
type outline []string

func (o *outline) add(format string, values ...any) {
	*o = append(*o, strings.Join(strings.Fields(fmt.Sprintf(format, values...)), " "))
}

func (o *outline) read(n *html.Node, depth int) {
	if n.Type == html.ElementNode {
		switch n.Data {
		case "h2", "p", "tr":
			o.add("%s: %s", n.Data, textOf(n))
			return
		case "ul":
			if depth++; depth == 1 {
				o.add("list")
			}
		case "li":
			o.add("item %d: %s", depth, textOf(n))
		case "ol", "pre", "blockquote", "hr", "h1", "h3":
			o.add("a strange %s", n.Data)
		}
	}
	for child := n.FirstChild; child != nil; child = child.NextSibling {
		o.read(child, depth)
	}
}

// textOf returns the text of a node, without that of lists in it.
func textOf(n *html.Node) string {
	if n.Type == html.TextNode {
		return n.Data
	}
	text := ""
	for child := n.FirstChild; child != nil; child = child.NextSibling {
		switch child.Data {
		case "ul":
		case "th", "td":
			text += "[" + strings.Join(strings.Fields(textOf(child)), " ") + "]"
		default:
			text += textOf(child)
		}
	}
	return text
}

// outlineOf returns the outline of a page.
func outlineOf(p *Page) outline {
	var o outline
	o.add("h2: %s", p.Title)
	o.add("p: %s", p.Verdict)
	if len(p.Hints) > 0 {
		o.add("list")
	}
	for _, hint := range p.Hints {
		o.add("item 1: %s", hint)
	}
	for _, section := range p.Sections {
		for _, block := range section {
			o.block(block)
		}
	}
	return o
}

func (o *outline) block(block Block) {
	switch b := block.(type) {
	case Facts:
		o.add("list")
		for _, fact := range b {
			for i, value := range fact.Values {
				if i == 0 {
					o.add("item 1: %s: %s", strings.Join(strings.Fields(fact.Name), " "), value)
				} else {
					o.add("item 2: %s", value)
				}
			}
		}
	case Tree:
		o.add("list")
		o.nodes(b, 1)
	case Paragraph:
		o.add("p: %s", string(b))
	case *Table:
		titles := []any{}
		for _, c := range b.Columns {
			titles = append(titles, c.Title)
		}
		for _, row := range append([][]any{titles}, b.Rows...) {
			cells := ""
			for _, cell := range row {
				cells += " [" + strings.Join(strings.Fields(fmt.Sprint(cell)), " ") + "]"
			}
			o.add("tr: %s", cells)
		}
	}
}

func (o *outline) nodes(t Tree, depth int) {
	for _, node := range t {
		o.add("item %d: %s", depth, node.Text)
		o.nodes(node.Children, depth+1)
	}
}
