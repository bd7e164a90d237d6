package simulate

import (
	"fmt"
	"math"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// zero12 is ZeRO-1 and ZeRO-2. Every rank has the full parameters, in one
// flat tensor for each group. It has the master weights and the states of its
// partition only (zero/stage_1_and_2.py).
type zero12 struct {
	*deepSpeed
	ranges   []groupRange // ranges of parameters in their groups, by index
	own      int64        // elements of all parameters that overlap the rank's partition
	buckets  hold         // of this backward pass
	reducing reduceBuckets
	// arriving holds the partition's gradients of this backward pass, and averaged holds those of earlier passes.
	arriving, averaged hold
	accumulated        []tensor // gradients on the host, by index of the parameter
	wide               []hold   // gradients in the accumulation type, by index
}

// groupRange is a range of a group's flat tensor, with the size of a rank's partition.
type groupRange struct{ from, to, partition int64 }

// owned returns the number of its elements in the partition of rank 0.
func (s groupRange) owned() int64 { return max(0, min(s.to, s.partition)-s.from) }

func newZeRO12(e *deepSpeed) *zero12 {
	n := len(e.parameters)
	p := &zero12{deepSpeed: e, ranges: make([]groupRange, n), accumulated: make([]tensor, n), wide: make([]hold, n)}
	for _, group := range e.groups {
		partition := e.aligned(elementsOf(group)) / e.Parallel.Shard
		var at int64
		for _, q := range group {
			s := groupRange{at, at + q.Elements, partition}
			p.ranges[q.Index] = s
			if s.owned() > 0 {
				p.own += q.Elements
			}
			at = s.to
		}
		p.addFlat(partition)
	}
	return p
}

// isZeRO2 reports whether this is ZeRO-2, which reduces and frees gradients during
// the backward pass.
func (e *zero12) isZeRO2() bool { return e.recipe.ZeROStage == 2 }

func (e *zero12) load() { e.loadFull(e.whyParameters) }

func (e *zero12) whyParameters() string {
	return fmt.Sprintf("%s parameters x %d B in %v: ZeRO-%d has them in full on every rank%s",
		ledger.Count(elementsOf(e.parameters)), e.ParameterType.Size(), e.ParameterType, e.recipe.ZeROStage,
		e.whyDecompressed())
}

func (e *zero12) initialize() {
	if e.offloads() {
		e.tiles()
	}
	var temporary hold // a variable of DeepSpeed's constructor that outlives the loop
	for i, group := range e.groups {
		e.flatten(group, e.aligned(elementsOf(group))*e.ParameterType.Size())
		temporary.free()
		temporary = e.masterWeights(e.flat[i].Elements)
	}
	largest := largestOf(e.trained) * e.ParameterType.Size()
	if e.offloads() {
		why := because("the largest parameter, %s x %d B, for gradients that are added up on the host "+
			"(temp_grad_buffer_for_gpu_offload and, never read, temp_grad_buffer_for_cpu_offload)",
			ledger.Count(largestOf(e.trained)), e.ParameterType.Size())
		e.holdOnHost(largest, ledger.StagingBuffers, why, e.pinsOptimizer())
		allocate(e.gpu, largest, ledger.StagingBuffers, why)
	}
	for _, p := range e.flat {
		bytes := p.Elements * e.master.Size()
		if e.offloads() {
			e.hostGradients(bytes, e.whyMasterGradients)
		} else {
			e.gpu.during(bytes, ledger.MasterGradients, e.whyMasterGradients, e.eager)
		}
	}
	if e.offloads() {
		e.eager()
	}
	temporary.free()
}

func (e *zero12) whyMasterGradients() string {
	if e.offloads() {
		return fmt.Sprintf("%s x %d B, on the host for good (initialize_optimizer_states)", e.shardCount(),
			e.master.Size())
	}
	return fmt.Sprintf("%s x (%d B flattened, then %d B cast) for the step (zero/stage_1_and_2.py, step)",
		e.shardCount(), e.ParameterType.Size(), e.master.Size())
}

// eager makes the states while the engine is made. Before 0.13.2 the engine
// stepped the optimizer once with zero gradients.
func (e *zero12) eager() {
	if !e.since(0, 13, 2) {
		e.makeStates()
	}
}

// flatten moves the parameters of a group into one tensor. Since 0.18.7 the
// tensor is made on the GPU if it fits beside the parameters (#7828). Otherwise
// the parameters are moved to the host, flattened there, and moved back. The
// cache is emptied before the flat tensor is made: 0.11.2 does so, 0.7.7 did not.
func (e *zero12) flatten(group []*autograd.Parameter, bytes int64) {
	if e.since(0, 18, 7) {
		e.gpu.emptyCache()
	}
	fits := e.GPU.Memory == 0 || e.gpu.live+ledger.Bytes(bytes) <= e.GPU.Memory
	if e.since(0, 18, 7) && fits {
		allocate(e.gpu, bytes, ledger.Parameters, e.whyParameters)
		e.unload(group)
		return
	}
	e.host.during(bytesOf(group, e.ParameterType), ledger.FlatteningCopies, e.whyFlattening, func() {
		e.unload(group)
		if e.since(0, 11, 2) {
			e.gpu.emptyCache()
		}
		e.host.during(bytes, ledger.FlatteningCopies, e.whyFlattening, func() {
			allocate(e.gpu, bytes, ledger.Parameters, e.whyParameters)
		})
	})
}

func (e *zero12) whyFlattening() string {
	return fmt.Sprintf("%s parameters x %d B: put into one tensor before their own storage is freed, on the GPU from "+
		"0.18.7 on if that fits (#7828), else on the host (zero/stage_1_and_2.py)", e.trainedCount(),
		e.ParameterType.Size())
}

// masterWeights makes the master weights of a group. It returns the memory that
// the constructor still holds on the host.
func (e *zero12) masterWeights(partition int64) (temporary hold) {
	bytes, bit16 := partition*e.master.Size(), partition*e.ParameterType.Size()
	if !e.offloads() {
		e.gpu.during(bit16, ledger.FlatteningCopies, e.whyFlattening, func() {
			allocate(e.gpu, bytes, ledger.MasterWeights, e.whyMaster)
		})
		return hold{}
	}
	convert := int64(0)
	if e.master != e.ParameterType {
		convert = bit16
	}
	pin := e.pinsOptimizer()
	if e.since(0, 14, 1) && !e.since(0, 18, 3) {
		pin = true // whatever the file says (#5301 until #7689)
	}
	pin = pin && e.since(0, 14, 1) && !e.overlapped()
	var clone hold
	if e.since(0, 18, 3) {
		e.gpu.during(bit16, ledger.FlatteningCopies, e.whyFlattening, func() {
			e.host.briefly(convert, ledger.DtypeConversions, whyConversion)
		})
	} else { // the partition was moved, then cloned on the host, then cast
		e.host.during(bit16, ledger.DtypeConversions, whyConversion, func() {
			clone = e.host.hold(bit16, ledger.DtypeConversions, whyConversion)
		})
	}
	component, why := e.hostMaster(e.whyMaster)
	e.holdOnHost(bytes, component, why, pin)
	clone.free()
	if !e.since(0, 17, 0) {
		return hold{}
	}
	// Parameters are cast on the host before they are copied (#7309).
	why = because("%s x %d B: parameters are cast on the host before they go to the GPU "+
		"(param_buffer_of_bit16_for_cpu_offload_groups, DeepSpeed #7309)", e.shardCount(), e.ParameterType.Size())
	if !e.pinsOptimizer() {
		e.holdOnHost(bit16, ledger.Bit16Staging, why, false)
		return hold{}
	}
	temporary = e.host.hold(bit16, ledger.PinningCopies, whyPinningCopies)
	e.pinnedMemory.allocate(bit16, ledger.Bit16Staging, why)
	return temporary
}

func (e *zero12) whyMaster() string {
	return fmt.Sprintf("%s parameters / %d ranks = %s x %d B (zero/stage_1_and_2.py, single_partition_of_fp32_groups)",
		e.trainedCount(), e.Parallel.Shard, e.shardCount(), e.master.Size())
}

// gradient handles a complete gradient.
func (e *zero12) gradient(p *autograd.Parameter) {
	if !e.buckets.held() && e.preparesBackward() {
		e.makeBuckets()
	}
	e.widen(p)
	if e.isZeRO2() || e.recipe.OverlapReduction && e.micro == e.micros-1 {
		e.add(p)
	}
}

// preparesBackward reports whether the engine tells the optimizer of backward passes: in a pipeline, that of the last
// stage only (pipe/engine.py, _exec_backward_pass).
func (e *zero12) preparesBackward() bool { return e.Stage == nil || !e.Stage.Chunks[0].Sends }

// makeBuckets makes the buckets of a backward pass, or of the reduction behind all passes of a pipeline.
func (e *zero12) makeBuckets() {
	count := int64(1)
	if e.recipe.OverlapReduction {
		count = 2
	}
	each := e.bucketElementBytes()
	e.buckets = e.gpu.hold(count*e.recipe.Sizes.ReduceBucket*each, ledger.CommunicationBuckets,
		because("%d x reduce_bucket_size %s x %d B%s, during the backward pass (setup_buckets)", count,
			ledger.Count(e.recipe.Sizes.ReduceBucket), each, e.whyTypes()))
}

// widen accumulates a gradient of ZeRO-1 in grad_accum_dtype.
func (e *zero12) widen(p *autograd.Parameter) {
	if d := e.recipe.GradientAccumulationDType; e.isZeRO2() || d == dtype.Invalid || d == e.ParameterType {
		return
	}
	bytes := p.Elements * e.recipe.GradientAccumulationDType.Size()
	if !e.wide[p.Index].held() {
		e.wide[p.Index] = e.gpu.hold(bytes, ledger.AccumulatedGradients, e.whyWide)
	} else {
		e.gpu.briefly(bytes, ledger.ReductionTemporaries, e.whyReduction)
	}
	p.DropGradient()
}

func (e *zero12) whyWide() string {
	size := e.recipe.GradientAccumulationDType.Size()
	return fmt.Sprintf("ZeRO-1 accumulates all gradients in grad_accum_dtype, %v, on the GPU: %s x %d B "+
		"(param.grad_accum)", e.recipe.GradientAccumulationDType, e.trainedCount(), size)
}

func (e *zero12) whyReduction() string {
	check := ""
	if each := e.overflowBytes(); each > 0 {
		check = fmt.Sprintf(" the inf/nan check (%d B),", each)
	}
	return fmt.Sprintf("of the largest gradient: the norm in double (8 B an element),%s a cast to %v "+
		"(zero/stage_1_and_2.py)", check, e.master)
}

// add copies a gradient into the bucket. A gradient that is larger than the
// bucket is reduced by itself, without a copy.
func (e *zero12) add(p *autograd.Parameter) {
	b := e.reducing.of(e.communicated(p))
	if b.elements+p.Elements > e.recipe.Sizes.ReduceBucket {
		e.reduce(b)
	}
	if p.Elements <= e.recipe.Sizes.ReduceBucket {
		if e.wide[p.Index].held() {
			e.gpu.briefly(p.Elements*e.ParameterType.Size(), ledger.ReductionTemporaries, e.whyReduction)
			drop(&e.wide[p.Index])
		}
		p.DropGradient()
	}
	b.add(p)
}

// reduce reduces the bucket over the ranks. A bucket that belongs to several
// ranks is copied once more (allreduce_bucket).
func (e *zero12) reduce(b *reduceBucket) {
	if len(b.parameters) == 0 {
		return
	}
	low, high := int64(math.MaxInt64), int64(0) // the ranks that the bucket belongs to
	for _, p := range b.parameters {
		s := e.ranges[p.Index]
		low, high = min(low, s.from/s.partition), max(high, (s.to-1)/s.partition)
	}
	if low < high {
		e.gpu.briefly(b.elements*e.bucketType(b).Size(), ledger.BucketCopies, e.whyCopied)
	}
	if t := b.communicated; t != e.bucketType(b) {
		e.gpu.briefly(b.elements*t.Size(), ledger.BucketCopies, e.whyCopied)
	}
	for _, p := range b.parameters {
		if e.ranges[p.Index].owned() > 0 {
			e.keep(p)
		}
		p.DropGradient()
		drop(&e.wide[p.Index])
	}
	b.clear()
}

func (e *zero12) whyCopied() string {
	return fmt.Sprintf("what is in a bucket, up to %s elements, put together by rank for the all-reduce, or cast to "+
		"communication_data_type (allreduce_bucket)", ledger.Count(e.recipe.Sizes.ReduceBucket))
}

// keep takes the rank's shard of a reduced gradient (copy_grads_in_partition).
func (e *zero12) keep(p *autograd.Parameter) {
	if !e.offloads() {
		if !e.arriving.held() {
			e.arriving = e.gpu.hold(e.own*e.ParameterType.Size(), ledger.Gradients, e.whyGradients)
		}
		return
	}
	if e.micros > 1 || e.recipe.ZenFlow != nil {
		e.accumulate(p)
	}
	if e.micro == e.micros-1 {
		slice := e.ranges[p.Index].owned()
		e.gpu.briefly(8*slice, ledger.ReductionTemporaries, e.whyReduction) // the norm, in double
		e.overflow(p.Elements, e.whyReduction)
		if e.master != e.ParameterType {
			e.gpu.briefly(e.master.Size()*slice, ledger.ReductionTemporaries, e.whyReduction)
		}
	}
}

// accumulate accumulates a gradient on the host, in a tensor as large as the
// parameter, even if the rank's shard is smaller. With low-precision gradients
// the tensor is part of the master gradients.
func (e *zero12) accumulate(p *autograd.Parameter) {
	if e.accumulated[p.Index].held() || e.recipe.LowPrecisionMaster {
		return
	}
	e.accumulated[p.Index] = e.holdOnHost(p.Elements*e.ParameterType.Size(), ledger.AccumulatedGradients,
		e.whyAccumulated, e.pinsOptimizer())
}

func (e *zero12) whyAccumulated() string {
	return fmt.Sprintf("full parameters of which the rank has a shard: %s x %d B, from the second micro batch on "+
		"(accumulated_grads_in_cpu)", ledger.Count(e.own), e.ParameterType.Size())
}

func (e *zero12) whyGradients() string {
	size := e.ParameterType.Size()
	if e.isZeRO2() {
		return fmt.Sprintf("full gradients until they are in a bucket, then those of parameters that touch the "+
			"partition, %s x %d B (grads_in_partition)", ledger.Count(e.own), size)
	}
	return fmt.Sprintf("ZeRO-1 keeps all gradients until the last backward pass of a step: %s x %d B",
		e.trainedCount(), size)
}

// endBackward reduces the last bucket and frees the buckets.
func (e *zero12) endBackward(last bool) {
	if e.Stage != nil {
		if !last {
			return
		}
		defer e.buckets.free()
		e.makeBuckets() // in addition to that of the last stage's passes: reduce_gradients(pipeline_parallel=True)
	}
	if !e.isZeRO2() && last && !e.recipe.OverlapReduction {
		for _, p := range e.trained {
			if p.HasGradient() || e.wide[p.Index].held() {
				e.add(p)
			}
		}
	}
	for _, b := range e.reducing.all {
		e.reduce(b)
	}
	if !e.averaged.held() {
		e.averaged, e.arriving = e.arriving, hold{}
	} else {
		drop(&e.arriving) // added to the gradients of earlier passes
	}
	if e.isZeRO2() || last { // ZeRO-1 reduces, and releases its buffers, behind the last backward pass of a step only
		drop(&e.buckets)
	}
}

func (e *zero12) step() {
	if e.offloads() {
		e.stepOnHost()
		return
	}
	var largest int64 // gradient, or its part in a partition
	for _, p := range e.counted() {
		largest = max(largest, min(p.Elements, e.ranges[p.Index].partition))
	}
	if e.ParameterType == dtype.F16 {
		e.overflow(largest, e.whyReduction)
	}
	e.gpu.briefly(8*largest, ledger.ReductionTemporaries, e.whyReduction) // the norm, in double
	for i, p := range e.flat {
		gradient := e.gpu.hold(p.Elements*e.ParameterType.Size(), ledger.MasterGradients, e.whyMasterGradients)
		if e.master != e.ParameterType {
			flattened := gradient
			gradient = e.gpu.hold(p.Elements*e.master.Size(), ledger.MasterGradients, e.whyMasterGradients)
			flattened.free()
		}
		if i == len(e.flat)-1 {
			drop(&e.averaged)
		}
		e.makeStates()
		e.copies(e.gpu, e.flat[i:i+1])
		gradient.free()
	}
}

// counted returns the parameters whose gradients this rank counts in the norm: those that an earlier stage of a
// pipeline has, too, are counted there (ds_pipe_replicated).
func (e *zero12) counted() []*autograd.Parameter {
	if e.Stage == nil {
		return e.trained
	}
	return slices.DeleteFunc(slices.Clone(e.trained), func(p *autograd.Parameter) bool {
		return slices.Contains(e.Stage.Replicated, p.Name)
	})
}

// makeStates makes the optimizer states, once.
func (e *zero12) makeStates() {
	if e.stepped {
		return
	}
	e.stepped = true
	if e.offloads() {
		e.hostStates(e.flat)
	} else {
		e.deviceStates(e.flat, e.whyShardStates)
	}
	e.selective()
}

// stepOnHost updates the partition and copies it to the GPU. Before 0.14.1 the
// copy itself cast the fp32 weights, on the host. Then they went to the GPU in
// fp32 (#5301). Since 0.17.0 the host casts them into a staging buffer (#7309).
func (e *zero12) stepOnHost() {
	e.makeStates()
	for _, p := range e.flat {
		switch {
		case e.since(0, 17, 0) || e.master == e.ParameterType:
		case e.since(0, 14, 1):
			e.gpu.briefly(p.Elements*e.master.Size(), ledger.DtypeConversions, whyConversion)
		default:
			e.host.briefly(p.Elements*e.ParameterType.Size(), ledger.DtypeConversions, whyConversion)
		}
	}
}
