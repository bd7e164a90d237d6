package plan

import (
	"strings"

	"plimsoll/autograd"
	"plimsoll/ledger"
)

// zero3 is stage 3 (runtime/zero/stage3.py, S3 in the reasons): parameters are
// gathered module by module.
type zero3 struct {
	*zero
	states   bool
	whole    bool // parameters are not sharded yet
	bucket   *hold
	live     map[*autograd.Parameter]*hold
	elements int64
	prefetch *hold
}

// persistent says whether a parameter stays whole on every GPU.
func (z *zero3) persistent(p *autograd.Parameter) bool {
	return p.Elements <= z.d.Sizes.PersistentParameter
}

func (z *zero3) shard(elements int64) int64 { return (elements + z.ranks - 1) / z.ranks }

// sums are the elements of a rank's shards, of all parameters and of those that
// are trained, and the bytes of what stays whole.
func (z *zero3) sums() (all, trained, kept int64) {
	for _, p := range z.parameters {
		all += z.shard(p.Bytes())
		if p.Trainable {
			trained += z.shard(p.Elements)
		}
		if z.persistent(p) {
			kept += p.Bytes()
		}
	}
	return all, trained, kept
}

func (z *zero3) load() {
	z.live = map[*autograd.Parameter]*hold{}
	for _, p := range z.parameters {
		z.elements += p.Elements
	}
	if z.ZeROInit {
		z.shardParameters()
		return
	}
	z.whole = true
	z.host.during(ledger.Bytes(z.storedBytes()), Loading, func() {})
	z.because(Loading, "the model is made on the host, whole, by every rank: zero.Init was not on")
	z.bucket = z.gpu.hold(z.storedBytes(), Weights)
}

// shardParameters leaves every rank its part, and what is small whole.
func (z *zero3) shardParameters() {
	all, _, kept := z.sums()
	pinned := z.pin(z.d.OffloadParameters)
	if z.d.OffloadParameters.Device == "cpu" {
		z.pinnedCopy(all, Weights, pinned)
	} else if z.d.OffloadParameters.Device == "none" {
		allocate(z.gpu, all, Weights)
	}
	allocate(z.gpu, kept, "persistent parameters")
	z.because(Weights, "%s parameters in %v, a part of each of %d ranks (S3:857)", ledger.Count(z.elements), z.Weights, z.ranks)
	z.because("persistent parameters", "parameters of up to %s elements stay whole (param_persistence_threshold)", ledger.Count(z.d.Sizes.PersistentParameter))
}

func (z *zero3) initialize() {
	if z.whole {
		z.shardParameters()
		drop(&z.bucket)
	}
	_, trained, _ := z.sums()
	width := z.Weights.Size()
	z.bucket = z.gpu.hold(min(z.d.Sizes.ReduceBucket, z.elements)*width, Buckets)
	z.because(Buckets, "reduce_bucket_size of %s elements x %d B, for good (S3:733)", ledger.Count(z.d.Sizes.ReduceBucket), width)
	pinned := z.pin(z.d.OffloadOptimizer)
	z.because(MasterWeights, "%d B x %s of the rank's part (S3:1108); a sub-group is there twice for a moment", z.masterBytes(), ledger.Count(trained))
	z.because(FlatGradients, "%d B x %s, always (grad_partitions_flat_buffer, S3:742)", width, ledger.Count(trained))
	z.because(PinnedRounding, "PyTorch rounds every pinned block up to a power of two (pytorch issue 95823)")
	group := min(z.d.Sizes.SubGroup, trained)
	if !z.offloads() {
		z.gpu.during(ledger.Bytes(z.masterBytes()*group), MasterWeights, func() { allocate(z.gpu, z.masterBytes()*trained, MasterWeights) })
		allocate(z.gpu, width*trained, FlatGradients)
		return
	}
	share := z.d.OffloadOptimizer.Ratio
	onCPU := int64(share * float64(trained))
	if onGPU := trained - onCPU; onGPU > 0 {
		allocate(z.gpu, z.masterBytes()*onGPU, MasterWeights)
	}
	if z.d.OffloadOptimizer.Device == "nvme" {
		z.onHost(4*4*group, "pinned buffers for NVMe", true)
		z.because("pinned buffers for NVMe", "4 buffers x 4 B x the largest sub-group of %s elements (runtime/swap_tensor)", ledger.Count(group))
		z.onHost(width*trained, FlatGradients, pinned)
		return
	}
	z.host.during(ledger.Bytes(z.masterBytes()*group), MasterWeights, func() { z.onHost(z.masterBytes()*onCPU, MasterWeights, false) })
	for left := onCPU; left > 0; left -= group {
		z.onHost(z.masterBytes()*min(left, group), HostGradients, pinned)
	}
	z.because(HostGradients, "%d B x %s, by sub-group (S3:1288)", z.masterBytes(), ledger.Count(onCPU))
	z.onHost(width*trained, FlatGradients, pinned)
	if z.d.OffloadOptimizer.SuperOffload {
		z.onHost(4*z.largest, "pinned gradient buffer of SuperOffload's worker", true)
		z.host.hold(8*onCPU, SharedMemory)
		z.because("pinned gradient buffer of SuperOffload's worker", "4 B x %s (superoffload_utils.py:86)", ledger.Count(z.largest))
		z.because(SharedMemory, "8 B x %s: master weights and gradients move to shared memory when they are first sent to the worker", ledger.Count(onCPU))
	}
	z.zenflow(trained)
}

// parametersOf are those of a module, not those of modules in it.
func (z *zero3) parametersOf(path string) []*autograd.Parameter {
	var list []*autograd.Parameter
	for _, suffix := range []string{".weight", ".bias", ".lora_A", ".lora_B"} {
		if p := z.modules.ByName[path+suffix]; p != nil {
			list = append(list, p)
		}
	}
	return list
}

// gather makes the parameters of a module whole: flat, and then each by itself.
func (z *zero3) gather(path string) {
	if z.prefetch == nil {
		ahead := min(z.d.Sizes.PrefetchBucket, z.elements)
		z.prefetch = z.gpu.hold(ahead*z.Weights.Size(), Gathered)
		z.because(Gathered, "parameters of the modules in use, twice while they are copied apart (partition_parameters.py:724), and stage3_prefetch_bucket_size of %s elements ahead", ledger.Count(z.d.Sizes.PrefetchBucket))
	}
	for _, p := range z.parametersOf(path) {
		if z.live[p] == nil && !z.persistent(p) {
			z.gpu.during(ledger.Bytes(p.Bytes()), Gathered, func() { z.live[p] = z.gpu.hold(p.Bytes(), Gathered) })
		}
	}
}

func (z *zero3) release(path string) {
	for _, p := range z.parametersOf(path) {
		z.live[p].free()
		delete(z.live, p)
	}
}

func (z *zero3) isBlock(path string) bool {
	return strings.Count(path, ".") > 0 && len(z.parametersOf(path)) == 0
}

func (z *zero3) BeforeForward(path string) { z.gather(path) }

// AfterForward releases a module unless it is used again soon.
func (z *zero3) AfterForward(path string) {
	if z.isBlock(path) {
		return
	}
	if z.Recompute == nil || z.tape.Recording() {
		if 2*z.elements <= z.d.Sizes.ReuseDistance && z.elements <= z.d.Sizes.LiveParameters {
			return // the whole model is within the distance
		}
	}
	z.release(path)
}

func (z *zero3) BeforeBackward(path string) { z.gather(path) }
func (z *zero3) AfterBackward(path string)  { z.release(path) }

// gradient is reduced from the bucket into the rank's part.
func (z *zero3) gradient(p *autograd.Parameter) {
	part := z.shard(p.Elements)
	z.because(ReduceTemporaries, "the bucket's gradients put together once more for the reduce-scatter (coalesced_collectives.py:158)")
	z.gpu.during(ledger.Bytes(min(p.Elements, z.d.Sizes.ReduceBucket)*z.Weights.Size()+4*part), ReduceTemporaries, func() {})
	p.DropGradient()
}

func (z *zero3) endBackward(bool) {
	for p, h := range z.live {
		h.free()
		delete(z.live, p)
	}
	drop(&z.prefetch)
}

func (z *zero3) step() {
	_, trained, _ := z.sums()
	width := z.Weights.Size()
	group := min(z.d.Sizes.SubGroup, trained)
	if z.offloads() {
		if !z.states && z.d.OffloadOptimizer.Device == "cpu" {
			onCPU := int64(z.d.OffloadOptimizer.Ratio * float64(trained))
			z.host.hold(z.stateBytes()*onCPU, States)
			if onGPU := trained - onCPU; onGPU > 0 {
				allocate(z.gpu, z.stateBytes()*onGPU, States)
			}
			z.because(States, "%d B x %s: exp_avg and exp_avg_sq, never pinned (ops/adam/cpu_adam.py:149)", z.stateBytes(), ledger.Count(onCPU))
		}
		z.because(StepTemporaries, "%d B x a sub-group of %s: updated parameters cast on the host, pageable (S3:2585)", width, ledger.Count(group))
		z.host.during(ledger.Bytes(width*group), StepTemporaries, func() {})
		z.states = true
		return
	}
	z.because(StepTemporaries, "(%d + 4) B x a sub-group of %s: gradients flattened and cast (S3:2398)", width, ledger.Count(group))
	z.gpu.during(ledger.Bytes((width+4)*group), StepTemporaries, func() {
		if !z.states {
			allocate(z.gpu, z.stateBytes()*trained, States)
			z.because(States, "%d B x %s of the rank's part: exp_avg and exp_avg_sq", z.stateBytes(), ledger.Count(trained))
		}
	})
	z.states = true
}

func (z *zero3) zeroGradients() {}
