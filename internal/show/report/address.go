package report

import (
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/published"
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
	if m := d.nearest(device.Kind); m != nil {
		s = append(s, Paragraph("  nearest measurement of a whole "+string(m.Device)+": "+m.Figures()),
			Paragraph("    "+m.Name()), Paragraph("    "+m.Source))
	}
	return s
}

// nearest returns the public measurement nearest to the plan of a device, nil where none is near.
func (d *PlanDocument) nearest(device ledger.Kind) *published.Measurement {
	for i := range d.Nearest {
		if d.Nearest[i].Device == device {
			return &d.Nearest[i]
		}
	}
	return nil
}

// nearestOf returns the public measurement nearest to a plan for each kind of device that it has.
func nearestOf(devices []ledger.Device, engine string, elements int64) (list []published.Measurement) {
	for _, kind := range []ledger.Kind{ledger.GPU, ledger.Host} {
		has := slices.ContainsFunc(devices, func(d ledger.Device) bool { return d.Kind == kind })
		if m := published.Nearest(engine, kind, elements); has && m != nil {
			list = append(list, *m)
		}
	}
	return list
}
