//go:build linux

// Package bench measures how near an update comes to the speed limit of memory. The speed of memory differs from host
// to host and from second to second, so no time is judged alone. Turns of the update, of a millisecond each, come in
// random order with turns that move the same bytes without arithmetic, over the same arenas and by the same workers.
// The result is the median of the ratios. Rounds in which other processes used the CPUs are thrown away.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/synthetic"
)

// Result is the measurement of one case.
type Result struct {
	Case
	// Repeats is the number of whole passes per sample, of which a sample has the mean. It is 0 in a core's cache.
	Repeats int
	Samples []Sample
	Rounds  Rounds
	// Checked is nil where no check was asked for. Compared is nil without a peer.
	Checked  *Checks
	Compared *Peer
}

// Sample is one round. Its times are for all parameters.
type Sample struct {
	// Traffic, Update, Norm and Journaled are the medians of turns. Journaled is an update with an undo log, which
	// another process could finish; zero where that was not asked for. A case in a core's cache has no norm.
	Traffic   float64 `json:"traffic_seconds"`
	Update    float64 `json:"update_seconds"`
	Norm      float64 `json:"norm_seconds"`
	Journaled float64 `json:"journaled_update_seconds"`
	// Fraction is the median of traffic time over update time in turns beside each other.
	Fraction float64 `json:"fraction_of_limit"`
	// TrafficTurns are the turns of traffic, in their order.
	TrafficTurns []float64 `json:"traffic_turns_seconds"`
	// Step is a whole step of the engine, norm and update; StepUpdate is its update. Both are zero for a case in a
	// core's cache, which has only turns.
	Step       float64 `json:"step_seconds"`
	StepUpdate float64 `json:"step_update_seconds"`
	// Arrived is a step whose norm was added up as the gradients arrived; zero where that was not asked for.
	Arrived float64 `json:"arrived_step_seconds"`
	// Peer holds the steps of the peer, by variant.
	Peer map[string]float64 `json:"peer_seconds,omitempty"`
}

// Run measures all cases, one after the other. It gives all memory back before it returns.
func (p *Suite) Run(ctx context.Context, progress activity.Progress) ([]Result, error) {
	var results []Result
	for _, c := range p.Cases {
		result, err := p.measure(ctx, c, progress)
		if err != nil {
			return nil, fmt.Errorf("%v: %w", c, err)
		}
		results = append(results, *result)
	}
	return results, nil
}

func (p *Suite) measure(ctx context.Context, c Case, progress activity.Progress) (result *Result, err error) {
	progress.Begin(c.String(), int64(p.Rounds), activity.Counts)
	defer progress.End()
	state, err := MakeState(ctx, c.Shards)
	defer func() { err = errors.Join(err, closeAll(state)) }()
	if err != nil {
		return nil, err
	}
	result = &Result{Case: c}
	w := watch{cpus: p.Host.CPUs}
	var peers peerProcesses
	if c.Peer != "" {
		peers, err = startPeers(ctx, p.Python, c)
		defer func() { err = errors.Join(err, closeAll(peers)) }()
		if err != nil {
			return nil, err
		}
		w.children = peers.ids()
	}
	turns := newTurns(c, state)
	var s *steps
	if !c.InCore {
		if s, err = newSteps(c, state, p.Norm); err != nil {
			return nil, err
		}
		result.Repeats = s.calibrate()
	}
	if peers != nil {
		if _, err := peers.round(); err != nil { // also warms up
			return nil, err
		}
	}
	result.Samples, result.Rounds, err = rounds(ctx, w, p.Rounds, func() (sample Sample, err error) {
		sample = turns.sample()
		if s != nil {
			s.round(result.Repeats, &sample)
		}
		if peers != nil {
			sample.Peer, err = peers.round()
		}
		return sample, err
	}, progress)
	if err != nil {
		return nil, err
	}
	if peers != nil {
		result.Compared = peers.found()
	}
	if c.Checks {
		result.Checked, err = p.check(ctx, w, s, 1+result.Repeats/8)
	}
	return result, err
}

// MakeState makes shards and fills them, so that every page is near the worker that first touches it. The caller closes
// them, even after an error.
func MakeState(ctx context.Context, configs []engine.ShardConfig) (shards []*engine.Shard, err error) {
	for _, config := range configs {
		s, err := engine.NewShard(config)
		if err != nil {
			return shards, err
		}
		shards = append(shards, s)
		s.Populate(ctx, func(ledger.Bytes) {})
		s.Each(func(at shard.Chunk, chunk kernel.Chunk) {
			if ctx.Err() == nil {
				synthetic.Weights(config.Rank, at.First, chunk)
				synthetic.Gradients(config.Rank, 1, at.First, chunk.Gradient)
			}
		})
	}
	return shards, nil
}

func closeAll[T io.Closer](all []T) error {
	var err error
	for _, one := range all {
		err = errors.Join(err, one.Close())
	}
	return err
}

// leastSample is the least time of all whole steps of a sample together. It is long beside the kernel's clock tick of
// 10 ms, the unit in which the kernel counts other processes.
var leastSample = 100 * time.Millisecond

// steps measures whole steps of the engine.
type steps struct {
	shards []*engine.Shard
	engine *engine.Engine
	norm   bool
	now    func() time.Time
}

func newSteps(c Case, shards []*engine.Shard, norm bool) (*steps, error) {
	e, err := engine.New(shards, []optim.Optimizer{c.Optimizer}, 1)
	return &steps{shards: shards, engine: e, norm: norm, now: time.Now}, err
}

// calibrate warms up and returns how many passes make a sample. It goes by the fastest of three steps or more. Other
// processes make a step longer and none shorter, and by such a step a sample would have too few.
func (s *steps) calibrate() int {
	var warm Sample
	s.round(1, &warm)
	fastest := math.Inf(1)
	for repeats := 1.0; ; {
		for range max(3, int(repeats)) {
			var trial Sample
			s.round(1, &trial)
			fastest = min(fastest, trial.Step)
		}
		missing := leastSample.Seconds() / (repeats * fastest)
		if missing <= 4 { // close enough
			return int(math.Ceil(repeats * max(missing, 1/repeats)))
		}
		repeats *= math.Ceil(min(missing/2, 64))
	}
}

// round adds the mean times of steps to a sample. Steps of both kinds take turns, too.
func (s *steps) round(repeats int, sample *Sample) {
	mean := 1 / float64(repeats)
	for range repeats {
		begin := s.now()
		result := s.engine.Step(1)
		sample.Step += mean * s.now().Sub(begin).Seconds()
		sample.StepUpdate += mean * result.UpdateTime.Seconds()
		if !s.norm {
			continue
		}
		for _, rank := range s.shards {
			rank.GradientsArrived(rank.Config().Range())
		}
		begin = s.now()
		s.engine.Step(1)
		sample.Arrived += mean * s.now().Sub(begin).Seconds()
	}
}
