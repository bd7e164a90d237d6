package plan

import (
	"slices"
	"testing"

	"plimsoll/ledger"
)

// TestFormulas plans jobs of all kinds. The formula of every component of every phase evaluates to its bytes, digit by
// digit.
func TestFormulas(t *testing.T) {
	for name, request := range jobs(t) {
		t.Run(name, func(t *testing.T) {
			for _, d := range planned(t, request).Devices {
				checkFormulas(t, &d)
			}
		})
	}
}

// checkFormulas evaluates the formulas of a device.
func checkFormulas(t *testing.T, d *ledger.Device) {
	t.Helper()
	for _, p := range append(slices.Clone(d.Phases), ledger.Phase{Name: "all phases", Components: d.Outside}) {
		for _, c := range p.Components {
			if sum, ok := c.Formula.Bytes(); !ok || sum != c.Bytes {
				t.Errorf("%s, %s %s: %s has %v, and its formula is %q", d.Kind, p.Iteration, p.Name, c.Component,
					c.Bytes.Exact(), c.Formula)
			}
		}
	}
}
