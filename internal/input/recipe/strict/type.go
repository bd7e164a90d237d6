package strict

import "plimsoll/internal/base/dtype"

// Type returns the element type at path, or Invalid. The schema lists only names that parse.
func (r *Reader) Type(path string) dtype.Type {
	t, _ := dtype.Parse(r.Word(path))
	return t
}
