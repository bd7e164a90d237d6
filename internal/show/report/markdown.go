package report

import (
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

func (p *Page) markdown() string {
	blocks := []string{"## " + escaped(p.Title) + "\n"}
	for _, section := range p.blocks() {
		for _, block := range section {
			if text := block.markdown(); text != "" {
				blocks = append(blocks, text)
			}
		}
	}
	return strings.Join(blocks, "\n")
}

func (f Facts) markdown() string {
	var b strings.Builder
	for _, fact := range f {
		if len(fact.Values) == 0 {
			continue
		}
		b.WriteString("- **" + escaped(fact.Name) + "**: " + escaped(fact.Values[0]) + "\n")
		for _, value := range fact.Values[1:] {
			b.WriteString("  - " + escaped(value) + "\n")
		}
	}
	return b.String()
}

func (t Tree) markdown() string {
	var b strings.Builder
	t.items(&b, "* ") // the mark of facts would make one list of both
	return b.String()
}

func (t Tree) items(b *strings.Builder, mark string) {
	for _, node := range t {
		b.WriteString(mark + escaped(node.Text) + "\n")
		node.Children.items(b, "  "+mark)
	}
}

func (l List) markdown() string {
	var b strings.Builder
	for _, item := range l {
		b.WriteString("- " + escaped(item) + "\n")
	}
	return b.String()
}

func (p Paragraph) markdown() string { return escaped(string(p)) + "\n" }

func (c conclusion) markdown() string {
	text := "**" + escaped(c.verdict) + "**\n"
	for i, hint := range c.hints {
		if i == 0 {
			text += "\n"
		}
		text += "+ " + escaped(hint) + "\n" // the mark of facts would make one list of both
	}
	return text
}

var (
	// marks matches text that has a meaning in Markdown anywhere in a line, or at the end of a heading. It first
	// matches a word with underscores inside, such as exp_avg: there they mean nothing.
	marks = lazyregexp.New("[A-Za-z0-9]+(?:_+[A-Za-z0-9]+)+|[\\\\`*_\\[\\]<>&~]|#$")
	// begins matches text that would be a list, a heading or a rule at the beginning of a line.
	begins = lazyregexp.New("^(?:[0-9]+[.)]|[-+]|#{1,6})(?: |$)|^[-=]+$")
)

// live matches what renderers make links of without a mark: people and teams, addresses, issues. An empty comment
// between its groups keeps it a text.
var live = lazyregexp.New(`(@|#|(?i:\bhttps?:|\bftp:|\bmailto:|\bxmpp:|\bwww))([\w./])`)

// escaped returns text on one line that Markdown shows unchanged. It leaves bars to the writer of tables: elsewhere
// they mean nothing.
func escaped(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	text = marks.ReplaceAllStringFunc(text, func(mark string) string {
		if len(mark) > 1 {
			return mark
		}
		return `\` + mark
	})
	text = live.ReplaceAllString(text, "$1<!-- -->$2")
	if begins.MatchString(text) {
		number := len(text) - len(strings.TrimLeft(text, "0123456789"))
		text = text[:number] + `\` + text[number:]
	}
	return text
}
