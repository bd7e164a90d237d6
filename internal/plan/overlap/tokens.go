package overlap

import (
	"time"

	"plimsoll/internal/state/optim/kernel"
)

// HostBytes returns how many bytes of host memory a training step moves for each parameter: those that its update
// reads and writes, the gradient that the trainer's device writes, and the parameter that it reads.
func HostBytes(f kernel.Format, update float64) float64 {
	return update + float64(f.Gradient.Size()+f.Parameter.Size())
}

// SpeculatedBytes is what an update writes of a log for each parameter, if it may have to be retracted.
const SpeculatedBytes = 1

// SpeculatedUpdate returns how long cores compute that update parameters and write such a log. A core takes 1.7 ns for
// a parameter with AVX-512, as docs/overlap.md has measured it on an AMD EPYC. It is nobody's measurement of other
// processors than x86-64 ones.
func SpeculatedUpdate(parameters int64, cores int) time.Duration {
	const ofCore = 1.7 // nanoseconds
	return time.Duration(ofCore * float64(parameters) / float64(cores))
}

// Rates are what decides from how many tokens on an update is hidden.
type Rates struct {
	HostBytes float64 // bytes of host memory that a step moves for each parameter
	Bandwidth float64 // bytes a second that a host moves for the optimizer
	FLOPS     float64 // floating-point operations a second that a GPU achieves
	// Parameters is the number of parameters of the model, and Active is how many of them a token uses.
	Parameters, Active int64
	Hosts              int // that share the update
	// Backward is how many times longer than a forward pass a backward pass is: 2, or 3 where activations are
	// recomputed.
	Backward float64
}

// HiddenFrom returns the tokens of a GPU's microbatch from which on a mode hides the whole update; with ZenFlow, that
// of all columns but the important ones. It returns 0 for a mode that hides nothing at any number of tokens.
func (r Rates) HiddenFrom(m Mode) float64 {
	forwards := 0.0 // how many times the forward pass the update may take
	switch m {
	case Forward:
		forwards = 1
	case Backward, Async, ZenFlow:
		forwards = 1 + r.Backward
	default:
		return 0
	}
	ofToken := 2 * float64(r.Active) / r.FLOPS // seconds of the forward pass
	update := r.HostBytes * float64(r.Parameters) / r.Bandwidth / float64(r.Hosts)
	return update / ofToken / forwards
}
