package states

import (
	"fmt"

	"plimsoll/arena"
	"plimsoll/ledger"
)

// Arenas returns the arenas for the states, which have no names yet. The control arena is the second.
func (d *Description) Arenas() []arena.Plan {
	layout := NewLayout(d.Chunks)
	plans := []arena.Plan{
		{Component: ledger.HeldStates, Size: ledger.Bytes(layout.Bytes()), Why: fmt.Sprintf(
			"%s B of states and %s B to move them into, the largest of %s chunks",
			ledger.Count(layout.Bytes()-layout.Gap()), ledger.Count(layout.Gap()), ledger.Count(int64(layout.Chunks())))},
		{Component: ledger.HeldControl, Size: ledger.Bytes(d.ControlBytes()), Why: fmt.Sprintf(
			"how far a step is, 2 x 8 B x %s numbers, and %s B for hyperparameters", ledger.Count(int64(d.Scalars())),
			ledger.Count(d.SettingsBytes))},
	}
	if d.Recovery {
		plans = append(plans, arena.Plan{Component: ledger.Gradients, Size: ledger.Bytes(d.GradientBytes),
			Why: "the gradients of the last step, to finish it after a death of the trainer"})
	}
	return plans
}
