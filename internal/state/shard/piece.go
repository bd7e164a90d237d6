package shard

import (
	"fmt"
	"unicode/utf8"

	"plimsoll/internal/state/optim/kernel"
)

// Piece is what a shard has of a parameter: a range of the flattened parameter.
type Piece struct {
	Name  string
	Shape []int64 // of the full parameter
	Group int     // number of the parameter group
	Range
	Moments kernel.MomentType
}

// Elements returns the number of elements of the full parameter.
func (p Piece) Elements() (int64, error) {
	elements := int64(1)
	for _, n := range p.Shape {
		if n < 0 || n > MaxElements || n > 0 && elements > MaxElements/n {
			return 0, fmt.Errorf("parameter %q has the shape %v, expected one of at most %d elements",
				p.Name, p.Shape, int64(MaxElements))
		}
		elements *= n
	}
	return elements, nil
}

// IsFull reports whether the piece is its full parameter.
func (p Piece) IsFull() bool {
	elements, err := p.Elements()
	return err == nil && p.Range == Range{0, elements}
}

// String returns the name of the piece: that of the parameter, and the range unless it is full.
func (p Piece) String() string {
	if p.IsFull() {
		return p.Name
	}
	return fmt.Sprintf("%s[%d:%d]", p.Name, p.First, p.End())
}

// Validate refuses a piece that no parameter can have.
func (p Piece) Validate() error {
	elements, err := p.Elements()
	switch {
	case err != nil:
		return err
	case p.Name == "":
		return fmt.Errorf("a parameter of the shape %v has no name", p.Shape)
	case !utf8.ValidString(p.Name):
		return fmt.Errorf("parameter %q has a name that is not UTF-8", p.Name)
	case p.First < 0 || p.Count < 1 || p.First > elements-p.Count:
		return fmt.Errorf("parameter %q: %d elements from %d on: expected a range within the %d of its shape %v",
			p.Name, p.Count, p.First, elements, p.Shape)
	case p.Group < 0 || p.Group > maxGroups:
		return fmt.Errorf("parameter %q is in parameter group %d, expected 0 to %d", p.Name, p.Group, maxGroups)
	case p.Moments >= kernel.MomentType(len(kernel.MomentNames())):
		return fmt.Errorf("parameter %q: unknown type %d of moments", p.Name, uint8(p.Moments))
	}
	return nil
}

// Sections returns the sections of a shard of pieces: one for each that has elements, as a step may leave any of them
// alone.
func Sections(pieces []Piece) []Section {
	var sections []Section
	for _, p := range pieces {
		if p.Count > 0 {
			sections = append(sections, Section{Elements: p.Count, Group: p.Group, Moments: p.Moments})
		}
	}
	return sections
}

// Cut returns what a range has of the concatenation of pieces.
func Cut(pieces []Piece, r Range) []Piece {
	var cut []Piece
	at := int64(0) // element of the concatenation
	for _, p := range pieces {
		own := Range{at, p.Count}.Intersect(r).Shift(p.First - at)
		at += p.Count
		if own.Count > 0 {
			p.Range = own
			cut = append(cut, p)
		}
	}
	return cut
}
