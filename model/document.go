package model

import (
	"fmt"

	"plimsoll/recipe/strict"
)

// members returns the members of an object, and elements those of a list. The
// path is that of the value, for messages.
func members(d *strict.Document, path string, v *strict.Value) ([]strict.Member, error) {
	if v.Kind != '{' {
		return nil, d.Fault(v.At, fmt.Sprintf("%s is %s, expected an object", path, v), "")
	}
	return v.Members, nil
}

func elements(d *strict.Document, path string, v *strict.Value) ([]*strict.Value, error) {
	if v.Kind != '[' {
		return nil, d.Fault(v.At, fmt.Sprintf("%s is %s, expected a list", path, v), "")
	}
	return v.Elements, nil
}

// whole is the path of a document's root.
const whole = "the document"

// textOf returns the text of a string, or "".
func textOf(v *strict.Value) string {
	if v.Kind != '"' {
		return ""
	}
	return v.Text
}
