package states

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
)

// Arenas returns the arenas for the states, which have no names yet. The control arena is the second.
func (d *Description) Arenas() []arena.Plan {
	l := NewLayout(d.Chunks)
	plans := []arena.Plan{
		{Component: ledger.HeldStates, Size: ledger.Bytes(l.Bytes()), Why: fmt.Sprintf(
			"%s B of states and %s B to move them into, the largest of %s chunks",
			ledger.Count(l.Bytes()-l.Gap()), ledger.Count(l.Gap()), ledger.Count(int64(l.Chunks())))},
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
