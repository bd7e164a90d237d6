package strict

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
)

// digitGroups matches a number whose thousands have commas.
var digitGroups = lazyregexp.New(`^\d{1,3}(?:,\d{3})+$`)

// slip returns advice for a common mistake in a value, or "".
func (d *Document) slip(rule Rule, v *Value) string {
	bare := Value{Kind: '0', Text: v.Text}
	if v.Text == "true" || v.Text == "false" {
		bare.Kind = 't'
	}
	word := slices.ContainsFunc(rule.words, func(word string) bool { return strings.EqualFold(word, v.Text) })
	switch {
	case v.Kind != '"' && word:
		return "YAML 1.1 reads " + v.Text + " as a boolean: write '" + v.Text + "' in quotes"
	case v.Kind == '"' && rule.IsNumber() && digitGroups.MatchString(v.Text):
		return "write " + strings.ReplaceAll(v.Text, ",", "") + ", without commas"
	case v.Kind != '"' || rule.form == textForm || rule.form == objectForm || rule.form == listForm:
		return ""
	case v.Text == "auto":
		return `nothing fills in "auto" for this key: give a value, or leave the key out`
	case rule.takes(&bare) && !strings.ContainsRune(`"'`, rune(d.Text[v.At])):
		return "YAML 1.1 reads " + v.Text + " as a string: write the exponent as in 5.0e-5, or no exponent"
	case rule.takes(&bare):
		return "write " + v.Text + " without the quotes"
	}
	return ""
}

// advice names the key that was probably meant: a key of this object with a
// similar spelling, or the object that the key belongs in.
func (r *Reader) advice(rule Rule, name string) string {
	if places := whereabouts(r.schema.Rule, r.schema.Path, name); len(places) == 1 {
		return fmt.Sprintf("%q belongs%s", name, within(places[0]))
	}
	return DidYouMean(name, rule.allNames())
}

// DidYouMean returns the question whether the candidate closest to name was
// meant, or "".
func DidYouMean(name string, candidates []string) string {
	if near := fault.Nearest(name, candidates); near != "" {
		return fmt.Sprintf("did you mean %q?", near)
	}
	return ""
}

// whereabouts returns the paths of the objects in a rule that have a key called
// name.
func whereabouts(rule Rule, path, name string) []string {
	var places []string
	for _, key := range rule.allNames() {
		if key == name {
			places = append(places, path)
		}
		places = append(places, whereabouts(rule.keys[key], join(path, key), name)...)
	}
	return places
}

// within returns " in path", for messages.
func within(path string) string {
	if path == "" {
		return " at the top level"
	}
	return " in " + path
}

// join returns the path of a name in the object at path.
func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// Names are the names of an object's keys, prepared for comparison with
// misspelled ones.
type Names struct {
	rule   Rule
	joined map[string]bool // without underscores
	words  [][]string
}

// Names returns the names of an object's keys.
func (r Rule) Names() Names {
	s := Names{rule: r, joined: map[string]bool{}}
	for _, name := range r.allNames() {
		name = strings.ToLower(name)
		s.joined[strings.ReplaceAll(name, "_", "")] = true
		s.words = append(s.words, strings.Split(name, "_"))
	}
	return s
}

// Know reports whether there is a key of that name.
func (s Names) Know(name string) bool {
	_, _, known := s.rule.named(name)
	return known
}

// Resemble reports whether name is probably a misspelled key. Each of its words
// differs from the key's in one place, by at most two letters. In a short word
// it may differ by one letter or two swapped ones. fault.Nearest accepts larger
// differences, because its names are certainly wrong.
func (s Names) Resemble(name string) bool {
	name = strings.ToLower(name)
	if s.joined[strings.ReplaceAll(name, "_", "")] {
		return true
	}
	words := strings.Split(name, "_")
	return slices.ContainsFunc(s.words,
		func(meant []string) bool { return slices.EqualFunc(words, meant, isSlipOfWord) })
}

func isSlipOfWord(a, b string) bool {
	limit := 2
	if min(len(a), len(b)) <= 4 {
		limit = 1
	}
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for a != "" && b != "" && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	swapped := len(a) == 2 && len(b) == 2 && a[0] == b[1] && a[1] == b[0]
	return swapped || max(len(a), len(b)) <= limit
}
