// Package fault describes bad input so that its author can correct it: what was
// found, where, what was expected, and which edit would help.
package fault

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Position is a place in a text file. Lines and columns count from 1. Columns
// count bytes, as in compilers. Line 0 means the file as a whole.
type Position struct {
	File         string
	Line, Column int
}

// At converts a byte offset into a position. An offset past the end of text
// gives the position just after its last byte.
func At(file string, text []byte, offset int64) Position {
	if offset > int64(len(text)) {
		offset = int64(len(text))
	}
	before := string(text[:max(offset, 0)])
	return Position{
		File:   file,
		Line:   1 + strings.Count(before, "\n"),
		Column: len(before) - strings.LastIndexByte(before, '\n'),
	}
}

// File returns the position of a file as a whole.
func File(name string) Position { return Position{File: name} }

// String returns the place in one line, whatever the name of the file has.
func (p Position) String() string {
	file := strings.ReplaceAll(p.File, "\n", `\n`)
	if file == "" || p.Line == 0 {
		return file
	}
	return fmt.Sprintf("%s:%d:%d", file, p.Line, p.Column)
}

// Input is bad input. The command line reports it with exit code 2.
type Input struct {
	Where Position // zero if the input is not a file (a flag, say)
	What  string   // what was found and what was expected
	Hint  string   // an edit that would correct it; may be empty
	Err   error    // the cause; may be nil
}

// Inputf returns bad input that is in no file. The format says what was found and what was expected.
func Inputf(format string, values ...any) *Input { return Position{}.Inputf(format, values...) }

// Inputf returns bad input at this place. The format says what was found and what was expected.
func (p Position) Inputf(format string, values ...any) *Input {
	return &Input{Where: p, What: fmt.Sprintf(format, values...)}
}

// WithHint adds an edit that would correct the input.
func (e *Input) WithHint(hint string) *Input {
	e.Hint = hint
	return e
}

// Error returns one line "where: what: cause", and a line with the hint if
// there is one.
func (e *Input) Error() string {
	var b strings.Builder
	if where := e.Where.String(); where != "" {
		b.WriteString(where + ": ")
	}
	b.WriteString(e.What)
	if e.Err != nil {
		if e.What != "" {
			b.WriteString(": ")
		}
		b.WriteString(e.Err.Error())
	}
	if e.Hint != "" {
		b.WriteString("\n  hint: " + e.Hint)
	}
	return b.String()
}

func (e *Input) Unwrap() error { return e.Err }

// Internal is a fault of the program itself. The command line reports it with
// exit code 1. It does not unwrap to its cause: that could be an Input, and the
// user's input is not at fault.
type Internal struct{ Err error }

func (e *Internal) Error() string {
	return fmt.Sprintf(
		"this is a fault of plimsoll, and not of what it was given: please report it with the command line, its "+
			"files and this message: %v", e.Err)
}

// OneOf lists what is allowed: "bf16", "split or fp32", "bf16, fp16 or fp32".
func OneOf(names ...string) string {
	last := len(names) - 1
	if last < 1 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

// Unknown returns the error for a name that is none of those known. It begins with the name, so that callers can say
// before it what has the name.
func Unknown(name string, known []string) error {
	text := fmt.Sprintf("%q: expected %s", name, OneOf(known...))
	if nearest := Nearest(name, known); nearest != "" {
		text += fmt.Sprintf("; did you mean %q?", nearest)
	}
	return errors.New(text)
}

// Nearest returns the candidate closest to name by edit distance, or "" if none
// is close enough to be a likely misspelling. Where half of the letters differ,
// it is another word: muon is not lion.
func Nearest(name string, candidates []string) string {
	best, distance := "", min(1+len(name)/3, max(len(name)-1, 0)/2)
	for _, c := range candidates {
		if d := editDistance(strings.ToLower(name), strings.ToLower(c), distance+1); d <= distance &&
			(best == "" || d < distance) {
			best, distance = c, d
		}
	}
	return best
}

// Misspells reports whether a name is another one with so many letters wrong at most, and not the same.
func Misspells(name, other string, most int) bool {
	return name != other && editDistance(name, other, most+1) <= most
}

// NearestParameter is Nearest for names of parameters. Their numbers are those of layers, experts and projections: a
// candidate with other numbers is another parameter, and no misspelling of the name.
func NearestParameter(name string, candidates []string) string {
	numbers := numbersIn(name)
	return Nearest(name, slices.DeleteFunc(slices.Clone(candidates), func(c string) bool {
		return !slices.Equal(numbersIn(c), numbers)
	}))
}

// numbersIn returns the numbers in a name, in their order, as they are written.
func numbersIn(name string) []string {
	return strings.FieldsFunc(name, func(r rune) bool { return r < '0' || r > '9' })
}

// editDistance returns the number of letters to insert, delete, replace or swap with their neighbour that make a into b
// (the optimal string alignment distance). It may return limit for any greater distance.
func editDistance(a, b string, limit int) int {
	if abs(len(a)-len(b)) > limit {
		return limit
	}
	above, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			substitute := last[j]
			if a[i] != b[j] {
				substitute++
			}
			row[j+1] = min(substitute, row[j]+1, last[j+1]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], above[j-1]+1)
			}
		}
		above, last, row = last, row, above
	}
	return last[len(b)]
}

func abs(x int) int { return max(x, -x) }
