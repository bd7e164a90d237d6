package report

import (
	"fmt"
	"strconv"

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
	Width    int // the least width in text
	Cut      int // the largest width in text, 0 for any
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
		t.Columns = append(t.Columns, Column{Title: title, Kind: kind})
	}
	return t
}

func (t *Table) add(cells ...any) { t.Rows = append(t.Rows, cells) }

// writer returns the table. The function written makes its cells and titles.
func (t *Table) writer(written func(string) string) table.Writer {
	w := table.NewWriter()
	w.SetStyle(styles[t.Style])
	w.SuppressTrailingSpaces()
	header := table.Row{}
	var configs []table.ColumnConfig
	for i, c := range t.Columns {
		align := c.Kind.align()
		header = append(header, written(c.Title))
		configs = append(configs, table.ColumnConfig{
			Number: i + 1, Align: align, AlignHeader: align, AlignFooter: align, WidthMin: c.Width, WidthMax: c.Cut,
			WidthMaxEnforcer: func(cell string, width int) string { return text.Snip(cell, width, "…") },
		})
	}
	w.SetColumnConfigs(configs)
	w.AppendHeader(header)
	row := func(cells []any) table.Row {
		row := table.Row{}
		for i, cell := range cells {
			row = append(row, written(t.Columns[i].format(cell)))
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

func (t *Table) text(layout) string {
	w := t.writer(func(cell string) string { return cell })
	if t.Style == Listed {
		w.ResetHeaders()
	}
	return w.Render() + "\n"
}

func (t *Table) markdown() string { return t.writer(escaped).RenderMarkdown() + "\n" }

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
			return strconv.FormatFloat(100*value, 'f', c.Decimals, 64) + " %"
		}
		return strconv.FormatFloat(value, 'f', c.Decimals, 64)
	}
	return fmt.Sprint(cell)
}
