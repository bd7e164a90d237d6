package plan

import (
	"fmt"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
)

// plain is a training loop without an engine: nothing is sharded. With several
// ranks DistributedDataParallel reduces the gradients.
type plain struct {
	*simulation
}

func (e *plain) BeforeForward(string)  {}
func (e *plain) AfterForward(string)   {}
func (e *plain) BeforeBackward(string) {}
func (e *plain) AfterBackward(string)  {}

// load makes the model on the host, in the type of training, and moves it to the
// GPU.
func (e *plain) load() {
	if !e.OnCPU {
		e.host.during(ledger.Bytes(e.storedBytes()), ledger.LoadStaging, func() {})
	}
	for _, p := range e.parameters {
		allocate(e.gpu, p.Bytes(), ledger.Parameters)
	}
}

func (e *plain) initialize() {
	if e.World > 1 {
		allocate(e.gpu, e.trainedBytes(), ledger.CommunicationBuckets)
	}
}

// gradient frees the gradient with LOMO, which fuses the step into the backward
// pass.
func (e *plain) gradient(p *autograd.Parameter) {
	if e.Optimizer.Name == "lomo" {
		p.DropGradient()
	}
}
func (e *plain) endBackward(bool) {}

func (e *plain) step() { e.optimize(e.trained) }

func (e *plain) zeroGradients() {
	for _, p := range e.trained {
		p.DropGradient()
	}
}

func (e *plain) save() {}

func (e *plain) reasons() map[ledger.Component]string {
	r := map[ledger.Component]string{
		ledger.Parameters: fmt.Sprintf("%s parameters in %v", ledger.Count(e.Model.Elements()), e.Weights),
	}
	r[ledger.LoadStaging] = "from_pretrained makes the model on the host, and it goes to the GPU from there; every " +
		"rank does so"
	if e.World > 1 {
		r[ledger.CommunicationBuckets] = "DistributedDataParallel adds gradients up in buckets as large as all " +
			"gradients (gradient_as_bucket_view=False)"
	}
	return r
}

// trainedElements returns the number of trainable elements.
func (s *simulation) trainedElements() int64 {
	var sum int64
	for _, p := range s.trained {
		sum += p.Elements
	}
	return sum
}

// storedBytes returns the size of all parameters.
func (s *simulation) storedBytes() int64 {
	var sum int64
	for _, p := range s.parameters {
		sum += p.Bytes()
	}
	return sum
}

// trainedBytes returns the size of the trainable parameters.
func (s *simulation) trainedBytes() int64 {
	var sum int64
	for _, p := range s.trained {
		sum += p.Elements * p.DType.Size()
	}
	return sum
}

// optimize runs a step of a torch optimizer on the GPU.
func (s *simulation) optimize(parameters []*autograd.Parameter) { s.optimizeOn(s.gpu, parameters) }

// optimizeOn runs a step of a torch optimizer on the device of the parameters.
// The first step makes the states.
func (s *simulation) optimizeOn(device *trace, parameters []*autograd.Parameter) {
	if !s.stepped {
		s.stepped = true
		component := ledger.OptimizerStates
		if s.Optimizer.managed {
			component = ledger.ManagedOptimizerStates
		}
		for _, p := range parameters {
			for _, state := range s.Optimizer.states(p) {
				if s.Optimizer.managed && p.Elements >= 100_000 {
					allocate(s.host, state.bytes, component)
				} else {
					allocate(device, state.bytes, component)
				}
			}
			if s.Optimizer.Variant == Fused && device == s.gpu && !s.OnCPU {
				allocate(device, dtype.F32.Size(), ledger.OptimizerStates) // the step counter
			}
		}
	}
	s.copies(device, parameters)
}

// copies allocates and frees the temporaries of a step.
func (s *simulation) copies(device *trace, parameters []*autograd.Parameter) {
	var made []int
	for _, bytes := range s.Optimizer.scratch(parameters) {
		made = append(made, device.Allocate(bytes, ledger.OptimizerTemporaries))
	}
	for _, id := range made {
		device.Free(id)
	}
}

// cpuWorkspace is the memory that MKL and oneDNN hold after their first matmul,
// measured with torch 2.15 on two cores.
const cpuWorkspace = 64 * ledger.MiB

// workspace allocates the workspace of matmuls. cuBLAS takes one from torch's
// allocator for every thread, and the backward pass has a thread of its own.
func (s *simulation) workspace() {
	switch {
	case s.OnCPU && s.workspaces < 1:
		allocate(s.host, int64(cpuWorkspace), ledger.MatmulWorkspaces)
	case s.OnCPU || s.workspaces == 2:
		return
	default:
		allocate(s.gpu, int64(s.GPU.Workspace()), ledger.MatmulWorkspaces)
	}
	s.workspaces++
}
