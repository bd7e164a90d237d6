package deepspeed

import (
	"strings"
	"testing"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/recipetest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// TestWith changes values of a configuration. It must be as if the file had them,
// and the configuration itself must stay as it was.
func TestWith(t *testing.T) {
	const text = `{"train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO, "bf16": {"enabled": true}}`
	parse := func(zero string) (*Config, error) {
		return Parse("ds.json", []byte(strings.Replace(text, "ZERO", zero, 1)), version.Version{})
	}
	for _, c := range []struct {
		from string
		with map[string]any
		to   string
	}{
		{`{"stage": 3}`, map[string]any{"stage": 2}, `{"stage": 2}`},
		{`{"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}`, map[string]any{"stage": 3},
			`{"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}`},
		{`{"stage": 3, "reduce_bucket_size": "auto"}`,
			map[string]any{"offload_optimizer.device": "cpu", "offload_param.device": "cpu"},
			`{"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}, ` +
				`"offload_param": {"device": "cpu"}}`},
		{`true`, map[string]any{"offload_optimizer.device": "cpu"},
			`{"stage": 1, "offload_optimizer": {"device": "cpu"}}`},
		{`{"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}`, map[string]any{"stage": 2}, ""},
		{`{"stage": 3}`, map[string]any{"stage": 4}, ""},
	} {
		d, err := parse(c.from)
		if err != nil {
			t.Fatal(err)
		}
		values := map[string]any{}
		for path, value := range c.with {
			values["zero_optimization."+path] = value
		}
		got, err := d.With(values)
		if c.to == "" {
			recipetest.RequireInput(t, err)
			continue
		}
		want, failed := parse(c.to)
		if err != nil || failed != nil {
			t.Fatal(err, failed)
		}
		ignored := cmp.Options{cmpopts.IgnoreUnexported(Config{}), cmpopts.IgnoreFields(Config{}, "Notes")}
		if difference := cmp.Diff(want, got, ignored); difference != "" {
			t.Errorf("%s with %v, and %s (-):\n%s", c.from, c.with, c.to, difference)
		}
		again, err := parse(c.from)
		if difference := cmp.Diff(again, d, ignored); err != nil || difference != "" {
			t.Errorf("%s has changed: %s", c.from, difference)
		}
	}
}
