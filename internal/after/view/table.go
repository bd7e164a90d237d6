//go:build linux

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
	leastSpark = 12
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

// table is rows of cells. The column of histories has no cells.
type table struct {
	columns   []column
	rows      [][]string
	histories []*history // of the rows
}

func (t *table) add(memory *history, cells ...string) {
	t.rows, t.histories = append(t.rows, cells), append(t.histories, memory)
}

// lines returns the heading and the rows.
func (t *table) lines(width int) (heading string, rows []string) {
	columns, places := fitting(t.columns, width)
	join := func(cell func(place int, c column) string) string {
		var b strings.Builder
		for i, c := range columns {
			text := ansi.Truncate(cell(places[i], c), c.width, "…")
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
	for i, row := range t.rows {
		rows = append(rows, join(func(place int, c column) string {
			if c.spark {
				return t.histories[i].spark(c.width)
			}
			return row[place]
		}))
	}
	return join(func(_ int, c column) string { return c.title }), rows
}
