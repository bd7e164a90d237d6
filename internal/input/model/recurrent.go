package model

import (
	"cmp"
	"slices"

	"plimsoll/internal/input/recipe/strict"
)

// Networks whose blocks carry a state along the sequence, and hybrids of them
// with attention. Their operations are those of transformers without the kernels
// of mamba-ssm and causal-conv1d.

// mambaMixer is the mixer of Mamba: its fields in config.json by name.
type mambaMixer struct {
	inner, state, kernel string // sizes
	rank                 string // a number, or "auto": a sixteenth of the width
	bias, convolution    setting
	norms                bool // of the step, B and C (Jamba)
}

// describe adds the mixer.
func (x mambaMixer) describe(s scope) {
	hidden := s.size("hidden_size")
	inner, state := s.sizeOr(2, x.inner)*hidden, s.sizeOr(16, x.state)
	rank := (hidden + 15) / 16
	if v, ok := s.find(x.rank); ok && v.Text != "auto" {
		rank = s.size(x.rank)
	}
	bias := s.is(x.bias)
	s.tensor("A_log", inner, state)
	s.tensor("D", inner)
	s.depthwise("conv1d", inner, s.sizeOr(4, x.kernel), s.is(x.convolution))
	s.linear("in_proj", hidden, 2*inner, bias)
	s.linear("x_proj", inner, rank+2*state, false)
	s.linear("dt_proj", rank, inner, true)
	s.linear("out_proj", inner, hidden, bias)
	if x.norms {
		s.norm("dt_layernorm", rank)
		s.norm("b_layernorm", state)
		s.norm("c_layernorm", state)
	}
}

// depthwise adds a convolution of every channel along the sequence.
func (s scope) depthwise(name string, channels, kernel int64, bias bool) Convolution {
	s.tensor(name+".weight", channels, 1, kernel)
	if bias {
		s.tensor(name+".bias", channels)
	}
	return Convolution{Path: s.module(name), Channels: channels, Kernel: kernel}
}

// mamba2Mixer is the mixer of Mamba 2 by the names of its fields.
type mamba2Mixer struct {
	heads, width, groups, state, kernel []string
	chunk                               string   // tokens of a chunk
	defaults                            [4]int64 // of groups, state, kernel and chunk
	inner                               string   // the field with the inner width; empty: heads times width
	expand                              string   // the factor of the inner width if width is "auto"
	bias, output, convolution, norm     setting
}

// describe adds the mixer.
func (x mamba2Mixer) describe(s scope) Attention {
	hidden, heads := s.size("hidden_size"), s.size(x.heads...)
	inner := s.sizeOr(2, x.expand) * hidden
	if x.inner != "" {
		inner = s.sizeOr(inner, x.inner)
	} else if v, ok := s.find(x.width...); ok && v.Text != "auto" {
		inner = heads * s.size(x.width...)
	}
	groups, state := s.sizeOr(x.defaults[0], x.groups...), s.sizeOr(x.defaults[1], x.state...)
	channels := inner + 2*groups*state
	m := &Scan{Path: s.module(""), Heads: heads, Groups: groups, State: state,
		Width: s.divide(inner, cmp.Or(x.inner, x.expand), heads, x.heads[0]),
		Chunk: s.sizeOr(x.defaults[3], x.chunk), Activation: s.activation("silu")}
	s.divide(heads, x.heads[0], groups, x.groups[0])
	s.tensor("dt_bias", heads)
	s.tensor("A_log", heads)
	s.tensor("D", heads)
	m.Convolution = s.depthwise("conv1d", channels, s.sizeOr(x.defaults[2], x.kernel...), s.is(x.convolution))
	m.Project = s.linear("in_proj", hidden, inner+channels+heads, s.is(x.bias))
	if s.is(x.norm) {
		m.Norm = s.norm("norm", inner)
		m.Norm.Width = inner / groups
	}
	return Attention{Scan: m, Output: s.linear("out_proj", inner, hidden, s.is(x.output))}
}

var (
	mamba1 = mambaMixer{inner: "expand", state: "state_size", kernel: "conv_kernel", rank: "time_step_rank",
		bias: setting{field: "use_bias"}, convolution: setting{"use_conv_bias", true}}
	jambaMixer = mambaMixer{inner: "mamba_expand", state: "mamba_d_state", kernel: "mamba_d_conv",
		rank: "mamba_dt_rank", bias: setting{field: "mamba_proj_bias"}, convolution: setting{"mamba_conv_bias", true},
		norms: true}
	mamba2Own = mamba2Mixer{
		heads: []string{"num_heads"}, width: []string{"head_dim"}, groups: []string{"n_groups"},
		state: []string{"state_size"}, kernel: []string{"conv_kernel"}, chunk: "chunk_size",
		defaults: [4]int64{8, 128, 4, 256}, expand: "expand",
		bias: setting{field: "use_bias"}, output: setting{field: "use_bias"},
		convolution: setting{"use_conv_bias", true}, norm: setting{otherwise: true},
	}
	bambaMixer = mamba2Mixer{
		heads: []string{"mamba_n_heads"}, width: []string{"mamba_d_head"}, groups: []string{"mamba_n_groups"},
		state: []string{"mamba_d_state"}, kernel: []string{"mamba_d_conv"}, chunk: "mamba_chunk_size",
		defaults: [4]int64{1, 256, 4, 256},
		expand:   "mamba_expand", bias: setting{field: "mamba_proj_bias"}, output: setting{field: "mamba_proj_bias"},
		convolution: setting{"mamba_conv_bias", true}, norm: setting{otherwise: true},
	}
	nemotronMixer = mamba2Mixer{
		heads: []string{"mamba_num_heads"}, width: []string{"mamba_head_dim"},
		groups: []string{"mamba_n_groups", "n_groups"}, state: []string{"ssm_state_size"},
		kernel: []string{"mamba_d_conv", "conv_kernel"}, chunk: "chunk_size",
		defaults: [4]int64{8, 128, 4, 128}, expand: "expand",
		bias: setting{field: "mamba_proj_bias"}, output: setting{field: "mamba_proj_bias"},
		convolution: setting{"use_conv_bias", true}, norm: setting{otherwise: true},
	}
)

// falconMixer is that of Falcon-H1, which has a width of its own.
func falconMixer() mamba2Mixer {
	x := bambaMixer
	x.inner, x.output, x.norm = "mamba_d_ssm", setting{field: "projectors_bias"}, setting{field: "mamba_rms_norm"}
	return x
}

// mamba returns a network of these mixers only.
func mamba(tied bool, mixer func(s scope)) func(scope) {
	return func(s scope) {
		s.withoutOperations()
		vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
		body := s.in("backbone")
		body.embedding("embeddings", vocabulary, hidden)
		body.repeat("layers", s.size("num_hidden_layers"), func(block scope, _ int64) {
			block.norm("norm", hidden)
			mixer(block.in("mixer"))
		})
		body.norm("norm_f", hidden)
		s.head("lm_head", hidden, vocabulary, tied, "backbone.embeddings.weight")
	}
}

// hybrid returns a decoder without operations, whose last norm has a name of its
// own.
func hybrid(norm string, tied bool, block func(s scope, index int64)) func(scope) {
	return func(s scope) {
		s.withoutOperations()
		vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
		body := s.in(s.body)
		body.embedding("embed_tokens", vocabulary, hidden)
		body.repeat("layers", s.size("num_hidden_layers"), block)
		body.norm(norm, hidden)
		s.head("lm_head", hidden, vocabulary, tied, s.body+".embed_tokens.weight")
	}
}

// hybridDecoder returns a decoder of blocks with operations, whose last norm has a
// name of its own.
func hybridDecoder(norm string, tied bool, block func(s scope, index int64, b *Block)) func(scope) {
	return func(s scope) {
		vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
		body := s.in(s.body)
		stack := s.stack(hidden, Stack{Causal: true,
			TokenEmbedding: body.embedding("embed_tokens", vocabulary, hidden)})
		body.blocks(stack, "layers", s.size("num_hidden_layers"), block)
		stack.FinalNorm = body.norm(norm, hidden)
		s.head("lm_head", hidden, vocabulary, tied, s.body+".embed_tokens.weight")
	}
}

// attentive reports whether a layer has attention, by the list of types under the
// first of the names that the file has.
func (s scope) attentive(index int64, otherwise bool, names ...string) bool {
	v, ok := s.find(names...)
	if !ok {
		return otherwise
	}
	types := s.list(v.name)
	if index >= int64(len(types)) {
		s.fail(v.At, "", "%s has %d elements: expected one for each layer", v.name, len(types))
	}
	switch types[index].Text {
	case "attention", "full_attention":
		return true
	case "mamba", "linear_attention":
		return false
	}
	s.fail(types[index].At, "", `%s has %s: expected "attention" or "mamba"`, v.name, types[index])
	return false
}

func jambaBlock(s scope, index int64) {
	if index%s.sizeOr(8, "attn_layer_period") == s.countOr(4, "attn_layer_offset") {
		attention{keyValueHeads: 8}.describe(s.in("self_attn"))
	} else {
		jambaMixer.describe(s.in("mamba"))
	}
	if s.sizeOr(16, "num_experts") > 1 &&
		index%s.sizeOr(2, "expert_layer_period") == s.countOr(1, "expert_layer_offset") {
		experts{module: "feed_forward", held: "feed_forward", router: "router", heldRouter: "router",
			inner: "intermediate_size"}.describe(s)
	} else {
		gated(s.in("feed_forward"), s.size("intermediate_size"), false)
	}
	s.norm("input_layernorm", s.size("hidden_size"))
	s.norm("pre_ff_layernorm", s.size("hidden_size"))
}

// bambaLayers reports whether a layer of Bamba has attention.
func bambaLayers(s scope, index int64) bool {
	listed := slices.ContainsFunc(s.list("attn_layer_indices"), func(v *strict.Value) bool {
		return v.Text == decimal(index)
	})
	return s.attentive(index, listed, "layers_block_type", "layer_types")
}

func bambaBlock(s scope, index int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	b.FeedForward = gated(s.in("feed_forward"), s.size("intermediate_size"), s.flagOr(false, "mlp_bias"))
	b.AttentionNorm = s.norm("input_layernorm", s.size("hidden_size"))
	b.FeedForwardNorm = s.norm("pre_ff_layernorm", s.size("hidden_size"))
	if bambaLayers(s, index) {
		b.Attention = attention{keyValueHeads: 8, inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
		b.Attention.Joined, b.Attention.Rotary = true, s.rotary(0.5)
	} else {
		b.Attention = bambaMixer.describe(s.in("mamba"))
	}
}

// falconH1 multiplies by constants of its own nearly everywhere.
func falconH1(s scope) {
	hybridDecoder("final_layernorm", false, falconH1Block)(s)
	s.network.Stacks[0].ScalesEmbedding, s.network.Head.Scaled = true, true
}

// falconH1Block has attention and a mixer side by side.
func falconH1Block(s scope, _ int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	b.FeedForward = gated(s.in("feed_forward"), s.size("intermediate_size"), s.flagOr(false, "mlp_bias"))
	b.FeedForward.Scales = true
	b.Attention = falconMixer().describe(s.in("mamba"))
	b.Attention.Scan.ScalesInput = true
	b.Attention.Scan.GatesLast = s.flagOr(true, "mamba_norm_before_gate")
	beside := attention{keyValueHeads: 8, inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	beside.ScalesKeys = true
	b.Beside = &beside
	b.AttentionNorm = s.norm("input_layernorm", s.size("hidden_size"))
	b.FeedForwardNorm = s.norm("pre_ff_layernorm", s.size("hidden_size"))
}

// graniteHybrid multiplies embeddings, halves of blocks and logits by constants.
func graniteHybrid(s scope) {
	hybridDecoder("norm", false, graniteHybridBlock)(s)
	s.network.Stacks[0].ScalesEmbedding, s.network.Head.Scaled = true, true
}

func graniteHybridBlock(s scope, index int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	blockNorms(s, b)
	b.ScalesHalves = true
	if s.countOr(8, "num_local_experts") > 0 {
		b.FeedForward = graniteExperts.with(func(e *experts) { e.shared = graniteShared }).describe(s)
	} else {
		b.FeedForward = graniteShared(s)
	}
	if s.attentive(index, false, "layer_types", "layers_block_type") {
		b.Attention = attention{inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
		if s.textOr("", "position_embedding_type") != "rope" {
			b.Attention.Rotary = 0
		}
	} else {
		b.Attention = bambaMixer.describe(s.in("mamba"))
	}
}

// nemotronH is Nemotron-H: every layer is a mixer, attention, or a feed-forward
// network of one kind.
func nemotronH(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
	body := s.in("backbone")
	stack := s.stack(hidden, Stack{TokenEmbedding: body.embedding("embeddings", vocabulary, hidden), Causal: true})
	kinds := s.nemotronLayers()
	body.blocks(stack, "layers", int64(len(kinds)), func(block scope, index int64, b *Block) {
		norm := block.norm("norm", hidden)
		norm.Kind = RMSNormF32
		mixer, bias := block.in("mixer"), s.flagOr(false, "mlp_bias")
		switch kinds[index] {
		case "mamba", "linear_attention":
			b.AttentionNorm, b.Attention = norm, nemotronMixer.describe(mixer)
			b.Attention.Scan.Activation = s.textOr("silu", "mamba_hidden_act")
		case "attention", "full_attention":
			bias := s.flagOr(false, "attention_bias")
			b.AttentionNorm = norm
			b.Attention = attention{keyValueHeads: 8, width: 128, inputBias: bias, outputBias: bias}.describe(mixer)
			b.Attention.Rotary = 0
		case "mlp":
			b.FeedForwardNorm = norm
			b.FeedForward = upAndDown("up_proj", "down_proj")(mixer, s.size("intermediate_size"), bias)
			b.FeedForward.Activation = s.textOr("relu2", "mlp_hidden_act")
		case "moe":
			b.FeedForwardNorm, b.FeedForward = norm, nemotronExperts(block, bias)
		default:
			s.fail(0, "", `the layers have type %q: expected "mamba", "attention", "mlp" or "moe"`, kinds[index])
		}
	})
	stack.FinalNorm = body.norm("norm_f", hidden)
	stack.FinalNorm.Kind = RMSNormF32
	s.head("lm_head", hidden, vocabulary, false, "backbone.embeddings.weight")
	s.network.Head.Wide, s.network.Body, s.network.HeldBody = true, "backbone", "model"
}

// nemotronLayers returns the types of the layers: a list, or a text with a
// character for each layer.
func (s scope) nemotronLayers() []string {
	var kinds []string
	for _, name := range []string{"layers_block_type", "layer_types"} {
		if types := s.list(name); types != nil {
			for _, v := range types {
				kinds = append(kinds, v.Text)
			}
			return kinds
		}
	}
	letters := map[rune]string{'M': "mamba", 'E': "moe", '*': "attention", '-': "mlp"}
	for _, letter := range s.textOr("", "hybrid_override_pattern") {
		kind, ok := letters[letter]
		if !ok {
			v, _ := s.find("hybrid_override_pattern")
			s.fail(v.At, "", "hybrid_override_pattern has %q: expected M, E, * or -", letter)
		}
		kinds = append(kinds, kind)
	}
	if kinds == nil {
		s.fail(0, "add the types of the layers", "layers_block_type is missing")
	}
	return kinds
}

// nemotronExperts adds experts of two projections, which may compute in a latent
// space.
func nemotronExperts(block scope, bias bool) FeedForward {
	s := block.in("mixer")
	hidden, inner := s.size("hidden_size"), s.size("moe_intermediate_size")
	count, width := s.size("n_routed_experts", "num_local_experts"), s.sizeOr(hidden, "moe_latent_size")
	activation := s.textOr("relu2", "mlp_hidden_act")
	s.refuseRouterLoss()
	m := &Mixture{Path: block.module("mixer"), Ungated: true, Routing: SigmoidOfAll, WideRouter: true, Rescaled: true,
		WideWeights: true, Normalized: s.flagOr(true, "norm_topk_prob"),
		Chosen: min(count, s.sizeOr(2, "num_experts_per_tok"))}
	s.repeat("experts", count, func(expert scope, _ int64) {
		m.Experts = append(m.Experts, FeedForward{Up: expert.linear("up_proj", width, inner, false),
			Down: expert.linear("down_proj", inner, width, false), Inner: inner, Width: width, Activation: activation})
	})
	m.Router = s.linear("gate", hidden, count, false)
	shared := upAndDown("up_proj", "down_proj")(s.in("shared_experts"),
		s.size("moe_shared_expert_intermediate_size"), bias)
	shared.Activation = activation
	m.Shared = &shared
	if width != hidden {
		m.Narrow, m.Widen = s.linear("fc1_latent_proj", hidden, width, bias),
			s.linear("fc2_latent_proj", width, hidden, bias)
	}
	return FeedForward{Mixture: m}
}

// rwkv is RWKV 4.
func rwkv(s scope) {
	s.withoutOperations()
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
	inner, attended := s.sizeOr(4*hidden, "intermediate_size"), s.sizeOr(hidden, "attention_hidden_size")
	body := s.in("rwkv")
	body.embedding("embeddings", vocabulary, hidden)
	body.repeat("blocks", s.size("num_hidden_layers"), func(block scope, index int64) {
		if index == 0 {
			block.layerNorm("pre_ln", hidden)
		}
		block.layerNorm("ln1", hidden)
		block.layerNorm("ln2", hidden)
		a, f := block.in("attention"), block.in("feed_forward")
		a.tensor("time_decay", attended)
		a.tensor("time_first", attended)
		for _, name := range []string{"time_mix_key", "time_mix_value", "time_mix_receptance"} {
			a.tensor(name, 1, 1, hidden)
		}
		for _, name := range []string{"key", "value", "receptance"} {
			a.linear(name, hidden, attended, false)
		}
		a.linear("output", attended, hidden, false)
		f.tensor("time_mix_key", 1, 1, hidden)
		f.tensor("time_mix_receptance", 1, 1, hidden)
		f.linear("key", hidden, inner, false)
		f.linear("receptance", hidden, hidden, false)
		f.linear("value", inner, hidden, false)
	})
	body.layerNorm("ln_out", hidden)
	s.head("head", hidden, vocabulary, false, "rwkv.embeddings.weight")
}
