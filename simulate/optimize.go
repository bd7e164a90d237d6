package simulate

import (
	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/job"
	"plimsoll/ledger"
)

// optimize runs a step of a torch optimizer on the GPU.
func (s *simulation) optimize(parameters []*autograd.Parameter) { s.optimizeOn(s.gpu, parameters) }

// optimizeOn runs a step of a torch optimizer on the device of the parameters.
// The first step makes the states.
func (s *simulation) optimizeOn(device *trace, parameters []*autograd.Parameter) {
	if !s.stepped {
		s.stepped = true
		component := ledger.OptimizerStates
		if s.Optimizer.Managed {
			component = ledger.ManagedOptimizerStates
		}
		for _, p := range parameters {
			for _, state := range s.Optimizer.States(p) {
				if s.Optimizer.Managed && p.Elements >= 100_000 {
					allocate(s.host, state.Bytes, component)
				} else {
					allocate(device, state.Bytes, component)
				}
			}
			if s.Optimizer.Variant == job.Fused && device == s.gpu && !s.OnCPU {
				allocate(device, dtype.F32.Size(), ledger.OptimizerStates) // the step counter
			}
		}
	}
	s.copies(device, parameters)
}

// copies allocates and frees the temporaries of a step.
func (s *simulation) copies(device *trace, parameters []*autograd.Parameter) {
	var made []int
	for _, bytes := range s.Optimizer.Temporaries(parameters) {
		made = append(made, device.Allocate(bytes, ledger.OptimizerTemporaries))
	}
	for _, id := range made {
		device.Free(id)
	}
}
