package engine

import (
	"crypto/sha256"
	"fmt"
	"testing"
)

// TestArenasKeepTheirLayout: a service takes over the arenas of the release before it. Their names, sizes and order
// stay the same, and so does the fingerprint in the journal.
func TestArenasKeepTheirLayout(t *testing.T) {
	want := map[string]string{
		"adamw split fp32":  "cfb206bb903e190e",
		"adamw split bf16":  "57a8d1cc377eb947",
		"adamw split int8":  "fd145e6d61f8aafb",
		"adamw fp32 mixed":  "fd1b7bf712c552d3",
		"lion split bf16":   "514a4eacf0ce86f1",
		"adagrad fp32 bf16": "d9cfb8da5132a0d6",
		"sgd fp32 fp32":     "f9bf1082f525a84a",
	}
	for _, test := range crashCases() {
		c := test.with(nil, 0)
		h := sha256.New()
		for _, a := range c.Arenas() {
			fmt.Fprintln(h, a.Name, a.Component, int64(a.Size), a.Why)
		}
		fmt.Fprintln(h, c.fingerprint())
		if got := fmt.Sprintf("%x", h.Sum(nil)[:8]); got != want[test.name] {
			t.Errorf("%s: the layout has the digest %s, want %s", test.name, got, want[test.name])
		}
	}
}
