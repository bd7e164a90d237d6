package plan

import (
	"fmt"

	"plimsoll/allocator"
	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
	"plimsoll/recipe"
)

// Components of DeepSpeed's on the host and on the GPU.
const (
	StagingBuffer        = "16-bit staging buffer"
	HostGradients        = "fp32 gradients"
	AccumulatedGradients = "accumulated gradients"
	UnusedGradientBuffer = "gradient buffer of the largest parameter"
	FlatGradients        = "16-bit gradient partitions"
	PinnedRounding       = "rounding of pinned blocks"
	PinnedTiles          = "pinned tiles of the CPU Adam"
	SharedMemory         = "/dev/shm"
	FlatCopy             = "flat copy of the parameters"
	StepTemporaries      = "gradients flattened and cast for the step"
	ReduceTemporaries    = "temporaries of the reduction"
)

// zero is what DeepSpeed's stages have in common. Line numbers in the reasons
// are those of DeepSpeed 0.19.6 (commit edaa72212).
type zero struct {
	*simulation
	d       *recipe.DeepSpeed
	ranks   int64
	largest int64 // elements of the largest parameter that is trained
	pins    *allocator.Pinned
	why     map[string]string
}

func newZeRO(s *simulation) sharding {
	c, _ := allocator.ParseConfiguration(s.Allocator, s.Versions.Torch) // New has parsed it before
	z := &zero{simulation: s, d: s.DeepSpeed, ranks: int64(s.ShardRanks), pins: allocator.NewPinned(c, s.Versions.Torch), why: map[string]string{}}
	for _, p := range s.trained {
		z.largest = max(z.largest, p.Elements)
	}
	if z.d.ZeROStage == 3 {
		return &zero3{zero: z}
	}
	return &zero12{zero: z}
}

func (z *zero) BeforeForward(string)  {}
func (z *zero) AfterForward(string)   {}
func (z *zero) BeforeBackward(string) {}
func (z *zero) AfterBackward(string)  {}
func (z *zero) save()                 {}

func (z *zero) reasons() map[string]string { return z.why }

// because notes a reason.
func (z *zero) because(component, format string, arguments ...any) {
	z.why[component] = fmt.Sprintf(format, arguments...)
}

// partition is the number of elements of a rank's part of all that is trained:
// S12 aligns it to two elements a rank (nccl_start_alignment_factor).
func (z *zero) partition() int64 {
	return (z.trainedElements() + 2*z.ranks - 1) / (2 * z.ranks) * 2
}

func (z *zero) offloads() bool { return z.d.OffloadOptimizer.Device != "none" }

// pin says whether a section of the configuration has its memory pinned. The
// default became true with pull request 8207.
func (z *zero) pin(o recipe.Offload) bool {
	if o.PinMemoryGiven {
		return o.PinMemory
	}
	return z.Versions.DeepSpeed.AtLeast(0, 19, 6)
}

// onHost holds bytes on the host, page-locked ones in blocks as PyTorch's
// pinned allocator rounds them.
func (z *zero) onHost(bytes int64, component string, pinned bool) {
	z.host.hold(bytes, component)
	if pinned {
		z.host.hold(int64(z.pins.Rounded(ledger.Bytes(bytes)))-bytes, PinnedRounding)
	}
}

// zero12 is stages 0 to 2 (runtime/zero/stage_1_and_2.py).
type zero12 struct {
	*zero
	buckets, partitions *hold
	accumulating        *hold
	full                *hold // fp32 gradients of BF16_Optimizer
	states              bool
}

func (z *zero12) load() {
	z.host.during(ledger.Bytes(z.storedBytes()), Loading, func() {})
	for _, p := range z.parameters {
		allocate(z.gpu, p.Bytes(), Weights)
	}
	z.because(Loading, "the model is made on the host and goes to the GPU from there; every rank does so")
	z.because(Weights, "%s parameters in %v, whole on every GPU at stage %d", ledger.Count(z.Model.Elements()), z.Weights, z.d.ZeROStage)
}

// masterBytes is the size of an element of the master weights and of their
// gradients.
func (z *zero) masterBytes() int64 {
	if z.d.LowPrecisionMaster {
		return z.Weights.Size()
	}
	return 4
}

func (z *zero) stateBytes() int64 {
	// Of 1 Mi elements, so that block-wise states count their scales.
	sample := &autograd.Parameter{Elements: 1 << 20, Rows: 1 << 10, DType: dtype.F32}
	var bytes int64
	for _, state := range z.Optimizer.states(sample) {
		bytes += state.bytes
	}
	if z.d.LowPrecisionState {
		bytes = bytes * z.Weights.Size() / 4
	}
	return bytes >> 20
}

func (z *zero12) initialize() {
	p, width, v := z.partition(), z.Weights.Size(), z.Versions.DeepSpeed
	if z.d.ZeROStage == 0 {
		z.unsharded()
		return
	}
	z.because(FlatCopy, "parameters are flattened on the GPU, one more copy for a moment: %s x %d B (S12:395-453)", ledger.Count(z.trainedElements()), width)
	if v.AtLeast(0, 18, 8) {
		z.gpu.during(ledger.Bytes(z.trainedElements()*width), FlatCopy, func() {})
	} else {
		// Before pull request 7828 they were flattened on the host, by every rank.
		z.host.during(ledger.Bytes(2*z.trainedElements()*width), FlatCopy, func() {})
		z.because(FlatCopy, "every rank copies all parameters to the host and flattens them there: 2 x %s x %d B (before pull request 7828)", ledger.Count(z.trainedElements()), width)
	}
	if !z.offloads() {
		allocate(z.gpu, z.masterBytes()*p, MasterWeights)
		z.because(MasterWeights, "%d B x %s parameters of the rank's part (S12:492)", z.masterBytes(), ledger.Count(p))
		return
	}
	if !v.AtLeast(0, 14, 3) {
		tile := int64(1 << 30) // 2 buffers of 128 Mi elements
		z.onHost(tile, PinnedTiles, false)
		z.because(PinnedTiles, "Adam_Optimizer pins 2 x 128 Mi x 4 B a process (until pull request 5409)")
	}
	pin := z.pin(z.d.OffloadOptimizer)
	always := v.AtLeast(0, 17, 0) && !v.AtLeast(0, 18, 3) // pinned whatever the configuration said: 7309 to 7689
	z.pinnedCopy(z.masterBytes()*p, MasterWeights, pin || always)
	z.because(MasterWeights, "%d B x %s parameters of the rank's part (S12:492-497)", z.masterBytes(), ledger.Count(p))
	if v.AtLeast(0, 17, 0) {
		z.pinnedCopy(width*p, StagingBuffer, pin || always)
		if always && !pin {
			z.host.hold(width*p, "pageable copy of the staging buffer")
			z.because("pageable copy of the staging buffer", "%d B x %s: the pageable buffer stayed beside its pinned copy (pull request 7689 removed it)", width, ledger.Count(p))
		}
		z.because(StagingBuffer, "%d B x %s: updated parameters in the model's type on their way to the GPU (S12:499-507, pull request 7309)", width, ledger.Count(p))
	}
	z.onHost(width*z.largest, UnusedGradientBuffer, pin)
	z.because(UnusedGradientBuffer, "%d B x %s, never read (S12:585-590)", width, ledger.Count(z.largest))
	allocate(z.gpu, width*z.largest, UnusedGradientBuffer)
	z.pinnedCopy(z.masterBytes()*p, HostGradients, pin)
	z.because(HostGradients, "%d B x %s (initialize_optimizer_states, S12:840-844)", z.masterBytes(), ledger.Count(p))
	z.because(PinnedRounding, "PyTorch rounds every pinned block up to a power of two (pytorch issue 95823)")
	z.zenflow(p)
}

// pinnedCopy is memory that is made pageable, and copied when it is pinned.
func (z *zero) pinnedCopy(bytes int64, component string, pinned bool) {
	if pinned {
		z.host.during(ledger.Bytes(bytes), component, func() { z.onHost(bytes, component, true) })
		return
	}
	z.onHost(bytes, component, false)
}

// zenflow is what ZenFlow's worker shares with the trainer when steps overlap
// (runtime/zenflow/zenflow_stage_1_and_2.py, zenflow_utils.py).
func (z *zero) zenflow(p int64) {
	f := z.d.ZenFlow
	if f == nil {
		return
	}
	selected := int64(f.TopKRatio * float64(z.trainedElements()))
	device := z.gpu
	if f.Offload {
		device = z.host
	}
	device.hold(4*z.Weights.Size()*selected/2, "ZenFlow's selected columns")
	z.because("ZenFlow's selected columns", "moments of %.0f %% of the columns in the parameters' type, the same on every rank", 100*f.TopKRatio)
	if f.OverlapStep {
		z.host.hold(12*p, SharedMemory)
		z.because(SharedMemory, "12 B x %s beside the master weights, which move there: two buffers of fp32 gradients of which one replaces the pinned one, and stale parameters (zenflow_utils.py:126)", ledger.Count(p))
	}
}

// unsharded is stage 0: BF16_Optimizer shards the master weights and adds
// gradients up in fp32; FP16_Optimizer has the master weights whole.
func (z *zero12) unsharded() {
	switch z.Weights {
	case dtype.BF16:
		allocate(z.gpu, 4*z.partition(), MasterWeights)
		z.full = z.gpu.hold(4*z.trainedElements(), HostGradients)
		z.because(MasterWeights, "4 B x %s of the rank's part (runtime/bf16_optimizer.py)", ledger.Count(z.partition()))
		z.because(HostGradients, "4 B x %s: BF16_Optimizer adds gradients of the whole model up in fp32 (runtime/bf16_optimizer.py)", ledger.Count(z.trainedElements()))
	case dtype.F16:
		allocate(z.gpu, 4*z.trainedElements(), MasterWeights)
		z.because(MasterWeights, "4 B x %s (runtime/fp16/fused_optimizer.py)", ledger.Count(z.trainedElements()))
	}
}

// gradient goes into a bucket, from which it is reduced. Stage 2 keeps the
// rank's part of it only.
func (z *zero12) gradient(p *autograd.Parameter) {
	width := z.Weights.Size()
	switch {
	case z.d.ZeROStage == 0:
		if z.full != nil {
			p.DropGradient() // added to the fp32 gradients
		}
		return
	case z.buckets == nil:
		size := min(z.d.Sizes.ReduceBucket, z.trainedElements()) * width
		copies := int64(1)
		if z.d.OverlapReduction {
			copies = 2
		}
		z.buckets = z.gpu.hold(copies*size, Buckets)
		z.because(Buckets, "%d x reduce_bucket_size of %s elements x %d B, from the first gradient to the end of the backward pass (S12:2493-2513); overlap_comm takes two", copies, ledger.Count(z.d.Sizes.ReduceBucket), width)
	}
	part := (p.Elements + z.ranks - 1) / z.ranks
	z.because(ReduceTemporaries, "overflow check, norm and fp32 copy of one gradient: 11 B an element and 4 B of the rank's part (S12:1600, 1663, 2486)")
	if z.offloads() {
		z.gpu.during(ledger.Bytes(11*p.Elements+4*part), ReduceTemporaries, func() {})
	}
	if z.d.ZeROStage == 2 {
		p.DropGradient()
		if !z.offloads() && z.partitions == nil {
			z.partitions = z.gpu.hold(width*z.partition(), FlatGradients)
			z.because(FlatGradients, "%d B x %s of the rank's part (S12:1678)", width, ledger.Count(z.partition()))
		}
	}
}

func (z *zero12) endBackward(last bool) {
	drop(&z.buckets)
	if !last && z.offloads() && z.accumulating == nil {
		// One pinned block a parameter.
		var sum, rounding int64
		for _, p := range z.trained {
			bytes := p.Elements * z.Weights.Size()
			sum += bytes
			rounding += int64(z.pins.Rounded(ledger.Bytes(bytes))) - bytes
		}
		z.accumulating = z.host.hold(sum/z.ranks, AccumulatedGradients)
		if z.pin(z.d.OffloadOptimizer) {
			z.host.hold(rounding/z.ranks, PinnedRounding)
		}
		z.because(AccumulatedGradients, "%d B x %s: between micro batches gradients are kept in the parameters' type, whole parameters of the rank's part (S12:1525)", z.Weights.Size(), ledger.Count(z.partition()))
	}
}

func (z *zero12) step() {
	p, width := z.partition(), z.Weights.Size()
	switch {
	case z.d.ZeROStage == 0:
		z.wholeStep()
	case z.offloads():
		if !z.states {
			z.host.hold(z.stateBytes()*p, States)
			z.because(States, "%d B x %s: exp_avg and exp_avg_sq, made in the first step, never pinned (ops/adam/cpu_adam.py:137)", z.stateBytes(), ledger.Count(p))
		}
	default:
		z.because(StepTemporaries, "(%d + 4) B x %s: gradients flattened and cast (S12:2089, 2350)", width, ledger.Count(p))
		z.gpu.during(ledger.Bytes((width+4)*p), StepTemporaries, func() {
			if !z.states {
				allocate(z.gpu, z.stateBytes()*p, States)
				z.because(States, "%d B x %s: exp_avg and exp_avg_sq of the rank's part, made in the first step", z.stateBytes(), ledger.Count(p))
			}
		})
		drop(&z.partitions)
	}
	z.states = true
}

// wholeStep is stage 0's.
func (z *zero12) wholeStep() {
	elements := z.trainedElements()
	if z.Weights == dtype.BF16 {
		elements = z.partition()
	}
	temporaries := int64(0)
	if z.Weights == dtype.F16 {
		temporaries = 4 * elements
	}
	z.because(StepTemporaries, "4 B x %s: gradients cast to fp32 and flattened (runtime/fp16/fused_optimizer.py)", ledger.Count(elements))
	z.gpu.during(ledger.Bytes(temporaries), StepTemporaries, func() {
		if !z.states {
			allocate(z.gpu, z.stateBytes()*elements, States)
			z.because(States, "%d B x %s: states of the optimizer, made in the first step", z.stateBytes(), ledger.Count(elements))
		}
	})
}

func (z *zero12) zeroGradients() {
	for _, p := range z.trained {
		p.DropGradient()
	}
}
