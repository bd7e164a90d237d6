package deepspeed

import (
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/strict"
)

// Autofill is a value that Hugging Face's integration computes for a key of a
// DeepSpeed configuration. It replaces "auto" and conflicts with any other
// value.
type Autofill struct {
	Path string // in the DeepSpeed configuration
	Is   *strict.Value
	From string // the argument that it was computed from, or both with " and "
	// where is the position of from in the file; zero if the value is a default.
	Where fault.Position
	// lenient accepts any value of the file.
	Lenient bool
}

// FillIn replaces "auto" in a DeepSpeed configuration.
func FillIn(d *strict.Document, values []Autofill) error {
	for _, f := range values {
		v := d.Root.Find(f.Path)
		switch {
		case v == nil:
		case v.IsAuto():
			at := v.At
			*v = *f.Is
			v.At = at
		case f.Lenient || v.Kind == 'n' || v.Equals(f.Is):
		default:
			said := "by default"
			if f.Where.Line > 0 {
				said = "in " + f.Where.String()
			}
			return d.Inputf(v.At, "DeepSpeed's %s is %s, but %s is %s %s", f.Path, v.InFull(), f.From,
				f.Is.InFull(), said).WithHint(`set it to "auto"`)
		}
	}
	return nil
}

// ResolveSizes returns the configuration with the sizes that are "auto" set to the
// values that the Trainer computes from the hidden size of the model.
func (d *Config) ResolveSizes(hidden int64) *Config {
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

// Hosted reads a configuration for accelerate, which requires ZeRO.
func Hosted(d *strict.Document, release version.Version) (*Config, error) {
	if d.Root.Kind == '{' && d.Root.Member("zero_optimization") == nil {
		return nil, d.Inputf(d.Root.At,
			`the DeepSpeed configuration has no "zero_optimization", which accelerate needs`).
			WithHint(`add "zero_optimization": {"stage": 2}`)
	}
	if d.Root.Kind == '{' && d.Root.Member(AccumulationKey) == nil {
		d.Root.Set(AccumulationKey, d.Root.At, strict.Of(1))
	}
	return Read(d, release)
}
