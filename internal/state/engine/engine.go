// Package engine runs optimizer steps over state in host memory: the norm of
// all gradients, then unscale, clip, update and 16-bit output in one pass.
//
// The result is the same to the bit for any number of workers, any chunk size and
// any binding. The update of an element does not depend on how the work is split,
// and the norm adds up blocks of a fixed size in a fixed order. A step allocates
// nothing.
//
// The caveats are at [Shard]: which slices die when, which goroutine may do what.
package engine

import (
	"errors"
	"fmt"
	"math"
	"time"

	"plimsoll/internal/state/optim"
)

// Engine is the optimizer of all ranks on this host.
type Engine struct {
	shards     []*Shard
	optimizers []optim.Optimizer // of each parameter group
	clip       float64
}

// New returns an engine over the shards of all ranks, in rank order, with an
// optimizer for each of their parameter groups. If clip is 0, gradients are not
// clipped.
func New(shards []*Shard, optimizers []optim.Optimizer, clip float64) (*Engine, error) {
	e := &Engine{shards: shards, clip: clip, optimizers: make([]optim.Optimizer, len(optimizers))}
	groups := 0
	for _, s := range shards {
		groups = max(groups, s.config.Groups)
		if s.isAccumulating() {
			return nil, fmt.Errorf("rank %d: an accumulation is half done: accumulate that gradient again, or clear "+
				"all gradients", s.config.Rank)
		}
		if s.Steps() != shards[0].Steps() || s.isUnderway() {
			return nil, fmt.Errorf("rank %d has finished step %d and rank %d step %d, and a step may be under way",
				shards[0].config.Rank, shards[0].Steps(), s.config.Rank, s.Steps())
		}
	}
	if groups != len(optimizers) {
		return nil, fmt.Errorf("the shards have %d parameter groups, and there are %d optimizers",
			groups, len(optimizers))
	}
	for i, o := range optimizers {
		if err := e.SetOptimizer(i, o); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// SetOptimizer changes the hyperparameters of a parameter group from the next
// step on.
func (e *Engine) SetOptimizer(group int, o optim.Optimizer) error {
	for _, s := range e.shards {
		if err := s.suits(group, o); err != nil {
			return err
		}
	}
	e.optimizers[group] = o
	return nil
}

// Result is what a step found and did.
type Result struct {
	// GradientNorm is the L2 norm of the unscaled gradients of all ranks.
	GradientNorm float64
	// NormTime and UpdateTime are how long the two passes took.
	NormTime, UpdateTime time.Duration
	// Skipped says that a gradient was infinite or NaN. Such a step leaves
	// every state and the step counter unchanged.
	Skipped bool
	// Err says that binary32 cannot hold the hyperparameters or the gradient
	// scale. Such a step leaves everything unchanged, too. Or it says that memory was
	// found damaged ([ErrDamaged]): then the state cannot go on.
	Err error
}

// Step updates all shards from the gradients in their arenas. The loss of these
// gradients was multiplied by lossScale.
func (e *Engine) Step(lossScale float64) Result {
	begin := time.Now()
	norm := e.gradientNorm() / lossScale
	result := Result{GradientNorm: norm, NormTime: time.Since(begin)}
	if math.IsInf(norm, 0) || math.IsNaN(norm) {
		result.Skipped = true
		e.forgetArrived()
		return result
	}
	begin = time.Now()
	update := Update{Step: e.Steps() + 1, GradScale: optim.GradScale(norm, lossScale, e.clip), Optimizers: e.optimizers}
	for _, s := range e.shards {
		if result.Err = s.checkConstants(update); result.Err != nil {
			e.forgetArrived()
			return result
		}
	}
	for _, s := range e.shards {
		s.update(update, nil, false)
	}
	for _, s := range e.shards {
		s.Wait()
		result.Err = errors.Join(result.Err, s.Err())
	}
	result.UpdateTime = time.Since(begin)
	return result
}

// forgetArrived drops the sums of gradients that have arrived: no step uses them.
func (e *Engine) forgetArrived() {
	for _, s := range e.shards {
		s.ForgetArrived()
	}
}

// gradientNorm returns the norm of the gradients of all ranks, still scaled.
func (e *Engine) gradientNorm() float64 {
	for _, s := range e.shards {
		s.startNorm()
	}
	sum := 0.0
	for _, s := range e.shards {
		sum += s.sumOfBlocks()
	}
	return math.Sqrt(sum)
}

// Traffic moves the bytes that the update of a step moves, without its arithmetic.
// The state does not change, except for parameter copies that an update only
// writes: see kernel.Set.Traffic.
// Shards on a tier move what a step reads from the disks and writes there, and nothing else.
func (e *Engine) Traffic() {
	for _, s := range e.shards {
		s.startTraffic()
	}
	for _, s := range e.shards {
		s.wait()
	}
}

// Steps returns the number of steps that were not skipped.
func (e *Engine) Steps() int64 { return e.shards[0].Steps() }
