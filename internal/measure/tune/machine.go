//go:build linux

package tune

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
)

// leastSample is the least time of a sample of an update. It is long beside the time of waking the workers.
const leastSample = 20 * time.Millisecond

// updates is the state of all ranks, and the workers that update it.
type updates struct {
	shards  []*engine.Shard
	engine  *engine.Engine
	workers int
	passes  int // in a sample
}

// newUpdates allocates the state of all ranks as a job does.
func (t *Tuning) newUpdates(ctx context.Context, f kernel.Format, assigned *binding.Assignment) (_ *updates,
	err error) {
	u := &updates{passes: 1}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.close())
		}
	}()
	var configs []engine.ShardConfig
	for i, rank := range assigned.Ranks {
		config, err := t.shard(f, max(1, t.Elements/int64(len(assigned.Ranks))), i, rank.OptimizerCPUs.List())
		if err != nil {
			return u, err
		}
		configs, u.workers = append(configs, config), u.workers+len(config.CPUs)
	}
	pages := engine.ChoosePages(t.Host, engine.ArenasOf(configs))
	for i := range configs {
		configs[i].Pages = pages
	}
	if u.shards, err = bench.MakeState(ctx, configs); err != nil {
		return u, err
	}
	u.engine, err = engine.New(u.shards, []optim.Optimizer{optim.DefaultAdamW()}, 1)
	return u, err
}

func (u *updates) close() (err error) {
	for _, s := range u.shards {
		err = errors.Join(err, s.Close())
	}
	return err
}

// sample returns the mean seconds of an update of all ranks. Time in which other processes had the workers' cores is
// left out: the more they were kept waiting, the less CPU time they took a second.
func (u *updates) sample() float64 {
	for {
		sum, began, busy := time.Duration(0), time.Now(), processTime()
		for range u.passes {
			sum += u.engine.Step(1).UpdateTime
		}
		if sum >= leastSample {
			possible := time.Since(began).Seconds() * float64(u.workers)
			ran := min(1, (processTime()-busy).Seconds()/possible)
			return ran * sum.Seconds() / float64(u.passes)
		}
		u.passes *= 2
	}
}

// processTime returns the CPU time of this process.
func processTime() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		panic(err) // only an argument could be wrong
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// update measures updates of a format by so many cores of each rank.
func (t *Tuning) update(ctx context.Context, h *host.Host, f kernel.Format, ranks int) Measure {
	return func(cores int, enough func([]float64) bool) (samples []float64, err error) {
		assigned, err := optimizerOf(h, ranks, cores)
		if err != nil {
			return nil, err
		}
		u, err := t.newUpdates(ctx, f, assigned)
		if err != nil {
			return nil, fmt.Errorf("updates of %v by %s: %w", f, ledger.Plural(cores, "core"), err)
		}
		defer func() { err = errors.Join(err, u.close()) }()
		u.sample() // warms up
		for !enough(samples) {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			samples = append(samples, u.sample())
		}
		return samples, nil
	}
}

// optimizerOf binds the ranks so that the optimizer of each has so many cores.
func optimizerOf(h *host.Host, ranks, cores int) (*binding.Assignment, error) {
	all, err := coresOf(h, ranks)
	if err != nil {
		return nil, err
	}
	return binding.Split(h, binding.Request{Ranks: ranks, TrainerCores: binding.TrainerShare{Cores: max(0, all-cores)}})
}

// trainerOf binds the ranks so that the trainer of each has so many cores.
func trainerOf(h *host.Host, ranks, cores int) (*binding.Assignment, error) {
	all, err := coresOf(h, ranks)
	if err != nil {
		return nil, err
	}
	share := binding.TrainerShare{Cores: cores}
	if cores >= all {
		share = binding.WholeTrainerShare
	}
	return binding.Split(h, binding.Request{Ranks: ranks, TrainerCores: share})
}

// imitation measures the load that takes the place of a trainer: one thread of each rank that launches kernels. Where
// updates overlap forward or backward, workers update on the cores that the trainer does not have.
func (t *Tuning) imitation(ctx context.Context, ranks int) Measure {
	return func(cores int, enough func([]float64) bool) (samples []float64, err error) {
		assigned, err := trainerOf(t.Host, ranks, cores)
		if err != nil {
			return nil, err
		}
		if t.Overlap != profile.NoOverlap && !assigned.Ranks[0].OptimizerCPUs.IsEmpty() {
			u, err := t.newUpdates(ctx, t.formats[0], assigned)
			if err != nil {
				return nil, err
			}
			defer u.beside()()
		}
		launchers := []*launcher{}
		defer func() {
			for _, l := range launchers {
				l.close()
			}
		}()
		for _, rank := range assigned.Ranks {
			l, err := newLauncher(rank.TrainerCPUs)
			if err != nil {
				return nil, err
			}
			launchers = append(launchers, l)
		}
		launch(launchers) // warms up
		for !enough(samples) {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			samples = append(samples, launch(launchers))
		}
		return samples, nil
	}
}

// beside makes steps until the function that it returns is called, which ends the updates.
func (u *updates) beside() (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			default:
				u.engine.Step(1)
			}
		}
	}()
	return func() {
		close(done)
		<-ended
		_ = u.close() // of memory that nobody uses any more
	}
}

// launch has all launchers do their work at the same time, and returns the longest time.
func launch(launchers []*launcher) float64 {
	for _, l := range launchers {
		l.begin <- struct{}{}
	}
	times := []float64{}
	for _, l := range launchers {
		times = append(times, <-l.seconds)
	}
	return slices.Max(times)
}
