package model

// decoder returns the structure that the descendants of Llama share: an
// embedding, blocks, a norm and a head. tied is the default of the class for
// tie_word_embeddings.
func decoder(tied bool, block func(s scope, index int64, b *Block)) func(scope) {
	return func(s scope) {
		vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
		body := s.in(s.body)
		stack := s.stack(hidden, Stack{
			TokenEmbedding: body.embedding("embed_tokens", vocabulary, hidden),
			Causal:         true,
		})
		body.blocks(stack, "layers", s.size("num_hidden_layers"), block)
		stack.FinalNorm = body.norm("norm", hidden)
		s.head("lm_head", hidden, vocabulary, tied, s.in(s.body).module("embed_tokens.weight"))
	}
}

func llamaBlock(s scope, _ int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	b.Attention = attention{inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), s.flagOr(false, "mlp_bias"))
	blockNorms(s, b)
}

func mistralBlock(s scope, _ int64, b *Block) {
	b.Attention = attention{keyValueHeads: 8}.describe(s.in("self_attn"))
	b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s, b)
}

func mixtralBlock(s scope, _ int64, b *Block) {
	b.Attention = attention{keyValueHeads: 8}.describe(s.in("self_attn"))
	b.FeedForward = mixtralExperts.describe(s)
	blockNorms(s, b)
}

func qwen2Block(s scope, _ int64, b *Block) {
	b.Attention = attention{keyValueHeads: 32, inputBias: true}.describe(s.in("self_attn"))
	b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s, b)
}

func qwen2MoeBlock(s scope, index int64, b *Block) {
	b.Attention = attention{keyValueHeads: 16, inputBias: s.flagOr(true, "qkv_bias")}.describe(s.in("self_attn"))
	mlp := s.in("mlp")
	if qwenSparse(s, index) {
		b.FeedForward = experts{chosen: 4, normalized: setting{field: "norm_topk_prob"}, auxiliary: true}.describe(s)
		shareExpert(mlp, b.FeedForward.Mixture)
	} else {
		b.FeedForward = gated(mlp, s.size("intermediate_size"), false)
	}
	blockNorms(s, b)
}

func qwen3Block(s scope, _ int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	b.Attention = attention{
		keyValueHeads: 32,
		width:         128,
		inputBias:     bias,
		outputBias:    bias,
		norms:         true,
	}.describe(s.in("self_attn"))
	b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s, b)
}

func qwen3MoeBlock(s scope, index int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	b.Attention = attention{
		keyValueHeads: 4,
		inputBias:     bias,
		outputBias:    bias,
		norms:         true,
	}.describe(s.in("self_attn"))
	if qwenSparse(s, index) {
		b.FeedForward = experts{count: []string{"num_experts", "num_local_experts"}, chosen: 8,
			normalized: setting{field: "norm_topk_prob"}, auxiliary: true}.describe(s)
	} else {
		b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), false)
	}
	blockNorms(s, b)
}

func qwen3NextBlock(s scope, index int64, b *Block) {
	qwen3NextAttention(s, index, b, deltaNet)
	mlp := s.in("mlp")
	if qwenSparse(s, index) {
		b.FeedForward = experts{chosen: 10, normalized: setting{"norm_topk_prob", true}, auxiliary: true}.describe(s)
		shareExpert(mlp, b.FeedForward.Mixture)
	} else {
		b.FeedForward = gated(mlp, s.size("intermediate_size"), false)
	}
	qwen3NextNorms(s, b)
}

// qwen3NextAttention adds full attention or the delta rule.
func qwen3NextAttention(s scope, index int64, b *Block, delta func(scope) Attention) {
	if s.layerType(index) == "full_attention" {
		bias := s.flagOr(false, "attention_bias")
		b.Attention = attention{
			keyValueHeads: 2,
			width:         256,
			inputBias:     bias,
			outputBias:    bias,
			norms:         true,
			gate:          true,
		}.describe(s.in("self_attn"))
		b.Attention.Joined, b.Attention.Rotary = true, s.rotary(0.25)
	} else {
		b.Attention = delta(s.in("linear_attn"))
	}
}

// qwen3NextNorms adds the norms of a block, which multiply by their weight in fp32.
func qwen3NextNorms(s scope, b *Block) {
	blockNorms(s, b)
	for _, norm := range []*Norm{&b.AttentionNorm, &b.FeedForwardNorm, &b.Attention.QueryNorm, &b.Attention.KeyNorm} {
		if norm.Kind != NoNorm {
			norm.Kind = RMSNormF32
		}
	}
}

// qwen3Next returns a decoder whose norms multiply by their weight in fp32.
func qwen3Next(block func(s scope, index int64, b *Block)) func(scope) {
	describe := decoder(false, block)
	return func(s scope) {
		describe(s)
		s.network.Stacks[0].FinalNorm.Kind = RMSNormF32
	}
}

func qwen35Block(s scope, index int64, b *Block) {
	qwen3NextAttention(s, index, b, splitDeltaNet)
	b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), false)
	qwen3NextNorms(s, b)
}

func qwen35MoEBlock(s scope, index int64, b *Block) {
	qwen3NextAttention(s, index, b, splitDeltaNet)
	b.FeedForward = experts{chosen: 8, normalized: setting{otherwise: true}, auxiliary: true}.describe(s)
	shareExpert(s.in("mlp"), b.FeedForward.Mixture)
	qwen3NextNorms(s, b)
}

// shareExpert adds the shared expert, which every token passes, and its gate.
func shareExpert(mlp scope, m *Mixture) {
	shared := gated(mlp.in("shared_expert"), mlp.size("shared_expert_intermediate_size"), false)
	m.Shared = &shared
	m.SharedGate = mlp.linear("shared_expert_gate", mlp.size("hidden_size"), 1, false)
}

// layerType returns layer_types[index]. Its default follows
// full_attention_interval: every fourth layer has full attention.
func (c *config) layerType(index int64) string {
	types := c.list("layer_types")
	if types == nil {
		if (index+1)%c.sizeOr(4, "full_attention_interval") == 0 {
			return "full_attention"
		}
		return "linear_attention"
	}
	if index >= int64(len(types)) {
		c.fail(c.fields["layer_types"].Value.At, "", "layer_types has %d elements: expected one for each layer",
			len(types))
	}
	name := types[index].Text
	if name != "full_attention" && name != "linear_attention" {
		c.fail(types[index].At, "", `layer_types has %s: expected "full_attention" or "linear_attention"`,
			types[index])
	}
	return name
}

// qwenSparse reports whether a layer has experts.
func qwenSparse(s scope, index int64) bool {
	for _, v := range s.list("mlp_only_layers") {
		if v.Kind != '0' {
			s.fail(v.At, "", "mlp_only_layers has %s: expected the number of a layer", v)
		}
		if v.Text == decimal(index) {
			return false
		}
	}
	return s.countOr(1, "num_experts", "num_local_experts") > 0 && (index+1)%s.sizeOr(1, "decoder_sparse_step") == 0
}

// gemmaDecoder returns a decoder with scaled embeddings, whose norms multiply
// by their weight in fp32.
func gemmaDecoder(soft bool, block func(s scope, index int64, b *Block)) func(scope) {
	describe := decoder(true, block)
	return func(s scope) {
		describe(s)
		stack := s.network.Stacks[0]
		stack.ScalesEmbedding, stack.FinalNorm.Kind = true, RMSNormF32
		s.network.Head.Soft = soft
	}
}

func gemmaBlock(s scope, _ int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	b.Attention = attention{
		keyValueHeads: 16,
		width:         256,
		inputBias:     bias,
		outputBias:    bias,
	}.describe(s.in("self_attn"))
	b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), false)
	b.FeedForward.Activation = s.activation("gelu_pytorch_tanh")
	blockNorms(s, b)
	b.AttentionNorm.Kind, b.FeedForwardNorm.Kind = RMSNormF32, RMSNormF32
}

func gemma2Block(s scope, index int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	b.Attention = attention{keyValueHeads: 4, width: 256, inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	b.Attention.Soft = !s.isNull("attn_logit_softcapping")
	if index%2 == 0 {
		b.Attention.Window = s.sizeOr(4096, "sliding_window")
	}
	b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), false)
	b.FeedForward.Activation = s.activation("gelu_pytorch_tanh")
	blockNorms(s, b)
	b.AfterAttention = b.FeedForwardNorm
	b.FeedForwardNorm = s.norm("pre_feedforward_layernorm", s.size("hidden_size"))
	b.AfterFeedForward = s.norm("post_feedforward_layernorm", s.size("hidden_size"))
	for _, norm := range []*Norm{&b.AttentionNorm, &b.AfterAttention, &b.FeedForwardNorm, &b.AfterFeedForward} {
		norm.Kind = RMSNormF32
	}
}

func phi3Block(s scope, _ int64, b *Block) {
	b.Attention = attention{fused: true}.describe(s.in("self_attn"))
	b.Attention.Joined = true
	hidden, inner := s.size("hidden_size"), s.size("intermediate_size")
	mlp := s.in("mlp")
	b.FeedForward = FeedForward{
		GateUp: mlp.linear("gate_up_proj", hidden, 2*inner, false),
		Down:   mlp.linear("down_proj", inner, hidden, false),
		Inner:  inner, Activation: s.activation("silu"),
	}
	blockNorms(s, b)
}

func deepseekV2Block(s scope, index int64, b *Block) {
	e := *deepseekExperts.with(func(e *experts) {
		e.chosen, e.routing, e.normalized = s.size("num_experts_per_tok"), SoftmaxOfAll, setting{}
	})
	deepseekBlock(s, index, b, 0, e, s.flagOr(false, "mlp_bias"))
}

func deepseekV3Block(s scope, index int64, b *Block) {
	deepseekBlock(s, index, b, 3, deepseekExperts, false)
}

// deepseekBlock omits tensors of the published files that are not trained with
// the model: the bias that balances the experts (a buffer), the scales of the
// fp8 weights, and the module that predicts further tokens.
func deepseekBlock(s scope, index int64, b *Block, dense int64, e experts, bias bool) {
	b.Attention = latentAttention(s.in("self_attn"))
	deepseekFeedForward(s, index, b, dense, e, bias)
	blockNorms(s, b)
}

// deepseekFeedForward adds experts after so many dense layers.
func deepseekFeedForward(s scope, index int64, b *Block, dense int64, e experts, bias bool) {
	if index < s.countOr(dense, "first_k_dense_replace") {
		b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), bias)
	} else {
		e.shared = func(block scope) FeedForward {
			inner := s.size("moe_intermediate_size") * s.size("n_shared_experts")
			return gated(block.in("mlp").in("shared_experts"), inner, bias)
		}
		b.FeedForward = e.describe(s)
	}
}

// blockNorms adds the norms before the attention and the feed-forward network.
func blockNorms(s scope, b *Block) {
	b.AttentionNorm = s.norm("input_layernorm", s.size("hidden_size"))
	b.FeedForwardNorm = s.norm("post_attention_layernorm", s.size("hidden_size"))
}

// attention is grouped-query attention. Its fields differ between classes; the
// sizes come from config.json.
type attention struct {
	keyValueHeads int64 // the default; 0 = the number of heads
	width         int64 // the default for a head; 0 = hidden_size/heads
	inputBias     bool  // of the projections to queries, keys and values
	outputBias    bool
	fused         bool // queries, keys and values in one projection
	norms         bool // of the queries and of the keys
	gate          bool // the projection to queries also computes an output gate
}

// sizes returns the numbers of heads and the width of one.
func (a attention) sizes(s scope) (heads, groups, width int64) {
	hidden := s.size("hidden_size")
	heads = s.size("num_attention_heads")
	width = s.sizeOr(a.width, "head_dim")
	if width == 0 {
		width = s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	}
	groups = heads
	if a.keyValueHeads > 0 && !s.isNull("num_key_value_heads") {
		groups = a.keyValueHeads
	}
	groups = s.sizeOr(groups, "num_key_value_heads")
	s.divide(heads, "num_attention_heads", groups, "num_key_value_heads")
	return heads, groups, width
}

func (a attention) describe(s scope) Attention {
	hidden := s.size("hidden_size")
	heads, groups, width := a.sizes(s)
	d := Attention{
		Heads: heads, KeyValueHeads: groups, Width: width, ValueWidth: width, Gated: a.gate, WideSoftmax: true,
		Rotary:  s.shareOr(1, "partial_rotary_factor"),
		Dropout: s.shareOr(0, "attention_dropout"),
	}
	if s.flagOr(true, "use_sliding_window") {
		d.Window = s.countOr(0, "sliding_window")
	}
	queries := heads * width
	if a.gate {
		queries *= 2
	}
	if a.fused {
		d.Output = s.linear("o_proj", heads*width, hidden, a.outputBias)
		d.Fused = s.linear("qkv_proj", hidden, queries+2*groups*width, a.inputBias)
	} else {
		d.Query = s.linear("q_proj", hidden, queries, a.inputBias)
		d.Key = s.linear("k_proj", hidden, groups*width, a.inputBias)
		d.Value = s.linear("v_proj", hidden, groups*width, a.inputBias)
		d.Output = s.linear("o_proj", heads*width, hidden, a.outputBias)
	}
	if a.norms {
		d.QueryNorm = s.norm("q_norm", width)
		d.KeyNorm = s.norm("k_norm", width)
	}
	return d
}

// latentAttention adds DeepSeek's attention. Queries (unless q_lora_rank is
// null) go through a low-rank projection, and so do keys with values.
func latentAttention(s scope) Attention {
	hidden, heads := s.size("hidden_size"), s.size("num_attention_heads")
	rank, rotary, plain, values := s.size("kv_lora_rank"), s.size("qk_rope_head_dim"), s.size("qk_nope_head_dim"),
		s.size("v_head_dim")
	bias := s.flagOr(false, "attention_bias")
	queries := heads * (plain + rotary)
	d := Attention{
		Heads:         heads,
		KeyValueHeads: heads,
		Joined:        true,
		Width:         plain + rotary,
		ValueWidth:    values,
		WideSoftmax:   true,
		Dropout:       s.shareOr(0, "attention_dropout"),
	}
	l := &Latent{Rank: rank, Rotated: rotary}
	if s.isNull("q_lora_rank") {
		d.Query = s.linear("q_proj", hidden, queries, false)
	} else {
		l.QueryRank = s.size("q_lora_rank")
		l.QueryDown = s.linear("q_a_proj", hidden, l.QueryRank, bias)
		l.QueryNorm = s.norm("q_a_layernorm", l.QueryRank)
		l.QueryUp = s.linear("q_b_proj", l.QueryRank, queries, false)
	}
	l.Down = s.linear("kv_a_proj_with_mqa", hidden, rank+rotary, bias)
	l.Norm = s.norm("kv_a_layernorm", rank)
	l.Up = s.linear("kv_b_proj", rank, heads*(plain+values), false)
	d.Output = s.linear("o_proj", heads*values, hidden, bias)
	d.Latent = l
	return d
}

// deltaNet adds the linear attention of Qwen3-Next.
func deltaNet(s scope) Attention {
	return gatedDelta(s, func(d *Delta, hidden, keys, values int64) {
		d.Project = s.linear("in_proj_qkvz", hidden, 2*keys+2*values, false)
		d.Gates = []string{s.linear("in_proj_ba", hidden, 2*d.ValueHeads, false)}
	}, nil)
}

// splitDeltaNet adds that of Qwen3.5, which has four projections.
func splitDeltaNet(s scope) Attention {
	return gatedDelta(s, nil, func(d *Delta, hidden, keys, values int64) {
		d.Project = s.linear("in_proj_qkv", hidden, 2*keys+values, false)
		d.OutputGate = s.linear("in_proj_z", hidden, values, false)
		d.Gates = []string{s.linear("in_proj_b", hidden, d.ValueHeads, false),
			s.linear("in_proj_a", hidden, d.ValueHeads, false)}
	})
}

// gatedDelta adds linear attention with the gated delta rule. One of before and
// after adds the projections, before or after the norm and the output.
func gatedDelta(s scope, before, after func(d *Delta, hidden, keys, values int64)) Attention {
	hidden, heads := s.size("hidden_size"), s.size("linear_num_value_heads")
	d := &Delta{
		KeyHeads: s.size("linear_num_key_heads"), KeyWidth: s.size("linear_key_head_dim"),
		ValueHeads: heads, ValueWidth: s.size("linear_value_head_dim"),
	}
	keys, values := d.KeyHeads*d.KeyWidth, heads*d.ValueWidth
	s.tensor("dt_bias", heads)
	s.tensor("A_log", heads)
	d.Path = s.module("")
	d.Convolution = s.depthwise("conv1d", 2*keys+values, s.size("linear_conv_kernel_dim"), false)
	if before != nil {
		before(d, hidden, keys, values)
	}
	d.Norm = s.norm("norm", d.ValueWidth)
	output := s.linear("out_proj", values, hidden, false)
	if after != nil {
		after(d, hidden, keys, values)
	}
	return Attention{Heads: heads, KeyValueHeads: heads, Width: d.KeyWidth, ValueWidth: d.ValueWidth, Delta: d,
		Output: output}
}

// gated adds a feed-forward network of three projections.
func gated(s scope, inner int64, bias bool) FeedForward {
	hidden := s.size("hidden_size")
	return FeedForward{
		Gate:  s.linear("gate_proj", hidden, inner, bias),
		Up:    s.linear("up_proj", hidden, inner, bias),
		Down:  s.linear("down_proj", inner, hidden, bias),
		Inner: inner, Activation: s.activation("silu"),
	}
}
