package steptime

import (
	"cmp"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// The bytes that operations beside products move in a forward pass of 16-bit activations, for each element.
const (
	normBytes     = 36 // of the residual stream, for a norm that computes in fp32, operation by operation
	layerBytes    = 6  // for a norm that is one kernel: read once for the moments and once more, and written
	residualBytes = 6  // two are read, one is written
	rotaryBytes   = 20 // of queries and keys: halves negated, joined, multiplied and added
	gateBytes     = 10 // of the feed-forward part: the activation, and its product
	curveBytes    = 4  // of an activation without a product
	pieceBytes    = 36 // of an activation that is computed operation by operation (gelu_new)
	dropoutBytes  = 5  // read, written, and a byte of its mask
	routedBytes   = 16 // of what goes to an expert: gathered, weighted and added
	logitBytes    = 16 // of a logit: written, upcast, and its logarithm of the softmax
	fusedBytes    = 6  // of any of these if a kernel does all of it
	scoreBytes    = 20 // of a score of eager attention: written, masked, upcast, softmax, cast back, read
	fakeBytes     = 40 // of what is rounded to few bits and back, operation by operation in fp32
	castBytes     = 6  // from fp32 to 16 bits
	scaledBytes   = 8  // of what products read in fp8: read for its maximum, and written by row and by column
)

// The operations that Python starts in a forward pass.
const (
	normKernels      = 6  // of a norm, operation by operation
	rotaryKernels    = 10 // of queries and keys
	attentionKernels = 6  // views made contiguous, and the kernel
	eagerKernels     = 12 // scores, mask, softmax, dropout, casts, values
	pieceKernels     = 8  // of an activation, operation by operation
	loraKernels      = 6  // of an adapted module: a cast, dropout, two products, the scale and the sum
	unpackKernels    = 6  // of a weight that operations of PyTorch unpack
	fakeKernels      = 10 // of what is rounded to few bits and back
	expertKernels    = 8  // of each expert, if experts are modules of their own
	routerKernels    = 14 // of a mixture: scores, choice, sorting, gathering and adding up
	// hookKernels is how long ZeRO-3's hooks around a module take to fetch and release its parameters, as operations: a
	// micro batch of 256 tokens of Qwen-1.8B takes 260 ms with ZeRO-3 on one A100 (QwenLM/Qwen).
	hookKernels = 14
	// usualModules are those of a block: norms, projections, and the modules around them. adapterModules are those
	// that an adapter puts in place of one.
	usualModules, adapterModules = 12, 4
)

// lost is the number of inputs for which a product takes as long as it takes to begin and to end its tiles.
const lost = 128

// lostIn returns what the products of a weight lose, as a part of their operations: they add up over its rows in one
// pass and over its columns in the other.
func lostIn(shape []int64) float64 {
	rows, columns := float64(shape[0]), float64(shape[len(shape)-1])
	return lost * (1/rows + 1/columns) / 2
}

// dequantizedBytes returns what dequantizing a weight moves for an element: bitsandbytes has one kernel for it. Weights
// of GPTQ and others are unpacked by operations of PyTorch: shifted, converted, masked, lessened by zeros and scaled.
func dequantizedBytes(q *recipe.Quantization) float64 {
	if q.Method == recipe.CompressedTensors { // ordinary from the first forward pass on
		return 0
	}
	if q.Method != "" {
		return 16
	}
	return float64(q.Bits)/8 + 2
}

// addModule adds what a program does around the product with a weight.
func (w *work) addModule(j *job.Job, p model.Parameter, elements, tokens float64) {
	w.kernels++
	if j.AutocastType != dtype.Invalid {
		w.kernels += 2
	}
	if j.Quantization != nil && p.Block >= 0 {
		w.kernels++
		if m := j.Quantization.Method; m != "" && m != recipe.CompressedTensors {
			w.kernels += unpackKernels
		}
	}
	inputs, outputs := float64(p.Shape[len(p.Shape)-1]), float64(p.Shape[0])
	if j.FP8() && p.Block >= 0 {
		w.traffic += elements * scaledBytes
	}
	if q := j.QAT; q != nil && p.Block >= 0 {
		w.traffic += elements * fakeBytes
		w.kernels += fakeKernels
		if q.Activations {
			w.traffic += tokens * inputs * fakeBytes
			w.kernels += fakeKernels
		}
	}
	if j.Adapter != nil && j.Adapter.Targets(moduleName(p)) {
		w.kernels += loraKernels
		if d := j.DeepSpeed; d != nil && d.ZeROStage == 3 {
			w.hooks += hookKernels * adapterModules
		}
		wide := float64(max(j.AdapterType.Size(), j.ComputeType().Size()))
		casts := 0.0
		if j.AdapterType.Size() > j.ComputeType().Size() && !j.Compile {
			casts = castBytes
		}
		w.traffic += tokens * (inputs*(casts+wide) + outputs*3*float64(j.ComputeType().Size()))
		if j.Adapter.Dropout > 0 {
			w.traffic += tokens * inputs * dropoutBytes * wide / 2
		}
		w.adapter += 2 * tokens * float64(j.Adapter.Rank) * (inputs + outputs)
	}
}

// addBlock adds attention and the operations between products.
func (w *work) addBlock(j *job.Job, of rows, s *model.Stack, b *model.Block) {
	tokens := of.all
	wide := float64(j.ComputeType().Size()) / 2 // as the constants are for 16 bits
	hidden := float64(of.hidden)
	along := tokens                // those that norms and residuals of a rank work on
	if j.Modules == "torchtitan" { // which has sequence parallelism among tensor parallel ranks
		along /= float64(j.Parallel.Tensor)
	}
	fused := j.Compile || j.Liger
	for _, n := range []model.Norm{b.AttentionNorm, b.CrossNorm, b.FeedForwardNorm, b.AfterAttention,
		b.AfterFeedForward} {
		w.addNorm(n, along*hidden*wide, fused)
	}
	w.traffic += along * hidden * 2 * residualBytes * wide
	w.kernels += 2
	if b.Dropout > 0 && !j.NoDropout && !j.Compile {
		w.traffic += tokens * hidden * 2 * dropoutBytes * wide
		w.kernels += 2
	}
	if j.AutocastType != dtype.Invalid && !j.Compile { // norms compute in fp32, and products cast what they read
		w.traffic += tokens * hidden * 2 * castBytes
	}
	for _, a := range []*model.Attention{&b.Attention, b.Beside} {
		if a != nil && a.Computes() {
			w.addAttention(j, of, s, a)
			w.addRotary(j, a, tokens*wide, fused)
		}
	}
	if b.Cross != nil {
		across := of
		across.sequence = of.across
		w.addAttention(j, across, s, b.Cross)
	}
	w.addFeedForward(j, &b.FeedForward, hidden, tokens*wide)
	if j.FP8() { // of queries, keys and values, of the output projection, and of both layers of the feed-forward part
		w.traffic += tokens * (3*hidden + float64(b.FeedForward.Inner)/float64(j.Parallel.Tensor)) * scaledBytes
	}
	if d := j.DeepSpeed; d != nil && d.ZeROStage == 3 {
		w.hooks += hookKernels * usualModules
		if x := b.FeedForward.Mixture; x != nil && !x.Fused() {
			w.hooks += hookKernels * 4 * float64(len(x.Experts))
		}
	}
}

// addNorm adds a normalization of so many elements.
func (w *work) addNorm(n model.Norm, elements float64, fused bool) {
	switch {
	case n.Kind == model.NoNorm:
	case n.Kind == model.LayerNorm || fused:
		w.traffic += elements * layerBytes
		w.kernels++
	default:
		w.traffic += elements * normBytes
		w.kernels += normKernels
	}
}

// addRotary adds the rotation of queries and keys.
func (w *work) addRotary(j *job.Job, a *model.Attention, tokens float64, fused bool) {
	if a.Rotary == 0 {
		return
	}
	bytes := float64(rotaryBytes)
	if fused {
		bytes = fusedBytes
	}
	w.traffic += tokens * a.Rotary * float64((a.Heads+a.KeyValueHeads)*a.Width) * bytes / float64(j.Parallel.Tensor)
	w.kernels += rotaryKernels
	each := tokens * float64(a.Width) / float64(j.Parallel.Tensor)
	w.addNorm(a.QueryNorm, each*float64(a.Heads), fused)
	w.addNorm(a.KeyNorm, each*float64(a.KeyValueHeads), fused)
}

// addFeedForward adds the activation, and what a mixture does with the tokens of its experts.
func (w *work) addFeedForward(j *job.Job, f *model.FeedForward, hidden, tokens float64) {
	inner := float64(f.Inner)
	gated := f.Gate != "" || f.GateUp != ""
	activation := f.Activation
	if x := f.Mixture; x != nil {
		inner, gated = 0, true
		if len(x.Experts) > 0 {
			inner = float64(x.Chosen * x.Experts[0].Inner)
		}
		if x.Shared != nil {
			inner += float64(x.Shared.Inner)
		}
		w.traffic += tokens * float64(x.Chosen) * hidden * routedBytes
		w.kernels += routerKernels
		if !x.Fused() {
			w.kernels += expertKernels * float64(len(x.Experts))
		}
	}
	bytes := float64(curveBytes)
	switch {
	case gated && (j.Compile || j.Liger):
		bytes = fusedBytes
	case gated:
		bytes = gateBytes
	case activation == "gelu_new" && !j.Compile && !j.FusedActivations:
		bytes = pieceBytes
		w.kernels += pieceKernels
	}
	w.kernels += 2
	w.traffic += tokens * inner * bytes / float64(j.Parallel.Tensor)
}

// addAttention adds the products of queries with keys, and of their scores with values. Kernels of causal attention
// leave out the half that is masked.
func (w *work) addAttention(j *job.Job, of rows, s *model.Stack, a *model.Attention) {
	tokens := of.all
	w.kernels += attentionKernels
	switch { // linear in the sequence
	case a.Delta != nil:
		w.addDelta(j, a.Delta, tokens)
		return
	case a.Scan != nil:
		w.addScan(j, a.Scan, tokens)
		return
	case a.Short != nil:
		w.traffic += tokens * float64(a.Short.Convolution.Channels) * normBytes
		return
	}
	keys := of.sequence
	half := s.Causal && j.Attention != forward.Eager
	switch {
	case a.Window > 0 && float64(a.Window) < keys:
		keys = float64(a.Window)
	case half:
		keys /= 2
	}
	width := a.Width
	values := cmp.Or(a.ValueWidth, width)
	heads := float64(a.Heads) / float64(j.Parallel.Tensor)
	operations := 2 * tokens * keys * heads * float64(width+values)
	if j.Attention == forward.Eager {
		w.traffic += tokens * of.sequence * heads * scoreBytes
		w.kernels += eagerKernels
	} else {
		w.begun += operations * flashStart(j) / of.sequence
	}
	w.attention += operations
}

// deltaChunk is the number of tokens that kernels of the gated delta rule take at a time (flash-linear-attention).
const deltaChunk = 64

// addDelta adds a recurrent layer, which computes chunks of tokens: scores within a chunk, and the state between them.
func (w *work) addDelta(j *job.Job, d *model.Delta, tokens float64) {
	heads := float64(d.ValueHeads) / float64(j.Parallel.Tensor)
	each := 3*deltaChunk*float64(d.KeyWidth+d.ValueWidth) + 3*float64(d.KeyWidth*d.ValueWidth)
	w.attention += 2 * tokens * heads * each
	w.begun += 2 * tokens * heads * each // such small products reach half of what attention does
	w.traffic += tokens * heads * float64(2*d.KeyWidth+2*d.ValueWidth) * normBytes
	w.kernels += eagerKernels
}

// addScan adds a selective state space: scores of the pairs within a chunk, and the states between chunks.
func (w *work) addScan(j *job.Job, s *model.Scan, tokens float64) {
	heads := float64(s.Heads) / float64(j.Parallel.Tensor)
	each := float64(s.Chunk*(s.State+s.Width) + 2*s.State*s.Width)
	w.attention += 2 * tokens * heads * each
	w.begun += 2 * tokens * heads * each // such small products reach half of what attention does
	w.traffic += tokens * heads * float64(3*s.Chunk+4*s.State+6*s.Width) * normBytes
	w.kernels += eagerKernels
}
