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
		"adamw split fp32":   "bd4b1f314a5e3fed",
		"adamw split bf16":   "d296a18f33624187",
		"adamw split int8":   "42cc716f893307d2",
		"adamw fp32 mixed":   "9a66686eed4108d7",
		"adamw split24 int8": "32b264ab71183d87",
		"lion split24 bf16":  "010fbc429e79a15b",
		"lion split bf16":    "cb916b5bed7ea8b5",
		"adagrad fp32 bf16":  "21007ca3fc45454f",
		"sgd fp32 fp32":      "42cfc527016e2a8c",
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
