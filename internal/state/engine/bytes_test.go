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
		"adamw split fp32":   "db0eee136881ebb7",
		"adamw split bf16":   "fe2da3d9e0c9ad2c",
		"adamw split int8":   "73a528a9d54a7980",
		"adamw fp32 mixed":   "9285f6eb74d7c1b1",
		"adamw split24 int8": "aa015f0568c3d9ff",
		"lion split24 bf16":  "f9228e0135f241c0",
		"lion split bf16":    "264d3f182dec35e7",
		"adagrad fp32 bf16":  "a565800344a07f84",
		"sgd fp32 fp32":      "a5d4b481ca157e61",
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
