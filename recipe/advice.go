package recipe

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/fault"
)

// slip returns advice for a common mistake in a value, or "".
func (c *checking) slip(r rule, v *value) string {
	bare := value{kind: '0', text: v.text}
	if v.text == "true" || v.text == "false" {
		bare.kind = 't'
	}
	word := slices.ContainsFunc(r.words, func(word string) bool { return strings.EqualFold(word, v.text) })
	switch {
	case v.kind != '"' && word:
		return "YAML 1.1 takes " + v.text + " for a truth value: write '" + v.text + "' in quotes"
	case v.kind != '"' || r.form == textForm || r.form == objectForm || r.form == listForm:
		return ""
	case v.text == "auto":
		return `nothing fills in "auto" for this key: give a value, or leave the key out`
	case r.takes(&bare) && !strings.ContainsRune(`"'`, rune(c.text[v.at])):
		return "YAML 1.1 takes " + v.text + " for a string: write the exponent as in 5.0e-5, or no exponent"
	case r.takes(&bare):
		return "write " + v.text + " without the quotes"
	}
	return ""
}

// advice names the key that was probably meant: a key of this object with a
// similar spelling, or the object that the key belongs in.
func (c *checking) advice(r rule, name string) string {
	if places := whereabouts(c.schema.rule, "", name); len(places) == 1 {
		return fmt.Sprintf("%q belongs%s", name, within(places[0]))
	}
	if near := fault.Nearest(name, slices.Sorted(maps.Keys(r.keys))); near != "" {
		return fmt.Sprintf("did you mean %q?", near)
	}
	return ""
}

// whereabouts returns the paths of the objects in r that have a key called
// name.
func whereabouts(r rule, path, name string) []string {
	var places []string
	for _, key := range slices.Sorted(maps.Keys(r.keys)) {
		if key == name {
			places = append(places, path)
		}
		below := key
		if path != "" {
			below = path + "." + key
		}
		places = append(places, whereabouts(r.keys[key], below, name)...)
	}
	return places
}

// spellings are the keys of a rule, prepared for comparison with misspelled
// names.
type spellings struct {
	joined map[string]bool // without underscores
	words  [][]string
}

func (r rule) spellings() spellings {
	s := spellings{joined: map[string]bool{}}
	for key := range r.keys {
		key = strings.ToLower(key)
		s.joined[strings.ReplaceAll(key, "_", "")] = true
		s.words = append(s.words, strings.Split(key, "_"))
	}
	return s
}

// haveSlip reports whether name is probably a misspelled key. Each of its words
// differs from the key's in one place, by at most two letters. In a short word
// it may differ by one letter or two swapped ones. fault.Nearest accepts larger
// differences, because its names are certainly wrong.
func (s spellings) haveSlip(name string) bool {
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
