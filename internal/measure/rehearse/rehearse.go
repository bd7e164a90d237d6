//go:build linux

// Package rehearse runs real optimizer steps on this host, over real bytes with synthetic weights and gradients. It
// measures how much host memory a training job will hold and how long a step will take. It compares the step with the
// speed limit of the host's memory. No GPU, weights or network are needed.
package rehearse

import (
	"context"
	"errors"
	"time"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/synthetic"
)

// Tolerance is how far the measured bytes per parameter may be from the planned ones, as a fraction.
const Tolerance = 0.005

// Step is one measured optimizer step.
type Step struct {
	Seconds       float64 `json:"seconds"`
	NormSeconds   float64 `json:"norm_seconds"`
	UpdateSeconds float64 `json:"update_seconds"`
	// TrafficSeconds is the time to move the bytes of the update without arithmetic, measured right after the update.
	TrafficSeconds float64 `json:"traffic_seconds"`
	GradientNorm   float64 `json:"gradient_norm"` // of the unscaled gradients; 0 where it is not finite
	LossScale      float64 `json:"loss_scale"`
	// Skipped reports that gradients overflowed. A skipped step updates and moves nothing.
	Skipped bool `json:"skipped"`
}

// Measurement is the result of a rehearsal.
type Measurement struct {
	// Measured is the memory that the ranks and the program held after the last step.
	Measured []ledger.Device
	Steps    []Step
	// Updates is the step counter of the optimizer. Skipped steps do not count.
	Updates int64
	// LossScale is the scale that the next step would have.
	LossScale float64
	// StateBytes is the memory of the named arenas, to the end of their last pages.
	StateBytes ledger.Bytes
	// Steady and Peak are the memory of the process after the last step, and its peak.
	Steady, Peak ledger.Bytes
	// Growth is how much more memory the process held after the last step than after the first.
	Growth ledger.Bytes
	// Huge is the part of the arenas that is on huge pages.
	Huge ledger.Bytes
	// InitializeSeconds is the time of the first touch of every page, and of writing the weights. AllocateSeconds is
	// that of the first touch alone.
	InitializeSeconds, AllocateSeconds float64
	// Paced are the steps with a paced trainer, one after each of Steps; none without one. Timeline is what the last of
	// them was, or nil.
	Paced    []PacedStep
	Timeline *Timeline
}

// Run maps the arenas, touches them and makes the steps. The plan must fit. Run gives all memory back before it
// returns.
func (p *Placement) Run(ctx context.Context, progress activity.Progress) (m *Measurement, err error) {
	t, err := p.begin()
	defer func() { err = errors.Join(err, t.close()) }()
	if err != nil {
		return nil, err
	}
	m = &Measurement{}
	defer p.runLanes()()
	begin := time.Now()
	var mapped ledger.Bytes
	for _, s := range t.all() {
		for _, a := range s.Arenas() {
			mapped += a.Mapped()
		}
	}
	progress.Begin("allocating memory", int64(mapped), activity.Bytes)
	for _, s := range t.all() {
		s.Populate(ctx, func(size ledger.Bytes) { progress.Advance(int64(size)) })
	}
	progress.End()
	m.AllocateSeconds = time.Since(begin).Seconds()
	progress.Begin("writing weights", p.Held, activity.Shares)
	t.each(func(s *engine.Shard, first int64, c kernel.Chunk) {
		if ctx.Err() == nil {
			synthetic.Weights(s.Config().Rank, first, c)
			progress.Advance(int64(c.Len()))
		}
	})
	progress.End()
	m.InitializeSeconds = time.Since(begin).Seconds()

	// The first reading starts threads of the garbage collector. Their memory is not growth of the job.
	if _, err := MeasureMemory(); err != nil {
		return nil, err
	}
	after := make([]probe.Memory, 0, 2)
	progress.Begin("optimizer steps", int64(p.Steps), activity.Counts)
	defer progress.End()
	for i := range p.warmUp() {
		if _, err := t.step(i); err != nil {
			return nil, err
		}
	}
	for i := range p.Steps {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		step, err := t.step(i)
		if err != nil {
			return nil, err
		}
		m.Steps = append(m.Steps, step)
		if t.paced != nil {
			paced, err := t.paced.run()
			if err != nil {
				return nil, err
			}
			m.Paced = append(m.Paced, paced)
		}
		progress.Advance(1)
		if i == 0 || i == p.Steps-1 {
			memory, err := MeasureMemory()
			if err != nil {
				return nil, err
			}
			after = append(after, memory)
		}
	}
	m.Updates, m.LossScale = t.engine.Steps()-int64(len(m.Paced)+p.warmUp()), t.scaler.Scale()
	if t.paced != nil {
		m.Timeline = t.paced.timeline()
	}
	return m, p.account(m, after[0], after[len(after)-1])
}

// account fills in the measured memory.
func (p *Placement) account(m *Measurement, first, last probe.Memory) error {
	everything := func(string) bool { return true }
	m.StateBytes = last.Proportional(isArena)
	m.Steady = last.Proportional(everything)
	m.Peak = max(last.Peak, m.Steady)
	m.Growth = m.Steady - first.Proportional(everything)
	m.Huge = hugeBytes(last)
	for _, shard := range p.allShards() {
		rank, err := MeasureArenas(shard.Rank, shard.Arenas(), last)
		if err != nil {
			return err
		}
		m.Measured = append(m.Measured, rank)
	}
	m.Measured = append(m.Measured, MeasureProgram(last))
	return nil
}
