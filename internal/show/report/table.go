package report

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// Table is rows of cells in columns with titles.
type Table struct {
	Style   Style
	Columns []Column
	Rows    [][]any
	Footer  []any
}

// Column says how its cells are written and aligned.
type Column struct {
	Title    string
	Kind     Kind
	Decimals int // of a float64
	Width    int // the least width in text, where the screen is wide enough
}

// Kind is what a column holds. Words are aligned to the left, and all others to the right. A column of any kind may
// also hold strings, which are written as they are: "none" among numbers, or a figure with its spread.
type Kind int

// The kinds of columns.
const (
	Words  Kind = iota
	Label       // a word that belongs to the figures beside it
	Bytes       // sizes with their unit: ledger.Bytes
	Number      // integers, and float64 with the column's decimals
	Share       // float64 in percent, with the column's decimals
)

// Style is how a table looks as text. In Markdown all look alike.
type Style int

// The styles of tables.
const (
	Ruled  Style = iota // lines between the columns, and below the titles
	Plain               // no lines
	Listed              // neither lines nor titles, and indented
)

// styles are go-pretty's settings for the styles. Its own would write titles in capitals.
var styles = map[Style]table.Style{
	Ruled:  {Box: table.StyleBoxLight, Options: table.OptionsDefault},
	Plain:  {Box: table.BoxStyle{MiddleVertical: " "}, Options: table.Options{SeparateColumns: true}},
	Listed: {Box: table.BoxStyle{PaddingLeft: "  "}},
}

// with adds columns of one kind.
func (t *Table) with(kind Kind, titles ...string) *Table {
	for _, title := range titles {
		t.Columns = append(t.Columns, Column{Title: oneLine(title), Kind: kind})
	}
	return t
}

func (t *Table) add(cells ...any) { t.Rows = append(t.Rows, cells) }

// writer returns the table. The function written makes its cells and titles, by their columns.
func (t *Table) writer(written func(column int, cell string) string) table.Writer {
	w := table.NewWriter()
	w.SetStyle(styles[t.Style])
	w.SuppressTrailingSpaces()
	header := table.Row{}
	var configs []table.ColumnConfig
	for i, c := range t.Columns {
		align := c.Kind.align()
		header = append(header, written(i, c.Title))
		configs = append(configs, table.ColumnConfig{
			Number: i + 1, Align: align, AlignHeader: align, AlignFooter: align, WidthMin: c.Width,
		})
	}
	w.SetColumnConfigs(configs)
	w.AppendHeader(header)
	row := func(cells []any) table.Row {
		row := table.Row{}
		for i, cell := range cells {
			row = append(row, written(i, t.Columns[i].format(cell)))
		}
		return row
	}
	for _, cells := range t.Rows {
		w.AppendRow(row(cells))
	}
	if len(t.Footer) > 0 {
		w.AppendFooter(row(t.Footer))
	}
	return w
}

// text writes the table within the width of the page. Where broken cells of words and broken titles are not enough,
// columns with one value in all rows go into a line above the table, and then the other columns into tables below each
// other. What is wider still becomes a list of its cells, row by row.
func (t *Table) text(l layout) string {
	whole := t.rendered(func(_ int, cell string) string { return cell })
	if l.page == 0 || widthOf(whole) <= l.page {
		return whole
	}
	if narrow, fits := t.narrow(l.page); fits {
		return narrow
	}
	if len(t.Rows) > 1 {
		if rest, same := t.varying(); len(same) > 0 {
			return Paragraph("all rows: "+strings.Join(same, ", ")).text(l) + rest.text(l)
		}
		if parts, fit := t.parts(l.page); fit {
			return strings.Join(parts, "\n")
		}
	}
	return t.records(l)
}

// narrow breaks cells of words, and titles, into lines. It reports whether that is enough.
func (t *Table) narrow(page int) (text string, fits bool) {
	narrow := *t
	narrow.Columns = slices.Clone(t.Columns)
	for i := range narrow.Columns {
		narrow.Columns[i].Width = 0
	}
	widths, atBlanks, least := narrow.widths()
	whole := narrow.rendered(func(_ int, cell string) string { return cell })
	excess := widthOf(whole) - page
	if excess = reduce(widths, atBlanks, excess); excess > 0 {
		excess = reduce(widths, least, excess)
	}
	if excess > 0 {
		return "", false
	}
	return narrow.rendered(func(column int, cell string) string {
		return strings.Join(wrapped(cell, widths[column]), "\n")
	}), true
}

// reduce takes an excess from the widest columns that may be narrower, and returns what is left of it.
func reduce(widths, least []int, excess int) int {
	for ; excess > 0; excess-- {
		widest := -1
		for i := range widths {
			if widths[i] > least[i] && (widest < 0 || widths[i] > widths[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			break
		}
		widths[widest]--
	}
	return excess
}

// picked returns a table of some of the columns.
func (t *Table) picked(columns []int) *Table {
	picked := &Table{Style: t.Style}
	of := func(cells []any) (some []any) {
		for _, i := range columns {
			if i < len(cells) {
				some = append(some, cells[i])
			}
		}
		return some
	}
	for _, i := range columns {
		picked.Columns = append(picked.Columns, t.Columns[i])
	}
	for _, row := range t.Rows {
		picked.add(of(row)...)
	}
	picked.Footer = of(t.Footer)
	return picked
}

// varying returns the table without columns that have the same value in all rows, and these.
func (t *Table) varying() (rest *Table, same []string) {
	var columns []int
	for i, c := range t.Columns {
		first := ""
		varies := len(t.Footer) > 0 || t.Style == Listed
		for k, row := range t.Rows {
			if i >= len(row) {
				varies = true
				break
			}
			if cell := c.format(row[i]); k == 0 {
				first = cell
			} else {
				varies = varies || cell != first
			}
		}
		if varies {
			columns = append(columns, i)
		} else {
			same = append(same, strings.TrimSpace(c.Title+" "+first))
		}
	}
	return t.picked(columns), same
}

// parts divides the columns among tables, each of which begins with the first column.
func (t *Table) parts(page int) (parts []string, fit bool) {
	for next := 1; next < len(t.Columns); {
		columns, part := []int{0}, ""
		for ; next < len(t.Columns); next++ {
			text, fits := t.picked(append(columns, next)).narrow(page)
			if !fits {
				break
			}
			columns, part = append(columns, next), text
		}
		if len(columns) == 1 {
			return nil, false
		}
		parts = append(parts, part)
	}
	return parts, len(parts) > 0
}

func (t *Table) rendered(written func(int, string) string) string {
	w := t.writer(written)
	if t.Style == Listed {
		w.ResetHeaders()
	}
	return w.Render() + "\n"
}

// widths returns the widths of the columns, and how narrow they may be: figures stay in one line, titles and words
// break at blanks and in paths behind slashes, and long words where they must.
func (t *Table) widths() (natural, atBlanks, least []int) {
	const leastWords = 16
	for i, c := range t.Columns {
		cells := []string{}
		for _, row := range append(slices.Clone(t.Rows), t.Footer) {
			if i < len(row) {
				cells = append(cells, c.format(row[i]))
			}
		}
		width, needed, word := widthOf(c.Title), 1, 0
		if t.Style == Listed {
			width = 0
		} else if words := strings.Fields(c.Title); len(words) > 0 {
			needed = widthOf(strings.Join(words, "\n"))
		}
		for _, cell := range cells {
			width = max(width, widthOf(cell))
			if c.Kind == Words {
				parts := strings.Fields(strings.ReplaceAll(cell, "/", "/ "))
				word = max(word, widthOf(strings.Join(parts, "\n")))
				needed = max(needed, min(widthOf(cell), leastWords))
			} else {
				needed = max(needed, widthOf(cell))
			}
		}
		natural, least = append(natural, width), append(least, min(needed, width))
		atBlanks = append(atBlanks, min(max(needed, word), width))
	}
	return natural, atBlanks, least
}

// records lists the cells of every row below each other.
func (t *Table) records(l layout) string {
	var rows []string
	for _, row := range append(slices.Clone(t.Rows), t.Footer) {
		var facts Facts
		for i, cell := range row {
			if text := t.Columns[i].format(cell); text != "" {
				facts.add(t.Columns[i].Title, "%s", text)
			}
		}
		if len(facts) > 0 {
			rows = append(rows, facts.text(l))
		}
	}
	return strings.Join(rows, "\n")
}

// widthOf returns the columns of the longest line.
func widthOf(s string) int { return text.LongestLineLen(s) }

func (t *Table) markdown() string {
	return t.writer(func(_ int, cell string) string { return escaped(cell) }).RenderMarkdown() + "\n"
}

func (k Kind) align() text.Align {
	if k == Words {
		return text.AlignLeft
	}
	return text.AlignRight
}

// format writes a cell. A nil cell is empty.
func (c Column) format(cell any) string {
	switch value := cell.(type) {
	case nil:
		return ""
	case float64:
		if c.Kind == Share {
			return decimal(100*value, c.Decimals) + " %"
		}
		return decimal(value, c.Decimals)
	}
	return oneLine(fmt.Sprint(cell))
}

// decimal writes a number. One that rounds to zero has no sign.
func decimal(value float64, decimals int) string {
	text := strconv.FormatFloat(value, 'f', decimals, 64)
	if strings.Trim(text, "-0.") == "" {
		return strings.TrimPrefix(text, "-")
	}
	return text
}
