package steptime

import (
	"strconv"
	"strings"

	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/parallel"
)

// unmodelledOfMegatron returns what a job of Megatron-LM does whose time has no basis, or "".
func unmodelledOfMegatron(j *megatron.Job) string {
	switch {
	case j.Adapter != nil:
		return "adapters on layers of Megatron core"
	case j.Kind == megatron.T5:
		return "an encoder beside a decoder"
	case j.FP8 != "" && j.GPU.Capability < 89:
		return "fp8 on a GPU that does not multiply it"
	}
	return ""
}

// megatronStages are the chunks of the pipeline stages of Megatron-LM. A job without stages has one.
type megatronStages struct {
	job    *megatron.Job
	chunks [][]megatronChunk
	passes [][]parallel.Pass
}

// megatronChunk is what a rank does for a chunk of layers.
type megatronChunk struct {
	pass, again        work // of the forward pass, and what of it the backward pass runs once more
	exchange, repeated exchange
	parameters         float64 // of the rank, but for its experts
	experts            float64 // parameters of the rank's experts
	layers             float64
}

// exchange are the bytes that a rank sends in a forward pass, and its operations.
type exchange struct {
	tensor, tensors float64 // parts of the residual stream, gathered or scattered among tensor parallel ranks
	keys, rings     float64 // keys and values of context parallelism, and the layers that pass them around
	routed, mixed   float64 // what goes to experts and comes back, and the layers that exchange it
}

func newMegatronStages(j *megatron.Job) *megatronStages {
	s := &megatronStages{job: j}
	for stage, chunks := range j.Table {
		var list []megatronChunk
		for _, c := range chunks {
			list = append(list, megatronChunkOf(j, c))
		}
		s.chunks = append(s.chunks, list)
		s.passes = append(s.passes, parallel.Schedule(j.Degrees, int64(stage), j.Micros, j.Group))
	}
	return s
}

// megatronTokens are the tokens of a micro batch on a rank.
type megatronTokens struct {
	all   float64 // of its part of the sequence
	split float64 // those of sequence parallelism, which norms work on
}

func megatronTokensOf(j *megatron.Job) megatronTokens {
	d := j.Degrees
	t := megatronTokens{all: float64(j.Sequences()*j.Sequence) / float64(d.Context)}
	t.split = t.all
	if j.SequenceSplit {
		t.split /= float64(d.Tensor)
	}
	return t
}

func megatronChunkOf(j *megatron.Job, c parallel.Chunk) megatronChunk {
	m := megatronChunk{layers: float64(c.Layers)}
	tokens, layers := megatronTokensOf(j), j.OnStage(c)
	of := &megatronWork{Job: j, tokens: tokens, layers: len(layers)}
	for _, p := range j.Parameters(c) {
		if p.Expert {
			m.experts += float64(p.Elements)
		} else {
			m.parameters += float64(p.Elements)
		}
		of.product(&m, p)
	}
	for i, layer := range layers {
		of.layer(&m, i, layer)
	}
	if c.Loss {
		of.head(&m)
	}
	return m
}

// megatronWork adds up what a chunk computes and exchanges.
type megatronWork struct {
	*megatron.Job
	tokens megatronTokens
	layers int // of the chunk
}

// repeats reports whether the backward pass runs a module of a layer of the chunk once more.
func (w *megatronWork) repeats(layer int, module string) bool {
	if w.Recompute == "full" {
		return w.RecomputeMethod != "block" || int64(layer) < max(w.RecomputeLayers, 1)
	}
	return w.Recomputes(module)
}

// moduleOf returns the module of selective recomputation that a parameter belongs to.
func moduleOf(name string) string {
	switch {
	case strings.Contains(name, "_up_proj"):
		return "mla_up_proj"
	case strings.HasPrefix(name, "mlp."):
		return "mlp"
	}
	return ""
}

// product adds the product with a weight.
func (w *megatronWork) product(m *megatronChunk, p megatron.Parameter) {
	if !p.Weight || strings.HasPrefix(p.Name, "embedding.") || strings.HasPrefix(p.Name, "output_layer") {
		return // the head has its own
	}
	rest, inLayer := strings.CutPrefix(p.Name, "layers.")
	number, name, _ := strings.Cut(rest, ".")
	layer, _ := strconv.Atoi(number) // of others it is not used
	tokens := w.tokens.all
	if strings.Contains(p.Name, "_down_proj") { // each rank has all of it, and its part of the tokens
		tokens = w.tokens.split
	}
	elements := float64(p.Elements)
	if p.Expert {
		w.expert(m, layer, elements)
		return
	}
	of := work{dense: 2 * elements * tokens, read: elements * float64(w.ParameterType.Size()),
		fill: 2 * elements * tokens * lost / float64(w.Hidden)}
	m.pass.add(of)
	if inLayer && w.repeats(layer, moduleOf(name)) {
		m.again.add(of)
	}
}

// expert adds the products with a weight of an expert. Tokens are balanced among the ranks of experts but for the
// imbalance that is given.
func (w *megatronWork) expert(m *megatronChunk, layer int, elements float64) {
	each := float64(w.Experts / w.Degrees.Expert) // experts of the rank
	of := work{experts: 2 * elements * w.routed() / each, weights: elements * float64(w.ParameterType.Size())}
	m.pass.add(of)
	if w.repeats(layer, "moe") {
		m.again.add(of)
	}
}

// routed returns the rows that the experts of a rank compute.
func (w *megatronWork) routed() float64 {
	return w.tokens.split * float64(w.TopK*w.Degrees.ExpertTensor) * max(1, w.Imbalance)
}

// mixtureKernels are the operations of a router, of its dispatcher, of the permutation of tokens and of the small
// products, with what they wait for the host: a micro batch of 4,096 tokens of Qwen3 30B takes 8.8 ms for each of its
// layers on B200 (Megatron-Bridge 26.02).
const mixtureKernels = 190

// mixture adds what a layer does to bring tokens to experts and back.
func (w *megatronWork) mixture() (of work, e exchange) {
	rows := w.routed() * float64(w.Hidden)
	of = work{traffic: rows * routedBytes * float64(w.ParameterType.Size()) / 2, kernels: mixtureKernels}
	inner := w.gate(w.routed() * float64(w.ExpertHidden) / float64(w.Degrees.ExpertTensor))
	of.traffic += inner.traffic
	if shared := w.SharedExpert; shared > 0 {
		of.traffic += w.gate(w.tokens.all * float64(shared) / float64(w.Degrees.Tensor)).traffic
	}
	if w.Degrees.Expert > 1 {
		e = exchange{routed: 2 * rows * float64(w.ParameterType.Size()), mixed: 2}
	}
	return of, e
}

// add adds other work.
func (w *work) add(o work) {
	w.dense, w.head, w.read, w.fill = w.dense+o.dense, w.head+o.head, w.read+o.read, w.fill+o.fill
	w.attention, w.begun = w.attention+o.attention, w.begun+o.begun
	w.experts, w.weights = w.experts+o.experts, w.weights+o.weights
	w.traffic, w.loss, w.kernels = w.traffic+o.traffic, w.loss+o.loss, w.kernels+o.kernels
}

func (e *exchange) add(o exchange) {
	e.tensor, e.tensors, e.keys, e.rings = e.tensor+o.tensor, e.tensors+o.tensors, e.keys+o.keys, e.rings+o.rings
	e.routed, e.mixed = e.routed+o.routed, e.mixed+o.mixed
}

// layer adds what a layer computes beside products with weights, and what it exchanges.
func (w *megatronWork) layer(m *megatronChunk, index int, layer megatron.Layer) {
	add := func(module string, of work, e exchange) {
		m.pass.add(of)
		m.exchange.add(e)
		if w.repeats(index, module) {
			m.again.add(of)
			m.repeated.add(e)
		}
	}
	add("core_attn", w.attention(layer), exchange{})
	add("layernorm", w.norms(), exchange{})
	around := w.residual(4) // two in attention, two in the feed-forward layer
	if layer.Mixture {
		of, e := w.mixture()
		add("moe", of, e)
		around = w.residual(2)
	} else {
		add("mlp", w.gate(w.tokens.all*float64(w.FeedForward)/float64(w.Degrees.Tensor)), exchange{})
	}
	if n := w.Degrees.Context; n > 1 {
		around.keys, around.rings = w.keys(), 1
	}
	add("", work{kernels: megatronKernels}, around)
}

// fusedStart is flashStart of cuDNN's kernels.
const fusedStart = 500

// attention returns the products of queries with keys, and of their scores with values.
func (w *megatronWork) attention(layer megatron.Layer) (of work) {
	width, values := float64(w.HeadSize), float64(w.HeadSize)
	if w.LatentAttention {
		width, values = float64(w.LatentHead+w.LatentPosition), float64(w.LatentValue)
	}
	keys := float64(w.Sequence)
	fused := w.Attention == "flash" || w.Attention == "fused"
	if fused && !layer.Bidirected {
		keys /= 2
	}
	heads := float64(w.QueryHeads())
	of.attention = 2 * w.tokens.all * keys * heads * (width + values)
	if fused {
		of.begun = of.attention * fusedStart / float64(w.Sequence)
	} else {
		of.traffic = w.tokens.all * float64(w.Sequence) * heads * scoreBytes
	}
	return of
}

// norms returns what norms, residual additions and rotations move.
func (w *megatronWork) norms() (of work) {
	norm, rotary := float64(fusedBytes), float64(fusedBytes)
	if !w.TransformerEngine() {
		norm, rotary = normBytes, rotaryBytes
	}
	wide := float64(w.ParameterType.Size()) / 2
	of.traffic = w.tokens.split * float64(w.Hidden) * 2 * (norm + residualBytes) * wide
	if w.PositionType == "rope" || w.PositionType == "yarn" {
		of.traffic += w.tokens.all * float64((w.QueryHeads()+w.KeyHeads())*w.HeadSize) * rotary * wide
	}
	return of
}

// gate returns what the activation of so many elements moves.
func (w *megatronWork) gate(elements float64) work {
	moved := float64(gateBytes)
	if !w.NoBiasSwiGLU {
		moved = fusedBytes
	}
	return work{traffic: elements * moved * float64(w.ParameterType.Size()) / 2}
}

// residual returns so many exchanges of the residual stream among tensor parallel ranks: each is an all-gather, or a
// reduce-scatter. Without sequence parallelism two of them are an all-reduce.
func (w *megatronWork) residual(count float64) exchange {
	if w.Degrees.Tensor == 1 {
		return exchange{}
	}
	return exchange{tensor: count * w.tokens.all * float64(w.Hidden*w.ParameterType.Size()), tensors: count}
}

// keys returns the bytes of all keys and values of a sequence that pass a rank.
func (w *megatronWork) keys() float64 {
	each := 2 * w.KeyHeads() * w.HeadSize
	if w.LatentAttention {
		each = w.QueryHeads() * (w.LatentHead + w.LatentPosition + w.LatentValue)
	}
	return float64(w.Sequences()*w.Sequence*each) * float64(w.ParameterType.Size())
}

// head adds the logits and the loss, also those of each token that is predicted beyond the next one.
func (w *megatronWork) head(m *megatronChunk) {
	logits := float64(logitBytes)
	if w.FusesLoss {
		logits = fusedBytes
	}
	each := float64(w.Vocabulary) / float64(w.Degrees.Tensor)
	count := 1 + float64(w.Predictions)
	products := count * 2 * w.tokens.all * float64(w.Hidden) * each
	m.pass.add(work{dense: products, head: products, read: float64(w.Hidden) * each * float64(w.ParameterType.Size()),
		loss: count * w.tokens.all * each * logits})
	m.exchange.add(w.residual(count))
	for range w.Predictions {
		w.layer(m, w.layers, w.Layers[len(w.Layers)-1])
	}
}

// megatronKernels are the operations of a layer that Python starts: Transformer Engine fuses norms and rotations.
const megatronKernels = 30

// parts returns the parts of a step at an end of the interval.
func (s *megatronStages) parts(r rates) (parts, error) {
	j := s.job
	micros := float64(j.Micros)
	bytes := megatronTokensOf(j).split * float64(j.Hidden*j.ParameterType.Size())
	t := &timetable{passes: s.passes, messages: r.messages(bytes, int(j.Degrees.Pipeline), len(s.chunks[0]),
		int(j.Degrees.World()), int(j.RanksPerNode))}
	duties := make([]duty, len(s.chunks))
	for i, chunks := range s.chunks {
		d := &duties[i]
		var times []passTimes
		for k := range chunks {
			c := &chunks[k]
			forward, backward := c.times(&r)
			there, back := c.waits(j, &r)
			if j.Reference { // a frozen model of the same size runs forward
				forward, there = 2*forward, 2*there
			}
			times = append(times, passTimes{forward: forward + there, backward: backward + back})
			d.forward, d.backward = d.forward+forward*micros, d.backward+backward*micros
			d.communication += (there + back) * micros
			d.last += c.reduction(j, &r, forward, backward)
			d.optimizer += c.steps(j, &r)
		}
		t.times = append(t.times, times)
	}
	return t.run(j.Micros, duties)
}

// times returns the times of the passes of a micro batch.
func (c *megatronChunk) times(r *rates) (forward, backward float64) {
	c.pass.reach = 1
	forward, backward = r.times(&c.pass, recomputation{}, false)
	again, _ := r.times(&c.again, recomputation{}, false)
	return forward, backward + again
}

// waits returns what the passes of a micro batch wait for.
func (c *megatronChunk) waits(j *megatron.Job, r *rates) (forward, backward float64) {
	once := c.exchange.time(j, r, c.pass.attention/r.attention)
	again := c.repeated.time(j, r, c.again.attention/r.attention)
	return once, again + c.exchange.back(j, r, 2.5*c.pass.attention/r.attention)
}

// time returns what a pass waits for its exchanges. Keys and values go around while attention runs.
func (e *exchange) time(j *megatron.Job, r *rates, attention float64) float64 {
	d, inNode := j.Degrees, j.RanksPerNode
	t := r.ring(e.tensor, d.Tensor, inNode, e.tensors)
	if e.rings > 0 {
		n := float64(d.Context)
		around := r.ring(e.keys, d.Context, max(1, inNode/d.Tensor), e.rings*(n-1))
		t += hidden(around, attention, n)
	}
	if e.mixed > 0 {
		nodes := 1.0
		if j.Dispatcher == "flex" { // DeepEP sends a token once to each node
			nodes = min(1, float64(max(1, d.Expert*d.ExpertTensor/inNode))/float64(max(1, j.TopK)))
		}
		t += r.all(e.routed, d.Expert, max(1, inNode/d.ExpertTensor), e.mixed, nodes)
	}
	return t
}

// back returns what the backward pass waits for: the same exchanges, and gradients of keys and values go around, too.
func (e *exchange) back(j *megatron.Job, r *rates, attention float64) float64 {
	o := *e
	o.keys *= 2
	return o.time(j, r, attention)
}

// reduction returns what the passes do not hide of the exchange among data parallel ranks: gradients behind the last
// backward pass, and parameters of the distributed optimizer behind the first forward pass.
func (c *megatronChunk) reduction(j *megatron.Job, r *rates, forward, backward float64) float64 {
	d := j.Degrees
	ring := func(width int64) float64 {
		t := r.ring(c.parameters*float64(width), d.Data*d.Context, max(1, j.RanksPerNode/d.Tensor), c.layers)
		inNode := max(1, j.RanksPerNode/(d.ExpertTensor*d.Expert))
		return t + r.ring(c.experts*float64(width), d.ExpertData, inNode, c.layers)
	}
	gradients, parameters := ring(j.GradientType.Size()), ring(j.ParameterType.Size())
	if !j.Distributed {
		gradients, parameters = 2*gradients, 0
	}
	if j.OverlapGradients {
		gradients = hidden(gradients, backward, c.layers)
	}
	if j.OverlapParams {
		parameters = hidden(parameters, forward, c.layers)
	}
	return gradients + parameters
}

// hostOptimizerBytes is what an update by the CPU moves of host memory for each parameter, as torch's AdamW does
// without a fused kernel, and hostCopies are the bytes that cross the link: a gradient and a parameter.
const hostOptimizerBytes, hostCopies = adamBytes * foreachOnHost, 4

// steps returns how long the update takes: on the GPU, by the CPU, or with states that come from the host.
func (c *megatronChunk) steps(j *megatron.Job, r *rates) float64 {
	onGPU := c.update(j) / r.Device
	mine := c.update(j) / updateBytes(j)
	switch {
	case j.CPUOffload:
		there := mine * j.OffloadFraction
		host := r.Host / float64(max(1, j.RanksPerNode))
		return onGPU*(1-j.OffloadFraction) + there*(hostOptimizerBytes/host+hostCopies/r.Link.In)
	case j.OffloadStates, j.ChunkedOffload: // master weights and moments come and go
		return onGPU + mine*12*(1/r.Link.In+1/r.Link.Out)
	}
	return onGPU
}

// updateBytes returns the bytes that an update on the GPU moves for a parameter.
func updateBytes(j *megatron.Job) float64 {
	return 2*4 + 2*2*4 + 2*float64(j.GradientType.Size()) + float64(j.ParameterType.Size())
}

// update returns the bytes that the optimizer moves: master weights and moments are read and written, gradients are
// read for the norm and for the update, and parameters are written.
func (c *megatronChunk) update(j *megatron.Job) float64 {
	each := updateBytes(j)
	mine := c.parameters + c.experts
	if j.Distributed {
		mine = c.parameters/float64(j.Degrees.Data*j.Degrees.Context) + c.experts/float64(max(1, j.Degrees.ExpertData))
	}
	return mine * each
}
