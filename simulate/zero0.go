package simulate

import (
	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/job"
	"plimsoll/ledger"
)

// fp16Optimizer is DeepSpeed without ZeRO: nothing is sharded. With 16-bit weights,
// FP16_Optimizer keeps fp32 master weights (fp16/fused_optimizer.py). For an
// optimizer other than DeepSpeed's fused Adam, FP16_UnfusedOptimizer does.
type fp16Optimizer struct{ *deepSpeed }

func (e *fp16Optimizer) initialize() {
	if e.ParameterType == dtype.F32 {
		e.flat = e.trained
		return
	}
	for _, group := range e.groups {
		if e.Optimizer.Variant == job.Fused {
			e.flatten(group)
		} else {
			for _, p := range group {
				shard := *p
				shard.DType = dtype.F32
				e.flat = append(e.flat, &shard)
			}
			allocate(e.gpu, bytesOf(group, dtype.F32), ledger.MasterWeights)
		}
	}
	// The optimizer is stepped once with zero gradients, to make its states.
	e.gpu.during(ledger.Bytes(bytesOf(e.flat, dtype.F32)), ledger.MasterGradients, func() { e.update(e.flat) })
	n := ledger.Count(elementsOf(e.trained))
	e.explain(ledger.MasterWeights,
		"%s parameters x 4 B: FP16_Optimizer keeps fp32 weights of the whole model on every rank without ZeRO "+
			"(fp16/fused_optimizer.py)", n)
	e.explain(ledger.MasterGradients,
		"%s parameters x 4 B: gradients cast to fp32 for the step, as a list and as one flat tensor "+
			"(fp16/fused_optimizer.py, step)", n)
	e.explain(ledger.ReductionTemporaries,
		"the search for what is not finite in the largest gradient: an fp32 copy (runtime/utils.py, CheckOverflow)")
	e.explain(ledger.FlatteningCopies,
		"%s parameters x %d B, twice: parameters are cloned and then put into one tensor (fp16/fused_optimizer.py)", n,
		e.ParameterType.Size())
}

// flatten moves the parameters of a group into one tensor. They are cloned
// first, so that for a moment three copies exist.
func (e *fp16Optimizer) flatten(group []*autograd.Parameter) {
	bytes := bytesOf(group, e.ParameterType)
	clones := e.gpu.hold(bytes, ledger.FlatteningCopies)
	allocate(e.gpu, bytes, ledger.Parameters)
	e.unload(group)
	clones.free()
	e.gpu.during(ledger.Bytes(bytes), ledger.FlatteningCopies, func() { // clone().float()
		allocate(e.gpu, 4*e.addFlat(elementsOf(group)).Elements, ledger.MasterWeights)
	})
}

func (e *fp16Optimizer) gradient(*autograd.Parameter) {}

// endBackward reduces the gradients. They are concatenated into buckets of more
// than 500,000,000 elements (engine.py, buffered_allreduce_fallback).
func (e *fp16Optimizer) endBackward(last bool) {
	if !last {
		return
	}
	var most, sum int64
	for _, p := range e.trained {
		sum += p.Elements
		most = max(most, sum)
		if sum > 5e8 {
			sum = 0
		}
	}
	e.explain(ledger.BucketCopies,
		"gradients are put together for the all-reduce until they have more than 500,000,000 elements: up to %s x %d "+
			"B (engine.py, buffered_allreduce_fallback)", ledger.Count(most), e.ParameterType.Size())
	e.gpu.during(ledger.Bytes(most*e.ParameterType.Size()), ledger.BucketCopies, func() {})
}

func (e *fp16Optimizer) step() {
	defer e.zero()
	if e.ParameterType == dtype.F32 {
		e.update(e.flat)
		return
	}
	e.gpu.during(ledger.Bytes(4*largestOf(e.trained)), ledger.ReductionTemporaries, func() {}) // CheckOverflow
	bytes := bytesOf(e.flat, dtype.F32)
	list := e.gpu.hold(bytes, ledger.MasterGradients)
	if e.Optimizer.Variant == job.Fused {
		flat := e.gpu.hold(bytes, ledger.MasterGradients)
		list.free()
		list = flat
		e.zero()
	}
	e.update(e.flat)
	list.free()
}

func (e *fp16Optimizer) zero() {
	for _, p := range e.trained {
		p.DropGradient()
	}
}

// bf16Optimizer is BF16_Optimizer. Every rank accumulates the gradients of the
// full model in fp32; master weights and states are partitioned
// (bf16_optimizer.py).
type bf16Optimizer struct {
	*deepSpeed
	stale bool // gradients of the last backward pass are not freed yet
}

func (e *bf16Optimizer) initialize() {
	for _, group := range e.groups {
		n := e.aligned(elementsOf(group))
		shard := e.addFlat(n / e.Parallel.Shard).Elements
		allocate(e.gpu, n*e.ParameterType.Size(), ledger.Parameters)
		e.unload(group)
		e.gpu.during(ledger.Bytes(shard*e.ParameterType.Size()), ledger.FlatteningCopies, func() {
			allocate(e.gpu, shard*4, ledger.MasterWeights)
		})
		allocate(e.gpu, n*4, ledger.AccumulatedGradients)
	}
	n := ledger.Count(elementsOf(e.trained))
	e.explain(ledger.MasterWeights, "%s parameters / %d ranks x 4 B (bf16_optimizer.py)", n, e.Parallel.Shard)
	e.explain(ledger.AccumulatedGradients,
		"%s parameters x 4 B: fp32 gradients of the whole model on every rank (bf16_optimizer.py, "+
			"fp32_groups_gradients_flat)", n)
	e.explain(ledger.FlatteningCopies,
		"parameters are put into one tensor before their own storage is freed (bf16_optimizer.py)")
	e.explain(ledger.Gradients,
		"%s parameters x %d B: gradients of the last backward pass, which the next one frees (bf16_optimizer.py, "+
			"clear_lp_grads)", n, e.ParameterType.Size())
	e.explain(ledger.ReductionTemporaries, "one gradient at a time is cast to fp32: %s x 4 B",
		ledger.Count(largestOf(e.trained)))
}

func (e *bf16Optimizer) BeforeBackward(string) {
	if e.stale {
		e.stale = false
		for _, p := range e.trained {
			p.DropGradient()
		}
	}
}

func (e *bf16Optimizer) gradient(p *autograd.Parameter) {
	e.gpu.during(ledger.Bytes(4*p.Elements), ledger.ReductionTemporaries, func() {})
}

func (e *bf16Optimizer) endBackward(bool) { e.stale = true }
func (e *bf16Optimizer) step()            { e.update(e.flat) }

// aligned rounds a number of elements up, so that every rank has a shard of the
// same even size (nccl_start_alignment_factor).
func (e *deepSpeed) aligned(elements int64) int64 {
	unit := 2 * e.Parallel.Shard
	return (elements + unit - 1) / unit * unit
}
