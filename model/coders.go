package model

// Decoders between GPT-2 and Llama, each with a structure of its own.

// gptBigCode is StarCoder's first generation: GPT-2 with linear modules, and one head of keys and values for all heads
// of queries.
func gptBigCode(s scope) {
	s.refuse("add_cross_attention")
	vocabulary, hidden := s.size("vocab_size"), s.size("n_embd", "hidden_size")
	heads, inner := s.sizeOr(12, "n_head", "num_attention_heads"), s.sizeOr(4*hidden, "n_inner")
	width := s.divide(hidden, "n_embd", heads, "n_head")
	groups := heads
	if s.flagOr(true, "multi_query") {
		groups = 1
	}
	positions := s.sizeOr(1024, "n_positions", "max_position_embeddings")
	s.network.Masks = positions * positions
	body := s.in("transformer")
	stack := s.stack(hidden, Stack{Causal: true, EmbeddingDropout: s.shareOr(0.1, "embd_pdrop")})
	stack.TokenEmbedding = body.embedding("wte", vocabulary, hidden)
	stack.PositionEmbedding = body.embedding("wpe", positions, hidden)
	body.blocks(stack, "h", s.sizeOr(12, "n_layer", "num_hidden_layers"), func(block scope, _ int64, b *Block) {
		b.Dropout = s.shareOr(0.1, "resid_pdrop")
		b.AttentionNorm = block.layerNorm("ln_1", hidden)
		b.Attention = Attention{Heads: heads, KeyValueHeads: groups, Width: width, ValueWidth: width, WideSoftmax: true,
			Dropout: s.shareOr(0.1, "attn_pdrop")}
		b.Attention.Fused = block.linear("attn.c_attn", hidden, hidden+2*groups*width, true)
		b.Attention.Output = block.linear("attn.c_proj", hidden, hidden, true)
		b.FeedForwardNorm = block.layerNorm("ln_2", hidden)
		b.FeedForward = FeedForward{
			Up:    block.linear("mlp.c_fc", hidden, inner, true),
			Down:  block.linear("mlp.c_proj", inner, hidden, true),
			Inner: inner, Activation: s.activation("gelu_pytorch_tanh"),
		}
	})
	stack.FinalNorm = body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.wte.weight")
}

// gptNeo has no kernel for attention but flash attention. Its windows are masks that every block holds.
func gptNeo(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
	heads, inner := s.sizeOr(16, "num_heads", "num_attention_heads"), s.sizeOr(4*hidden, "intermediate_size")
	width := s.divide(hidden, "hidden_size", heads, "num_heads")
	positions, dropout := s.sizeOr(2048, "max_position_embeddings"), s.shareOr(0, "resid_dropout")
	body := s.in("transformer")
	stack := s.stack(hidden, Stack{Causal: true, EmbeddingDropout: s.shareOr(0, "embed_dropout")})
	stack.TokenEmbedding = body.embedding("wte", vocabulary, hidden)
	stack.PositionEmbedding = body.embedding("wpe", positions, hidden)
	body.blocks(stack, "h", s.sizeOr(24, "num_layers", "num_hidden_layers"), func(block scope, _ int64, b *Block) {
		s.network.Masks += positions * positions
		b.Dropout = dropout
		b.AttentionNorm = block.layerNorm("ln_1", hidden)
		a := block.in("attn").in("attention")
		b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width,
			WideScores: true, WideSoftmax: true, NoSDPA: true, Dropout: s.shareOr(0, "attention_dropout")}
		b.Attention.Key = a.linear("k_proj", hidden, hidden, false)
		b.Attention.Value = a.linear("v_proj", hidden, hidden, false)
		b.Attention.Query = a.linear("q_proj", hidden, hidden, false)
		b.Attention.Output = a.linear("out_proj", hidden, hidden, true)
		b.FeedForwardNorm = block.layerNorm("ln_2", hidden)
		b.FeedForward = FeedForward{
			Up:    block.linear("mlp.c_fc", hidden, inner, true),
			Down:  block.linear("mlp.c_proj", inner, hidden, true),
			Inner: inner, Activation: s.activation("gelu_new"),
		}
	})
	stack.FinalNorm = body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.wte.weight")
}

func persimmon(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("intermediate_size")
	heads := s.size("num_attention_heads")
	width := s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	body := s.in("model")
	stack := s.stack(hidden, Stack{Causal: true})
	stack.TokenEmbedding = body.embedding("embed_tokens", vocabulary, hidden)
	body.blocks(stack, "layers", s.size("num_hidden_layers"), func(block scope, _ int64, b *Block) {
		b.Dropout, b.UndroppedFeedForward = 0, true
		b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width, Joined: true,
			Rotary: s.rotary(0.5), Dropout: s.shareOr(0, "attention_dropout")}
		a := block.in("self_attn")
		b.Attention.Fused = a.linear("query_key_value", hidden, 3*hidden, true)
		b.Attention.Output = a.linear("dense", hidden, hidden, true)
		if s.flagOr(true, "qk_layernorm") {
			b.Attention.QueryNorm = a.layerNorm("q_layernorm", width)
			b.Attention.KeyNorm = a.layerNorm("k_layernorm", width)
		}
		b.FeedForward = FeedForward{
			Up:            block.linear("mlp.dense_h_to_4h", hidden, inner, true),
			Down:          block.linear("mlp.dense_4h_to_h", inner, hidden, true),
			OutputDropout: s.shareOr(0, "hidden_dropout"),
			Inner:         inner, Activation: s.activation("relu2"),
		}
		b.AttentionNorm = block.layerNorm("input_layernorm", hidden)
		b.FeedForwardNorm = block.layerNorm("post_attention_layernorm", hidden)
	})
	stack.FinalNorm = body.layerNorm("final_layernorm", hidden)
	s.head("lm_head", hidden, vocabulary, false, "model.embed_tokens.weight")
}

// nanoChat's norms have no weights. One comes before the first block, too.
func nanoChat(s scope) {
	variant{
		inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms, late: true, kind: RMSNormF32, bare: true,
		feedForward: upAndDown("fc1", "fc2"), activation: "relu2",
	}.describe(s)
	stack := s.network.Stacks[0]
	stack.EmbeddingNorm = stack.FinalNorm
	s.network.Head.Soft = !s.isNull("final_logit_softcapping")
}

// vaultGemma is Gemma 2 without norms behind the halves of a block.
func vaultGemma(s scope) {
	variant{
		tied: true, keyValueHeads: 4, width: 256, inputBias: attentionBias, outputBias: attentionBias,
		norms: []blockNorm{{name: "input_layernorm", place: beforeAttention},
			{name: "pre_feedforward_layernorm", place: beforeFeedForward}},
		kind: RMSNormF32, activation: "gelu_pytorch_tanh", windows: 2, window: 4096, scalesEmbedding: true,
	}.describe(s)
	for i := range s.network.Stacks[0].Blocks {
		a := &s.network.Stacks[0].Blocks[i].Attention
		a.Soft, a.NoSDPA = !s.isNull("attn_logit_softcapping"), true
	}
	s.network.Head.Soft = !s.isNull("final_logit_softcapping")
}
