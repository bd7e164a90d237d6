package simulate

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// parameterMaker makes the parameters of a rank: the model's, quantized if the
// job asks for it, and the adapter's.
type parameterMaker struct {
	*job.Job
	made   forward.Parameters
	list   []*autograd.Parameter
	copies map[copied]*autograd.Parameter // that PEFT trains
}

// copied identifies a parameter of a module that PEFT trains a copy of.
type copied struct {
	module   string
	original *autograd.Parameter
}

// makeParameters makes the parameters of a rank, by module and in their order.
func makeParameters(j *job.Job) (forward.Parameters, []*autograd.Parameter) {
	count := len(j.Model.Parameters)
	m := &parameterMaker{Job: j, list: make([]*autograd.Parameter, 0, count), copies: map[copied]*autograd.Parameter{},
		made: forward.Parameters{ByName: make(map[string]*autograd.Parameter, count),
			Adapters: map[string]*forward.Adapter{}, Experts: map[*model.Mixture]forward.Experts{}}}
	m.makeModel()
	for _, b := range j.Model.Network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil {
			m.made.Experts[x] = experts(x, m.made)
		}
	}
	if j.Adapter != nil {
		m.adapt()
	}
	return m.made, m.list
}

// makeModel makes the parameters of the model.
func (m *parameterMaker) makeModel() {
	count := len(m.Model.Parameters)
	linear := make(map[string]bool, count)
	linear[m.Model.Network.Head.Projection] = false
	for _, path := range m.Model.Network.Linears() {
		linear[path] = true
	}
	experts, fused := m.expertModules(), m.FusedExperts()
	undivided := m.Model.Network.Undivided()
	own := make(map[string]*autograd.Parameter, count) // the model's; PEFT may train copies of them
	for _, p := range m.Model.Parameters {
		module, isWeight := strings.CutSuffix(p.Name, ".weight")
		elsewhere, isExpert := experts[module]
		if elsewhere {
			continue
		}
		if owner, ok := own[p.TiedTo]; ok {
			m.made.ByName[p.Name] = m.copied(p.Name, owner)
			continue
		}
		made := &autograd.Parameter{Name: p.Name, Elements: p.Elements(), DType: m.ComputeType(),
			Trainable: m.Adapter == nil && !p.Frozen && m.Unfrozen.Has(p.Name), Embedding: p.IsEmbedding()}
		if p.Wide && m.CastType == dtype.Invalid || m.Widens(p.Name) {
			made.DType = dtype.F32
		}
		made.Wide = p.Wide && m.CastType != dtype.Invalid
		quantized, product := linear[module]
		switch len(p.Shape) {
		case 2:
			made.Rows = p.Shape[0]
			if quantized && isWeight && m.Model.Network.InputFirst {
				made.Rows = p.Shape[1]
			}
		case 3: // fused experts, or a convolution
			made.Matrices, made.Rows = p.Shape[0], p.Shape[1]
		}
		made.Hidden = (len(p.Shape) == 2 || fused[p.Name]) && !strings.Contains(p.Name, "embed") && !made.Embedding &&
			module != m.Model.Network.Head.Projection
		made.Expert = isExpert || fused[p.Name]
		if fused[p.Name] {
			made.Matrices /= m.Parallel.Expert
			made.Elements /= m.Parallel.Expert
		}
		if isWeight && (product && !undivided[module] || made.Embedding) || fused[p.Name] {
			made.Elements /= m.Parallel.Tensor
			made.Rows = max(1, made.Rows/m.Parallel.Tensor)
		}
		if isWeight && (quantized || product && m.quantizesHead()) ||
			m.QuantizesExperts && fused[p.Name] && len(p.Shape) == 3 {
			m.quantize(made)
		}
		if a := m.Adapter; a != nil {
			made.Trainable = p.Beside || a.Bias == "all" && strings.HasSuffix(p.Name, ".bias")
		}
		own[p.Name] = made
		m.list = append(m.list, made)
		m.made.ByName[p.Name] = m.copied(p.Name, made)
	}
}

// copied returns the parameter that is used under a name: the original, or the
// copy of it that PEFT trains beside the original (ModulesToSaveWrapper and
// LNTuningLayer). The copy is not tied to parameters outside its module.
func (m *parameterMaker) copied(name string, original *autograd.Parameter) *autograd.Parameter {
	if m.Adapter == nil {
		return original
	}
	key := copied{m.Adapter.Copies(name[:max(0, strings.LastIndexByte(name, '.'))]), original}
	if key.module == "" {
		return original
	}
	if m.copies[key] == nil {
		again := *original
		again.Trainable, original.Trainable = true, false
		m.copies[key] = &again
		m.list = append(m.list, &again)
	}
	return m.copies[key]
}

// experts returns the rank's weights of the experts of a mixture.
func experts(x *model.Mixture, m forward.Parameters) forward.Experts {
	var e forward.Experts
	if x.Fused() {
		return forward.Experts{GateUp: []*autograd.Parameter{m.ByName[x.GateUp]},
			Down: []*autograd.Parameter{m.ByName[x.Down]}}
	}
	for i := range x.Experts {
		f := &x.Experts[i]
		if up := m.ByName[f.Up+".weight"]; up != nil {
			e.Up, e.Down = append(e.Up, up), append(e.Down, m.ByName[f.Down+".weight"])
			if !x.Ungated {
				e.Gate = append(e.Gate, m.ByName[f.Gate+".weight"])
			}
		}
	}
	return e
}

// expertModules returns the modules of experts that have weights of their own, each with whether it lies on other
// ranks.
func (m *parameterMaker) expertModules() map[string]bool {
	elsewhere := map[string]bool{}
	for _, b := range m.Model.Network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil && !x.Fused() {
			own := ceilDivide(int64(len(x.Experts)), m.Parallel.Expert)
			for i := range x.Experts {
				f, other := &x.Experts[i], int64(i) >= own
				elsewhere[f.Gate], elsewhere[f.Up], elsewhere[f.Down] = other, other, other
			}
		}
	}
	return elsewhere
}

// quantize quantizes the weight of a linear module as bitsandbytes does. In 4
// bits, 64 elements share an fp32 scale. With double quantization the scales are
// bytes, of which 256 share an fp32 scale (bitsandbytes/functional.py,
// quantize_4bit). In 8 bits every row has a scale.
func (m *parameterMaker) quantize(p *autograd.Parameter) {
	q := m.Quantization
	if q == nil || q.Bits == 0 {
		return
	}
	if q.Skips(p.Name) {
		return
	}
	if q.Method != "" {
		pack(p, q)
		return
	}
	if q.Bits == 8 {
		p.Quantized, p.StoredBytes = autograd.EightBit, p.Elements+4*p.Rows*max(1, p.Matrices)
		return
	}
	blocks := (p.Elements + 63) / 64
	p.Quantized, p.StoredBytes = autograd.FourBit, (p.Elements+1)/2+4*blocks
	if q.DoubleQuant {
		p.StoredBytes = (p.Elements+1)/2 + blocks + (blocks+255)/256*4
	}
}

// pack sets the size of a weight that GPTQ, AWQ or compressed-tensors has packed: integers, and for every group of
// inputs scales in 16 bits and zero points in as many as weights. GPTQ has the group of every input, too
// (BaseQuantLinear of GPTQModel, August 2026).
func pack(p *autograd.Parameter, q *recipe.Quantization) {
	if q.Method == "aqlm" { // codes, codebooks and a scale for each output (QuantizedLinear in aqlm 1.1.7)
		codes := p.Elements / int64(q.Group) * int64(q.Codebooks) * int64(q.CodeBits/8)
		p.Quantized = autograd.AQLM
		p.StoredBytes = codes + (int64(q.Codebooks)<<q.CodeBits*int64(q.Group)+p.Rows)*p.DType.Size()
		return
	}
	in, groups, bits := p.Elements/p.Rows, int64(1), int64(q.Bits)
	if q.Group > 0 {
		groups = (in + int64(q.Group) - 1) / int64(q.Group)
	}
	words := func(elements int64) int64 { return (elements*bits + 31) / 32 * 4 }
	if q.Method == recipe.CompressedTensors { // and the shape of the weight (PackedQuantizationCompressor)
		p.StoredBytes = words(in)*p.Rows + 2*groups*p.Rows + 2*4
		if q.Asymmetric {
			p.StoredBytes += groups * words(p.Rows)
		}
		if q.Ordered {
			p.StoredBytes += 4 * in
		}
		return // Unquantized: every product has the ordinary weight, see simulation.decompress
	}
	p.Quantized, p.StoredBytes = autograd.AWQ, in*words(p.Rows)+groups*(words(p.Rows)+2*p.Rows)
	if q.Method == "gptq" {
		p.Quantized, p.StoredBytes = autograd.GPTQ, words(in)*p.Rows+groups*(words(p.Rows)+2*p.Rows)+4*in
	}
}

// quantizesHead reports whether the output head may be quantized, too. It is
// skipped unless a list of modules to skip is given; then the list decides.
func (m *parameterMaker) quantizesHead() bool {
	return m.Quantization != nil && m.Quantization.SkipModules != nil && m.Quantization.Method == ""
}

// adapterType returns the type that an adapter's parameters compute in, and whether their shards are wider: FSDP casts
// them as it does those of the model.
func (m *parameterMaker) adapterType() (of dtype.Type, wide bool) {
	if m.CastType == dtype.Invalid {
		return m.AdapterType, false
	}
	return m.CastType, m.AdapterType == dtype.F32
}

// adapt makes the parameters of the adapter.
func (m *parameterMaker) adapt() {
	a := m.Adapter
	if a.Type == "LN_TUNING" {
		return
	}
	add := func(name string, rows, columns int64, trainable bool) *autograd.Parameter {
		p := &autograd.Parameter{Name: name, Elements: rows * columns, Trainable: trainable}
		p.DType, p.Wide = m.adapterType()
		if columns > 1 {
			p.Rows, p.Hidden = rows, !strings.Contains(name, "embed")
		}
		module := name[:max(0, strings.LastIndexByte(strings.TrimSuffix(name, ".bias"), '.'))]
		if w := m.made.ByName[module+".weight"]; w != nil {
			p.Expert = w.Expert
		}
		m.list = append(m.list, p)
		return p
	}
	if a.VirtualTokens > 0 {
		m.addPrompt(add)
		return
	}
	targets := m.targets()
	var widestIn, widestOut int64
	for _, t := range targets {
		widestIn, widestOut = max(widestIn, t.in), max(widestOut, t.out)
	}
	var sharedA, sharedB *autograd.Parameter
	for _, t := range targets {
		if bias := m.made.ByName[t.path+".bias"]; bias != nil && strings.HasSuffix(a.Bias, "_only") {
			bias.Trainable = true
		}
		f := &forward.Adapter{Dropout: a.Dropout, Rank: int64(a.RankOf(t.path)) * t.parts,
			SharesDropout: t.shared, Padded: t.padded}
		switch a.Type {
		case "IA3":
			f.Kind, f.ScalesInput = forward.IA3, a.Feedforward(t.path)
			width := t.out
			if f.ScalesInput {
				width = t.in
			}
			f.Vectors = []*autograd.Parameter{add(t.path+".ia3_l", width, 1, true)}
		case "OFT":
			m.addRotation(f, t, add)
		case "LOHA", "LOKR", "MISS":
			m.addFactors(f, t, add)
		case "VERA":
			f.Kind = forward.VeRA
			if sharedA == nil {
				sharedA, sharedB = add("vera_A", f.Rank, widestIn, false), add("vera_B", widestOut, f.Rank, false)
			}
			f.A, f.B = sharedA, sharedB
			f.Vectors = []*autograd.Parameter{add(t.path+".vera_lambda_d", f.Rank, 1, true),
				add(t.path+".vera_lambda_b", t.out, 1, true)}
		default:
			m.addLoRA(f, t, add)
		}
		m.made.Adapters[t.path] = f
	}
	for _, name := range m.AdaptedParameters() {
		w := m.made.ByName[name]
		f := &forward.Adapter{Kind: forward.LoRA, InFull: m.AddsInFull || w.Matrices == 0}
		f.Rank = int64(a.RankOf(name)) * max(1, w.Matrices)
		out := w.Rows // of one matrix
		f.A = add(name+".lora_A", f.Rank, w.Elements/max(1, w.Matrices)/out, true)
		f.B = add(name+".lora_B", out, f.Rank, true)
		m.made.Adapters[name] = f
	}
}

// adding makes a parameter of an adapter.
type adding = func(name string, rows, columns int64, trainable bool) *autograd.Parameter

// addLoRA makes the parameters of LoRA, DoRA and AdaLoRA.
func (m *parameterMaker) addLoRA(f *forward.Adapter, t target, add adding) {
	a := m.Adapter
	f.Kind = forward.LoRA
	f.A, f.B = add(t.path+".lora_A", f.Rank, t.in, true), add(t.path+".lora_B", t.out, f.Rank, true)
	if a.LoRABias && a.Type == "LORA" {
		f.Bias = add(t.path+".lora_B.bias", t.out, 1, true)
	}
	if a.Type == "ADALORA" {
		f.Kind = forward.AdaLoRA
		// PEFT makes ranknum in fp32 without a gradient. Its cast to the
		// weight's type is another parameter, which has a gradient.
		w := m.made.ByName[t.path+".weight"]
		taken := w.DType != dtype.F32 || w.Quantized != autograd.Unquantized
		f.Vectors = []*autograd.Parameter{add(t.path+".lora_E", f.Rank, 1, true),
			add(t.path+".ranknum", 1, 1, taken)}
	}
	if a.DoRA {
		f.Kind = forward.DoRA
		f.Vectors = []*autograd.Parameter{add(t.path+".lora_magnitude_vector", t.out, 1, true)}
	}
}

// addFactors makes the parameters that LoHa, LoKr and MiSS make a weight of.
func (m *parameterMaker) addFactors(f *forward.Adapter, t target, add adding) {
	switch m.Adapter.Type {
	case "LOHA":
		f.Kind = forward.LoHa
		f.A, f.B = add(t.path+".hada_w1_a", t.out, f.Rank, true), add(t.path+".hada_w1_b", f.Rank, t.in, true)
		f.Vectors = []*autograd.Parameter{add(t.path+".hada_w2_a", t.out, f.Rank, true),
			add(t.path+".hada_w2_b", f.Rank, t.in, true)}
	case "LOKR":
		m.addKronecker(f, t, add)
	case "MISS":
		f.Kind = forward.MiSS
		f.A = add(t.path+".miss_block", f.Rank, cmp.Or(int64(m.Adapter.Repeated), t.out), true)
	}
}

// addKronecker makes LoKr's two matrices of a module, each whole or in two of low rank: update_layer in
// tuners/lokr/layer.py of PEFT.
func (m *parameterMaker) addKronecker(f *forward.Adapter, t target, add adding) {
	f.Kind = forward.LoKr
	of := func(name string, rows, columns int64, low bool) (*autograd.Parameter, *autograd.Parameter) {
		if !low {
			return add(name, rows, columns, true), nil
		}
		return add(name+"_a", rows, f.Rank, true), add(name+"_b", f.Rank, columns, true)
	}
	inFirst, inSecond := peft.Factors(t.in, int64(m.Adapter.Factor))
	outFirst, outSecond := peft.Factors(t.out, int64(m.Adapter.Factor))
	first, firstB := of(t.path+".lokr_w1", outFirst, inFirst,
		m.Adapter.DividesFirst && 2*f.Rank < max(outFirst, inFirst))
	second, secondB := of(t.path+".lokr_w2", outSecond, inSecond, 2*f.Rank < max(outSecond, inSecond))
	f.A, f.B, f.Vectors = first, firstB, []*autograd.Parameter{second, secondB}
}

// addPrompt makes the parameters of the tokens that an adapter puts before those of every sequence: PromptEmbedding and
// PromptEncoder in PEFT's tuners.
func (m *parameterMaker) addPrompt(add adding) {
	a, width := m.Adapter, m.Model.Network.Hidden
	p := &forward.Prompt{Tokens: int64(a.VirtualTokens),
		Embedding: add("prompt_encoder.embedding", int64(a.VirtualTokens), width, true)}
	if a.Type == "P_TUNING" {
		inner := cmp.Or(int64(a.Encoder), width)
		for i, size := range [][2]int64{{inner, width}, {inner, inner}, {width, inner}} {
			name := fmt.Sprintf("prompt_encoder.mlp_head.%d", 2*i)
			p.Layers = append(p.Layers, forward.PromptLayer{Weight: add(name, size[0], size[1], true),
				Bias: add(name+".bias", size[0], 1, true)})
		}
	}
	m.made.Prompt = p
}

// addRotation makes OFT's parameter of a module, and the buffers with the places of its elements in the blocks.
func (m *parameterMaker) addRotation(f *forward.Adapter, t target, add adding) {
	blocks, size := m.Adapter.OFTBlocks(t.in)
	if m.Adapter.SharesBlock {
		blocks = 1
	}
	f.Kind, f.Rank, f.Block, f.Terms = forward.OFT, blocks, size, int64(m.Adapter.Terms)
	upper := size * (size - 1) / 2
	f.A = add(t.path+".oft_R", blocks, upper, true)
	add(t.path+".oft_R.rows and cols", 2*upper, 1, false).DType = dtype.I64
}

// target is a linear module or an embedding that the adapter adapts.
type target struct {
	path    string
	in, out int64
	// parts is 1, or the number of queries, keys and values of a fused projection that litgpt adapts together, each
	// with a rank of its own.
	parts int64
	// shared means that it is a part of litgpt's LoRAQKVLinear. padded means that litgpt pads the product with zeros,
	// as not all of queries, keys and values are adapted.
	shared, padded bool
}

func (m *parameterMaker) targets() []target {
	var list []target
	attentions := m.litgptAttentions()
	for _, path := range append(m.Model.Network.Linears(), m.Model.Network.Head.Projection) {
		w := m.made.ByName[path+".weight"]
		if w == nil || w.Rows == 0 {
			continue
		}
		t := target{path: path, in: w.Elements / w.Rows, out: w.Rows, parts: 1}
		adapted := m.Adapter.Targets(path)
		if a := attentions[path]; a != nil {
			adapted = m.adaptPart(&t, a) || adapted
		}
		if adapted {
			list = append(list, t)
		}
	}
	if m.Adapter.Type != "LORA" || m.Adapter.AllLinear() {
		return list
	}
	for _, p := range m.Model.Parameters {
		path := strings.TrimSuffix(p.Name, ".weight")
		if w := m.made.ByName[p.Name]; p.IsEmbedding() && m.Adapter.Targets(path) {
			list = append(list, target{path: path, in: w.Rows, out: w.Elements / w.Rows, parts: 1})
		}
	}
	return list
}

// litgptAttentions returns the attention of each projection of queries, keys or values, by path. It is empty for
// modules of other libraries.
func (m *parameterMaker) litgptAttentions() map[string]*model.Attention {
	attentions := map[string]*model.Attention{}
	if !m.FusedQKV {
		return attentions
	}
	for _, b := range m.Model.Network.Blocks() {
		for _, path := range []string{b.Attention.Query, b.Attention.Key, b.Attention.Value, b.Attention.Fused} {
			if path != "" {
				attentions[path] = &b.Attention
			}
		}
	}
	return attentions
}

// adaptPart sets what litgpt adapts of a projection of queries, keys and values (LoRAQKVLinear). It reports whether
// parts of a fused projection are adapted: its query, key or value, which lora_query and the like choose.
func (m *parameterMaker) adaptPart(t *target, a *model.Attention) bool {
	t.shared = true
	if t.path != a.Fused {
		t.padded = !m.Adapter.Targets(a.Query) || !m.Adapter.Targets(a.Key) || !m.Adapter.Targets(a.Value)
		return false
	}
	keys, values := a.KeyValueHeads*a.Width, a.KeyValueHeads*a.ValueWidth
	var out, parts int64
	for name, width := range map[string]int64{"query": a.Heads * a.Width, "key": keys, "value": values} {
		if m.Adapter.Targets(t.path + "." + name) {
			out, parts = out+width, parts+1
		}
	}
	if parts == 0 {
		t.parts = 3
		return false
	}
	t.out, t.parts, t.padded = out, parts, parts < 3
	return true
}
