package view

import (
	"strings"

	"github.com/charmbracelet/x/ansi"
)

// column is a column of a table. Words are on the left, numbers on the right.
type column struct {
	title  string
	width  int // the least one, if the column takes what is left
	words  bool
	needed int  // columns with the lowest number go first where the screen is narrow; 0 is never shown
	spark  bool // the column takes the width that is left
}

func words(title string, width, needed int) column {
	return column{title: title, width: width, words: true, needed: needed}
}

func number(title string, width, needed int) column {
	return column{title: title, width: width, needed: needed}
}

func spark(title string, needed int) column {
	return column{title: title, width: leastSpark, words: true, needed: needed, spark: true}
}

// leastSpark and mostSpark bound the column that takes the width that is left.
const (
	leastSpark = 8
	mostSpark  = 60
)

// mostNeeded is the need of columns without which a table says nothing.
const mostNeeded = 9

// fitting returns the columns that fit a width, and their places in the list.
func fitting(columns []column, width int) (fit []column, places []int) {
	shown := make([]bool, len(columns))
	left := width + 1 // no space before the first
	for need := mostNeeded; need > 0; need-- {
		for i, c := range columns {
			if c.needed == need && left >= c.width+1 {
				left -= c.width + 1
				shown[i] = true
			}
		}
	}
	for i, c := range columns {
		if !shown[i] {
			continue
		}
		if c.spark {
			c.width = min(mostSpark, c.width+left)
		}
		fit, places = append(fit, c), append(places, i)
	}
	return fit, places
}

// table is rows of cells.
type table struct {
	columns []column
	rows    [][]string
}

// lines returns the heading and the rows.
func (t *table) lines(width int) (heading string, rows []string) {
	columns, places := fitting(t.columns, width)
	join := func(cell func(i int) string) string {
		var b strings.Builder
		for i, c := range columns {
			text := ansi.Truncate(cell(places[i]), c.width, "…")
			pad := strings.Repeat(" ", c.width-ansi.StringWidth(text))
			if i > 0 {
				b.WriteByte(' ')
			}
			if c.words {
				b.WriteString(text + pad)
			} else {
				b.WriteString(pad + text)
			}
		}
		return strings.TrimRight(b.String(), " ")
	}
	for _, row := range t.rows {
		rows = append(rows, join(func(i int) string { return row[i] }))
	}
	return join(func(i int) string { return t.columns[i].title }), rows
}
