package axolotl

import (
	"regexp"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe"
)

var (
	rowRange   = lazyregexp.New(`^(.+)\[[0-9]*(?::[0-9]*)?\]$`)
	literalDot = lazyregexp.New(`\.(\+?)`)
)

// unfrozen reads unfrozen_parameters. A dot in a pattern is a dot, except before a plus.
func (r *reader) unfrozen() error {
	const key = "unfrozen_parameters"
	v := r.Find(key)
	if !recipe.On(v) {
		return nil
	}
	u := &recipe.Unfrozen{Place: r.Place(key)}
	for _, e := range recipe.AsList(v).Elements {
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
		u.Patterns = append(u.Patterns, compiled)
	}
	r.To.Unfrozen = u
	return nil
}
