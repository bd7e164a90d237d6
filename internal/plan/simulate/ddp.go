package simulate

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// ddp is a training loop without an engine: nothing is sharded. With several
// ranks DistributedDataParallel reduces the gradients.
type ddp struct {
	*simulation
	buckets []hold
	ready   []*autograd.Parameter // in the order in which the first backward pass that reduces completed gradients
	reduced bool
	rebuilt bool
}

// BeforeForward makes the buckets once more, in the order in which the first backward pass has completed gradients
// (_rebuild_buckets). A Reducer that looks for parameters without a gradient leaves them.
func (e *ddp) BeforeForward(string) {
	if !e.reduced || e.rebuilt || len(e.buckets) == 0 || e.FindsUnused {
		return
	}
	e.rebuilt = true
	for i := range e.buckets {
		e.buckets[i].free()
	}
	e.makeBuckets(e.ready, firstBucket, e.bucketCap())
}

func (e *ddp) AfterForward(string)   {}
func (e *ddp) BeforeBackward(string) {}
func (e *ddp) AfterBackward(string)  {}

// load makes the model on the host, in the type of training, and moves it to the
// GPU.
func (e *ddp) load() {
	if !e.OnCPU {
		e.stage()
	}
	why := because("%s parameters in %v%s", ledger.Count(e.Model.Elements()), e.ParameterType, e.whyDecompressed())
	for _, p := range e.parameters {
		allocate(e.gpu, p.Bytes(), e.weights(), why)
	}
}

// stage holds the model on the host until it has gone to the GPU. Weights that stay in their mapped files are there
// once for all ranks of a node.
func (s *simulation) stage() {
	if !s.MapsWeights() {
		s.host.briefly(s.storedBytes(), ledger.LoadStaging, whyStaged)
		return
	}
	s.host.maps(s.perNode(s.storedBytes()), because("%s%s parameters in %v", whyMapped,
		ledger.Count(elementsOf(s.parameters)), s.ParameterType))
}

// whyStaged is the reason for the copy of a model on the host while it is loaded.
func whyStaged() string {
	return "from_pretrained makes the model on the host, and it goes to the GPU from there; every rank does so"
}

func (e *ddp) initialize() {
	e.holdStates(e.trained)
	if e.World > int(e.Stages()) {
		e.broadcast()
		switch {
		case e.FindsUnused:
			e.makeBuckets(e.trained, firstBucket, e.bucketCap())
		default: // until the order of gradients is known
			e.makeBuckets(e.trained, math.MaxInt64)
		}
	}
}

// firstBucket is the size from which on DDP closes its first bucket (_DEFAULT_FIRST_BUCKET_BYTES).
const firstBucket = 1 << 20

// bucketCap is the size from which on DDP closes further buckets.
func (e *ddp) bucketCap() int64 { return int64(cmp.Or(e.DDPBucketMiB, 25)) << 20 }

// broadcastBucket is the size from which on DDP broadcasts a part of the model that it has put together.
const broadcastBucket = 250 << 20

// broadcast sends the model to all ranks. Two of the copies are under way at a time (_broadcast_coalesced in
// torch/csrc/distributed/c10d/comm.cpp).
func (e *ddp) broadcast() {
	why := because("DistributedDataParallel broadcasts the model from rank 0, in two copies of 250 MiB at a time " +
		"(_sync_module_states in torch/distributed/utils.py)")
	var before hold
	for _, bytes := range bucketSizes(e.parameters, []int64{broadcastBucket}) {
		copied := e.gpu.hold(bytes, ledger.BucketCopies, why)
		before.free()
		before = copied
	}
	before.free()
}

// makeBuckets allocates the buckets of parameters.
func (e *ddp) makeBuckets(parameters []*autograd.Parameter, limits ...int64) {
	why := because("DistributedDataParallel adds gradients up in buckets as large as all gradients " +
		"(gradient_as_bucket_view=False)")
	sizes := bucketSizes(parameters, limits)
	if !e.rebuilt {
		slices.Reverse(sizes) // gradients come in about the reverse order
	}
	e.buckets = e.buckets[:0]
	for _, bytes := range sizes {
		e.buckets = append(e.buckets, e.gpu.hold(bytes, ledger.CommunicationBuckets, why))
	}
}

// bucketSizes puts parameters of a type into a bucket until it has as much as the limit. The last of the limits holds
// for all further buckets (compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp).
func bucketSizes(parameters []*autograd.Parameter, limits []int64) (sizes []int64) {
	type open struct {
		at, closed int // the place of its size, and the buckets of the type that are full
	}
	types := map[dtype.Type]*open{}
	for _, p := range parameters {
		of := types[p.DType]
		if of == nil {
			of = &open{at: -1}
			types[p.DType] = of
		}
		if of.at < 0 {
			of.at, sizes = len(sizes), append(sizes, 0)
		}
		sizes[of.at] += int64(p.Bytes())
		if sizes[of.at] >= limits[min(of.closed, len(limits)-1)] {
			of.at, of.closed = -1, of.closed+1
		}
	}
	return sizes
}

// clones copies what the model returns, as DDP does where it looks for parameters without a gradient, so that the
// backward pass of the copy can tell that it begins (_DDPSink). accelerate has cast it to fp32. It returns the logits
// that the program then holds.
func (e *ddp) clones(logits *autograd.Tensor) hold {
	if logits == nil || !e.FindsUnused || len(e.buckets) == 0 {
		return hold{}
	}
	why := because("logits that DistributedDataParallel copies, in the type that accelerate returns them in (_DDPSink)")
	bytes := logits.Bytes()
	var wide hold
	if e.AutocastType != dtype.Invalid && logits.DType != dtype.F32 {
		bytes = logits.Elements * dtype.F32.Size()
		wide = e.gpu.hold(bytes, ledger.LogitsAndLoss, why)
		e.tape.Drop(logits)
	}
	clone := e.gpu.hold(bytes, ledger.LogitsAndLoss, why)
	wide.free()
	return clone
}

// gradient frees the gradient where the step is a part of the backward pass: with LOMO, or an optimizer for each
// parameter.
func (e *ddp) gradient(p *autograd.Parameter) {
	switch {
	case e.Optimizer.StepsInBackward():
		p.DropGradient()
	case e.StepsInBackward:
		e.stepInBackward(p)
	}
	if !e.reduced && e.micro == e.micros-1 {
		e.ready = append(e.ready, p)
	}
}

func (e *ddp) whyGradients() string {
	return fmt.Sprintf("%s trained parameters, gradients of their type", e.trainedCount())
}

func (e *ddp) endForward() {}

func (e *ddp) endBackward(last bool) { e.reduced = e.reduced || last }

func (e *ddp) step() {
	if e.StepsInBackward {
		e.stepped = true
		return
	}
	e.update(e.gpu, e.trained)
}

func (e *ddp) zeroGradients() {
	for _, p := range e.trained {
		p.DropGradient()
	}
}

func (e *ddp) save() {
	e.writeModel()
	e.writeStates()
}

func (e *ddp) resume() { e.readStates() }
