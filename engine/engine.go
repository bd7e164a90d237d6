// Package engine runs optimizer steps over state in host memory: the norm of
// all gradients, then unscale, clip, update and 16-bit output in one pass.
//
// The result is the same to the bit for any number of workers, any chunk size
// and any binding: an update of an element does not depend on how the work is
// split, and the norm adds up blocks of a fixed size in a fixed order. A step
// allocates nothing.
package engine

import (
	"fmt"
	"math"
	"time"

	"plimsoll/optim"
)

// Engine is the optimizer of all ranks on this host.
type Engine struct {
	shards     []*Shard
	optimizers []optim.Optimizer // of each parameter group
	clip       float64
}

// New is an engine over the shards of all ranks, in rank order, with an
// optimizer for each of their parameter groups. A clip of 0 means that
// gradients are not clipped.
func New(shards []*Shard, optimizers []optim.Optimizer, clip float64) (*Engine, error) {
	e := &Engine{shards: shards, clip: clip, optimizers: make([]optim.Optimizer, len(optimizers))}
	groups := 0
	for _, s := range shards {
		groups = max(groups, s.config.groups())
		if s.isAccumulating() {
			return nil, fmt.Errorf("rank %d: a gradient is half added: add it again, or clear all", s.config.Rank)
		}
		if s.Steps() != shards[0].Steps() || s.isUnderway() {
			return nil, fmt.Errorf("rank %d has finished step %d and rank %d step %d, and a step may be under way", shards[0].config.Rank, shards[0].Steps(), s.config.Rank, s.Steps())
		}
	}
	if groups != len(optimizers) {
		return nil, fmt.Errorf("the shards have %d parameter groups, and there are %d optimizers", groups, len(optimizers))
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
	// NormTime and UpdateTime are what the two passes took.
	NormTime, UpdateTime time.Duration
	// Skipped says that a gradient was infinite or NaN. Such a step leaves
	// every state and the step counter as they were.
	Skipped bool
	// Err says that binary32 cannot hold the hyperparameters or the factor that
	// unscales and clips. Such a step leaves everything as it was, too.
	Err error
}

// Step updates all shards from the gradients in their arenas, which were
// computed from a loss that was multiplied by lossScale.
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
	step, scale := e.Steps()+1, optim.GradientScale(norm, lossScale, e.clip)
	for _, s := range e.shards {
		if result.Err = s.checkConstants(step, scale, e.optimizers); result.Err != nil {
			e.forgetArrived()
			return result
		}
	}
	for _, s := range e.shards {
		s.update(step, scale, e.optimizers, nil)
	}
	for _, s := range e.shards {
		s.Wait()
	}
	result.UpdateTime = time.Since(begin)
	return result
}

// forgetArrived says that the gradients are those of no step.
func (e *Engine) forgetArrived() {
	for _, s := range e.shards {
		s.ForgetArrived()
	}
}

// gradientNorm is the norm of the gradients of all ranks as they lie in the
// arenas.
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

// Traffic moves the bytes that the update of a step moves, without its
// arithmetic. State is left as it is, but for parameter copies that are only
// written: see kernel.Set.Traffic.
func (e *Engine) Traffic() {
	for _, s := range e.shards {
		s.startChunks(true, s.moveChunk)
	}
	for _, s := range e.shards {
		s.wait()
	}
}

// Steps is the number of steps that were not skipped.
func (e *Engine) Steps() int64 { return e.shards[0].Steps() }
