package recipe

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/fault"
)

// filling is a value that Hugging Face's integration computes for a key of a
// DeepSpeed configuration. It replaces "auto" and conflicts with any other
// value.
type filling struct {
	path string // in the DeepSpeed configuration
	is   *value
	name string // the arguments that it was computed from
	// the position of name in the file; zero if the value is a default
	where fault.Position
	// lenient accepts any value of the file.
	lenient bool
}

// fill replaces "auto" in a DeepSpeed configuration.
func (d *document) fill(fillings []filling) error {
	for _, f := range fillings {
		v := d.root.find(f.path)
		switch {
		case v == nil:
		case v.kind == '"' && v.text == "auto":
			at := v.at
			*v = *f.is
			v.at = at
		case f.lenient || v.kind == 'n' || v.same(f.is):
		default:
			said := "by default"
			if f.where.Line > 0 {
				said = "in " + f.where.String()
			}
			return &fault.Input{
				Where: d.position(v.at),
				What: fmt.Sprintf("DeepSpeed's %s is %s, but %s is %s %s",
					f.path, v.inFull(), f.name, f.is.inFull(), said),
				Hint: `set it to "auto"`,
			}
		}
	}
	return nil
}

// inFull returns the value for messages, with the elements of a list.
func (v *value) inFull() string {
	if v.kind != '[' {
		return v.String()
	}
	var elements []string
	for _, element := range v.elements {
		elements = append(elements, element.inFull())
	}
	return "[" + strings.Join(elements, ", ") + "]"
}

// same reports whether two values are equal. It compares numbers by value, not
// by spelling.
func (v *value) same(w *value) bool {
	if v.kind != w.kind {
		return false
	}
	switch v.kind {
	case '0':
		v.parseNumber()
		w.parseNumber()
		return v.number == w.number
	case '"':
		return v.text == w.text
	}
	return slices.EqualFunc(v.elements, w.elements, (*value).same)
}

// ResolveSizes returns the configuration with the sizes that are "auto" set to the
// values that the Trainer computes from the hidden size of the model.
func (d *DeepSpeed) ResolveSizes(hidden int64) *DeepSpeed {
	resolved := *d
	const zero = "zero_optimization."
	auto := func(key string) bool { return slices.Contains(d.Auto, zero+key) }
	if auto("reduce_bucket_size") {
		resolved.Sizes.ReduceBucket = hidden * hidden
	}
	if auto("stage3_prefetch_bucket_size") && d.ZeROStage == 3 {
		resolved.Sizes.PrefetchBucket = int64(0.9 * float64(hidden*hidden))
	}
	if auto("stage3_param_persistence_threshold") && d.ZeROStage == 3 {
		resolved.Sizes.PersistentParameter = 10 * hidden
	}
	return &resolved
}
