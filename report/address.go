package report

import (
	"strings"

	"plimsoll/ledger"
	"plimsoll/published"
)

// addressOf returns where the bytes of a component come from, in the phase in which it is largest: the formula with its
// numbers, the source that makes it, and the nearest measurement.
func (d *PlanDocument) addressOf(device *ledger.Device, c ledger.Holding, phase string) Section {
	var s Section
	if len(c.Formula) > 0 {
		s = append(s, Paragraph("  formula in "+phase+":"))
		for _, line := range c.Formula.Lines() {
			s = append(s, Paragraph("    "+line))
		}
	}
	if c.Origin != nil {
		s = append(s, Paragraph("  source: "+c.Origin.String()))
	}
	if m := d.nearest(device); m != nil {
		s = append(s, Paragraph("  nearest measurement of a whole "+string(m.Device)+": "+m.String()))
	}
	return s
}

// nearest returns the public measurement nearest to the plan of a device, nil where none is near.
func (d *PlanDocument) nearest(device *ledger.Device) *published.Measurement {
	return published.Nearest(published.EngineOf(d.Job.Engine), device.Kind, d.Model.Parameters)
}

// inDetail returns why a component has its bytes, with the formula and the source.
func inDetail(c ledger.Holding) string {
	parts := []string{c.Why}
	if len(c.Formula) > 0 {
		parts = append(parts, "formula: "+c.Formula.String())
	}
	if c.Origin != nil {
		parts = append(parts, "source: "+c.Origin.String())
	}
	return strings.Join(parts, "; ")
}
