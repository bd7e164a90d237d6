package steptime

import (
	"cmp"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// work is what one rank computes in a forward pass of a micro batch. The backward pass follows from it.
type work struct {
	dense, experts float64 // floating-point operations of products with weights
	head           float64 // those of dense that are outside of all blocks
	attention      float64 // of products of activations
	traffic        float64 // bytes of GPU memory that other operations read and write
	loss           float64 // bytes that the logits move
	read, weights  float64 // bytes of weights that products of dense and of experts read
	dequantized    float64 // bytes that dequantizing all weights reads and writes
	kernels        float64 // that Python starts
	frozen         float64 // share of the products with weights that no gradient needs
	reach          float64 // share of the blocks that the backward pass goes through
}

// sequenceOf returns the length of all micro batches but the first.
func sequenceOf(j *job.Job) int64 { return cmp.Or(j.UsualSequence, j.Sequence) }

// chosenOf returns the share of the experts' weights that a token is multiplied by, by name.
func chosenOf(j *job.Job) map[string]float64 {
	chosen := map[string]float64{}
	for _, b := range j.Model.Network.Blocks() {
		x := b.FeedForward.Mixture
		if x == nil {
			continue
		}
		s := float64(x.Chosen) / float64(max(1, len(x.Experts)))
		if x.Routing == model.SigmoidOfChosen { // all experts compute
			s = 1
		}
		chosen[x.GateUp], chosen[x.Down] = s, s
		for _, e := range x.Experts {
			chosen[e.Gate+".weight"], chosen[e.Up+".weight"], chosen[e.Down+".weight"] = s, s, s
		}
	}
	return chosen
}

// expertPart returns the part of a model's parameters that are weights of experts.
func expertPart(j *job.Job) float64 {
	chosen, experts := chosenOf(j), int64(0)
	for _, p := range j.Model.Parameters {
		if _, expert := chosen[p.Name]; expert {
			experts += p.Elements()
		}
	}
	return float64(experts) / float64(j.Model.Elements())
}

// Active returns the share of every parameter that a token is multiplied by, and the sum over the model: 1 for most
// weights, that of the chosen experts for experts, and 0 for embeddings.
func Active(j *job.Job) (share func(p model.Parameter) float64, sum float64) {
	chosen := chosenOf(j)
	share = func(p model.Parameter) float64 {
		if p.IsEmbedding() && p.TiedTo == "" {
			return 0
		}
		if s, expert := chosen[p.Name]; expert {
			return s
		}
		return 1
	}
	for _, p := range j.Model.Parameters {
		sum += float64(p.Elements()) * share(p)
	}
	return share, sum
}

// The bytes that operations beside products move in a forward pass of 16-bit activations, for each token.
const (
	normBytes     = 36 // of an element of the residual stream, for a norm that computes in fp32, operation by operation
	residualBytes = 6  // two are read, one is written
	rotaryBytes   = 20 // of an element of queries and keys: halves negated, joined, multiplied and added
	gateBytes     = 10 // of an element of the feed-forward part: the activation, and its product
	routedBytes   = 16 // of an element that goes to an expert: gathered, weighted and added
	logitBytes    = 16 // of a logit: written, upcast, and its logarithm of the softmax
	fusedBytes    = 6  // of an element of any of these if a kernel does all of it
	scoreBytes    = 20 // of a score of eager attention: written, masked, upcast, softmax, cast back, read
)

// The kernels that Python starts in a forward pass.
const (
	blockKernels  = 40
	expertKernels = 8 // of each expert, if experts are modules of their own
)

// workOf returns what a rank computes.
func workOf(j *job.Job) work {
	var w work
	network := j.Model.Network
	tokens := float64(j.Sequences()*sequenceOf(j)) / float64(j.Parallel.Context)
	share, _ := Active(j)
	var frozen float64
	lowest := len(network.Blocks())
	each := float64(j.Parallel.Tensor)
	for _, p := range j.Model.Parameters {
		s := share(p)
		trains := j.Adapter == nil && !p.Frozen && j.Unfrozen.Has(p.Name)
		if trains && (p.Block >= 0 || p.IsEmbedding() && p.TiedTo == "") {
			lowest = min(lowest, max(0, p.Block))
		}
		if s == 0 || len(p.Shape) < 2 {
			continue
		}
		if !trains {
			frozen += 2 * float64(p.Elements()) / each * s * tokens
		}
		elements := float64(p.Elements()) / each
		if s < 1 {
			w.experts += 2 * elements * s * tokens
			w.weights += elements * float64(j.ComputeType().Size()) / float64(j.Parallel.Expert)
		} else {
			w.dense += 2 * elements * tokens
			w.read += elements * float64(j.ComputeType().Size())
			if p.Block < 0 {
				w.head += 2 * elements * tokens
			}
		}
		if j.AutocastType != dtype.Invalid { // which casts weights in each pass
			w.traffic += elements * float64(j.ParameterType.Size()+j.AutocastType.Size())
		}
		if q := j.Quantization; q != nil && p.Block >= 0 {
			w.dequantized += elements * (float64(q.Bits)/8 + 2)
		}
	}
	w.frozen, w.reach = frozen/max(1, w.dense+w.experts), 1
	if n := len(network.Blocks()); n > 0 && j.Adapter == nil && !j.UnfreezesEmbeddings() && j.Stage == nil {
		w.reach = float64(n-lowest) / float64(n)
	}
	fused := j.Compile || j.Liger
	for _, s := range network.Stacks {
		for i := range s.Blocks {
			w.addBlock(j, s, &s.Blocks[i], tokens, fused)
		}
	}
	logits := float64(logitBytes)
	switch j.Loss {
	case forward.FusedLoss, forward.ChunkedLoss, forward.CompiledLoss, forward.TiledLoss, forward.RecomputedLoss:
		logits = fusedBytes
	}
	w.loss = tokens * float64(network.Head.Outputs) * logits / each
	return w
}

// addBlock adds attention and the operations between products.
func (w *work) addBlock(j *job.Job, s *model.Stack, b *model.Block, tokens float64, fused bool) {
	norm, residual, rotary, gate, routed := float64(normBytes), float64(residualBytes), float64(rotaryBytes),
		float64(gateBytes), float64(routedBytes)
	if fused {
		norm, rotary, gate = fusedBytes, fusedBytes, fusedBytes
	}
	wide := float64(j.ComputeType().Size()) / 2 // as the constants are for 16 bits
	hidden := float64(j.Model.Network.Hidden)
	w.traffic += tokens * hidden * 2 * (norm + residual) * wide
	w.kernels += blockKernels
	for _, a := range []*model.Attention{&b.Attention, b.Cross} {
		if a != nil {
			w.addAttention(j, s, a, tokens)
			w.traffic += tokens * float64((a.Heads+a.KeyValueHeads)*a.Width) * rotary * wide /
				float64(j.Parallel.Tensor)
		}
	}
	f := &b.FeedForward
	inner := float64(f.Inner)
	if x := f.Mixture; x != nil {
		inner = 0
		if len(x.Experts) > 0 {
			inner = float64(x.Chosen * x.Experts[0].Inner)
		}
		if x.Shared != nil {
			inner += float64(x.Shared.Inner)
		}
		w.traffic += tokens * float64(x.Chosen) * hidden * routed * wide
		if !x.Fused() {
			w.kernels += expertKernels * float64(len(x.Experts))
		}
	}
	w.traffic += tokens * inner * gate * wide / float64(j.Parallel.Tensor)
}

// addAttention adds the products of queries with keys, and of their scores with values. Kernels of causal attention
// leave out the half that is masked.
func (w *work) addAttention(j *job.Job, s *model.Stack, a *model.Attention, tokens float64) {
	if a.Delta != nil { // linear in the sequence: its state is small beside the projections
		return
	}
	keys := float64(sequenceOf(j))
	half := s.Causal && j.Attention != forward.Eager
	switch {
	case a.Window > 0 && float64(a.Window) < keys:
		keys = float64(a.Window)
	case half:
		keys /= 2
	}
	width := a.Width
	values := a.ValueWidth
	if values == 0 {
		values = width
	}
	heads := float64(a.Heads) / float64(j.Parallel.Tensor)
	w.attention += 2 * tokens * keys * heads * float64(width+values)
	if j.Attention == forward.Eager {
		w.traffic += tokens * float64(sequenceOf(j)) * heads * scoreBytes
	}
}
