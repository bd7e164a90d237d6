package job

import "testing"

// TestOptimizerRows holds every row of the table to be complete, and every name to stand for one kind.
func TestOptimizerRows(t *testing.T) {
	kinds := map[string]string{}
	for i := range optimizerKinds {
		k := &optimizerKinds[i]
		names := []string{k.name}
		for name := range k.aliases {
			names = append(names, name)
		}
		for _, name := range names {
			if other, twice := kinds[name]; twice {
				t.Errorf("%s is a name of %s and of %s", name, other, k.name)
			}
			kinds[name] = k.name
		}
		if k.states == nil && k.choose == nil {
			t.Errorf("%s has no states, and nothing chooses them", k.name)
		}
		if k.why == "" && (k.lists > 0 || k.passes != nil && k.choose == nil) {
			t.Errorf("%s has temporaries without a reason", k.name)
		}
		if k.compresses && !k.ofDeepSpeed {
			t.Errorf("%s compresses what ranks exchange, which only optimizers of DeepSpeed do", k.name)
		}
		if len(k.variants) > 0 && k.variant != "" {
			t.Errorf("%s has several variants, and one", k.name)
		}
	}
}
