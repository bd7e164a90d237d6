// Package rehearse runs real optimizer steps over real bytes on this host, with
// synthetic weights and gradients: what a training job will hold in host
// memory, how long a step will take, and how near that is to what the host's
// memory can do. No GPU, no weights and no network are needed.
package rehearse

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"plimsoll/arena"
	"plimsoll/engine"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
	"plimsoll/probe"
	"plimsoll/synthetic"
)

// Tolerance is how far measured bytes a parameter may be from planned ones.
const Tolerance = 0.005

// Step is one measured optimizer step.
type Step struct {
	Seconds       float64 `json:"seconds"`
	NormSeconds   float64 `json:"norm_seconds"`
	UpdateSeconds float64 `json:"update_seconds"`
	// TrafficSeconds is what moving the bytes of the update took right after
	// it, without arithmetic.
	TrafficSeconds float64 `json:"traffic_seconds"`
	GradientNorm   float64 `json:"gradient_norm"` // not scaled; 0 where it is not finite
	LossScale      float64 `json:"loss_scale"`
	// Skipped says that gradients overflowed. Then nothing was updated, and
	// nothing moved.
	Skipped bool `json:"skipped"`
}

// Measurement is what a rehearsal found.
type Measurement struct {
	// Measured is what ranks and program held after the last step.
	Measured []ledger.Device
	Steps    []Step
	// Updates is the step counter of the optimizer, which skipped steps leave
	// as it is.
	Updates int64
	// LossScale is the one that the next step would have.
	LossScale float64
	// StateBytes is what the named arenas hold, to the end of their last
	// pages.
	StateBytes ledger.Bytes
	// Steady and Peak are of the whole process, after the last step.
	Steady, Peak ledger.Bytes
	// Growth is what the process held more after the last step than after the
	// first.
	Growth ledger.Bytes
	// Huge is the part of the arenas that is on huge pages.
	Huge ledger.Bytes
	// InitializeSeconds is the time to touch every page first.
	InitializeSeconds float64
}

// Progress hears what a rehearsal is doing.
type Progress interface {
	// Begin starts an activity of a number of parts.
	Begin(activity string, parts int64)
	// Advance says that parts are done. It may be called from many threads.
	Advance(parts int64)
	// End ends the activity.
	End()
}

// Run maps the arenas, touches them and makes the steps. The plan must fit.
// Everything is given back before it returns.
func (p *Plan) Run(ctx context.Context, progress Progress) (m *Measurement, err error) {
	t, err := p.begin()
	defer func() { err = errors.Join(err, t.close()) }()
	if err != nil {
		return nil, err
	}
	m = &Measurement{}
	begin := time.Now()
	var mapped ledger.Bytes
	for _, s := range t.shards {
		for _, a := range s.Arenas() {
			mapped += a.Mapped()
		}
	}
	progress.Begin("getting memory", int64(mapped))
	for _, s := range t.shards {
		s.Populate(ctx, func(size ledger.Bytes) { progress.Advance(int64(size)) })
	}
	progress.End()
	progress.Begin("writing weights", p.Held)
	t.each(func(s *engine.Shard, first int64, c kernel.Chunk) {
		if ctx.Err() == nil {
			synthetic.State(s.Config().Rank, first, c)
			progress.Advance(int64(c.Len()))
		}
	})
	progress.End()
	m.InitializeSeconds = time.Since(begin).Seconds()

	// The first reading starts threads of the garbage collector, which are no
	// growth.
	if _, err := measure(); err != nil {
		return nil, err
	}
	after := make([]probe.Memory, 0, 2)
	progress.Begin("optimizer steps", int64(p.Steps))
	defer progress.End()
	for i := range p.Steps {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		step, err := t.step(i)
		if err != nil {
			return nil, err
		}
		m.Steps = append(m.Steps, step)
		progress.Advance(1)
		if i == 0 || i == p.Steps-1 {
			memory, err := measure()
			if err != nil {
				return nil, err
			}
			after = append(after, memory)
		}
	}
	m.Updates, m.LossScale = t.engine.Steps(), t.scaler.Scale()
	return m, p.account(m, after[0], after[len(after)-1])
}

// measure reads this process's memory without the garbage that reading it, and
// showing progress, have left on the Go heap.
func measure() (probe.Memory, error) {
	debug.FreeOSMemory()
	return probe.Process(os.DirFS("/"), "self")
}

// account fills in what was measured.
func (p *Plan) account(m *Measurement, first, last probe.Memory) error {
	isArena := func(name string) bool { return strings.HasPrefix(name, arenaPrefix) }
	everything := func(string) bool { return true }
	m.StateBytes = last.Proportional(isArena)
	m.Steady = last.Proportional(everything)
	m.Peak = max(last.Peak, m.Steady)
	m.Growth = m.Steady - first.Proportional(everything)
	for name, mapping := range last.Mappings {
		if isArena(name) {
			m.Huge += mapping.Huge
		}
	}
	for _, shard := range p.Shards {
		rank, err := measureShard(shard, last)
		if err != nil {
			return err
		}
		m.Measured = append(m.Measured, rank)
	}
	node := hostMemory(ledger.WholeNode)
	hold(&node, ledger.PageTables, last.PageTables, "")
	hold(&node, ledger.Process, m.Steady-m.StateBytes, "")
	m.Measured = append(m.Measured, node)
	return nil
}

// measureShard reads the arenas of a rank. An arena fills its last page from the
// front, so resident bytes beyond its size are rounding.
func measureShard(shard engine.ShardConfig, memory probe.Memory) (ledger.Device, error) {
	rank := hostMemory(shard.Rank)
	var rounding ledger.Bytes
	for _, a := range shard.Arenas() {
		name := arenaPrefix + a.Name
		mapping, ok := memory.Mappings[name]
		if !ok {
			return rank, fmt.Errorf("/proc/self/smaps: %w: no mapping is named %s", fs.ErrNotExist, name)
		}
		measured := min(mapping.Proportional, a.Size)
		hold(&rank, a.Component, measured, "")
		rounding += mapping.Proportional - measured
	}
	hold(&rank, ledger.PageRounding, rounding, "")
	return rank, nil
}

// arenaPrefix is how the kernel names a mapping of an arena.
const arenaPrefix = "/memfd:" + arena.NamePrefix
