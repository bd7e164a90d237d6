//go:build linux

// Package bench measures how near an update comes to the speed limit of memory. The speed of memory differs from host
// to host and from minute to minute, so no time is judged alone. Rounds of the update alternate with rounds that move
// the same bytes without arithmetic, over the same arenas and by the same workers. The result is the median of the
// ratios. Rounds in which other processes used the CPUs are thrown away.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"plimsoll/activity"
	"plimsoll/engine"
	"plimsoll/ledger"
	"plimsoll/optim"
	"plimsoll/optim/kernel"
	"plimsoll/shard"
	"plimsoll/synthetic"
)

// Result is the measurement of one case.
type Result struct {
	Case
	// Repeats is the number of passes per sample. A sample is their mean.
	Repeats int
	Samples []Sample
	Rounds  Rounds
	// Checked is nil where no check was asked for. Compared is nil without a peer.
	Checked  *Checks
	Compared *Peer
}

// Sample is one round: the mean seconds of a pass of each kind.
type Sample struct {
	Traffic float64 `json:"traffic_seconds"`
	Update  float64 `json:"update_seconds"`
	// Norm and Step are zero for a case in a core's cache, which has only the update.
	Norm float64 `json:"norm_seconds"`
	Step float64 `json:"step_seconds"`
	// Arrived is a step whose norm was added up as the gradients arrived; zero where that was not asked for.
	Arrived float64 `json:"arrived_step_seconds"`
	// Journaled is an update with an undo log, which another process could finish; zero where that was not asked for.
	Journaled float64 `json:"journaled_update_seconds"`
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
	s, err := newSubject(c, state, p.Norm)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	result.Repeats = calibrate(s)
	if peers != nil {
		if _, err := peers.round(); err != nil { // also warms up
			return nil, err
		}
	}
	result.Samples, result.Rounds, err = rounds(ctx, w, p.Rounds, func() (sample Sample, err error) {
		sample = s.round(result.Repeats)
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
		result.Checked, err = p.check(ctx, w, s.(*steps), 1+result.Repeats/8)
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
				synthetic.State(config.Rank, at.First, chunk)
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

// subject is measured, round by round.
type subject interface {
	// round makes each pass that many times and returns the mean times.
	round(repeats int) Sample
	Close() error
}

// leastSample is the least time of all passes of a sample together. It is long beside the kernel's clock tick of 10
// ms, the unit in which the kernel counts other processes.
const leastSample = 100 * time.Millisecond

// calibrate warms up and returns how many passes make a sample.
func calibrate(s subject) int {
	s.round(1)
	for repeats := 1.0; ; {
		missing := leastSample.Seconds() / (repeats * s.round(int(repeats)).Update)
		if missing <= 4 { // close enough
			return int(math.Ceil(repeats * max(missing, 1/repeats)))
		}
		repeats *= math.Ceil(min(missing/2, 64))
	}
}

func newSubject(c Case, shards []*engine.Shard, norm bool) (subject, error) {
	if c.InCore {
		k := &chunks{config: c.Shards[0], shard: shards[0]}
		c.Optimizer.Constants(&k.constants, 1000, 1)
		return k, nil
	}
	s := &steps{shards: shards, norm: norm}
	optimizers := []optim.Optimizer{c.Optimizer}
	var err error
	if c.Journal() {
		if s.journaled, err = engine.New(shards, optimizers, 1); err != nil {
			return nil, err
		}
		s.attached, err = withoutJournal(shards)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.shards = s.attached
	}
	s.engine, err = engine.New(s.shards, optimizers, 1)
	return s, err
}

// withoutJournal attaches to the same bytes of state, but makes steps without an undo log.
func withoutJournal(shards []*engine.Shard) (attached []*engine.Shard, err error) {
	for _, s := range shards {
		config, files := s.Config(), map[string]*os.File{}
		for _, a := range s.Arenas() {
			files[a.Name()] = a.File()
		}
		config.Journal = false
		other, err := engine.AttachShard(config, files)
		if err != nil {
			return attached, err
		}
		attached = append(attached, other)
	}
	return attached, nil
}

// chunks measures the kernels alone. Each worker walks its one chunk again and again, because handing out the work
// would take longer than the work.
type chunks struct {
	config    engine.ShardConfig
	shard     *engine.Shard
	constants kernel.Constants
}

func (k *chunks) Close() error { return nil }

func (k *chunks) round(repeats int) Sample {
	pass := func(body func(c kernel.Chunk)) float64 {
		begin := time.Now()
		k.shard.Each(func(_ shard.Chunk, c kernel.Chunk) {
			for range repeats {
				body(c)
			}
		})
		return time.Since(begin).Seconds() / float64(repeats)
	}
	return Sample{
		Traffic: pass(func(c kernel.Chunk) { k.config.Kernel.Traffic(k.config.Format, c) }),
		Update:  pass(func(c kernel.Chunk) { k.config.Kernel.Update(k.config.Format, &k.constants, c) }),
	}
}

// steps measures steps of the engine.
type steps struct {
	shards []*engine.Shard
	engine *engine.Engine
	norm   bool
	// Where the case has an undo log, journaled makes steps with it. The others are made by shards that are attached
	// to the same arenas without the log.
	journaled *engine.Engine
	attached  []*engine.Shard
}

func (s *steps) Close() error { return closeAll(s.attached) }

func (s *steps) round(repeats int) Sample {
	var sample Sample
	mean := 1 / float64(repeats)
	for range repeats {
		begin := time.Now()
		s.engine.Traffic()
		sample.Traffic += mean * time.Since(begin).Seconds()
	}
	for range repeats {
		begin := time.Now()
		result := s.engine.Step(1)
		sample.Step += mean * time.Since(begin).Seconds()
		sample.Norm += mean * result.NormTime.Seconds()
		sample.Update += mean * result.UpdateTime.Seconds()
	}
	for range repeats {
		if !s.norm {
			break
		}
		for _, rank := range s.shards {
			rank.GradientsArrived(rank.Config().Range())
		}
		begin := time.Now()
		s.engine.Step(1)
		sample.Arrived += mean * time.Since(begin).Seconds()
	}
	for range repeats {
		if s.journaled == nil {
			break
		}
		sample.Journaled += mean * s.journaled.Step(1).UpdateTime.Seconds()
	}
	return sample
}
