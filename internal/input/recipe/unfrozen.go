package recipe

import (
	"regexp"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
)

// Unfrozen are patterns of the only parameters that axolotl trains: freeze_layers_except in
// src/axolotl/utils/freeze.py.
type Unfrozen struct {
	Place fault.Position
	// Embeds means that a pattern names the embeddings or the head: their output then needs a gradient.
	Embeds   bool
	Ranges   bool // some pattern has a range of rows
	patterns []*regexp.Regexp
}

// Has reports whether a parameter is trained. A nil Unfrozen has all.
func (u *Unfrozen) Has(name string) bool {
	return u == nil || slices.ContainsFunc(u.patterns, func(p *regexp.Regexp) bool { return p.MatchString(name) })
}

var (
	rowRange   = lazyregexp.New(`^(.+)\[[0-9]*(?::[0-9]*)?\]$`)
	literalDot = lazyregexp.New(`\.(\+?)`)
)

// readUnfrozen reads unfrozen_parameters. A dot in a pattern is a dot, except before a plus.
func (r *frameworkReader) readUnfrozen() error {
	const key = "unfrozen_parameters"
	v := r.Find(key)
	if !on(v) {
		return nil
	}
	u := &Unfrozen{Place: r.Place(key)}
	for _, e := range asList(v).Elements {
		pattern := e.Text
		if found := rowRange.FindStringSubmatch(pattern); found != nil {
			pattern, u.Ranges = found[1], true
		}
		u.Embeds = u.Embeds || strings.Contains(pattern, "lm_head") || strings.Contains(pattern, "embed_tokens")
		pattern = literalDot.ReplaceAllStringFunc(pattern, func(dot string) string {
			if dot == "." {
				return `\.`
			}
			return dot
		})
		compiled, err := regexp.Compile(`\A(?:` + pattern + `)`)
		if err != nil {
			return r.Inputf(e.At, "%s has %q, a pattern that plimsoll cannot read", key, e.Text).
				WithHint("check the brackets; lookaround is not supported")
		}
		u.patterns = append(u.patterns, compiled)
	}
	r.to.Unfrozen = u
	return nil
}
