package plan

import (
	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
)

// divided is ZeRO-3. Every parameter is sharded among the ranks, and gathered
// while a module uses it (zero/stage3.py, zero/partition_parameters.py).
type divided struct {
	*fetcher
	parts      []locked // shards of single parameters, by index
	subGroups  []subGroup
	bucket     []*autograd.Parameter
	elements   int64
	persistent []*autograd.Parameter
	moving     []moving // tensors that the first step moves to shared memory
}

// subGroup is the flat tensor that the optimizer steps at a time.
type subGroup struct {
	flat  *autograd.Parameter
	onGPU bool
}

func newDivided(e *deepSpeed) *divided {
	d := &divided{parts: make([]locked, len(e.parameters))}
	for _, group := range e.groups {
		var sum int64
		for i, p := range group {
			if sum += e.part(p.Elements); sum >= e.recipe.Sizes.SubGroup || i == len(group)-1 {
				d.subGroups = append(d.subGroups, subGroup{flat: e.shard(sum)})
				sum = 0
			}
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
	d.fetcher = newFetcher(e, d.persistent)
	return d
}

func (e *deepSpeed) part(n int64) int64 {
	ranks := int64(e.ShardRanks)
	return (n + ranks - 1) / ranks
}

// partBytes returns the size of a rank's shard of a parameter.
func (e *deepSpeed) partBytes(p *autograd.Parameter) int64 {
	if p.Quantized != autograd.Unquantized {
		return e.part(p.Bytes())
	}
	return e.part(p.Elements) * p.DType.Size()
}

// parametersOn returns the device of the parameter shards: none (the GPU), cpu or
// nvme.
func (e *deepSpeed) parametersOn() string { return e.recipe.OffloadParameters.Device }

// load makes the model: sharded at once (zero.Init), or unsharded on every rank.
func (e *divided) load() {
	if !e.ZeROInit {
		e.deepSpeed.load()
		return
	}
	for _, p := range e.parameters {
		e.loaded[p.Index] = e.gpu.hold(p.Bytes(), ledger.GatheredParameters)
		e.divide(p)
	}
}

// divide replaces a parameter by the rank's shard of it.
func (e *divided) divide(p *autograd.Parameter) {
	switch e.parametersOn() {
	case "none":
		e.parts[p.Index] = locked{hold: e.gpu.hold(e.partBytes(p), ledger.Parameters)}
	case "cpu":
		e.parts[p.Index] = e.place(e.partBytes(p), ledger.Parameters, e.pinsOf(e.recipe.OffloadParameters))
	}
	e.unload([]*autograd.Parameter{p})
}

func (e *divided) initialize() {
	if e.offloads() {
		e.tiles()
	}
	if e.parametersOn() == "nvme" {
		// All shards of a module go through pinned buffers to and from NVMe.
		o := e.recipe.OffloadParameters
		e.pins.lock(o.Buffers*o.BufferElements*e.Weights.Size(), ledger.SwapBuffers)
	}
	for _, p := range e.parameters {
		if e.loaded[p.Index].held() {
			e.divide(p)
		}
	}
	e.joinParts()
	for _, p := range e.trained { // gradient hooks need the full parameter
		e.gpu.during(e.gathers()*ledger.Bytes(2*p.Elements*p.DType.Size()), ledger.GatheredParameters, func() {})
	}
	if e.recipe.OffloadOptimizer.Device == "nvme" {
		e.swapBuffers()
	} else {
		e.masterWeights()
		e.masterGradients()
	}
	allocate(e.gpu, e.recipe.Sizes.ReduceBucket*e.Weights.Size(), ledger.CommunicationBuckets)
	gradients := elementsOf(e.flat) * e.accumulation().Size()
	if e.offloads() {
		e.place(gradients, ledger.AccumulatedGradients, e.pinned())
	} else {
		allocate(e.gpu, gradients, ledger.AccumulatedGradients)
	}
	e.superOffload()
	e.describe()
}

// gathers returns 0 on a single rank with the parameters on its GPU, else 1.
func (e *deepSpeed) gathers() ledger.Bytes {
	if e.ShardRanks == 1 && e.parametersOn() == "none" {
		return 0
	}
	return 1
}

// accumulation returns the type that gradients of shards are accumulated in.
func (e *deepSpeed) accumulation() dtype.Type {
	if d := e.recipe.GradientAccumulationDType; d != dtype.Invalid {
		return d
	}
	return e.Weights
}

// joinParts moves the shards of trainable parameters into one tensor. On the GPU
// it does so by way of the host (zero/utils.py, defragment). On the host the
// tensor is pinned, whatever the file says
// (_create_param_groups_fp16_flat_cpu_memory).
func (e *divided) joinParts() {
	if e.parametersOn() == "none" {
		bytes := elementsOf(e.flat) * e.Weights.Size()
		e.host.during(ledger.Bytes(bytes), ledger.FlatteningCopies, func() {
			e.freeParts(e.trained)
			allocate(e.gpu, bytes, ledger.Parameters)
		})
		return
	}
	held := e.recipe.OffloadParameters.HeldElements
	for _, group := range e.groups {
		var n int64
		for _, p := range group {
			n += e.part(p.Elements)
		}
		if e.parametersOn() == "nvme" {
			n = min(n, held)
			held -= n
		}
		if n > 0 {
			e.pins.lock(n*e.Weights.Size(), ledger.Parameters)
		}
		e.freeParts(group)
	}
}

func (e *divided) freeParts(parameters []*autograd.Parameter) {
	for _, p := range parameters {
		e.parts[p.Index].free()
		e.parts[p.Index] = locked{}
	}
}

// masterWeights makes the master weights: it casts the shards and clones them
// (_create_fp32_partitions). Only 0.18.2 uses shards that have the type already
// as master weights; later releases compare a device with its name (#7651,
// #7700).
func (e *divided) masterWeights() {
	if e.Weights == dtype.F32 && !e.offloads() && e.since(0, 18, 2) && !e.since(0, 18, 3) {
		return
	}
	for _, g := range e.subGroups {
		n, home := g.flat.Elements, e.homeOf(g)
		var cast, moved int64
		if e.master != e.Weights || home == e.host && e.parametersOn() == "none" {
			cast = n * e.master.Size()
		}
		if e.master != e.Weights && home == e.host && e.parametersOn() == "none" {
			moved = n * e.Weights.Size()
		}
		e.host.during(ledger.Bytes(moved), ledger.DtypeConversions, func() {
			home.during(ledger.Bytes(cast), ledger.DtypeConversions, func() { e.keepMaster(home, n*e.master.Size()) })
		})
	}
}

// keepMaster holds the master weights of a sub-group.
func (e *divided) keepMaster(home *trace, bytes int64) {
	if home == e.gpu {
		allocate(home, bytes, ledger.MasterWeights)
		return
	}
	e.moves(locked{hold: home.hold(bytes, e.hostMaster())}, bytes, ledger.SharedMasterWeights)
}

func (e *divided) homeOf(g subGroup) *trace {
	if e.offloads() && !g.onGPU {
		return e.host
	}
	return e.gpu
}

// masterGradients allocates the master gradients of an offloaded optimizer.
// Without offload they exist during the step only. Before 0.13.2 the states were
// made here.
func (e *divided) masterGradients() {
	var most int64
	for _, g := range e.subGroups {
		most = max(most, g.flat.Elements)
	}
	home := e.gpu
	if e.offloads() {
		home = e.host
	}
	home.during(ledger.Bytes(most*e.master.Size()), ledger.MasterGradients, func() {
		for _, g := range e.subGroups {
			switch bytes := g.flat.Elements * e.master.Size(); {
			case e.offloads() && g.onGPU:
				allocate(e.gpu, bytes, ledger.MasterGradients)
			case e.offloads():
				e.moves(e.hostGradients(bytes), bytes, ledger.SharedMasterGradients)
			}
			if !e.since(0, 13, 2) {
				e.makeStates(g)
			}
		}
	})
	e.stepped = !e.since(0, 13, 2)
}

func (e *divided) makeStates(g subGroup) {
	switch {
	case e.stepped || e.recipe.OffloadOptimizer.Device == "nvme":
	case e.homeOf(g) == e.host:
		e.hostStates([]*autograd.Parameter{g.flat})
	default:
		e.deviceStates([]*autograd.Parameter{g.flat})
	}
}

// swapBuffers allocates the buffers for the states of a sub-group
// (swap_tensor/utils.py, SwapBufferManager). Since 0.19.4 their size is not
// rounded up.
func (e *divided) swapBuffers() {
	var most int64
	for _, g := range e.subGroups {
		most = max(most, g.flat.Elements)
	}
	for range e.recipe.OffloadOptimizer.Buffers {
		if e.since(0, 19, 4) {
			allocate(e.host, most*e.master.Size(), ledger.SwapBuffers)
		} else {
			e.pins.lock(most*e.master.Size(), ledger.SwapBuffers)
		}
	}
}

func (e *divided) gradient(p *autograd.Parameter) {
	if e.elements+p.Elements > e.recipe.Sizes.ReduceBucket && e.elements > 0 {
		e.reduce()
	}
	if e.elements+p.Elements <= e.recipe.Sizes.ReduceBucket {
		p.DropGradient() // copied into the bucket
	}
	e.bucket = append(e.bucket, p)
	e.elements += p.Elements
}

// reduce reduces the bucket. It first concatenates the shards of all ranks; the
// rank's own shard of the result remains (reduce_scatter_coalesced).
func (e *divided) reduce() {
	var padded int64
	for _, p := range e.bucket {
		padded += e.part(p.Elements) * int64(e.ShardRanks)
	}
	e.gpu.during(ledger.Bytes(padded*e.Weights.Size()), ledger.BucketCopies, func() {
		for _, p := range e.bucket {
			e.keep(p)
			p.DropGradient()
		}
	})
	e.bucket, e.elements = e.bucket[:0], 0
}

// keep moves the rank's shard of a gradient to the host. The GPU accumulates it
// and casts it for the optimizer (partition_grads).
func (e *divided) keep(p *autograd.Parameter) {
	if !e.offloads() {
		return
	}
	n := e.part(p.Elements)
	e.gpu.during(ledger.Bytes(n*e.accumulation().Size()), ledger.ReductionTemporaries, func() {
		if e.micro == e.micros-1 {
			e.gpu.during(ledger.Bytes(8*min(n, normChunk)), ledger.ReductionTemporaries, func() {})
			if e.accumulation() != e.master {
				e.gpu.during(ledger.Bytes(n*e.master.Size()), ledger.ReductionTemporaries, func() {})
			}
		}
	})
}

// normChunk is the number of elements that the norm is computed of at a time
// (_constant_buffered_norm2).
const normChunk = 250_000_000

func (e *divided) endBackward(bool) {
	e.reduce()
	e.reset()
}

func (e *divided) step() {
	e.releaseAll()
	largest := e.part(largestOf(e.trained))
	if !e.offloads() {
		if e.Weights == dtype.F16 {
			e.overflow(largest)
		}
		e.gpu.during(ledger.Bytes(8*largest), ledger.ReductionTemporaries, func() {})
	}
	for _, g := range e.subGroups {
		e.stepSubGroup(g)
	}
	if !e.stepped {
		e.selective()
	}
	e.stepped = true
	e.share()
	e.fetch(e.persistent)
	e.there = 0 // persistent parameters are not counted
}

func (e *divided) stepSubGroup(g subGroup) {
	n := g.flat.Elements
	if e.offloads() {
		e.makeStates(g)
		if e.homeOf(g) == e.host && e.parametersOn() == "none" && e.master != e.Weights {
			e.host.during(ledger.Bytes(n*e.Weights.Size()), ledger.DtypeConversions, func() {})
		}
		if g.onGPU {
			e.copies(e.gpu, []*autograd.Parameter{g.flat})
		}
		return
	}
	gradient := e.gpu.hold(n*e.accumulation().Size(), ledger.MasterGradients)
	if e.accumulation() != e.master {
		flattened := gradient
		gradient = e.gpu.hold(n*e.master.Size(), ledger.MasterGradients)
		flattened.free()
	}
	e.makeStates(g)
	e.copies(e.gpu, []*autograd.Parameter{g.flat})
	gradient.free()
}

// save gathers the full model on the host of rank 0 for a checkpoint. The ranks
// of its node share the memory equally in the plan.
func (e *divided) save() {
	if !e.recipe.GatherOnSave {
		return
	}
	for _, p := range e.parameters {
		e.gpu.during(e.gathers()*ledger.Bytes(2*p.Bytes()), ledger.GatheredParameters, func() {})
	}
	e.host.during(ledger.Bytes(e.storedBytes()/int64(max(1, e.RanksPerNode))), ledger.FullStateDict, func() {})
}
