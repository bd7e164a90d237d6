package recipe

import (
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/strict"
)

// autofill is a value that Hugging Face's integration computes for a key of a
// DeepSpeed configuration. It replaces "auto" and conflicts with any other
// value.
type autofill struct {
	path string // in the DeepSpeed configuration
	is   *strict.Value
	from string // the argument that it was computed from, or both with " and "
	// where is the position of from in the file; zero if the value is a default.
	where fault.Position
	// lenient accepts any value of the file.
	lenient bool
}

// fillIn replaces "auto" in a DeepSpeed configuration.
func fillIn(d *strict.Document, values []autofill) error {
	for _, f := range values {
		v := d.Root.Find(f.path)
		switch {
		case v == nil:
		case v.IsAuto():
			at := v.At
			*v = *f.is
			v.At = at
		case f.lenient || v.Kind == 'n' || v.Equals(f.is):
		default:
			said := "by default"
			if f.where.Line > 0 {
				said = "in " + f.where.String()
			}
			return d.Inputf(v.At, "DeepSpeed's %s is %s, but %s is %s %s", f.path, v.InFull(), f.from,
				f.is.InFull(), said).WithHint(`set it to "auto"`)
		}
	}
	return nil
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
