package plan

import (
	"plimsoll/autograd"
	"plimsoll/dtype"
)

// plain is a training loop without an engine: the model is whole on every GPU,
// and DistributedDataParallel adds gradients up where there are several.
type plain struct {
	*simulation
	buckets int // DDP's, which hold a copy of all gradients; -1 before the first
	kept    []int
}

func (e *plain) BeforeForward(string)  {}
func (e *plain) AfterForward(string)   {}
func (e *plain) BeforeBackward(string) {}
func (e *plain) AfterBackward(string)  {}

func (e *plain) load() {
	for _, p := range e.parameters {
		allocate(e.gpu, p.StoredBytes(), Weights)
	}
}

func (e *plain) initialize() {
	if e.World > 1 {
		allocate(e.gpu, e.trainedBytes(), Buckets)
	}
}

func (e *plain) gradient(*autograd.Parameter) {}
func (e *plain) endBackward(bool)             {}

func (e *plain) step() {
	e.optimize(e.trained)
	for _, p := range e.trained {
		p.DropGradient()
	}
}

func (e *plain) save() {}

// trainedBytes is the size of what is trained.
func (s *simulation) trainedBytes() int64 {
	var sum int64
	for _, p := range s.trained {
		sum += p.Elements * p.DType.Size()
	}
	return sum
}

// optimize is a step of a torch optimizer over parameters on the GPU. The
// first makes the states.
func (s *simulation) optimize(parameters []*autograd.Parameter) {
	if !s.stepped {
		s.stepped = true
		for _, p := range parameters {
			for _, state := range s.Optimizer.states(p) {
				allocate(s.gpu, state.bytes, States)
			}
			if s.Optimizer.Variant == Fused {
				allocate(s.gpu, dtype.F32.Size(), States) // the step counter
			}
		}
	}
	s.gpu.during(s.Optimizer.scratch(parameters), OptimizerCopies, func() {})
}

// workspace is what cuBLAS takes through torch's allocator at the first
// product of matrices of a thread; the backward pass has a thread of its own.
func (s *simulation) workspace() {
	if s.workspaces < 2 {
		s.workspaces++
		allocate(s.gpu, int64(s.Workspace), Workspaces)
	}
}
