//go:build linux

package cycle

import (
	"context"
	"errors"
	"time"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/measure/summary"
)

// Step is one measured step. Times of several ranks are those of the slowest.
type Step struct {
	// Seconds is the time until the last byte is on the host, and ReadySeconds until a trainer goes on: all is updated,
	// and with recovery the parameters are on the host. ExposedSeconds is how long it waits.
	Seconds        float64 `json:"seconds"`
	ReadySeconds   float64 `json:"ready_seconds"`
	ExposedSeconds float64 `json:"exposed_seconds"`
	// InSeconds, UpdateSeconds and OutSeconds are how long each actor was busy.
	InSeconds     float64 `json:"copy_in_seconds"`
	UpdateSeconds float64 `json:"update_seconds"`
	OutSeconds    float64 `json:"copy_out_seconds"`
	// PredictedSeconds and PredictedReadySeconds are what the law says of these three for Seconds and ReadySeconds.
	PredictedSeconds      float64 `json:"predicted_seconds"`
	PredictedReadySeconds float64 `json:"predicted_ready_seconds"`
}

// Measurement is the result of a rehearsal.
type Measurement struct {
	// Measured is the memory that the ranks and the program held after the last step.
	Measured []ledger.Device
	Steps    []Step
	// Timeline is what the last step was.
	Timeline          *rehearse.Timeline
	InitializeSeconds float64
}

// Run maps the arenas, fills them and makes the steps. The plan must fit. Run gives all memory back before it returns.
// It fails if bytes do not arrive.
func (p *Placement) Run(ctx context.Context, progress activity.Progress) (m *Measurement, err error) {
	t, err := p.begin()
	defer func() { err = errors.Join(err, t.close()) }()
	if err != nil {
		return nil, err
	}
	m = &Measurement{}
	begin := time.Now()
	t.fill(ctx, progress)
	m.InitializeSeconds = time.Since(begin).Seconds()
	progress.Begin("steps of the states", int64(p.Steps), activity.Counts)
	defer progress.End()
	for range p.Steps {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		step, err := t.step()
		if err != nil {
			return nil, err
		}
		m.Steps = append(m.Steps, step)
		progress.Advance(1)
	}
	m.Timeline = t.timeline
	if err := t.checkAll(); err != nil {
		return nil, err
	}
	memory, err := rehearse.MeasureMemory()
	if err != nil {
		return nil, err
	}
	for _, r := range p.Ranks {
		rank, err := rehearse.MeasureArenas(r.Number, p.arenas(r), memory)
		if err != nil {
			return nil, err
		}
		m.Measured = append(m.Measured, rank)
	}
	m.Measured = append(m.Measured, rehearse.MeasureProgram(memory))
	return m, nil
}

// Median returns the medians of the steps after the first, which warms up. Steps take the chunks in ascending and in
// descending order in turns: it is the mean of the medians of either order.
func Median(steps []Step) Step {
	var orders [2][]Step
	for i, s := range steps {
		if i > 0 || len(steps) == 1 {
			orders[i%2] = append(orders[i%2], s)
		}
	}
	a, b := medians(orders[0]), medians(orders[1])
	switch {
	case len(orders[0]) == 0:
		return b
	case len(orders[1]) == 0:
		return a
	}
	for _, of := range figures {
		*of(&a) = (*of(&a) + *of(&b)) / 2
	}
	return a
}

// figures are the numbers of a step.
var figures = []func(*Step) *float64{
	func(s *Step) *float64 { return &s.Seconds }, func(s *Step) *float64 { return &s.ReadySeconds },
	func(s *Step) *float64 { return &s.ExposedSeconds }, func(s *Step) *float64 { return &s.InSeconds },
	func(s *Step) *float64 { return &s.UpdateSeconds }, func(s *Step) *float64 { return &s.OutSeconds },
	func(s *Step) *float64 { return &s.PredictedSeconds },
	func(s *Step) *float64 { return &s.PredictedReadySeconds },
}

// medians returns the median of each number, or zeros for no steps.
func medians(steps []Step) (median Step) {
	if len(steps) == 0 {
		return median
	}
	for _, of := range figures {
		var values []float64
		for i := range steps {
			values = append(values, *of(&steps[i]))
		}
		*of(&median) = summary.Median(values)
	}
	return median
}
