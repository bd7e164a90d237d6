//go:build linux

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
		"adamw split fp32":   "6010476c87f6f46c",
		"adamw split bf16":   "feac77d3cac73145",
		"adamw split int8":   "7444277f7527a70f",
		"adamw fp32 mixed":   "babb3cf71b9fe335",
		"adamw split24 int8": "2d52664e44e4c0e6",
		"lion split24 bf16":  "52b790d8d32c346f",
		"lion split bf16":    "33f0980423c3d7d8",
		"adagrad fp32 bf16":  "52fa70a81caa857d",
		"sgd fp32 fp32":      "2404670979e4a1c5",
	}
	for _, test := range crashCases() {
		c := test.with(nil, 0)
		h := sha256.New()
		for _, a := range c.Arenas() {
			fmt.Fprintln(h, a.Name, a.Component, int64(a.Size))
		}
		fmt.Fprintln(h, c.fingerprint())
		if got := fmt.Sprintf("%x", h.Sum(nil)[:8]); got != want[test.name] {
			t.Errorf("%s: the layout has the digest %s, want %s", test.name, got, want[test.name])
		}
	}
}
