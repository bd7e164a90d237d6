package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
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
			allocate(e.gpu, bytesOf(group, dtype.F32), ledger.MasterWeights, e.whyMaster)
		}
	}
	// The optimizer is stepped once with zero gradients, to make its states.
	e.gpu.during(bytesOf(e.flat, dtype.F32), ledger.MasterGradients, e.whyMasterGradients, func() { e.update(e.flat) })
}

func (e *fp16Optimizer) whyMaster() string {
	return fmt.Sprintf("%s parameters x 4 B: FP16_Optimizer keeps fp32 weights of the full model on every rank "+
		"without ZeRO (fp16/fused_optimizer.py)", e.trainedCount())
}

func (e *fp16Optimizer) whyMasterGradients() string {
	return fmt.Sprintf("%s parameters x 4 B: gradients cast to fp32 for the step, as a list and as one flat tensor "+
		"(fp16/fused_optimizer.py, step)", e.trainedCount())
}

// flatten moves the parameters of a group into one tensor. They are cloned
// first, so that for a moment three copies exist.
func (e *fp16Optimizer) flatten(group []*autograd.Parameter) {
	bytes := bytesOf(group, e.ParameterType)
	why := because("%s parameters x %d B, twice: parameters are cloned and then put into one tensor "+
		"(fp16/fused_optimizer.py)", e.trainedCount(), e.ParameterType.Size())
	clones := e.gpu.hold(bytes, ledger.FlatteningCopies, why)
	allocate(e.gpu, bytes, ledger.Parameters, e.whyFull)
	e.unload(group)
	clones.free()
	e.gpu.during(bytes, ledger.FlatteningCopies, why, func() { // clone().float()
		allocate(e.gpu, 4*e.addFlat(elementsOf(group)).Elements, ledger.MasterWeights, e.whyMaster)
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
	why := because("gradients are put together for the all-reduce until they have more than 500,000,000 elements: up "+
		"to %s x %d B, and once more in communication_data_type if that is another type (engine.py, "+
		"buffered_allreduce_fallback)", ledger.Count(most), e.ParameterType.Size())
	var cast int64
	if t := e.communicates(); t != e.ParameterType {
		cast = most * t.Size()
	}
	e.gpu.during(cast, ledger.BucketCopies, why, func() {
		e.gpu.briefly(most*e.ParameterType.Size(), ledger.BucketCopies, why)
	})
}

func (e *fp16Optimizer) step() {
	defer e.zero()
	if e.ParameterType == dtype.F32 {
		e.update(e.flat)
		return
	}
	if e.Optimizer.Name == "lamb" {
		e.stepLamb()
		return
	}
	e.gpu.briefly(4*largestOf(e.trained), ledger.ReductionTemporaries, because("the inf/nan check of "+
		"the largest gradient: an fp32 copy (runtime/utils.py, CheckOverflow)"))
	bytes := bytesOf(e.flat, dtype.F32)
	list := e.gpu.hold(bytes, ledger.MasterGradients, e.whyMasterGradients)
	if e.Optimizer.Variant == job.Fused {
		flat := e.gpu.hold(bytes, ledger.MasterGradients, e.whyMasterGradients)
		list.free()
		list = flat
		e.zero()
	}
	e.update(e.flat)
	list.free()
}

// stepLamb is step_fused_lamb of FP16_UnfusedOptimizer. Lamb's kernel reads the gradients in 16 bits, so none are cast
// but for the norm.
func (e *fp16Optimizer) stepLamb() {
	why := because("gradients of a group are put into one tensor, and once more for the norm " +
		"(fp16/unfused_optimizer.py, step_fused_lamb)")
	for _, group := range e.groups {
		bytes := bytesOf(group, e.ParameterType)
		defer e.gpu.hold(bytes, ledger.FlatteningCopies, why).free()
		e.gpu.during(bytes, ledger.FlatteningCopies, why, func() {
			e.gpu.briefly(bytesOf(group, dtype.F32), ledger.ReductionTemporaries, because("the norm of all "+
				"gradients of a group in fp32 (runtime/utils.py, get_weight_norm)"))
		})
	}
	e.update(e.flat)
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
	accumulated dtype.Type // of the accumulated gradients
	stale       bool       // gradients of the last backward pass are not freed yet
}

func (e *bf16Optimizer) initialize() {
	for _, group := range e.groups {
		n := e.aligned(elementsOf(group))
		shard := e.addFlat(n / e.Parallel.Shard).Elements
		allocate(e.gpu, n*e.ParameterType.Size(), ledger.Parameters, e.whyFull)
		e.unload(group)
		why := because("parameters are put into one tensor before their own storage is freed (bf16_optimizer.py)")
		e.gpu.during(shard*e.ParameterType.Size(), ledger.FlatteningCopies, why, func() {
			allocate(e.gpu, shard*4, ledger.MasterWeights, because("%s parameters / %d ranks x 4 B (bf16_optimizer.py)",
				e.trainedCount(), e.Parallel.Shard))
		})
		allocate(e.gpu, n*e.accumulated.Size(), ledger.AccumulatedGradients, because("%s parameters x %d B: "+
			"accumulated gradients of the full model on every rank (bf16_optimizer.py, fp32_groups_gradients_flat)",
			e.trainedCount(), e.accumulated.Size()))
	}
}

func (e *bf16Optimizer) BeforeBackward(string) {
	if e.stale && !e.zeroes() {
		e.drop()
	}
}

// zeroes reports whether gradients of a backward pass are zeroed instead of freed (clear_lp_grads): from #4318 to
// #5434, and since #7018.
func (e *bf16Optimizer) zeroes() bool {
	return e.since(0, 16, 5) || e.since(0, 12, 6) && !e.since(0, 14, 2)
}

func (e *bf16Optimizer) drop() {
	e.stale = false
	for _, p := range e.trained {
		p.DropGradient()
	}
}

func (e *bf16Optimizer) gradient(p *autograd.Parameter) {
	if e.accumulated == e.ParameterType {
		return
	}
	e.gpu.briefly(4*p.Elements, ledger.ReductionTemporaries, func() string {
		return fmt.Sprintf("one gradient at a time is cast to fp32: %s x 4 B", ledger.Count(largestOf(e.trained)))
	})
}

func (e *bf16Optimizer) whyGradients() string {
	return fmt.Sprintf("%s parameters x %d B: gradients of the last backward pass beside the accumulated ones "+
		"(bf16_optimizer.py, clear_lp_grads)", e.trainedCount(), e.ParameterType.Size())
}

func (e *bf16Optimizer) endBackward(last bool) {
	e.stale = true
	if last {
		e.reduce()
	}
}

// reduce reduces the accumulated gradients: flat tensors of the groups, together up to 500,000,000 elements (engine.py,
// buffered_allreduce_fallback).
func (e *bf16Optimizer) reduce() {
	why := because("accumulated gradients are put together for the all-reduce until they have more than 500,000,000 "+
		"elements, and cast to communication_data_type, %v (engine.py, buffered_allreduce_fallback)", e.communicates())
	var sum, groups int64
	flush := func() {
		var together, cast int64
		if groups > 1 {
			together = sum * e.accumulated.Size()
		}
		if t := e.communicates(); t != e.accumulated {
			cast = sum * t.Size()
		}
		e.gpu.during(together, ledger.BucketCopies, why, func() { e.gpu.briefly(cast, ledger.BucketCopies, why) })
		sum, groups = 0, 0
	}
	for _, group := range e.groups {
		sum, groups = sum+e.aligned(elementsOf(group)), groups+1
		if sum > 5e8 {
			flush()
		}
	}
	flush()
}

func (e *bf16Optimizer) step() {
	for _, p := range e.flat {
		var cast int64
		if e.accumulated != dtype.F32 {
			cast = 4 * p.Elements
		}
		defer e.gpu.hold(cast, ledger.MasterGradients, because("%s x 4 B: accumulated gradients cast for the step "+
			"(bf16_optimizer.py, step)", e.shardCount())).free()
	}
	e.update(e.flat)
	if e.since(0, 16, 5) { // zero_grad
		e.drop()
	}
}

// aligned rounds a number of elements up, so that every rank has a shard of the
// same even size (nccl_start_alignment_factor).
func (e *deepSpeed) aligned(elements int64) int64 {
	unit := 2 * e.Parallel.Shard
	return (elements + unit - 1) / unit * unit
}
