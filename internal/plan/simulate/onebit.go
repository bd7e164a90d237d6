package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
)

// oneBit is the step of the optimizers that exchange one bit for each number: OnebitAdam, ZeroOneAdam and OnebitLamb
// (runtime/fp16/onebit). It stands for the steps after freeze_step: those before compress nothing and take less.
type oneBit struct {
	*deepSpeed
	errors    bool // worker_error and server_error are there for good
	exchanged bool // CuPy's pool is there
}

// step updates flat tensors. The first call is DeepSpeed's initialization step: it makes states, and exchanges them
// with errors that it frees.
func (e *oneBit) step(flat []*autograd.Parameter) {
	first := !e.stepped
	if first {
		e.stepped = true
		e.deviceStates(flat, e.whyStates)
	}
	if e.Optimizer.Name == job.OneBitLamb {
		e.stepTogether(flat, first)
		return
	}
	keeps := !first || e.ParameterType == dtype.F32 // without a flat tensor, DeepSpeed frees only the last errors
	if keeps && !e.errors {
		e.errors = true
		for _, p := range flat {
			e.gpu.emptyCache()
			e.holdErrors(p.Elements)
		}
	}
	for _, p := range flat {
		var errors []hold
		if !keeps {
			errors = e.holdErrors(p.Elements)
		}
		e.exchange(p.Elements, first)
		for _, h := range errors {
			h.free()
		}
		if !first { // exp_avg_sq.sqrt(), and the sum with eps; then the update, and its product with the learning rate
			e.gpu.briefly(2*4*p.Elements, ledger.OptimizerTemporaries, e.whyExchange)
		}
	}
}

// stepTogether is OnebitLamb's step: it exchanges the averages of all parameters as one tensor, which replaces their
// own.
func (e *oneBit) stepTogether(flat []*autograd.Parameter, first bool) {
	all := elementsOf(flat)
	if first {
		e.gpu.briefly(4*all+4*e.padded(all), ledger.OptimizerTemporaries, e.whyExchange)
		errors := e.holdErrors(all)
		e.exchange(e.padded(all), true)
		for _, h := range errors {
			h.free()
		}
		return
	}
	if !e.errors {
		e.errors = true
		e.gpu.emptyCache()
		e.holdErrors(all)
	}
	e.gpu.during(4*all, ledger.OptimizerTemporaries, e.whyExchange, func() { // exp_avg_last_step
		e.exchange(e.padded(all), true)
		e.gpu.briefly(7*4*largestOf(flat), ledger.OptimizerTemporaries, e.whyExchange)
	})
}

// padded returns the size of a tensor that can be cut into the bytes of every rank (corrected_tensor_size).
func (e *oneBit) padded(elements int64) int64 {
	ranks := int64(e.World)
	unit := ranks * leastCommon(ranks, 8)
	return (elements + unit - 1) / unit * unit
}

func leastCommon(a, b int64) int64 {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// holdErrors makes worker_error and server_error, the rest of what was exchanged.
func (e *oneBit) holdErrors(elements int64) []hold {
	n := e.padded(elements)
	return []hold{e.gpu.hold(4*n, ledger.CompressionErrors, e.whyErrors),
		e.gpu.hold(4*n/int64(e.World), ledger.CompressionErrors, e.whyErrors)}
}

func (e *oneBit) whyErrors() string {
	return fmt.Sprintf("worker_error as large as the states, and server_error / %d ranks, in fp32: what one bit could "+
		"not say (runtime/fp16/onebit)", e.World)
}

// exchange runs compressed_allreduce of NcclBackend (runtime/comm/nccl.py). A tensor of another size than its error is
// copied first. The new error takes two tensors. ZeroOneAdam holds its update beside them.
func (e *oneBit) exchange(elements int64, initial bool) {
	if e.World == 1 {
		return
	}
	n := e.padded(elements)
	beside := int64(0)
	if n != elements {
		beside += 4 * n
	}
	if e.Optimizer.Name == job.ZeroOneAdam && !initial {
		beside += 4 * elements
	}
	e.gpu.during(beside, ledger.OptimizerTemporaries, e.whyExchange, func() {
		e.gpu.briefly(2*4*n, ledger.OptimizerTemporaries, e.whyExchange)
		e.pool()
	})
}

// pool makes CuPy's pool, which is not torch's: the bits of the largest tensor as bytes, and their packed copies.
func (e *oneBit) pool() {
	if e.exchanged {
		return
	}
	e.exchanged = true
	n := e.padded(largestOf(e.flat))
	if e.Optimizer.Name == job.OneBitLamb {
		n = e.padded(elementsOf(e.flat))
	}
	allocate(e.gpu, n+n/2+n/8/int64(e.World), ledger.CommunicationBuckets, because("CuPy's memory pool: %s bits "+
		"unpacked to bytes, and four packed copies (runtime/comm/nccl.py, compressed_allreduce)", ledger.Count(n)))
}

func (e *oneBit) whyExchange() string {
	return "the exchange of 1-bit averages: the padded tensor, its signs in fp32 and the new error " +
		"(runtime/comm/nccl.py); the update and its parts (runtime/fp16/onebit)"
}
