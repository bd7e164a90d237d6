package model

// Decoders whose code lies beside their weights on the hub. Their config.json tells
// the parameters. Their operations are those of that code, and not planned but for the first Qwen.

// qwen1 is the first Qwen. Its intermediate_size is that of both projections before the product together.
func qwen1(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("intermediate_size")/2
	heads, each := s.size("num_attention_heads"), s.size("kv_channels")
	width := each * heads
	bias := !s.flagOr(true, "no_bias")
	body := s.in("transformer")
	stack := s.stack(hidden, Stack{Causal: true})
	stack.TokenEmbedding = body.embedding("wte", vocabulary, hidden)
	stack.EmbeddingDropout = s.shareOr(0, "emb_dropout_prob")
	body.blocks(stack, "h", s.size("num_hidden_layers"), func(block scope, _ int64, b *Block) {
		b.AttentionNorm = block.norm("ln_1", hidden)
		b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: each, ValueWidth: each, Rotary: 1,
			WideRotary: true, Dropout: s.shareOr(0, "attn_dropout_prob")}
		b.Attention.Fused = block.linear("attn.c_attn", hidden, 3*width, true)
		b.Attention.Output = block.linear("attn.c_proj", width, hidden, bias)
		b.FeedForwardNorm = block.norm("ln_2", hidden)
		mlp := block.in("mlp")
		b.FeedForward = FeedForward{Up: mlp.linear("w1", hidden, inner, bias),
			Gate: mlp.linear("w2", hidden, inner, bias), Down: mlp.linear("c_proj", inner, hidden, bias),
			Inner: inner, Activation: "silu"}
	})
	stack.FinalNorm = body.norm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, false, "transformer.wte.weight")
	s.network.Head.NarrowLoss = true
}

// remoteLlama returns a decoder with the structure of Llama: Baichuan, InternLM and
// XVERSE.
func remoteLlama(block func(s scope, index int64)) func(scope) { return hybrid("norm", false, block) }

// baichuanBlock has one projection to queries, keys and values.
func baichuanBlock(s scope, _ int64) {
	hidden := s.size("hidden_size")
	s.linear("self_attn.W_pack", hidden, 3*hidden, false)
	s.linear("self_attn.o_proj", hidden, hidden, false)
	gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s, &Block{})
}

func internLMBlock(s scope, _ int64) {
	bias := s.flagOr(true, "bias")
	attention{inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s, &Block{})
}

func xverseBlock(s scope, _ int64) {
	attention{}.describe(s.in("self_attn"))
	gated(s.in("mlp"), s.size("intermediate_size"), false)
	blockNorms(s, &Block{})
}

// miMo is Qwen 2 with layers that predict further tokens (num_nextn_predict_layers).
func miMo(s scope) {
	s.withoutOperations()
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
	layer := func(s scope, _ int64) {
		attention{keyValueHeads: 32, inputBias: true}.describe(s.in("self_attn"))
		gated(s.in("mlp"), s.size("intermediate_size"), false)
		blockNorms(s, &Block{})
	}
	body := s.in("model")
	body.embedding("embed_tokens", vocabulary, hidden)
	body.repeat("layers", s.size("num_hidden_layers"), layer)
	body.norm("norm", hidden)
	body.repeat("mtp_layers", s.countOr(0, "num_nextn_predict_layers"), func(further scope, index int64) {
		layer(further, index)
		for _, name := range []string{"token_layernorm", "hidden_layernorm", "final_layernorm"} {
			further.norm(name, hidden)
		}
		further.linear("input_proj", 2*hidden, hidden, false)
	})
	s.head("lm_head", hidden, vocabulary, false, "model.embed_tokens.weight")
}

func internLM2(s scope) {
	s.withoutOperations()
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
	bias := s.flagOr(false, "bias")
	body := s.in("model")
	body.embedding("tok_embeddings", vocabulary, hidden)
	body.repeat("layers", s.size("num_hidden_layers"), func(block scope, _ int64) {
		heads, groups, width := attention{}.sizes(block)
		block.linear("attention.wqkv", hidden, (heads+2*groups)*width, bias)
		block.linear("attention.wo", heads*width, hidden, bias)
		threeProjections(block.in("feed_forward"), s.size("intermediate_size"))
		block.norm("attention_norm", hidden)
		block.norm("ffn_norm", hidden)
	})
	body.norm("norm", hidden)
	s.head("output", hidden, vocabulary, false, "model.tok_embeddings.weight")
}

// chatGLM is ChatGLM from the second version on, and the first GLM-4.
func chatGLM(s scope) {
	s.withoutOperations()
	s.refuseSet("position_encoding_2d") // of the first version, whose layers are others
	vocabulary, hidden, inner := s.size("padded_vocab_size"), s.size("hidden_size"), s.size("ffn_hidden_size")
	width := s.size("kv_channels")
	heads := s.size("num_attention_heads")
	groups := heads
	if s.flagOr(false, "multi_query_attention") {
		groups = s.sizeOr(1, "multi_query_group_num")
	}
	bias := s.flagOr(false, "add_bias_linear")
	norm := scope.norm
	if !s.flagOr(true, "rmsnorm") {
		norm = scope.layerNorm
	}
	body := s.in("transformer")
	body.embedding("embedding.word_embeddings", vocabulary, hidden)
	encoder := body.in("encoder")
	encoder.repeat("layers", s.size("num_layers"), func(block scope, _ int64) {
		norm(block, "input_layernorm", hidden)
		block.linear("self_attention.query_key_value", hidden, (heads+2*groups)*width,
			bias || s.flagOr(false, "add_qkv_bias"))
		block.linear("self_attention.dense", heads*width, hidden, bias)
		norm(block, "post_attention_layernorm", hidden)
		block.linear("mlp.dense_h_to_4h", hidden, 2*inner, bias)
		block.linear("mlp.dense_4h_to_h", inner, hidden, bias)
	})
	if s.flagOr(true, "post_layer_norm") {
		norm(encoder, "final_layernorm", hidden)
	}
	body.linear("output_layer", hidden, vocabulary, false)
}

// deBERTa returns DeBERTa v2 and v3, whose attention knows the distances of tokens,
// with a classifier of sequences, of tokens or of answers.
func deBERTa(head bertHead) func(scope) {
	return func(s scope) {
		s.withoutOperations()
		s.refuseSet("conv_kernel_size")
		hidden, inner := s.size("hidden_size"), s.size("intermediate_size")
		body := s.in("deberta")
		e := body.in("embeddings")
		e.embedding("word_embeddings", s.size("vocab_size"), hidden)
		if s.flagOr(true, "position_biased_input") {
			e.embedding("position_embeddings", s.size("max_position_embeddings"), hidden)
		}
		if types := s.countOr(0, "type_vocab_size"); types > 0 {
			e.embedding("token_type_embeddings", types, hidden)
		}
		e.layerNorm("LayerNorm", hidden)
		encoder := body.in("encoder")
		encoder.repeat("layer", s.size("num_hidden_layers"), func(block scope, _ int64) {
			for _, name := range []string{"query_proj", "key_proj", "value_proj"} {
				block.linear("attention.self."+name, hidden, hidden, true)
			}
			block.linear("attention.output.dense", hidden, hidden, true)
			block.layerNorm("attention.output.LayerNorm", hidden)
			block.linear("intermediate.dense", hidden, inner, true)
			block.linear("output.dense", inner, hidden, true)
			block.layerNorm("output.LayerNorm", hidden)
		})
		if s.flagOr(false, "relative_attention") {
			if !s.flagOr(false, "share_att_key") {
				s.fail(0, Documented, "share_att_key is not true, which is not supported")
			}
			encoder.embedding("rel_embeddings", 2*s.size("position_buckets"), hidden)
		}
		if s.textOr("none", "norm_rel_ebd") == "layer_norm" {
			encoder.layerNorm("LayerNorm", hidden)
		}
		switch head {
		case bertClassification:
			s.linear("pooler.dense", hidden, hidden, true)
			s.linear("classifier", hidden, s.labels(), true)
		case bertTokens:
			s.linear("classifier", hidden, s.labels(), true)
		default:
			s.linear("qa_outputs", hidden, 2, true)
		}
	}
}
