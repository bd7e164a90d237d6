package strict

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/version"
)

// Rule is the set of values that a key accepts, and its default value. The zero Rule accepts any value. The methods
// return changed copies.
type Rule struct {
	form form

	keys     Keys              // of an object: the known keys
	names    map[string]string // of an object: the keys by their other names
	open     bool              // of an object: other keys are accepted, too
	noted    bool              // of an object: other keys are noted, but misspelled keys are refused
	slips    bool              // of an object: misspelled keys are noted, too
	comments bool              // of an object: keys that begin with _ are accepted
	strictly version.Version   // of an object: other keys are refused from this release on, and noted before
	each     *Rule             // of a list: its elements; of an object: the values of all keys

	words    []string // of a text: the accepted words; none means any
	anyCase  bool     // the words may be written in any case
	low      float64  // of a number: the limits, both included
	high     float64
	below    bool // high itself is excluded
	digits   bool // a whole number has neither point nor exponent
	length   int  // of a list; 0 means any
	optional bool // null means absent
	auto     bool // "auto" is accepted: another program or the default decides
	lax      bool // numbers and booleans may be strings, and booleans may be 0 or 1

	also       *Rule           // a further form that the key accepts
	aliases    []string        // other names of the key
	deprecated string          // the alias that is noted
	since      version.Version // the first release that knows the key; zero means all
	note       string          // the remark about a key that is deprecated or without effect
	fallback   *Value          // the value without the key; nil means the zero value
}

// Keys are the rules of an object's keys.
type Keys map[string]Rule

type form int

const (
	anyForm form = iota
	objectForm
	listForm
	integerForm
	numberForm
	booleanForm
	textForm
)

// Integer, Number and Boolean return rules that accept any such value.
func Integer() Rule { return Rule{form: integerForm, low: math.Inf(-1), high: math.Inf(1)} }
func Number() Rule  { return Rule{form: numberForm, low: math.Inf(-1), high: math.Inf(1)} }
func Boolean() Rule { return Rule{form: booleanForm} }

// Text returns a rule that accepts one of the words, or any text if there are no words.
func Text(words ...string) Rule { return Rule{form: textForm, words: words} }

// List returns the rule of a list with such elements.
func List(each Rule) Rule { return Rule{form: listForm, each: &each} }

// Object returns the rule of an object. Later lists of keys override earlier
// ones.
func Object(lists ...Keys) Rule {
	r := Rule{form: objectForm, keys: Merge(lists...), names: map[string]string{}}
	for key, rule := range r.keys {
		for _, alias := range rule.aliases {
			r.names[alias] = key
		}
	}
	return r
}

// Merge returns the keys of all lists. Later ones override earlier ones.
func Merge(lists ...Keys) Keys {
	merged := Keys{}
	for _, list := range lists {
		maps.Copy(merged, list)
	}
	return merged
}

// Map returns the rule of an object with any keys whose values follow each. The lists are of keys with other values.
func Map(each Rule, lists ...Keys) Rule { r := Object(lists...); r.each = &each; return r }

// Free returns the rule of an object that the program passes on unread.
func Free() Rule { return Object().AndOthers() }

// Keys returns the keys of an object. It is nil for any other rule.
func (r Rule) Keys() Keys { return r.object().keys }

// For returns the rule for each of the names.
func (r Rule) For(names string) Keys {
	keys := Keys{}
	for name := range strings.FieldsSeq(names) {
		keys[name] = r
	}
	return keys
}

// From, To and Under limit a number. Under excludes the limit.
func (r Rule) From(low float64) Rule   { r.low = low; return r }
func (r Rule) To(high float64) Rule    { r.high = high; return r }
func (r Rule) Under(high float64) Rule { r.high, r.below = high, true; return r }

// Digits refuses a whole number with a point or an exponent, as Python's int does. Without it, 5e8 is a whole number.
func (r Rule) Digits() Rule { r.digits = true; return r }

// OrNull accepts null, and OrAuto "auto": the default applies.
func (r Rule) OrNull() Rule { r.optional = true; return r }
func (r Rule) OrAuto() Rule { r.auto = true; return r }

// Lax follows pydantic: numbers and booleans may be strings, and booleans may
// be 0 or 1.
func (r Rule) Lax() Rule { r.lax = true; return r }

// IsNumber reports whether the rule accepts numbers only, null aside.
func (r Rule) IsNumber() bool {
	return (r.form == integerForm || r.form == numberForm) && r.also == nil
}

// InAnyCase accepts the words of a text in capitals, too.
func (r Rule) InAnyCase() Rule { r.anyCase = true; return r }

// OfLength limits a list.
func (r Rule) OfLength(n int) Rule { r.length = n; return r }

// AndOthers accepts unknown keys of an object. NotingOthers notes them, but
// refuses misspelled keys. AndComments accepts keys that begin with _.
func (r Rule) AndOthers() Rule    { r.open = true; return r }
func (r Rule) NotingOthers() Rule { r.noted = true; return r }
func (r Rule) AndComments() Rule  { r.comments = true; return r }

// NotingAll notes unknown keys, also misspelled ones, with the key that was probably meant.
func (r Rule) NotingAll() Rule { r.noted, r.slips = true, true; return r }

// StrictSince refuses unknown keys of an object from a release of the program on, and notes them before. It also notes
// those with the value "auto": DeepSpeed drops them before it looks for unknown keys.
func (r Rule) StrictSince(release string) Rule { r.strictly = releaseOf(release); return r.NotingAll() }

// Since says that a key is unknown before a release of the program.
func (r Rule) Since(release string) Rule { r.since = releaseOf(release); return r }

func releaseOf(text string) version.Version {
	v, err := version.Parse(text)
	if err != nil {
		panic(err)
	}
	return v
}

// isFrom reports whether a release is the given one or later.
func isFrom(release, first version.Version) bool {
	return release.AtLeast(first.Major, first.Minor, first.Patch)
}

// Alias gives the key another name. An object may have one of the two.
func (r Rule) Alias(name string) Rule { r.aliases = append(slices.Clone(r.aliases), name); return r }

// Deprecated gives the key another name, whose use is noted.
func (r Rule) Deprecated(name string) Rule { r = r.Alias(name); r.deprecated = name; return r }

// Prefixed gives each key of an object a second name, with the prefix.
func (r Rule) Prefixed(prefix string) Rule {
	names := maps.Clone(r.names)
	for key := range r.keys {
		names[prefix+key] = key
	}
	r.names = names
	return r
}

// Noting notes every use of the key.
func (r Rule) Noting(note string) Rule { r.note = note; return r }

// Or adds a form that the rule accepts.
func (r Rule) Or(other Rule) Rule {
	if r.also != nil {
		other = r.also.Or(other)
	}
	r.also = &other
	return r
}

// Default sets the value of the key if the document has none. It panics if the rule does not accept it.
func (r Rule) Default(x any) Rule {
	v := Of(x)
	if !r.takes(v) {
		panic(fmt.Sprintf("strict: the default %v is not %v", x, r))
	}
	r.fallback = v
	return r
}

// named returns the key with that name, whether it is an alias or not, and its
// rule.
func (r Rule) named(name string) (key string, rule Rule, known bool) {
	key = name
	if canonical, is := r.names[name]; is {
		key = canonical
	}
	if rule, known = r.keys[key]; !known && r.each != nil && r.form == objectForm {
		return key, *r.each, true
	}
	return key, rule, known
}

// allNames returns the sorted keys and aliases of an object.
func (r Rule) allNames() []string {
	names := slices.AppendSeq(slices.Collect(maps.Keys(r.keys)), maps.Keys(r.names))
	slices.Sort(names)
	return names
}

// String returns what the rule expects, for messages.
func (r Rule) String() string {
	expected := ""
	switch r.form {
	case objectForm:
		expected = "an object"
	case listForm:
		if expected = "a list"; r.length > 0 {
			expected = fmt.Sprintf("a list of %d", r.length)
		}
	case integerForm:
		expected = "a whole number" + r.limits()
	case numberForm:
		expected = "a number" + r.limits()
	case booleanForm:
		expected = "true or false"
	case textForm:
		if expected = "a string"; len(r.words) > 0 {
			expected = quoted(r.words)
		}
	}
	if r.also != nil {
		expected += " or " + r.also.String()
	}
	if r.auto {
		expected += ` or "auto"`
	}
	if r.optional {
		expected += " or null"
	}
	return expected
}

func (r Rule) limits() string {
	low, high := strconv.FormatFloat(r.low, 'f', -1, 64), strconv.FormatFloat(r.high, 'f', -1, 64)
	switch {
	case r.below:
		return " from " + low + " to below " + high
	case math.IsInf(r.low, -1) && math.IsInf(r.high, 1):
		return ""
	case math.IsInf(r.high, 1):
		return " of at least " + low
	default:
		return " from " + low + " to " + high
	}
}

// quoted returns `one of "a", "b", "c"`, or `"a"` for a single word.
func quoted(words []string) string {
	var list []string
	for _, word := range words {
		list = append(list, strconv.Quote(word))
	}
	if len(list) == 1 {
		return list[0]
	}
	return "one of " + strings.Join(list, ", ")
}

// takes converts v to the form of the rule and reports whether it could.
func (r Rule) takes(v *Value) bool {
	switch r.form {
	case anyForm:
		return true
	case objectForm:
		return v.Kind == '{'
	case listForm:
		return v.Kind == '[' && (r.length == 0 || len(v.Elements) == r.length)
	case booleanForm:
		if v.Kind == 't' || v.Kind == 'f' {
			v.Truth = v.Kind == 't'
			return true
		}
		return r.lax && (v.Kind == '0' || v.Kind == '"') && v.parseTruth()
	case integerForm, numberForm:
		if v.Kind != '0' && !(r.lax && v.Kind == '"') {
			return false
		}
		whole, ok := v.parseNumber()
		whole = whole && !(r.digits && strings.ContainsAny(v.Text, ".eE"))
		return ok && (whole || r.form == numberForm) &&
			v.Number >= r.low && v.Number <= r.high && !(r.below && v.Number == r.high)
	default:
		return v.Kind == '"' && (len(r.words) == 0 || slices.ContainsFunc(r.words, func(word string) bool {
			return word == v.Text || r.anyCase && strings.EqualFold(word, v.Text)
		}))
	}
}
