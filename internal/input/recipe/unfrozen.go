package recipe

import (
	"regexp"
	"slices"

	"plimsoll/internal/base/fault"
)

// Unfrozen are patterns of the only parameters that axolotl trains: freeze_layers_except in
// src/axolotl/utils/freeze.py.
type Unfrozen struct {
	Place fault.Position
	// Embeds means that a pattern names the embeddings or the head: their output then needs a gradient.
	Embeds   bool
	Ranges   bool // some pattern has a range of rows
	Patterns []*regexp.Regexp
}

// Has reports whether a parameter is trained. A nil Unfrozen has all.
func (u *Unfrozen) Has(name string) bool {
	return u == nil || slices.ContainsFunc(u.Patterns, func(p *regexp.Regexp) bool { return p.MatchString(name) })
}
