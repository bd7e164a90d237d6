package steptime

import (
	"cmp"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/plan/roads"
)

// predictor computes a step of ranks at one end of the interval, in seconds. With pipeline stages they run one chunk.
type predictor struct {
	job       *job.Job
	rates     rates
	trained   float64
	offloaded []roads.Parameter

	forward, backward float64 // of a micro batch
	added             float64 // what a backward pass takes to add its gradients to those before
	waits             waits
	optimizer         float64
}

// waits are what passes do not hide of the communication: of every micro batch, and at the end of the last one.
type waits struct{ forward, backward, last float64 }

func (p *predictor) predict(w work) {
	p.passes(w)
	p.communicate()
	p.update()
}

// total returns the parts of a step without pipeline stages.
func (p *predictor) total() parts {
	micros := float64(p.job.Accumulation)
	return parts{forward: p.forward * micros, backward: p.backward*micros + p.added*(micros-1),
		communication: (p.waits.forward+p.waits.backward)*micros + p.waits.last, optimizer: p.optimizer}
}

// recomputation is the share of the blocks that the backward pass runs forward again. A selective one keeps the results
// of products.
type recomputation struct {
	share     float64
	selective bool
}

// times returns the times of a forward and a backward pass. A backward pass has twice the products of a forward pass:
// for gradients of inputs and of weights. Fused attention computes its scores once more.
func (r *rates) times(w *work, again recomputation, compiled bool) (forward, backward float64) {
	head, loss := w.head/r.head, w.loss/r.Device
	dense := max(head+(w.dense+w.fill-w.head)/r.dense, w.read/r.Device)
	experts := max(w.experts/r.experts, w.weights/r.Device)
	attention := (w.attention + w.begun) / r.attention
	other := (w.traffic+w.loss+w.dequantized)/r.Device + 2*w.adapter/r.head // thin matrices reach half
	if r.given {
		dense, experts, attention, other = w.dense/r.FLOPS, w.experts/r.FLOPS, w.attention/r.FLOPS, 0
		head, loss = w.head/r.FLOPS, 0
	}
	start := w.kernels * r.kernel
	if compiled {
		start /= 4 // fused kernels
	}
	start += w.hooks * r.kernel
	busy := dense + experts + attention + other
	trained := 1 - w.frozen // inputs have gradients as far as the pass goes, and weights that are trained
	through := head + w.reach*max(0, dense-head+experts)
	back := through + trained*(dense+experts) + w.reach*(2.5*attention+2*(other-loss)) + 2*loss
	repeated := max(0, busy-head-loss) // blocks only
	if again.selective {
		repeated = max(0, other-loss)
	}
	return max(busy, start), max(back+w.reach*repeated*again.share, w.reach*start*(1+again.share))
}

// passes sets the times of the passes of a micro batch.
func (p *predictor) passes(w work) {
	j := p.job
	var again recomputation
	if c := j.Recompute; c != nil {
		again = recomputation{share: 1 / float64(max(1, j.RecomputeEvery)), selective: c.Selective > 0}
	}
	p.forward, p.backward = p.rates.times(&w, again, j.Compile)
	if j.Reference != nil || j.Answers != nil && j.Answers.BaseIsReference { // a frozen model of the same size, mostly
		p.forward += p.forward * p.reference()
	}
	if j.Answers != nil && j.Answers.Mismatched != job.Never { // without gradients, on answers to other prompts
		p.forward *= 2
	}
	critics := 1 + p.critics()
	p.forward, p.backward = critics*p.forward, critics*p.backward
	p.offloadActivations()
	gradients := p.trained / float64(j.Parallel.Tensor) * float64(j.ParameterType.Size())
	if j.DeepSpeed != nil && j.DeepSpeed.ZeROStage > 1 || j.FSDP != nil && j.SyncEachBatch {
		gradients /= float64(p.holders())
	}
	p.added = 3 * gradients / p.rates.Device
}

// critics returns the work of critics in a step over that of the policy: parameters times tokens.
func (p *predictor) critics() (share float64) {
	work := func(j *job.Job) float64 {
		return float64(j.Model.Elements()) * float64(j.Sequences()*j.Sequence) * float64(max(1, j.Accumulation))
	}
	for i := range p.job.Companions {
		if c := &p.job.Companions[i]; c.Trains() {
			share += work(c.Job) / work(p.job)
		}
	}
	return share
}

// offloadActivations adds what the passes wait for activations on their way to the host and back. With streams of their
// own the copies go while the pass computes.
func (p *predictor) offloadActivations() {
	o := p.job.OffloadActivations
	if o == nil {
		return
	}
	bytes, link := activationsOf(p.job), p.rates.Link
	if o.Streams {
		p.forward, p.backward = max(p.forward, bytes/link.Out), max(p.backward, bytes/link.In)
		return
	}
	p.forward, p.backward = p.forward+bytes/link.Out, p.backward+bytes/link.In
}

// reference returns the size of the frozen model over that of the trained one.
func (p *predictor) reference() float64 {
	if p.job.Reference == nil {
		return 1
	}
	return float64(p.job.Reference.Elements()) / float64(max(1, p.job.Model.Elements()))
}

// group returns the bytes a second that pass each rank of a ring, of whose ranks so many are in each node. A node has
// as many rings as ranks, and each leaves it by the port of another rank.
func (r *rates) group(ranks, inNode int64) float64 {
	network := r.network * float64(inNode)
	switch {
	case ranks <= inNode:
		return r.peer
	case r.peer == 0:
		return network
	}
	return min(r.peer, network)
}

// gather returns the time of an all-gather in a ring, or of a reduce-scatter: each rank sends all parts but its own. An
// all-reduce is both. The operation comes in pieces, each with its latency.
func (p *predictor) gather(bytes float64, ranks int64, pieces float64) float64 {
	return p.rates.ring(bytes, ranks, max(1, int64(p.job.RanksPerNode)/p.job.Parallel.Tensor), pieces)
}

// gatherModel returns the time in which FSDP gathers so many bytes of all parameters, or reduces as many of their
// gradients. Under expert parallelism a rank gathers its own experts alone, among the ranks that have the same ones.
func (p *predictor) gatherModel(bytes, pieces float64) float64 {
	parallel := p.job.Parallel
	if parallel.Expert == 1 {
		return p.gather(bytes, parallel.Shard, pieces)
	}
	experts := bytes * expertPart(p.job)
	inNode := max(1, int64(p.job.RanksPerNode)/(parallel.Tensor*parallel.Expert))
	return p.gather(bytes-experts, parallel.Shard, pieces) +
		p.rates.ring(experts/float64(parallel.Expert), parallel.Shard/parallel.Expert, inNode, pieces)
}

// ring is gather for a ring with so many of its ranks in a node.
func (r *rates) ring(bytes float64, ranks, inNode int64, pieces float64) float64 {
	if ranks <= 1 {
		return 0
	}
	n := float64(ranks)
	return bytes*(n-1)/n/r.group(ranks, inNode) + pieces*collectiveTime
}

// all returns the time of an all-to-all exchange: each rank sends to others of its node by their links, and to those of
// other nodes by a port of its own. Once is the part of what goes to other nodes that is sent.
func (r *rates) all(bytes float64, ranks, inNode int64, pieces, once float64) float64 {
	if ranks <= 1 {
		return 0
	}
	n, near := float64(ranks), float64(min(ranks, inNode))
	t := pieces * collectiveTime
	if r.peer > 0 && near > 1 {
		t += bytes * (near - 1) / n / r.peer
	}
	if n > near {
		t += bytes * (n - near) / n * once / r.network
	}
	return t
}

// hidden returns what a pass does not hide of a communication that comes in pieces: one piece, and what takes longer
// than the pass.
func hidden(communication, pass, pieces float64) float64 {
	return min(communication, communication/max(1, pieces)+max(0, communication-pass))
}

// communicate sets what passes do not hide of the communication between ranks.
func (p *predictor) communicate() {
	j := p.job
	blocks := float64(len(j.Model.Network.Blocks()) + 1)
	tensor := float64(j.Parallel.Tensor)
	model := float64(j.Model.Elements()) / tensor * float64(j.ComputeType().Size())
	trained := p.trained / tensor
	shard, world := j.Parallel.Shard, int64(j.World)/(j.Parallel.Tensor*j.Stages())
	gradient := float64(gradientType(j).Size())
	forward, backward := p.forward, p.backward
	switch d := j.DeepSpeed; {
	case j.FSDP != nil:
		once := p.gatherModel(model, blocks)
		reduce := p.gatherModel(trained*gradient, blocks)
		if replicas := int64(j.Replicas()); replicas > 1 {
			inNode := max(1, int64(j.RanksPerNode)/(j.Parallel.Tensor*shard))
			reduce += 2 * p.rates.ring(trained*gradient/float64(shard), replicas, inNode, blocks)
		}
		if j.FSDP.OffloadParameters {
			once += model / float64(shard) / p.rates.Link.In
		}
		again := once
		if gathersOnce(j.FSDP) {
			again = 0
		}
		p.waits = waits{forward: hidden(once, forward, blocks), backward: hidden(again+reduce, backward, blocks)}
		if !j.SyncEachBatch {
			last := p.waits.backward
			p.waits.backward = hidden(again, backward, blocks)
			p.waits.last = last - p.waits.backward
		}
		if j.Pipeline != nil && gathersOnce(j.FSDP) { // stages keep what is gathered until the last micro batch
			p.waits.forward, p.waits.last = 0, p.waits.last+p.waits.forward
		}
	case d != nil && d.ZeROStage == 3:
		once := p.gather(model, world, blocks)
		if d.OffloadParameters.Device == "cpu" {
			once += model / float64(world) / p.rates.Link.In
		}
		p.waits = waits{forward: hidden(once, forward, blocks),
			backward: p.reduced(once+p.gather(trained*gradient, world, blocks), backward, d)}
	case d != nil && d.ZeROStage > 0:
		buckets := trained / float64(max(1, d.Sizes.ReduceBucket))
		p.waits.last = p.gather(trained*float64(j.ComputeType().Size()), world, blocks)
		reduce := p.reduced(p.gather(trained*gradient, world, 1+buckets), backward, d)
		if d.ZeROStage == 2 {
			p.waits.backward = reduce
		} else {
			p.waits.last += reduce
		}
	case world > 1: // buckets of 25 MB
		p.waits.last = hidden(2*p.gather(trained*gradient, world, blocks), backward, blocks)
	}
	inForward, inBackward := p.within()
	p.waits.forward, p.waits.backward = p.waits.forward+inForward, p.waits.backward+inBackward
}

// reduced returns what the backward pass does not hide of a reduction by DeepSpeed.
func (p *predictor) reduced(communication, pass float64, d *deepspeed.Config) float64 {
	if !d.OverlapReduction {
		return communication
	}
	return hidden(communication, pass, float64(len(p.job.Model.Network.Blocks())+1))
}

// within returns the communication of a micro batch between ranks that share the model or a sequence, which its passes
// wait for. Ranks that share the width of a block make two all-reduces of the residual stream in each pass. Those that
// share a sequence pass keys and values around, and backward their gradients, too; or they exchange heads for tokens
// around attention. Recomputed blocks communicate once more.
func (p *predictor) within() (forward, backward float64) {
	j := p.job
	width := float64(j.ComputeType().Size())
	residual := float64(j.Model.Network.Hidden) * width
	tokens := float64(j.Sequences()*sequenceOf(j)) / float64(j.Parallel.Context)
	again := 0.0
	if j.Recompute != nil && j.Recompute.Selective == 0 {
		again = 1 / float64(max(1, j.RecomputeEvery))
	}
	add := func(once, back float64) {
		forward, backward = forward+once, backward+back+again*once
	}
	inNode := max(1, int64(j.RanksPerNode)/j.Parallel.Tensor)
	for _, b := range j.Model.Network.Blocks() {
		reduces := 2 * 2 * p.rates.ring(tokens*residual, j.Parallel.Tensor, int64(j.RanksPerNode), 1)
		add(reduces, reduces)
		if n := j.Parallel.Context; n > 1 {
			a := &b.Attention
			each := tokens * width / float64(j.Parallel.Tensor)
			keys := each * float64(a.KeyValueHeads*(a.Width+cmp.Or(a.ValueWidth, a.Width)))
			if j.Parallel.Ulysses || j.Parallel.DeepSpeedUlysses {
				once := p.rates.ring(2*each*float64(a.Heads*a.Width)+keys, n, inNode, 4)
				add(once, once)
			} else {
				once := p.rates.ring(keys*float64(n), n, inNode, float64(n-1))
				add(once, 2*once)
			}
		}
		if x := b.FeedForward.Mixture; x != nil && j.Parallel.Expert > 1 { // to the experts and back
			once := 2 * p.rates.all(tokens*residual*float64(x.Chosen), j.Parallel.Expert, inNode, 1, 1)
			add(once, once)
		}
	}
	return forward, backward
}

// gathersOnce reports whether FSDP keeps parameters between the passes.
func gathersOnce(f *recipe.FSDP) bool {
	return f.Strategy == "shard_grad_op" || f.Strategy == "hybrid_shard_zero2"
}

// gradientType returns the type that gradients are reduced in.
func gradientType(j *job.Job) dtype.Type {
	switch {
	case j.FSDP != nil && j.ReduceType != dtype.Invalid:
		return j.ReduceType
	case j.Adapter != nil:
		return j.AdapterType
	}
	return j.ParameterType
}

// The bytes of host memory that an update by the CPU moves, for each parameter.
const (
	adamBytes = 28 // fp32 parameter, gradient and two moments: read, and written but for the gradient
	// deepSpeedBytes is what DeepSpeed's CPUAdam moves with the operations around it: gradients are scaled (8), their
	// norm is computed (4), and the 16-bit copy is made (6).
	deepSpeedBytes = adamBytes + 8 + 4 + 6
	// foreachPasses is how many times the traffic of a fused update a list of operations moves, and foreachOnHost on a
	// CPU, where each also takes its temporaries from the system.
	foreachPasses, foreachOnHost = 2.8, 7
)

// update sets what the trainer waits for the optimizer. The norm of the gradients reads them once.
func (p *predictor) update() {
	j, r := p.job, p.rates
	each := p.trained / float64(j.Parallel.Tensor) / float64(p.holders())
	rank := roads.Job{Ranks: j.RanksPerNode, Forward: seconds(p.forward), Backward: seconds(p.backward)}
	variant := 1.0
	if j.Optimizer.Variant != job.Fused && (j.DeepSpeed == nil) {
		variant = foreachPasses
	}
	d := j.DeepSpeed
	switch {
	case j.Offload != nil && j.Offload.Format != nil:
		p.optimizer = p.onHost(each, float64(j.Offload.Format.TrafficBytes(1)), overlap.None, rank)
		if j.Offload.Tier != nil {
			p.optimizer = max(p.optimizer, p.onDisks(int64(each), rank))
		}
	case j.Offload != nil:
		step := roads.NewLayout(p.offloaded, j.Offload.Settings).Step(r.Rates, rank)
		p.optimizer = step.Exposed.Seconds()
	case d != nil && d.OffloadOptimizer.Device == "cpu":
		mode := overlap.None
		if d.OffloadOptimizer.SuperOffload {
			mode = overlap.Backward
		}
		p.optimizer = p.onHost(each, deepSpeedBytes, mode, rank)
		// Gradients of further micro batches are added up on the GPU and go back to the host.
		moved := each * float64(j.ComputeType().Size()) * (1/r.Link.In + 1/r.Link.Out)
		blocks := float64(len(j.Model.Network.Blocks()) + 1)
		p.waits.last += float64(j.Accumulation-1) * hidden(moved, p.backward, blocks)
	case j.FSDP != nil && j.FSDP.OffloadParameters:
		bytes := float64(adamBytes)
		if j.Optimizer.Variant != job.Fused {
			bytes *= foreachOnHost
		}
		p.optimizer = p.onHost(each, bytes, overlap.None, rank)
	default:
		bytes := p.residentBytes() * variant
		if j.Clip > 0 {
			bytes += float64(gradientType(j).Size())
		}
		p.optimizer = each * bytes / r.Device
	}
}

// onHost returns what the trainer waits for an update by the CPU, by the law of package roads. Nothing runs behind the
// next forward pass: these engines wait for all parameters.
func (p *predictor) onHost(each, bytes float64, mode overlap.Mode, rank roads.Job) float64 {
	width := float64(p.job.ComputeType().Size())
	c := roads.CPU{Traffic: ledger.Bytes(each * bytes), Gradients: ledger.Bytes(each * width),
		Parameters: ledger.Bytes(each * width), Mode: mode, Layers: Layers(p.job)}
	if mode == overlap.Backward {
		rank.Forward = 0
	}
	return p.rates.CPU(c, rank).Exposed.Seconds()
}

// onDisks returns the time in which the disks of a node read and write what a step of all its ranks does.
func (p *predictor) onDisks(each int64, rank roads.Job) float64 {
	tier, err := p.job.Offload.TierBytes(p.job, each)
	if err != nil { // the plan has refused it
		return 0
	}
	return float64(tier.StepReads+tier.StepWrites) * float64(rank.Ranks) / p.rates.Disk
}

// holders returns the number of ranks that hold the states of a parameter in parts.
func (p *predictor) holders() int64 {
	j := p.job
	switch {
	case j.FSDP != nil:
		return j.Parallel.Shard
	case j.DeepSpeed != nil && j.DeepSpeed.ZeROStage > 0:
		return max(1, int64(j.World)/(j.Parallel.Tensor*j.Stages()))
	}
	return 1
}

// residentBytes returns what an update on the GPU moves for each parameter: states twice, parameters twice, gradients
// once, and DeepSpeed's master weights beside them.
func (p *predictor) residentBytes() float64 {
	j := p.job
	stored := j.ParameterType
	if j.Adapter != nil {
		stored = j.AdapterType
	}
	const elements = 1 << 20
	var states int64
	for _, s := range j.Optimizer.States(sample(elements, stored)) {
		states += s.Bytes
	}
	if j.DeepSpeed != nil && stored.Size() == 2 { // states and gradients in fp32, and a copy in 16 bits
		states *= 2
		return 2*float64(states)/elements + 8 + 4 + 2
	}
	return 2*float64(states)/elements + 3*float64(stored.Size())
}

// hiddenFrom returns from how many tokens on a forward pass hides an update by the optimizer service.
func hiddenFrom(j *job.Job, m Machine, forward time.Duration) float64 {
	_, active := Active(j)
	if m.Host == 0 || active == 0 || forward <= 0 || j.Adapter != nil {
		return 0
	}
	const hostBytes = 30 // docs/overlap.md: split master weights and fp32 moments
	tokens := float64(j.Sequences()*sequenceOf(j)*int64(j.Accumulation)) / float64(j.Parallel.Context)
	achieved := 2 * active / float64(j.Parallel.Tensor) * tokens / forward.Seconds()
	return overlap.Rates{HostBytes: hostBytes, Bandwidth: m.Host, FLOPS: achieved, Parameters: j.Model.Elements(),
		Active: int64(active), Hosts: j.Nodes}.HiddenFrom(overlap.Forward)
}

func seconds(s float64) time.Duration { return time.Duration(min(s, 1e9) * float64(time.Second)) }
