package report

import (
	"cmp"
	"fmt"
	"slices"

	"plimsoll/internal/base/ledger"
)

// heaviestRows returns a table with as many rows as are wanted: those of the most weight, in their order. Its last row
// counts the others.
func (t *Table) heaviestRows(most int, weight func(row []any) ledger.Bytes) *Table {
	if len(t.Rows) <= most+1 { // a row in place of one row says nothing
		return t
	}
	places := make([]int, len(t.Rows))
	for i := range places {
		places[i] = i
	}
	slices.SortStableFunc(places, func(a, b int) int { return cmp.Compare(weight(t.Rows[b]), weight(t.Rows[a])) })
	places = places[:most]
	slices.Sort(places)
	shown := *t
	shown.Rows = nil
	for _, i := range places {
		shown.Rows = append(shown.Rows, t.Rows[i])
	}
	rest := make([]any, len(t.Columns))
	rest[0] = fmt.Sprintf("%d smaller", len(t.Rows)-most)
	shown.add(rest...)
	return &shown
}

// largestCell is the weight of a row by its largest size.
func largestCell(row []any) (most ledger.Bytes) {
	for _, cell := range row {
		if size, is := cell.(ledger.Bytes); is {
			most = max(most, size, -size)
		}
	}
	return most
}

// chosen returns the facts of some names.
func (f Facts) chosen(names ...string) (list Facts) {
	for _, fact := range f {
		if slices.Contains(names, fact.Name) {
			list = append(list, fact)
		}
	}
	return list
}

// next is the last line of a screenful.
func next(format string, values ...any) Facts {
	var f Facts
	f.add("next", format, values...)
	return f
}
