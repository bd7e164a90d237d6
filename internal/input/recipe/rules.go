package recipe

import (
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// The rules of most keys.
var (
	boolean = strict.Boolean()
	integer = strict.Integer()
	number  = strict.Number()
	text    = strict.Text()
	count   = integer.From(0)
	size    = integer.From(1)
	amount  = number.From(0)
	share   = number.From(0).To(1)
	free    = strict.Free()

	names       = strict.List(text)
	NameOrNames = text.Or(names).OrNull()
)

// The rules of keys that programs read with argparse or OmegaConf: null is the default, and texts are converted.
var (
	Switched = boolean.Lax().OrNull()
	Counted  = size.Lax().OrNull()
	Measured = number.Lax().OrNull()
	Worded   = text.OrNull()
	Anything = strict.Rule{}.OrNull()
)

// Ignored returns the rules of keys that no plan depends on. A list has one a line, beside comments that begin with #.
func Ignored(list string) strict.Keys {
	return Anything.For(comment.ReplaceAllString(list, ""))
}

var comment = lazyregexp.New("(?m)^#.*")

// The short names of package strict that the tables of keys use.
type keys = strict.Keys

var (
	object = strict.Object
	list   = strict.List
	oneOf  = strict.Text
)

// dictionary returns the rule of an object of which DeepSpeed looks up keys and ignores others.
func dictionary(lists ...keys) strict.Rule { return object(lists...).NotingAll() }

// pydantic returns the rule of an object that DeepSpeed reads with a pydantic model since a release, and as a section
// before. Conversions are lax, and every key accepts "auto" for its default.
func pydantic(since string, lists ...keys) strict.Rule {
	relaxed := keys{}
	for _, list := range lists {
		for name, rule := range list {
			relaxed[name] = rule.Lax().OrAuto()
		}
	}
	return object(relaxed).StrictSince(since)
}

// instead returns the note about a key that another has replaced.
func instead(key string) string { return `is deprecated: use "` + key + `"` }
