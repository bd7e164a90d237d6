package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// zero3 is ZeRO-3. Every parameter is sharded among the ranks, and gathered
// while a module uses it (zero/stage3.py, zero/partition_parameters.py).
type zero3 struct {
	*deepSpeed
	coordinator *coordinator
	shards      []tensor // shards of single parameters, by index
	secondary   []tensor // second partitions of single parameters (hpZ), by index
	subGroups   []subGroup
	reducing    reduceBuckets
	persistent  []*autograd.Parameter
	moving      []moving // tensors that the first step moves to shared memory
}

// subGroup is a flat tensor: the optimizer steps one at a time.
type subGroup struct {
	flat  *autograd.Parameter
	onGPU bool
}

func newZeRO3(e *deepSpeed) *zero3 {
	n := len(e.parameters)
	d := &zero3{deepSpeed: e, shards: make([]tensor, n), secondary: make([]tensor, n)}
	for _, group := range e.groups {
		shards := make([]int64, len(group))
		for i, p := range group {
			shards[i] = e.shardOf(p.Elements)
		}
		for _, elements := range subGroups(shards, e.recipe.Sizes.SubGroup) {
			d.subGroups = append(d.subGroups, subGroup{flat: e.addFlat(elements)})
		}
	}
	if e.offloads() { // Twin-Flow keeps the first sub-groups on the GPU
		for i := range int((1 - e.recipe.OffloadOptimizer.Ratio) * float64(len(d.subGroups))) {
			d.subGroups[i].onGPU = true
		}
	}
	total := int64(0)
	for _, p := range e.parameters {
		if n := p.Elements; n <= e.recipe.Sizes.PersistentParameter && total+n <= e.recipe.Sizes.PersistentModel {
			total += n
			d.persistent = append(d.persistent, p)
		}
	}
	d.coordinator = newCoordinator(e, d.persistent)
	d.coordinator.partition = d.partition
	return d
}

// subGroups cuts the parameters of a group, of which a rank has so many elements each, into sub-groups: one ends with
// the parameter that fills it (stage3.py, _create_fp16_sub_groups).
func subGroups(shards []int64, size int64) (elements []int64) {
	var sum int64
	for i, n := range shards {
		if sum += n; sum >= size || i == len(shards)-1 {
			elements = append(elements, sum)
			sum = 0
		}
	}
	return elements
}

func (e *deepSpeed) shardOf(n int64) int64 {
	return ceilDivide(n, e.Parallel.Shard)
}

// shardBytes returns the size of a rank's shard of a parameter.
func (e *deepSpeed) shardBytes(p *autograd.Parameter) int64 {
	if p.Quantized != autograd.Unquantized {
		return e.shardOf(p.Bytes())
	}
	return e.shardOf(p.Elements) * p.DType.Size()
}

// parametersOn returns the device of the parameter shards: none (the GPU), cpu or
// nvme.
func (e *deepSpeed) parametersOn() string { return e.recipe.OffloadParameters.Device }

// load makes the model: sharded at once (zero.Init), or unsharded on every rank.
func (e *zero3) load() {
	if !e.ZeROInit {
		e.loadFull(e.whyParameters)
		return
	}
	for _, p := range e.parameters {
		e.loaded[p.Index] = e.gpu.hold(p.Bytes(), ledger.GatheredParameters, e.coordinator.whyGathered)
		e.shard(p)
	}
}

// shard replaces a parameter by the rank's shard of it.
func (e *zero3) shard(p *autograd.Parameter) {
	e.partition(p)
	switch e.parametersOn() {
	case "none":
		e.shards[p.Index] = tensor{hold: e.gpu.hold(e.shardBytes(p), e.weights(), e.whyParameters)}
	case "cpu":
		e.shards[p.Index] = e.holdOnHost(e.shardBytes(p), e.weights(), e.whyParameters,
			e.pinsOffload(e.recipe.OffloadParameters))
	}
	e.unload([]*autograd.Parameter{p})
}

// partition keeps a second partition of a gathered parameter, if the file asks for hpZ: a group of ranks, mostly those
// of a node, then gathers the parameter among themselves until the next step (_partition_param_sec).
func (e *zero3) partition(p *autograd.Parameter) {
	ranks := e.secondaryRanks()
	if ranks < 1 || e.secondary[p.Index].held() {
		return
	}
	bytes := e.shardOf(p.Elements) * e.Parallel.Shard / ranks * p.DType.Size()
	if e.parametersOn() == "cpu" {
		e.secondary[p.Index] = e.holdOnHost(bytes, ledger.SecondaryParameters, e.whySecondary,
			e.pinsOffload(e.recipe.OffloadParameters))
		return
	}
	e.secondary[p.Index] = tensor{hold: e.gpu.hold(bytes, ledger.SecondaryParameters, e.whySecondary)}
}

// secondaryRanks returns the number of ranks that share second partitions, or 0 where there are none.
func (e *zero3) secondaryRanks() int64 {
	if n := e.recipe.Sizes.SecondaryPartition; n > 1 {
		return min(n, e.Parallel.Shard)
	}
	return 0
}

func (e *zero3) whySecondary() string {
	return fmt.Sprintf("hpZ: %s parameters x %d B / %d ranks, from the end of the forward pass to the step "+
		"(zero_hpz_partition_size; zero/partition_parameters.py, _partition_param_sec)",
		ledger.Count(elementsOf(e.parameters)), e.ParameterType.Size(), e.secondaryRanks())
}

// invalidate frees the second partitions of parameters that the step has changed (invalidate_secondary_tensor).
func (e *zero3) invalidate() {
	for _, p := range e.trained {
		e.secondary[p.Index].free()
		e.secondary[p.Index] = tensor{}
	}
}

func (e *zero3) whyParameters() string {
	return fmt.Sprintf("one of %d shards of %s parameters x %d B, pinned in one block a group on the "+
		"host with offload_param (zero/stage3.py)", e.Parallel.Shard, ledger.Count(elementsOf(e.parameters)),
		e.ParameterType.Size())
}

func (e *zero3) initialize() {
	if e.offloads() {
		e.tiles()
	}
	if e.parametersOn() == "nvme" {
		// All shards of a module go through pinned buffers to and from NVMe.
		o := e.recipe.OffloadParameters
		e.pinnedMemory.allocate(o.Buffers*o.BufferElements*e.ParameterType.Size(), ledger.SwapBuffers,
			e.whySwapBuffers)
	}
	for _, p := range e.parameters {
		if e.loaded[p.Index].held() {
			e.shard(p)
		}
	}
	e.flattenShards()
	for _, p := range e.trained { // gradient hooks need the full parameter
		e.gpu.briefly(e.gathers()*2*p.Elements*p.DType.Size(), ledger.GatheredParameters, e.coordinator.whyGathered)
	}
	if e.recipe.OffloadOptimizer.Device == "nvme" {
		e.swapBuffers()
	} else {
		e.masterWeights()
		e.masterGradients()
	}
	allocate(e.gpu, e.recipe.Sizes.ReduceBucket*e.bucketElementBytes(), ledger.CommunicationBuckets,
		because("reduce_bucket_size %s x %d B%s, for good (zero/stage3.py)",
			ledger.Count(e.recipe.Sizes.ReduceBucket), e.bucketElementBytes(), e.whyTypes()))
	gradients := elementsOf(e.flat) * e.accumulation().Size()
	why := because("%s x %d B, for good (zero/stage3.py, grad_partitions_flat_buffer)", e.shardCount(),
		e.accumulation().Size())
	if e.offloads() {
		e.holdOnHost(gradients, ledger.AccumulatedGradients, why, e.pinsOptimizer())
	} else {
		allocate(e.gpu, gradients, ledger.AccumulatedGradients, why)
	}
	e.superOffload()
}

// gathers returns 0 on a single rank with the parameters on its GPU, else 1.
func (e *deepSpeed) gathers() int64 {
	if e.Parallel.Shard == 1 && e.parametersOn() == "none" {
		return 0
	}
	return 1
}

// accumulation returns the type that gradients of shards are accumulated in.
func (e *deepSpeed) accumulation() dtype.Type {
	if d := e.recipe.GradientAccumulationDType; d != dtype.Invalid {
		return d
	}
	return e.ParameterType
}

// flattenShards moves the shards of trainable parameters into one tensor. On the GPU
// it does so by way of the host (zero/utils.py, defragment). On the host the
// tensor is pinned, whatever the file says
// (_create_param_groups_fp16_flat_cpu_memory).
func (e *zero3) flattenShards() {
	if e.parametersOn() == "none" {
		bytes := elementsOf(e.flat) * e.ParameterType.Size()
		why := because("parts of parameters are moved to the host and back as one tensor (zero/utils.py, defragment)")
		e.host.during(bytes, ledger.FlatteningCopies, why, func() {
			e.freeShards(e.trained)
			e.gpu.emptyCache()
			allocate(e.gpu, bytes, ledger.Parameters, e.whyParameters)
		})
		return
	}
	held := e.recipe.OffloadParameters.HeldElements
	for _, group := range e.groups {
		var n int64
		for _, p := range group {
			n += e.shardOf(p.Elements)
		}
		if e.parametersOn() == "nvme" {
			n = min(n, held)
			held -= n
		}
		if n > 0 {
			e.pinnedMemory.allocate(n*e.ParameterType.Size(), ledger.Parameters, e.whyParameters)
		}
		e.freeShards(group)
	}
}

func (e *zero3) freeShards(parameters []*autograd.Parameter) {
	for _, p := range parameters {
		e.shards[p.Index].free()
		e.shards[p.Index] = tensor{}
	}
}

// masterWeights makes the master weights: it casts the shards and clones them (_create_fp32_partitions). Shards may
// have the type already. Only 0.18.2 then uses them as master weights; later releases compare a device with its name
// (#7651, #7700).
func (e *zero3) masterWeights() {
	if e.ParameterType == dtype.F32 && !e.offloads() && e.since(0, 18, 2) && !e.since(0, 18, 3) {
		return
	}
	for _, g := range e.subGroups {
		n, device := g.flat.Elements, e.deviceOf(g)
		var cast, moved int64
		if e.master != e.ParameterType || device == e.host && e.parametersOn() == "none" {
			cast = n * e.master.Size()
		}
		if e.master != e.ParameterType && device == e.host && e.parametersOn() == "none" {
			moved = n * e.ParameterType.Size()
		}
		e.host.during(moved, ledger.DtypeConversions, whyConversion, func() {
			device.during(cast, ledger.DtypeConversions, whyConversion, func() {
				e.keepMaster(device, n*e.master.Size())
			})
		})
	}
}

// keepMaster holds the master weights of a sub-group.
func (e *zero3) keepMaster(device *trace, bytes int64) {
	why := because("%s parameters / %d ranks = %s x %d B (zero/stage3.py, _create_fp32_partitions)", e.trainedCount(),
		e.Parallel.Shard, e.shardCount(), e.master.Size())
	if device == e.gpu {
		allocate(device, bytes, ledger.MasterWeights, why)
		return
	}
	component, why := e.hostMaster(why)
	e.moves(tensor{hold: device.hold(bytes, component, why)}, bytes, ledger.SharedMasterWeights)
}

func (e *zero3) deviceOf(g subGroup) *trace {
	if e.offloads() && !g.onGPU {
		return e.host
	}
	return e.gpu
}

// masterGradients allocates the master gradients of an offloaded optimizer.
// Without offload they exist during the step only. Before 0.13.2 the states were
// made here.
func (e *zero3) masterGradients() {
	var most int64
	for _, g := range e.subGroups {
		most = max(most, g.flat.Elements)
	}
	device := e.gpu
	if e.offloads() {
		device = e.host
	}
	device.during(most*e.master.Size(), ledger.MasterGradients, e.whyMasterGradients, func() {
		for _, g := range e.subGroups {
			switch bytes := g.flat.Elements * e.master.Size(); {
			case e.offloads() && g.onGPU:
				allocate(e.gpu, bytes, ledger.MasterGradients, e.whyMasterGradients)
			case e.offloads():
				e.moves(e.hostGradients(bytes, e.whyMasterGradients), bytes, ledger.SharedMasterGradients)
			}
			if !e.since(0, 13, 2) {
				e.makeStates(g)
			}
		}
	})
	e.stepped = !e.since(0, 13, 2)
}

func (e *zero3) whyMasterGradients() string {
	return fmt.Sprintf("in sub-groups of %s elements: %d B, for good where the host steps, flattened and cast for the "+
		"step on the GPU (zero/stage3.py, initialize_optimizer_states)", ledger.Count(e.recipe.Sizes.SubGroup),
		e.master.Size())
}

func (e *zero3) makeStates(g subGroup) {
	switch {
	case e.stepped || e.recipe.OffloadOptimizer.Device == "nvme":
	case e.deviceOf(g) == e.host:
		e.hostStates([]*autograd.Parameter{g.flat})
	default:
		e.deviceStates([]*autograd.Parameter{g.flat}, e.whyShardStates)
	}
}

// swapBuffers allocates the buffers for the states of a sub-group
// (swap_tensor/utils.py, SwapBufferManager). Since 0.19.4 their size is not
// rounded up.
func (e *zero3) swapBuffers() {
	var most int64
	for _, g := range e.subGroups {
		most = max(most, g.flat.Elements)
	}
	for range e.recipe.OffloadOptimizer.Buffers {
		if e.since(0, 19, 4) {
			allocate(e.host, most*e.master.Size(), ledger.SwapBuffers, e.whySwapBuffers)
		} else {
			e.pinnedMemory.allocate(most*e.master.Size(), ledger.SwapBuffers, e.whySwapBuffers)
		}
	}
}

func (e *zero3) whySwapBuffers() string {
	return fmt.Sprintf("offload_optimizer: buffer_count %d x the largest sub-group x %d B; offload_param: %d x %s x "+
		"%d B in one block (swap_tensor)", e.recipe.OffloadOptimizer.Buffers, e.master.Size(),
		e.recipe.OffloadParameters.Buffers, ledger.Count(e.recipe.OffloadParameters.BufferElements),
		e.ParameterType.Size())
}

func (e *zero3) gradient(p *autograd.Parameter) {
	b := e.reducing.of(e.communicated(p))
	if b.elements+p.Elements > e.recipe.Sizes.ReduceBucket && b.elements > 0 {
		e.reduce(b)
	}
	if b.elements+p.Elements <= e.recipe.Sizes.ReduceBucket {
		p.DropGradient() // copied into the bucket
	}
	b.add(p)
}

func (e *zero3) whyGradients() string {
	return "full gradients until they are in the bucket; one that is larger stays until it is reduced"
}

// reduce reduces the bucket. It first concatenates the shards of all ranks; the
// rank's own shard of the result remains (reduce_scatter_coalesced).
func (e *zero3) reduce(b *reduceBucket) {
	var padded, cast, parts int64
	for _, p := range b.parameters {
		padded += e.shardOf(p.Elements) * e.Parallel.Shard
	}
	why := because("what is in the bucket, put together by rank for the reduce-scatter " +
		"(comm/coalesced_collectives.py), with casts from and to communication_data_type (zero/stage3.py)")
	if e.bucketType(b) != b.communicated {
		cast = b.elements * b.communicated.Size()
	}
	if t := e.accumulation(); t != b.communicated {
		parts = padded / e.Parallel.Shard * t.Size()
	}
	e.gpu.during(cast, ledger.BucketCopies, why, func() {
		e.gpu.during(padded*b.communicated.Size(), ledger.BucketCopies, why, func() {
			e.gpu.during(parts, ledger.BucketCopies, why, func() {
				for _, p := range b.parameters {
					e.keep(p)
					p.DropGradient()
				}
			})
		})
	})
	b.clear()
}

// keep moves the rank's shard of a gradient to the host. The GPU accumulates it
// and casts it for the optimizer (partition_grads).
func (e *zero3) keep(p *autograd.Parameter) {
	if !e.offloads() {
		return
	}
	n := e.shardOf(p.Elements)
	e.gpu.during(n*e.accumulation().Size(), ledger.ReductionTemporaries, e.whyReduction, func() {
		if e.micro == e.micros-1 {
			e.gpu.briefly(8*min(n, normChunk), ledger.ReductionTemporaries, e.whyReduction)
			if e.accumulation() != e.master {
				e.gpu.briefly(n*e.master.Size(), ledger.ReductionTemporaries, e.whyReduction)
			}
		}
	})
}

func (e *zero3) whyReduction() string {
	return fmt.Sprintf("of a rank's part of a gradient: on the GPU to be added up, the norm in double of up to "+
		"250,000,000 elements, a cast to %v (zero/stage3.py, partition_grads)", e.master)
}

// normChunk is the number of elements that the norm reads at a time (_constant_buffered_norm2).
const normChunk = 250_000_000

func (e *zero3) endBackward(bool) {
	for _, b := range e.reducing.all {
		e.reduce(b)
	}
	e.coordinator.reset()
}

func (e *zero3) step() {
	e.coordinator.releaseAll()
	largest := e.shardOf(largestOf(e.trained))
	if !e.offloads() {
		if e.ParameterType == dtype.F16 {
			e.overflow(largest, e.whyReduction)
		}
		e.gpu.briefly(8*largest, ledger.ReductionTemporaries, e.whyReduction)
	}
	for _, g := range e.subGroups {
		e.stepSubGroup(g)
	}
	if !e.stepped {
		e.selective()
	}
	e.stepped = true
	e.share()
	e.coordinator.fetch(e.persistent)
	e.invalidate()
	e.coordinator.live = 0 // persistent parameters are not counted
}

func (e *zero3) stepSubGroup(g subGroup) {
	n := g.flat.Elements
	if e.offloads() {
		e.makeStates(g)
		if e.deviceOf(g) == e.host && e.parametersOn() == "none" && e.master != e.ParameterType {
			e.host.briefly(n*e.ParameterType.Size(), ledger.DtypeConversions, whyConversion)
		}
		if g.onGPU {
			e.copies(e.gpu, []*autograd.Parameter{g.flat})
		}
		return
	}
	gradient := e.gpu.hold(n*e.accumulation().Size(), ledger.MasterGradients, e.whyMasterGradients)
	if e.accumulation() != e.master {
		flattened := gradient
		gradient = e.gpu.hold(n*e.master.Size(), ledger.MasterGradients, e.whyMasterGradients)
		flattened.free()
	}
	e.makeStates(g)
	e.copies(e.gpu, []*autograd.Parameter{g.flat})
	gradient.free()
}

func (e *zero3) BeforeForward(module string)  { e.coordinator.use(module) }
func (e *zero3) AfterForward(module string)   { e.coordinator.release(module) }
func (e *zero3) BeforeBackward(module string) { e.coordinator.use(module) }
func (e *zero3) AfterBackward(module string)  { e.coordinator.release(module) }
