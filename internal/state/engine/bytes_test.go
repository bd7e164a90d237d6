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
		"adamw split fp32":   "32b9c85272a5143e",
		"adamw split bf16":   "fe2da3d9e0c9ad2c",
		"adamw split int8":   "5f6921e49ad67d1f",
		"adamw fp32 mixed":   "9285f6eb74d7c1b1",
		"adamw split24 int8": "74e0e45741422d9d",
		"lion split24 bf16":  "f9228e0135f241c0",
		"lion split bf16":    "f530e55ca7ba8fa6",
		"adagrad fp32 bf16":  "a565800344a07f84",
		"sgd fp32 fp32":      "0b4e3c0064cf67fd",
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
