//go:build linux

package report

import (
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/measure/summary"
	"plimsoll/internal/plan/overlap"
)

// Overlap is what a paced trainer found. Seconds are medians over the steps after the first, and means where some of
// these were clipped.
type Overlap struct {
	Mode            string  `json:"mode"`
	ForwardSeconds  float64 `json:"forward_seconds"`
	BackwardSeconds float64 `json:"backward_seconds"`
	Layers          int     `json:"layers"`
	// ExposedSeconds is how long the trainer waited, and WorkSeconds how long the workers worked. PredictedSeconds is
	// what the law says of UpdateSeconds and NormSeconds, which are those of all parameters once.
	ExposedSeconds   float64 `json:"exposed_seconds"`
	WorkSeconds      float64 `json:"work_seconds"`
	PredictedSeconds float64 `json:"predicted_exposed_seconds"`
	UpdateSeconds    float64 `json:"update_seconds"`
	NormSeconds      float64 `json:"norm_seconds"`
	// HiddenFraction is the share of the work that the trainer did not wait for.
	HiddenFraction float64 `json:"hidden_fraction"`
	// HiddenFromTokens are the tokens of a microbatch from which on the update hides in a training; null where the
	// tokens of the forward pass are unknown.
	HiddenFromTokens *float64             `json:"hidden_from_tokens"`
	Steps            []rehearse.PacedStep `json:"steps"`
	timeline         *rehearse.Timeline   // of the last step; nil without one
}

// newOverlap returns nil where no trainer was asked for.
func newOverlap(p *rehearse.Placement, m *rehearse.Measurement) *Overlap {
	if p.Pace == nil {
		return nil
	}
	o := &Overlap{Mode: string(p.Pace.Mode), ForwardSeconds: p.Pace.Forward.Seconds(),
		BackwardSeconds: p.Pace.Backward.Seconds(), Layers: p.LayerCount(), Steps: []rehearse.PacedStep{}}
	if m == nil || len(m.Paced) == 0 {
		return o
	}
	o.Steps, o.timeline = m.Paced, m.Timeline
	warm := m.Paced
	if len(warm) > 1 {
		warm = warm[1:]
	}
	clipped := o.clipped() > 0
	of := func(value func(rehearse.PacedStep) float64) float64 {
		if clipped {
			return mean(warm, value)
		}
		return summary.Over(warm, value).Median
	}
	o.ExposedSeconds = of(func(s rehearse.PacedStep) float64 { return s.ExposedSeconds })
	o.WorkSeconds = of(func(s rehearse.PacedStep) float64 { return s.WorkSeconds })
	o.PredictedSeconds = of(func(s rehearse.PacedStep) float64 { return s.PredictedSeconds })
	o.UpdateSeconds = of(func(s rehearse.PacedStep) float64 { return s.UpdateSeconds })
	o.NormSeconds = of(func(s rehearse.PacedStep) float64 { return s.NormSeconds })
	if o.WorkSeconds > 0 {
		o.HiddenFraction = max(0, 1-o.ExposedSeconds/o.WorkSeconds)
	}
	if tokens := p.HiddenFrom(o.UpdateSeconds); tokens > 0 {
		o.HiddenFromTokens = &tokens
	}
	return o
}

// facts returns the lines of the trainer.
func (o *Overlap) facts() Facts {
	var f Facts
	f.add("trainer", "paced, overlap %s: forward %s, backward %s, %s", o.Mode, seconds(o.ForwardSeconds),
		seconds(o.BackwardSeconds), counted(int64(o.Layers), "layer"))
	if len(o.Steps) == 0 {
		return f
	}
	step := o.ForwardSeconds + o.BackwardSeconds
	f.add("exposed", "%s of a step of %s (%.1f %%); the law predicts %s (%.1f %%)", seconds(o.ExposedSeconds),
		seconds(step+o.ExposedSeconds), 100*o.ExposedSeconds/(step+o.ExposedSeconds), seconds(o.PredictedSeconds),
		100*o.PredictedSeconds/(step+o.PredictedSeconds))
	if clipped := o.clipped(); clipped > 0 {
		f.add("clipped", "%d of %s, each retracted and made again", clipped, counted(int64(len(o.Steps)), "step"))
	}
	f.add("hidden", "%.0f %% of %s for update and norm", 100*o.HiddenFraction, seconds(o.WorkSeconds))
	if o.HiddenFromTokens != nil {
		f.add("T*", "%.0f tokens a microbatch hide the update on this host, copies to and from the GPU included",
			*o.HiddenFromTokens)
	} else if o.Mode == string(overlap.None) {
		f.add("T*", "none: without overlap no number of tokens hides the update")
	}
	return f
}

// mean returns the mean of a value of the steps.
func mean(steps []rehearse.PacedStep, value func(rehearse.PacedStep) float64) (sum float64) {
	for _, s := range steps {
		sum += value(s) / float64(len(steps))
	}
	return sum
}

// clipped returns how many steps were retracted and made again.
func (o *Overlap) clipped() (sum int) {
	for _, s := range o.Steps {
		if s.Clipped {
			sum++
		}
	}
	return sum
}

// sections returns the lines of the trainer and the picture of a step.
func (o *Overlap) sections() []Section {
	sections := []Section{{o.facts()}}
	if o.timeline != nil {
		sections = append(sections, Section{Gantt{o.timeline}})
	}
	return sections
}
