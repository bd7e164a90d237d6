package steptime

import (
	"time"

	"plimsoll/dtype"
	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/overlap"
	"plimsoll/recipe"
	"plimsoll/roads"
)

// predictor computes a step at one end of the interval, in seconds.
type predictor struct {
	job       *job.Job
	rates     rates
	trained   float64
	offloaded []roads.Parameter

	forward, backward, exposed, optimizer float64
	lastForward, lastBackward             float64 // of one micro batch
}

func (p *predictor) predict(w work) {
	p.passes(w)
	p.communicate(w)
	p.update()
}

// passes sets the times of forward and backward passes. A backward pass has twice the products of a forward pass: for
// gradients of inputs and of weights. Fused attention computes its scores once more. Recomputed blocks are run forward
// again; a selective recomputation keeps the results of products.
func (p *predictor) passes(w work) {
	j, r := p.job, p.rates
	dense, experts := max(w.dense/r.dense, w.read/r.Device), max(w.experts/r.experts, w.weights/r.Device)
	attention, other := w.attention/r.attention, (w.traffic+w.loss+w.dequantized)/r.Device
	head, loss := w.head/r.dense, w.loss/r.Device
	if r.given {
		dense, experts, attention, other = w.dense/r.FLOPS, w.experts/r.FLOPS, w.attention/r.FLOPS, 0
		head, loss = w.head/r.FLOPS, 0
	}
	start := w.kernels * kernelTime
	if j.Compile {
		start /= 4 // fused kernels
	}
	one := max(dense+experts+attention+other, start)
	trained := 1 - w.frozen // inputs have gradients as far as the pass goes, and weights that are trained
	through := head + w.reach*max(0, dense-head+experts)
	back := max(through+trained*(dense+experts)+w.reach*(2.5*attention+2*(other-loss))+2*loss, w.reach*2*start)
	if c := j.Recompute; c != nil {
		again := max(0, one-head-loss) // blocks only
		if c.Selective > 0 {
			again = max(0, other-loss)
		}
		back += w.reach * again / float64(max(1, j.RecomputeEvery))
	}
	if j.Reference != nil || j.Answers != nil && j.Answers.BaseIsReference { // a frozen model of the same size, mostly
		one += one * p.reference()
	}
	p.lastForward, p.lastBackward = one, back
	p.forward, p.backward = one*float64(j.Accumulation), back*float64(j.Accumulation)
	// Each further micro batch adds its gradients to those that are there.
	added := p.trained / float64(j.Parallel.Tensor) * float64(j.ParameterType.Size())
	if j.DeepSpeed != nil && j.DeepSpeed.ZeROStage > 1 || j.FSDP != nil && j.SyncEachBatch {
		added /= float64(p.holders())
	}
	p.backward += float64(j.Accumulation-1) * 3 * added / r.Device
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
func (p *predictor) group(ranks, inNode int64) float64 {
	network := p.rates.network * float64(inNode)
	switch {
	case ranks <= inNode:
		return p.rates.peer
	case p.rates.peer == 0:
		return network
	}
	return min(p.rates.peer, network)
}

// gather returns the time of an all-gather in a ring, or of a reduce-scatter: each rank sends all parts but its own. An
// all-reduce is both. The operation comes in pieces, each with its latency.
func (p *predictor) gather(bytes float64, ranks int64, pieces float64) float64 {
	return p.ring(bytes, ranks, max(1, int64(p.job.RanksPerNode)/p.job.Parallel.Tensor), pieces)
}

// ring is gather for a ring with so many of its ranks in a node.
func (p *predictor) ring(bytes float64, ranks, inNode int64, pieces float64) float64 {
	if ranks <= 1 {
		return 0
	}
	n := float64(ranks)
	return bytes*(n-1)/n/p.group(ranks, inNode) + pieces*collectiveTime
}

// hidden returns what a pass does not hide of a communication that comes in pieces: one piece, and what takes longer
// than the pass.
func hidden(communication, pass, pieces float64) float64 {
	return min(communication, communication/max(1, pieces)+max(0, communication-pass))
}

// communicate sets what passes do not hide of the communication between ranks, for all micro batches.
func (p *predictor) communicate(w work) {
	j := p.job
	blocks := float64(len(j.Model.Network.Blocks()) + 1)
	micros := float64(j.Accumulation)
	tensor := float64(j.Parallel.Tensor)
	model := float64(j.Model.Elements()) / tensor * float64(j.ComputeType().Size())
	trained := p.trained / tensor
	shard, world := j.Parallel.Shard, int64(j.World)/j.Parallel.Tensor
	gradient := float64(gradientType(j).Size())
	forward, backward := p.lastForward, p.lastBackward
	switch d := j.DeepSpeed; {
	case j.FSDP != nil:
		once := p.gather(model, shard, blocks)
		reduce := p.gather(trained*gradient, shard, blocks)
		if replicas := int64(j.Replicas()); replicas > 1 {
			inNode := max(1, int64(j.RanksPerNode)/(j.Parallel.Tensor*shard))
			reduce += 2 * p.ring(trained*gradient/float64(shard), replicas, inNode, blocks)
		}
		if j.FSDP.OffloadParameters {
			once += model / float64(shard) / p.rates.Link.In
		}
		again := once
		if gathersOnce(j.FSDP) {
			again = 0
		}
		last := hidden(again+reduce, backward, blocks)
		if !j.SyncEachBatch {
			p.exposed = hidden(once, forward, blocks)*micros + hidden(again, backward, blocks)*(micros-1) + last
		} else {
			p.exposed = (hidden(once, forward, blocks) + last) * micros
		}
	case d != nil && d.ZeROStage == 3:
		once := p.gather(model, world, blocks)
		if d.OffloadParameters.Device == "cpu" {
			once += model / float64(world) / p.rates.Link.In
		}
		p.exposed = micros * (hidden(once, forward, blocks) +
			p.reduced(once+p.gather(trained*gradient, world, blocks), backward, d))
	case d != nil && d.ZeROStage > 0:
		reduces := 1.0
		if d.ZeROStage == 2 {
			reduces = micros
		}
		buckets := trained / float64(max(1, d.Sizes.ReduceBucket))
		p.exposed = reduces*p.reduced(p.gather(trained*gradient, world, 1+buckets), backward, d) +
			p.gather(trained*float64(j.ComputeType().Size()), world, blocks)
	case world > 1: // buckets of 25 MB
		all := 2 * p.gather(trained*gradient, world, blocks)
		p.exposed = hidden(all, backward, blocks)
	}
	p.exposed += micros * p.within()
}

// reduced returns what the backward pass does not hide of a reduction by DeepSpeed.
func (p *predictor) reduced(communication, pass float64, d *recipe.DeepSpeed) float64 {
	if !d.OverlapReduction {
		return communication
	}
	return hidden(communication, pass, float64(len(p.job.Model.Network.Blocks())+1))
}

// within returns the communication of a micro batch between ranks that share the model or a sequence, which its passes
// wait for: two all-reduces of a block forward, and as many backward.
func (p *predictor) within() (sum float64) {
	j := p.job
	blocks := float64(len(j.Model.Network.Blocks()))
	hidden := float64(j.Model.Network.Hidden * j.ComputeType().Size())
	tokens := float64(j.Sequences()*sequenceOf(j)) / float64(j.Parallel.Context)
	passes := 2.0
	if j.Recompute != nil && j.Recompute.Selective == 0 {
		passes = 3
	}
	node := int64(j.RanksPerNode)
	sum = passes * blocks * 2 * 2 * p.ring(tokens*hidden, j.Parallel.Tensor, node, 1)
	if n := j.Parallel.Context; n > 1 { // keys and values
		sum += passes * blocks * p.ring(2*tokens*float64(n)*hidden, n, node, 1)
	}
	if n := j.Parallel.Expert; n > 1 {
		for _, b := range j.Model.Network.Blocks() {
			if x := b.FeedForward.Mixture; x != nil { // to the experts and back
				sum += passes * 2 * p.ring(tokens*hidden*float64(x.Chosen), n, node, 1)
			}
		}
	}
	return sum
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
	rank := roads.Job{Ranks: j.RanksPerNode, Forward: seconds(p.lastForward), Backward: seconds(p.lastBackward)}
	variant := 1.0
	if j.Optimizer.Variant != job.Fused && (j.DeepSpeed == nil) {
		variant = foreachPasses
	}
	d := j.DeepSpeed
	switch {
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
		p.exposed += float64(j.Accumulation-1) * hidden(moved, p.lastBackward, blocks)
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

// holders returns the number of ranks that hold the states of a parameter in parts.
func (p *predictor) holders() int64 {
	j := p.job
	switch {
	case j.FSDP != nil:
		return j.Parallel.Shard
	case j.DeepSpeed != nil && j.DeepSpeed.ZeROStage > 0:
		return max(1, int64(j.World)/j.Parallel.Tensor)
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
