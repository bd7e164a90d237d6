package model

import (
	"slices"

	"plimsoll/internal/input/recipe/strict"
)

// Decoders with operations of their own, whose parameters alone are planned.

// lfm2 is LFM2: short convolutions and attention. Its last norm has the name of
// the embedding's.
func lfm2(feedForward func(s scope, index int64) FeedForward) func(scope) {
	return func(s scope) {
		if v, ok := s.find("tie_embedding"); ok {
			s.fields["tie_word_embeddings"] = strict.Member{Name: v.name, Value: v.Value}
		}
		hybridDecoder("embedding_norm", true, func(block scope, index int64, b *Block) {
			hidden, bias := s.size("hidden_size"), s.flagOr(false, "conv_bias")
			if block.lfm2Attentive(index) {
				a := block.in("self_attn")
				d := attention{keyValueHeads: 8}
				heads, groups, width := d.sizes(a)
				b.Attention = Attention{Heads: heads, KeyValueHeads: groups, Width: width, ValueWidth: width,
					Rotary: 1, WideSoftmax: true}
				b.Attention.Query = a.linear("q_proj", hidden, heads*width, false)
				b.Attention.Key = a.linear("k_proj", hidden, groups*width, false)
				b.Attention.Value = a.linear("v_proj", hidden, groups*width, false)
				b.Attention.Output = a.linear("out_proj", heads*width, hidden, false)
				b.Attention.QueryNorm = a.norm("q_layernorm", width)
				b.Attention.KeyNorm = a.norm("k_layernorm", width)
			} else {
				c := block.in("conv")
				short := &ShortConvolution{Convolution: c.depthwise("conv", hidden, s.sizeOr(3, "conv_L_cache"), bias)}
				short.Project = c.linear("in_proj", hidden, 3*hidden, bias)
				b.Attention = Attention{Short: short, Output: c.linear("out_proj", hidden, hidden, bias)}
			}
			b.FeedForward = feedForward(block, index)
			b.AttentionNorm = block.norm("operator_norm", hidden)
			b.FeedForwardNorm = block.norm("ffn_norm", hidden)
		})(s)
	}
}

// lfm2Attentive reports whether a layer has attention.
func (s scope) lfm2Attentive(index int64) bool {
	types := s.list("layer_types")
	if types == nil {
		listed := s.list("full_attn_idxs")
		return listed == nil || slices.ContainsFunc(listed, func(v *strict.Value) bool {
			return v.Text == decimal(index)
		})
	}
	if index >= int64(len(types)) {
		s.fail(s.fields["layer_types"].Value.At, "", "layer_types has %d elements: expected one for each layer",
			len(types))
	}
	return types[index].Text == "full_attention"
}

// lfm2Dense adds a gated network whose width is two thirds of the file's, scaled and
// rounded up.
func lfm2Dense(block scope, _ int64) FeedForward {
	inner := block.size("block_ff_dim", "intermediate_size")
	if block.flagOr(true, "block_auto_adjust_ff_dim") {
		inner = 2 * inner / 3
		if v, ok := block.take(strict.Number(), "block_ffn_dim_multiplier"); ok {
			inner = int64(v.Number * float64(inner))
		}
		multiple := block.sizeOr(256, "block_multiple_of")
		inner = (inner + multiple - 1) / multiple * multiple
	}
	return threeProjections(block.in("feed_forward"), inner)
}

// lfm2Sparse adds experts after the dense layers.
func lfm2Sparse(block scope, index int64) FeedForward {
	if index < block.countOr(2, "num_dense_layers") {
		return threeProjections(block.in("feed_forward"), block.size("intermediate_size"))
	}
	return experts{module: "feed_forward", held: "feed_forward", names: mixtralNames, chosen: 4, routing: SigmoidOfAll,
		normalized: setting{"norm_topk_prob", true}, rescaled: true}.describe(block)
}

// threeProjections adds a gated network with the names of Meta's Llama.
func threeProjections(s scope, inner int64) FeedForward {
	hidden := s.size("hidden_size")
	return FeedForward{
		Gate:  s.linear("w1", hidden, inner, false),
		Up:    s.linear("w3", hidden, inner, false),
		Down:  s.linear("w2", inner, hidden, false),
		Inner: inner, Activation: "silu",
	}
}

// deepseekV32Block is a block of DeepSeek-V3.2, whose indexer chooses the tokens to
// attend to.
func deepseekV32Block(s scope, index int64) { sparseLatentBlock(s, index, true) }

// glmSparseBlock is a block of GLM-5, which may take the tokens that the indexer of an earlier block has chosen
// (GlmMoeDsaConfig in transformers/models/glm_moe_dsa/configuration_glm_moe_dsa.py).
func glmSparseBlock(s scope, index int64) {
	every, from := s.sizeOr(1, "index_topk_freq"), s.countOr(2, "index_skip_topk_offset")
	indexes := max(index-from+1, 0)%every == 0
	types := s.list("indexer_types")
	if types == nil {
		types = s.list("index_topk_pattern")
	}
	if types != nil {
		if index >= int64(len(types)) {
			s.fail(types[0].At, "", "there are %d types of indexers: expected one for each layer", len(types))
		}
		indexes = types[index].Text == "full"
	}
	sparseLatentBlock(s, index, indexes)
}

// sparseLatentBlock is a block with latent attention to chosen tokens, and an indexer that chooses them.
func sparseLatentBlock(s scope, index int64, indexes bool) {
	var b Block
	a := s.in("self_attn")
	latentAttention(a)
	if indexes {
		indexer(s, a)
	}
	deepseekFeedForward(s, index, &b, 3, deepseekExperts, false)
	blockNorms(s, &b)
}

// indexer describes what chooses the tokens to attend to.
func indexer(s, a scope) {
	heads, width := s.sizeOr(64, "index_n_heads"), s.sizeOr(128, "index_head_dim")
	indexer := a.in("indexer")
	indexer.linear("wq_b", s.size("q_lora_rank"), heads*width, false)
	indexer.linear("wk", s.size("hidden_size"), width, false)
	indexer.layerNorm("k_norm", width)
	indexer.linear("weights_proj", s.size("hidden_size"), heads, false)
}

// phiMoEBlock is a block of Phi-3.5-MoE, whose router samples.
func phiMoEBlock(s scope, _ int64) {
	bias := s.flagOr(false, "attention_bias")
	attention{keyValueHeads: 8, inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	mixtralExperts.with(func(e *experts) { e.heldRouter = "router" }).describe(s)
	s.layerNorm("input_layernorm", s.size("hidden_size"))
	s.layerNorm("post_attention_layernorm", s.size("hidden_size"))
}

func phiMoE(s scope) {
	s.withoutOperations()
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
	body := s.in("model")
	body.embedding("embed_tokens", vocabulary, hidden)
	body.repeat("layers", s.size("num_hidden_layers"), phiMoEBlock)
	body.layerNorm("norm", hidden)
	s.head("lm_head", hidden, vocabulary, false, "model.embed_tokens.weight")
	if s.flagOr(false, "lm_head_bias") {
		s.tensor("lm_head.bias", vocabulary)
	}
}

// miniMaxBlock is a block of MiniMax-Text: lightning attention, or softmax attention.
func miniMaxBlock(s scope, index int64) {
	hidden := s.size("hidden_size")
	a := s.in("self_attn")
	if s.attentive(index, (index+1)%2 == 0, "layer_types") {
		attention{keyValueHeads: 8}.describe(a)
	} else {
		heads := s.size("num_attention_heads")
		inner := heads * s.sizeOr(hidden/heads, "head_dim")
		a.norm("norm", inner)
		a.linear("qkv_proj", hidden, 3*inner, false)
		a.linear("out_proj", inner, hidden, false)
		a.linear("output_gate", hidden, inner, false)
	}
	s.norm("input_layernorm", hidden)
	s.norm("post_attention_layernorm", hidden)
	mixtralExperts.describe(s)
}

// recurrentGemmaBlock is a block of RecurrentGemma: a linear recurrence, or attention
// in a window.
func recurrentGemmaBlock(s scope, index int64) {
	hidden, bias := s.size("hidden_size"), s.flagOr(false, "attention_bias")
	s.norm("temporal_pre_norm", hidden)
	t := s.in("temporal_block")
	kinds := s.list("block_types")
	if kind := index % max(1, int64(len(kinds))); kinds == nil && index%3 == 2 ||
		kinds != nil && kinds[kind].Text == "attention" {
		heads, groups, width := attention{}.sizes(t)
		t.linear("q_proj", hidden, heads*width, bias)
		t.linear("k_proj", hidden, groups*width, bias)
		t.linear("v_proj", hidden, groups*width, bias)
		t.linear("o_proj", heads*width, hidden, true)
	} else {
		lru, heads := s.sizeOr(hidden, "lru_width"), s.size("num_attention_heads")
		width := s.divide(lru, "lru_width", heads, "num_attention_heads")
		t.linear("linear_y", hidden, lru, true)
		t.linear("linear_x", hidden, lru, true)
		t.linear("linear_out", lru, hidden, true)
		t.depthwise("conv_1d", lru, s.sizeOr(4, "conv1d_width"), true)
		g := t.in("rg_lru")
		g.tensor("recurrent_param", lru)
		for _, gate := range []string{"input_gate", "recurrent_gate"} {
			g.tensor(gate+"_weight", heads, width, width)
			g.tensor(gate+"_bias", heads, width)
		}
	}
	s.norm("channel_pre_norm", hidden)
	mlp, inner := s.in("mlp_block"), s.size("intermediate_size")/2
	mlp.linear("gate_proj", hidden, inner, true)
	mlp.linear("up_proj", hidden, inner, true)
	mlp.linear("down_proj", inner, hidden, true)
}

// afmoeBlock is a block of Arcee's mixture. A projection of its own gates the outputs of attention.
func afmoeBlock(s scope, index int64) {
	hidden, bias, a := s.size("hidden_size"), s.flagOr(false, "attention_bias"), s.in("self_attn")
	s.norm("input_layernorm", hidden)
	s.norm("post_attention_layernorm", hidden)
	s.norm("pre_mlp_layernorm", hidden)
	s.norm("post_mlp_layernorm", hidden)
	d := attention{keyValueHeads: 16, inputBias: bias, outputBias: bias, norms: true}
	heads, _, width := d.sizes(a)
	d.describe(a)
	a.linear("gate_proj", hidden, heads*width, false)
	if index < s.countOr(1, "num_dense_layers") {
		gated(s.in("mlp"), s.size("intermediate_size"), false)
		return
	}
	s.in("mlp").frozen("expert_bias", s.size("num_experts"))
	experts{router: "router.gate", heldRouter: "router.gate", chosen: 6,
		shared: func(block scope) FeedForward {
			inner := block.countOr(2, "num_shared_experts") * block.size("moe_intermediate_size")
			return gated(block.in("mlp").in("shared_experts"), inner, false)
		}}.describe(s)
}

// kimiLinearBlock is a block of Kimi Linear: linear attention with a gate for every channel, and DeepSeek's attention
// in the layers that linear_attn_config names.
func kimiLinearBlock(s scope, index int64) {
	hidden, a := s.size("hidden_size"), s.in("self_attn")
	linear := s.inside("linear_attn_config", "", "", nil)
	if linear.numbers("full_attn_layers")[index+1] {
		latentAttention(a)
	} else {
		kimiDelta(a, hidden, linear.sizeOr(128, "head_dim"), linear.sizeOr(32, "num_heads"),
			linear.sizeOr(4, "short_conv_kernel_size"))
	}
	s.norm("input_layernorm", hidden)
	s.norm("post_attention_layernorm", hidden)
	if index < s.countOr(0, "first_k_dense_replace") {
		gated(s.in("block_sparse_moe"), s.size("intermediate_size"), false)
		return
	}
	experts{module: "block_sparse_moe", names: mixtralNames, perToken: "num_experts_per_token", chosen: 8,
		shared: func(block scope) FeedForward {
			inner := block.countOr(1, "num_shared_experts") * block.size("moe_intermediate_size")
			return gated(block.in("block_sparse_moe").in("shared_experts"), inner, false)
		}}.describe(s)
	s.mixtures = nil // the authors' code, which trust_remote_code loads, has modules for every expert
}

// kimiDelta adds linear attention with the delta rule and a decay for every channel.
func kimiDelta(a scope, hidden, width, heads, kernel int64) {
	for _, name := range []string{"q", "k", "v"} {
		a.linear(name+"_proj", hidden, heads*width, false)
		a.depthwise(name+"_conv1d", heads*width, kernel, false)
	}
	a.tensor("A_log", 1, 1, heads, 1)
	a.tensor("dt_bias", heads*width)
	for _, name := range []string{"f", "g"} {
		a.linear(name+"_a_proj", hidden, width, false)
		a.linear(name+"_b_proj", width, heads*width, false)
	}
	a.linear("b_proj", hidden, heads, false)
	a.norm("o_norm", width)
	a.linear("o_proj", heads*width, hidden, false)
}
