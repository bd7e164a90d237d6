// Package strict reads JSON and YAML documents strictly. A schema lists every key with its type, its range and its
// default. Every fault has a position and, if the cause can be guessed, a hint with the edit that fixes it.
package strict

import (
	"path/filepath"
	"sort"
	"strings"

	"plimsoll/internal/base/fault"
)

// Document is the text of a file and its parsed value. A part of a file is a
// Document with the file's text and another root.
type Document struct {
	File string
	Text []byte
	Root *Value

	syntax syntax
	lines  []int64 // offsets at which lines begin; see lineStarts
}

// Parse parses YAML if the name of the file ends in .yaml or .yml. Otherwise it
// parses JSON without comments, like Python's json.
func Parse(file string, text []byte) (*Document, error) {
	if IsYAML(file) {
		return parseYAML(file, text)
	}
	return ParseJSON(file, text)
}

// ParseYAML parses YAML, whatever the name of the file.
func ParseYAML(file string, text []byte) (*Document, error) { return parseYAML(file, text) }

// ParseJSON parses JSON without comments.
func ParseJSON(file string, text []byte) (*Document, error) {
	return (&Document{File: file, Text: text, syntax: jsonSyntax}).parseJSON(text)
}

// ParseCommented parses JSON with comments (//, /* */, #) and trailing commas.
// Hjson also allows names and strings without quotes and members without
// commas. They are refused: with them, a forgotten quote or comma changes the
// meaning of a file.
func ParseCommented(file string, text []byte) (*Document, error) {
	d := &Document{File: file, Text: text, syntax: jsonSyntax}
	plain, err := d.withoutComments()
	if err != nil {
		return nil, err
	}
	return d.parseJSON(plain)
}

// IsYAML reports whether a file name ends like that of a YAML file.
func IsYAML(file string) bool {
	ending := strings.ToLower(filepath.Ext(file))
	return ending == ".yaml" || ending == ".yml"
}

// lineStarts returns the offsets at which lines begin. It computes them once,
// as every key may need a position.
func (d *Document) lineStarts() []int64 {
	if d.lines == nil {
		d.lines = []int64{0}
		for i, c := range d.Text {
			if c == '\n' {
				d.lines = append(d.lines, int64(i)+1)
			}
		}
	}
	return d.lines
}

// Position returns the line and column of an offset, as [fault.At] does.
func (d *Document) Position(at int64) fault.Position {
	at = min(max(at, 0), int64(len(d.Text)))
	starts := d.lineStarts()
	line := sort.Search(len(starts), func(i int) bool { return starts[i] > at })
	return fault.Position{File: d.File, Line: line, Column: int(at-starts[line-1]) + 1}
}

// Inputf returns bad input at an offset.
func (d *Document) Inputf(at int64, format string, values ...any) *fault.Input {
	return d.Position(at).Inputf(format, values...)
}
