// Package rule has the rules of most keys of configurations.
package rule

import (
	"maps"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// The rules of most keys.
var (
	Boolean = strict.Boolean()
	Integer = strict.Integer()
	Number  = strict.Number()
	Text    = strict.Text()
	Count   = Integer.From(0)
	Size    = Integer.From(1)
	Amount  = Number.From(0)
	Share   = Number.From(0).To(1)
	Free    = strict.Free()

	Names       = strict.List(Text)
	NameOrNames = Text.Or(Names).OrNull()
)

// The rules of keys that programs read with argparse or OmegaConf: null is the default, and texts are converted.
var (
	Switched = Boolean.Lax().OrNull()
	Counted  = Size.Lax().OrNull()
	Measured = Number.Lax().OrNull()
	Worded   = Text.OrNull()
	Anything = strict.Rule{}.OrNull()
)

// Ignored returns the rules of keys that no plan depends on. A list has one a line, beside comments that begin with #.
// Headings, which begin with ##, say why. Patterns with * are of keys in sections that are not read.
func Ignored(list string) strict.Keys {
	keys := Anything.For(Uncommented(list))
	maps.DeleteFunc(keys, func(name string, _ strict.Rule) bool { return strings.Contains(name, "*") })
	return keys
}

// Uncommented returns a list of keys without its lines of comment.
func Uncommented(list string) string { return comment.ReplaceAllString(list, "") }

var comment = lazyregexp.New("(?m)^#.*")

// Instead returns the note about a key that another has replaced.
func Instead(key string) string { return `is deprecated: use "` + key + `"` }
