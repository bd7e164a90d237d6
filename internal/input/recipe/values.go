package recipe

import (
	"slices"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// Give sets a member of an object, whether the object has it or not.
func Give(object *strict.Value, name string, at int64, is *strict.Value) {
	given := *is
	if given.At = max(given.At, at); given.At < 0 {
		given.At = 0
	}
	if m := object.Member(name); m != nil {
		m.Value = &given
		return
	}
	object.Members = append(object.Members, strict.Member{Name: name, At: max(at, 0), Value: &given})
}

// On reports whether a value of any form asks for something.
func On(v *strict.Value) bool {
	if v == nil || v.IsEmpty() {
		return false
	}
	return !slices.Contains([]string{"false", "False", "0", "no", "none", "null"}, v.Text) && v.Kind != 'f'
}

// Separated returns a text with commas as a list of its parts.
func Separated(v *strict.Value) *strict.Value {
	if v == nil || v.Kind != '"' {
		return v
	}
	list := &strict.Value{At: v.At, Kind: '['}
	for part := range strings.SplitSeq(v.Text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			list.Elements = append(list.Elements, &strict.Value{At: v.At, Kind: '"', Text: part})
		}
	}
	return list
}

// OneName returns a list of one name as the name, as TRL does for "all-linear".
func OneName(v *strict.Value) *strict.Value {
	if v != nil && len(v.Elements) == 1 && v.Elements[0].Text == "all-linear" {
		return v.Elements[0]
	}
	return v
}

// AsList returns a name as a list of one.
func AsList(v *strict.Value) *strict.Value {
	if v == nil || v.Kind == '[' {
		return v
	}
	return &strict.Value{At: v.At, Kind: '[', Elements: []*strict.Value{v}}
}
