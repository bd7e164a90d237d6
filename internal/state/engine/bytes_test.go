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
		"adamw split fp32":                "57fdc86df3b5fb0d",
		"adamw split bf16":                "69b5b6af4e5e5d59",
		"adamw split int8":                "ff92875a9a46b8f7",
		"adamw fp32 mixed":                "d853104eef91f3aa",
		"adamw split24 int8":              "1c34ca79f30e21d7",
		"lion split24 bf16":               "3e08ddf6fc5fa6fc",
		"lion split bf16":                 "32c6de2ed1b0f2cf",
		"adagrad fp32 bf16":               "24f4ed54be8319cb",
		"sgd fp32 fp32":                   "aef4f05baf1cda62",
		"adamw fp32 fp32, gradients bf16": "3e9bea98c3a129ad",
		"adamw fp32 fp32, gradients fp32": "e36a9c592ac2dbfd",
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
