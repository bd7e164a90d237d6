package simulate

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// optimizeOn runs a step of a torch optimizer on the device of the parameters.
// The first step makes the states.
func (s *simulation) optimizeOn(device *trace, parameters []*autograd.Parameter) {
	if !s.stepped {
		s.stepped = true
		s.makeStates(device, parameters)
	}
	s.copies(device, parameters)
}

// stepInBackward updates a parameter once its gradient is complete, and frees the gradient.
func (s *simulation) stepInBackward(p *autograd.Parameter) {
	one := []*autograd.Parameter{p}
	if !s.stepped {
		s.makeStates(s.gpu, one)
	}
	s.copies(s.gpu, one)
	p.DropGradient()
}

// makeStates allocates the states of parameters.
func (s *simulation) makeStates(device *trace, parameters []*autograd.Parameter) {
	component, why := ledger.OptimizerStates, s.whyStates
	if s.Optimizer.Managed {
		component, why = ledger.ManagedOptimizerStates, because("%s, paged: in CUDA's managed memory, on the "+
			"host unless the step needs it", s.Optimizer.Name)
	}
	for _, p := range parameters {
		for _, state := range s.Optimizer.States(p) {
			if s.Optimizer.Managed && p.Elements >= 100_000 {
				allocate(s.host, state.Bytes, component, why)
			} else {
				allocate(device, state.Bytes, component, why)
			}
		}
		if s.Optimizer.CountsOnGPU(p) && device == s.gpu && !s.OnCPU {
			allocate(device, dtype.F32.Size(), ledger.OptimizerStates, s.whyStates) // the step counter
		}
	}
}

// whyStates is the reason for states that the first step makes.
func (s *simulation) whyStates() string {
	return fmt.Sprintf("%s: %s, made in the first step", s.Optimizer.Name, s.stateText())
}

// stateText describes the optimizer states.
func (s *simulation) stateText() string {
	if len(s.trained) == 0 {
		return "nothing is trained"
	}
	var names []string
	for _, p := range s.trained {
		for _, state := range s.Optimizer.States(p) {
			if !slices.Contains(names, state.Name) {
				names = append(names, state.Name)
			}
		}
	}
	if len(names) == 0 {
		return "no state"
	}
	return fmt.Sprintf("%s of %s parameters", strings.Join(names, " + "), s.trainedCount())
}

// copies allocates and frees the temporaries of a step.
func (s *simulation) copies(device *trace, parameters []*autograd.Parameter) {
	for _, temporaries := range s.Optimizer.Passes(parameters) {
		var made []int
		for _, bytes := range temporaries {
			made = append(made, device.Allocate(bytes, ledger.OptimizerTemporaries, s.Optimizer.TemporariesWhy))
		}
		for _, id := range made {
			device.Free(id)
		}
	}
}
