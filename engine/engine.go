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
	"plimsoll/optim/kernel"
)

// Engine is the optimizer of all ranks on this host.
type Engine struct {
	shards     []*Shard
	optimizers []optim.Optimizer // of each parameter group
	clip       float64
	steps      int64
}

// New is an engine over the shards of all ranks, in rank order, with an
// optimizer for each of their parameter groups. A clip of 0 means that
// gradients are not clipped.
func New(shards []*Shard, optimizers []optim.Optimizer, clip float64) (*Engine, error) {
	e := &Engine{shards: shards, clip: clip, optimizers: make([]optim.Optimizer, len(optimizers))}
	groups := 0
	for _, s := range shards {
		s.constants = make([]kernel.Constants, len(optimizers))
		for _, section := range s.sections {
			groups = max(groups, section.group+1)
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
	if err := o.Validate(); err != nil {
		return fmt.Errorf("parameter group %d: %v: %w", group, o, err)
	}
	for _, s := range e.shards {
		if algorithm := s.config.Format.Algorithm; o.Algorithm() != algorithm {
			return fmt.Errorf("parameter group %d: the state is that of %v, and the optimizer is %v", group, algorithm, o)
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
}

// Step updates all shards from the gradients in their arenas, which were
// computed from a loss that was multiplied by lossScale.
func (e *Engine) Step(lossScale float64) Result {
	begin := time.Now()
	norm := e.gradientNorm() / lossScale
	result := Result{GradientNorm: norm, NormTime: time.Since(begin)}
	if math.IsInf(norm, 0) || math.IsNaN(norm) {
		result.Skipped = true
		return result
	}
	begin = time.Now()
	e.steps++
	scale := optim.GradientScale(norm, lossScale, e.clip)
	for _, s := range e.shards {
		for i, o := range e.optimizers {
			o.Constants(&s.constants[i], e.steps, scale)
		}
		s.startChunks(true, s.updateChunk)
	}
	e.wait()
	result.UpdateTime = time.Since(begin)
	return result
}

// gradientNorm is the norm of the gradients of all ranks as they lie in the
// arenas.
func (e *Engine) gradientNorm() float64 {
	for _, s := range e.shards {
		s.start(0, s.config.normBlocks(), true, s.sumBlock)
	}
	e.wait()
	sum := 0.0
	for _, s := range e.shards {
		sum += s.sumSquares()
		clear(s.summed)
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
	e.wait()
}

// Steps is the number of steps that were not skipped.
func (e *Engine) Steps() int64 { return e.steps }

func (e *Engine) wait() {
	for _, s := range e.shards {
		s.wait()
	}
}
