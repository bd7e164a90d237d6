package model

// decoder is the frame that the descendants of Llama share: an embedding,
// blocks, a norm and a head. tied is whether the class ties its word
// embeddings where config.json does not say.
func decoder(tied bool, block func(s scope, index int64)) func(scope) {
	return func(s scope) {
		vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
		body := s.in("model")
		body.embedding("embed_tokens", vocabulary, hidden)
		body.repeat("layers", s.size("num_hidden_layers"), block)
		body.norm("norm", hidden)
		s.head("lm_head", hidden, vocabulary, tied, "model.embed_tokens.weight")
	}
}

func llamaBlock(s scope, _ int64) {
	bias := s.flagOr(false, "attention_bias")
	attention{inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	gated(s.in("mlp"), s.size("intermediate_size"), s.flagOr(false, "mlp_bias"))
	blockNorms(s)
}

func mistralBlock(s scope, _ int64) {
	attention{keyValueHeads: 8}.describe(s.in("self_attn"))
	gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s)
}

func mixtralBlock(s scope, _ int64) {
	attention{keyValueHeads: 8}.describe(s.in("self_attn"))
	hidden, inner, experts := s.size("hidden_size"), s.size("intermediate_size"), s.size("num_local_experts", "num_experts")
	mixture := s.in("block_sparse_moe")
	mixture.linear("gate", hidden, experts, false)
	mixture.repeat("experts", experts, func(expert scope, _ int64) {
		expert.linear("w1", hidden, inner, false)
		expert.linear("w2", inner, hidden, false)
		expert.linear("w3", hidden, inner, false)
	})
	blockNorms(s)
}

func qwen2Block(s scope, _ int64) {
	attention{keyValueHeads: 32, inputBias: true}.describe(s.in("self_attn"))
	gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s)
}

func qwen3Block(s scope, _ int64) {
	bias := s.flagOr(false, "attention_bias")
	attention{keyValueHeads: 32, width: 128, inputBias: bias, outputBias: bias, norms: true}.describe(s.in("self_attn"))
	gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s)
}

func qwen3MoeBlock(s scope, index int64) {
	bias := s.flagOr(false, "attention_bias")
	attention{keyValueHeads: 4, inputBias: bias, outputBias: bias, norms: true}.describe(s.in("self_attn"))
	if qwenSparse(s, index) {
		mixture(s.in("mlp"), s.size("num_experts", "num_local_experts"))
	} else {
		gated(s.in("mlp"), s.size("intermediate_size"), false)
	}
	blockNorms(s)
}

func qwen3NextBlock(s scope, index int64) {
	if s.layerType(index) == "full_attention" {
		bias := s.flagOr(false, "attention_bias")
		attention{keyValueHeads: 2, width: 256, inputBias: bias, outputBias: bias, norms: true, gate: true}.describe(s.in("self_attn"))
	} else {
		deltaNet(s.in("linear_attn"))
	}
	mlp := s.in("mlp")
	if qwenSparse(s, index) {
		mixture(mlp, s.size("num_experts"))
		gated(mlp.in("shared_expert"), s.size("shared_expert_intermediate_size"), false)
		mlp.linear("shared_expert_gate", s.size("hidden_size"), 1, false)
	} else {
		gated(mlp, s.size("intermediate_size"), false)
	}
	blockNorms(s)
}

// layerType is layer_types[index], or what full_attention_interval makes it:
// every fourth layer has full attention.
func (c *config) layerType(index int64) string {
	types := c.list("layer_types")
	if types == nil {
		if (index+1)%c.sizeOr(4, "full_attention_interval") == 0 {
			return "full_attention"
		}
		return "linear_attention"
	}
	if index >= int64(len(types)) {
		c.fail(c.fields["layer_types"].at, "", "layer_types has %d elements: one for each layer was expected", len(types))
		return ""
	}
	name, _ := types[index].text()
	if name != "full_attention" && name != "linear_attention" {
		c.fail(types[index].at, "", `layer_types: "full_attention" or "linear_attention" was expected, and %s is here`, types[index].shown())
	}
	return name
}

// qwenSparse says whether a layer has experts.
func qwenSparse(s scope, index int64) bool {
	for _, v := range s.list("mlp_only_layers") {
		if v.raw.Kind() != '0' {
			s.fail(v.at, "", "mlp_only_layers: the number of a layer was expected, and %s is here", v.shown())
		}
		if string(v.raw) == decimal(index) {
			return false
		}
	}
	return s.countOr(1, "num_experts", "num_local_experts") > 0 && (index+1)%s.sizeOr(1, "decoder_sparse_step") == 0
}

func gemmaBlock(s scope, _ int64) {
	bias := s.flagOr(false, "attention_bias")
	attention{keyValueHeads: 16, width: 256, inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s)
}

func gemma2Block(s scope, _ int64) {
	bias := s.flagOr(false, "attention_bias")
	attention{keyValueHeads: 4, width: 256, inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s)
	s.norm("pre_feedforward_layernorm", s.size("hidden_size"))
	s.norm("post_feedforward_layernorm", s.size("hidden_size"))
}

func phi3Block(s scope, _ int64) {
	attention{fused: true}.describe(s.in("self_attn"))
	hidden, inner := s.size("hidden_size"), s.size("intermediate_size")
	mlp := s.in("mlp")
	mlp.linear("gate_up_proj", hidden, 2*inner, false)
	mlp.linear("down_proj", inner, hidden, false)
	blockNorms(s)
}

func deepseekV2Block(s scope, index int64) {
	deepseekBlock(s, index, 0, s.flagOr(false, "mlp_bias"))
}

func deepseekV3Block(s scope, index int64) { deepseekBlock(s, index, 3, false) }

// deepseekBlock leaves out what is in the published files and is not trained
// with the model: the bias that balances the experts (a buffer), the scales of
// the fp8 weights, and the module that predicts further tokens.
func deepseekBlock(s scope, index, dense int64, bias bool) {
	latentAttention(s.in("self_attn"))
	mlp := s.in("mlp")
	if index < s.countOr(dense, "first_k_dense_replace") {
		gated(mlp, s.size("intermediate_size"), bias)
	} else {
		mixture(mlp, s.size("n_routed_experts"))
		gated(mlp.in("shared_experts"), s.size("moe_intermediate_size")*s.size("n_shared_experts"), bias)
	}
	blockNorms(s)
}

// blockNorms are the norms before the attention and before the feed-forward
// network.
func blockNorms(s scope) {
	s.norm("input_layernorm", s.size("hidden_size"))
	s.norm("post_attention_layernorm", s.size("hidden_size"))
}

// attention is attention with grouped queries. Its fields are what differs
// from class to class; the sizes come from config.json.
type attention struct {
	keyValueHeads int64 // where config.json does not say; 0: as many as there are heads
	width         int64 // of a head where config.json does not say; 0: hidden_size/heads
	inputBias     bool  // of the projections to queries, keys and values
	outputBias    bool
	fused         bool // queries, keys and values in one projection
	norms         bool // of the queries and of the keys
	gate          bool // the projection to queries makes an output gate too
}

func (a attention) describe(s scope) {
	hidden, heads := s.size("hidden_size"), s.size("num_attention_heads")
	width := s.sizeOr(a.width, "head_dim")
	if width == 0 {
		width = s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	}
	groups := heads
	if a.keyValueHeads > 0 && !s.isNull("num_key_value_heads") {
		groups = a.keyValueHeads
	}
	groups = s.sizeOr(groups, "num_key_value_heads")
	s.divide(heads, "num_attention_heads", groups, "num_key_value_heads")

	queries := heads * width
	if a.gate {
		queries *= 2
	}
	if a.fused {
		s.linear("o_proj", heads*width, hidden, a.outputBias)
		s.linear("qkv_proj", hidden, queries+2*groups*width, a.inputBias)
	} else {
		s.linear("q_proj", hidden, queries, a.inputBias)
		s.linear("k_proj", hidden, groups*width, a.inputBias)
		s.linear("v_proj", hidden, groups*width, a.inputBias)
		s.linear("o_proj", heads*width, hidden, a.outputBias)
	}
	if a.norms {
		s.norm("q_norm", width)
		s.norm("k_norm", width)
	}
}

// latentAttention is DeepSeek's: queries (unless q_lora_rank is null) and keys
// with values go through a projection of low rank.
func latentAttention(s scope) {
	hidden, heads := s.size("hidden_size"), s.size("num_attention_heads")
	rank, rotary, plain, values := s.size("kv_lora_rank"), s.size("qk_rope_head_dim"), s.size("qk_nope_head_dim"), s.size("v_head_dim")
	bias := s.flagOr(false, "attention_bias")
	queries := heads * (plain + rotary)
	if s.isNull("q_lora_rank") {
		s.linear("q_proj", hidden, queries, false)
	} else {
		queryRank := s.size("q_lora_rank")
		s.linear("q_a_proj", hidden, queryRank, bias)
		s.norm("q_a_layernorm", queryRank)
		s.linear("q_b_proj", queryRank, queries, false)
	}
	s.linear("kv_a_proj_with_mqa", hidden, rank+rotary, bias)
	s.norm("kv_a_layernorm", rank)
	s.linear("kv_b_proj", rank, heads*(plain+values), false)
	s.linear("o_proj", heads*values, hidden, bias)
}

// deltaNet is the linear attention of Qwen3-Next.
func deltaNet(s scope) {
	hidden, heads := s.size("hidden_size"), s.size("linear_num_value_heads")
	keys := s.size("linear_num_key_heads") * s.size("linear_key_head_dim")
	values := heads * s.size("linear_value_head_dim")
	s.tensor("dt_bias", heads)
	s.tensor("A_log", heads)
	s.tensor("conv1d.weight", 2*keys+values, 1, s.size("linear_conv_kernel_dim"))
	s.linear("in_proj_qkvz", hidden, 2*keys+2*values, false)
	s.linear("in_proj_ba", hidden, 2*heads, false)
	s.norm("norm", s.size("linear_value_head_dim"))
	s.linear("out_proj", values, hidden, false)
}

// gated is the feed-forward network of three projections.
func gated(s scope, inner int64, bias bool) {
	hidden := s.size("hidden_size")
	s.linear("gate_proj", hidden, inner, bias)
	s.linear("up_proj", hidden, inner, bias)
	s.linear("down_proj", inner, hidden, bias)
}

// mixture is a router and the experts that it chooses from.
func mixture(s scope, experts int64) {
	inner := s.size("moe_intermediate_size")
	s.linear("gate", s.size("hidden_size"), experts, false)
	s.repeat("experts", experts, func(expert scope, _ int64) { gated(expert, inner, false) })
}
