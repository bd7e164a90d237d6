//go:build linux

package report

import (
	"math"
	"testing"

	"plimsoll/internal/input/model"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/plan/overlap"
)

// TestHiddenShareOfAnInterval: with ZenFlow, what is hidden is a share of the work of a mean step, as the wait is. All
// columns are updated once in four steps, and the important ones in every step.
func TestHiddenShareOfAnInterval(t *testing.T) {
	p := &rehearse.Placement{Job: &rehearse.Job{Model: new(model.Model),
		Pace: &rehearse.Pace{Mode: overlap.ZenFlow, UpdateInterval: 4}}}
	step := rehearse.PacedStep{ExposedSeconds: 0.009, WorkSeconds: 0.012, UpdateSeconds: 0.03, NormSeconds: 0.006}
	o := newOverlap(p, &rehearse.Measurement{Paced: []rehearse.PacedStep{step, step}})
	if math.Abs(o.HiddenFraction-0.25) > 1e-9 {
		t.Errorf("%g is hidden, want 0.25", o.HiddenFraction)
	}
}
