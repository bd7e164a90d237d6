package model

import "strings"

// Architectures older than Llama, each with a structure of its own.

func gpt2(s scope) {
	s.refuse("add_cross_attention")
	vocabulary, hidden := s.size("vocab_size"), s.size("n_embd", "hidden_size")
	heads, inner := s.sizeOr(12, "n_head", "num_attention_heads"), s.sizeOr(4*hidden, "n_inner")
	width := s.divide(hidden, "n_embd", heads, "n_head")
	s.network.InputFirst = true
	project := func(s scope, name string, in, out int64) string {
		s.tensor(name+".weight", in, out)
		s.tensor(name+".bias", out)
		return s.module(name)
	}
	body := s.in("transformer")
	stack := s.stack(hidden, Stack{Causal: true, EmbeddingDropout: s.shareOr(0.1, "embd_pdrop")})
	stack.TokenEmbedding = body.embedding("wte", vocabulary, hidden)
	stack.PositionEmbedding = body.embedding("wpe", s.size("n_positions", "max_position_embeddings"), hidden)
	body.blocks(stack, "h", s.size("n_layer", "num_hidden_layers"), func(block scope, _ int64, b *Block) {
		b.Dropout = s.shareOr(0.1, "resid_pdrop")
		b.AttentionNorm = block.layerNorm("ln_1", hidden)
		b.Attention = Attention{
			Heads:         heads,
			KeyValueHeads: heads,
			Width:         width,
			ValueWidth:    width,
			Dropout:       s.shareOr(0.1, "attn_pdrop"),
		}
		b.Attention.Fused = project(block, "attn.c_attn", hidden, 3*hidden)
		b.Attention.Output = project(block, "attn.c_proj", hidden, hidden)
		b.FeedForwardNorm = block.layerNorm("ln_2", hidden)
		b.FeedForward = FeedForward{
			Up:    project(block, "mlp.c_fc", hidden, inner),
			Down:  project(block, "mlp.c_proj", inner, hidden),
			Inner: inner, Activation: s.activation("gelu_new"),
		}
	})
	stack.FinalNorm = body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.wte.weight")
}

func gptNeoX(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("intermediate_size")
	heads := s.size("num_attention_heads")
	width := s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	bias := s.flagOr(true, "attention_bias")
	body := s.in("gpt_neox")
	stack := s.stack(hidden, Stack{Causal: true, EmbeddingDropout: s.shareOr(0, "hidden_dropout")})
	stack.TokenEmbedding = body.embedding("embed_in", vocabulary, hidden)
	body.blocks(stack, "layers", s.size("num_hidden_layers"), func(block scope, _ int64, b *Block) {
		if s.flagOr(true, "use_parallel_residual") {
			b.Arrangement = Parallel
		}
		b.Dropout = s.shareOr(0, "hidden_dropout")
		b.AttentionNorm = block.layerNorm("input_layernorm", hidden)
		b.FeedForwardNorm = block.layerNorm("post_attention_layernorm", hidden)
		b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width,
			Joined: true, Rotary: s.shareOr(0.25, "rotary_pct", "partial_rotary_factor"),
			Dropout: s.shareOr(0, "attention_dropout")}
		b.Attention.Fused = block.linear("attention.query_key_value", hidden, 3*hidden, bias)
		b.Attention.Output = block.linear("attention.dense", hidden, hidden, bias)
		b.FeedForward = FeedForward{
			Up:    block.linear("mlp.dense_h_to_4h", hidden, inner, true),
			Down:  block.linear("mlp.dense_4h_to_h", inner, hidden, true),
			Inner: inner, Activation: s.activation("gelu"),
		}
	})
	stack.FinalNorm = body.layerNorm("final_layer_norm", hidden)
	s.head("embed_out", hidden, vocabulary, false, "gpt_neox.embed_in.weight")
}

func phi(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("intermediate_size")
	heads := s.size("num_attention_heads")
	groups := s.sizeOr(heads, "num_key_value_heads")
	width := s.sizeOr(0, "head_dim")
	if width == 0 {
		width = s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	}
	body := s.in("model")
	stack := s.stack(hidden, Stack{Causal: true, EmbeddingDropout: s.shareOr(0, "embd_pdrop")})
	stack.TokenEmbedding = body.embedding("embed_tokens", vocabulary, hidden)
	body.blocks(stack, "layers", s.size("num_hidden_layers"), func(block scope, _ int64, b *Block) {
		b.Arrangement, b.Dropout = Parallel, s.shareOr(0, "resid_pdrop")
		a := block.in("self_attn")
		b.Attention = Attention{Heads: heads, KeyValueHeads: groups, Width: width, ValueWidth: width,
			Joined: true, Rotary: s.shareOr(0.5, "partial_rotary_factor"), Dropout: s.shareOr(0, "attention_dropout")}
		b.Attention.Query = a.linear("q_proj", hidden, heads*width, true)
		b.Attention.Key = a.linear("k_proj", hidden, groups*width, true)
		b.Attention.Value = a.linear("v_proj", hidden, groups*width, true)
		b.Attention.Output = a.linear("dense", heads*width, hidden, true)
		if s.flagOr(false, "qk_layernorm") {
			b.Attention.QueryNorm = a.layerNorm("q_layernorm", width)
			b.Attention.KeyNorm = a.layerNorm("k_layernorm", width)
		}
		b.FeedForward = FeedForward{
			Up:    block.linear("mlp.fc1", hidden, inner, true),
			Down:  block.linear("mlp.fc2", inner, hidden, true),
			Inner: inner, Activation: s.activation("gelu_new"),
		}
		b.AttentionNorm = block.layerNorm("input_layernorm", hidden)
	})
	stack.FinalNorm = body.layerNorm("final_layernorm", hidden)
	s.head("lm_head", hidden, vocabulary, false, "model.embed_tokens.weight")
	s.tensor("lm_head.bias", vocabulary)
}

// gptJ is GPT-J. Every block makes sines and cosines of its own.
func gptJ(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("n_embd", "hidden_size")
	heads, inner := s.size("n_head", "num_attention_heads"), s.sizeOr(4*hidden, "n_inner")
	width := s.divide(hidden, "n_embd", heads, "n_head")
	rotated := width
	if !s.isNull("rotary_dim") {
		rotated = min(width, s.sizeOr(64, "rotary_dim"))
	}
	dropout := s.shareOr(0, "resid_pdrop")
	body := s.in("transformer")
	stack := s.stack(hidden, Stack{Causal: true, EmbeddingDropout: s.shareOr(0, "embd_pdrop")})
	stack.TokenEmbedding = body.embedding("wte", vocabulary, hidden)
	body.blocks(stack, "h", s.size("n_layer", "num_hidden_layers"), func(block scope, _ int64, b *Block) {
		b.Arrangement, b.Dropout = Parallel, dropout
		b.AttentionNorm = block.layerNorm("ln_1", hidden)
		a := block.in("attn")
		b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width, Joined: true,
			Rotary: float64(rotated) / float64(width), OwnAngles: true, WideScores: true, WideSoftmax: true,
			NoSDPA: true, Dropout: s.shareOr(0, "attn_pdrop")}
		b.Attention.Key = a.linear("k_proj", hidden, hidden, false)
		b.Attention.Value = a.linear("v_proj", hidden, hidden, false)
		b.Attention.Query = a.linear("q_proj", hidden, hidden, false)
		b.Attention.Output = a.linear("out_proj", hidden, hidden, false)
		b.FeedForward = FeedForward{
			Up:    block.linear("mlp.fc_in", hidden, inner, true),
			Down:  block.linear("mlp.fc_out", inner, hidden, true),
			Inner: inner, Activation: s.activation("gelu_new"),
		}
	})
	stack.FinalNorm = body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, false, "transformer.wte.weight")
	s.tensor("lm_head.bias", vocabulary)
}

func opt(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("ffn_dim")
	heads := s.size("num_attention_heads")
	width := s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	embedded := s.sizeOr(hidden, "word_embed_proj_dim")
	bias := s.flagOr(true, "enable_bias")
	before := s.flagOr(true, "do_layer_norm_before")
	norm := scope.layerNorm
	if !s.flagOr(true, "layer_norm_elementwise_affine") {
		norm = func(scope, string, int64) Norm { return Norm{Kind: LayerNorm} }
	}
	body := s.in("model").in("decoder")
	stack := s.stack(hidden, Stack{Causal: true})
	stack.TokenEmbedding = body.embedding("embed_tokens", vocabulary, embedded)
	// the first two are for padding
	stack.PositionEmbedding = body.embedding("embed_positions", s.size("max_position_embeddings")+2, hidden)
	if embedded != hidden {
		stack.EmbeddingWidth = embedded
		stack.ProjectOut = body.linear("project_out", hidden, embedded, false)
		stack.ProjectIn = body.linear("project_in", embedded, hidden, false)
	}
	if before && !s.flagOr(false, "_remove_final_layer_norm") {
		stack.FinalNorm = norm(body, "final_layer_norm", hidden)
	}
	body.blocks(stack, "layers", s.size("num_hidden_layers"), func(block scope, _ int64, b *Block) {
		if !before {
			b.Arrangement = PostNorm
		}
		b.Dropout = s.shareOr(0.1, "dropout")
		b.Attention = Attention{
			Heads:         heads,
			KeyValueHeads: heads,
			Width:         width,
			ValueWidth:    width,
			WideSoftmax:   true,
			Dropout:       s.shareOr(0, "attention_dropout"),
		}
		a := block.in("self_attn")
		b.Attention.Key = a.linear("k_proj", hidden, hidden, bias)
		b.Attention.Value = a.linear("v_proj", hidden, hidden, bias)
		b.Attention.Query = a.linear("q_proj", hidden, hidden, bias)
		b.Attention.Output = a.linear("out_proj", hidden, hidden, bias)
		b.AttentionNorm = norm(block, "self_attn_layer_norm", hidden)
		b.FeedForward = FeedForward{
			Up:    block.linear("fc1", hidden, inner, bias),
			Down:  block.linear("fc2", inner, hidden, bias),
			Inner: inner, Activation: s.activation("relu"),
		}
		b.FeedForwardNorm = norm(block, "final_layer_norm", hidden)
	})
	s.head("lm_head", embedded, vocabulary, true, "model.decoder.embed_tokens.weight")
}

func bloom(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size", "n_embed")
	heads := s.size("n_head", "num_attention_heads")
	width := s.divide(hidden, "hidden_size", heads, "n_head")
	body := s.in("transformer")
	stack := s.stack(hidden, Stack{Causal: true})
	stack.TokenEmbedding = body.embedding("word_embeddings", vocabulary, hidden)
	stack.EmbeddingNorm = body.layerNorm("word_embeddings_layernorm", hidden)
	body.blocks(stack, "h", s.size("n_layer", "num_hidden_layers"), func(block scope, _ int64, b *Block) {
		b.Dropout = s.shareOr(0, "hidden_dropout")
		b.AttentionNorm = block.layerNorm("input_layernorm", hidden)
		b.Attention = Attention{
			Heads:         heads,
			KeyValueHeads: heads,
			Width:         width,
			ValueWidth:    width,
			Biased:        true,
			WideSoftmax:   true,
			NoSDPA:        true,
			Dropout:       s.shareOr(0, "attention_dropout"),
		}
		b.Attention.Fused = block.linear("self_attention.query_key_value", hidden, 3*hidden, true)
		b.Attention.Output = block.linear("self_attention.dense", hidden, hidden, true)
		b.FeedForwardNorm = block.layerNorm("post_attention_layernorm", hidden)
		b.FeedForward = FeedForward{
			Up:    block.linear("mlp.dense_h_to_4h", hidden, 4*hidden, true),
			Down:  block.linear("mlp.dense_4h_to_h", 4*hidden, hidden, true),
			Inner: 4 * hidden, Activation: "bloom_gelu",
		}
	})
	stack.FinalNorm = body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.word_embeddings.weight")
}

func falcon(s scope) {
	vocabulary, hidden, heads := s.size("vocab_size"), s.size("hidden_size", "n_embed"),
		s.size("num_attention_heads", "n_head")
	inner := s.sizeOr(4*hidden, "ffn_hidden_size")
	width := s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	bias := s.flagOr(false, "bias")
	grouped := s.flagOr(false, "new_decoder_architecture")
	groups := heads
	switch {
	case grouped:
		groups = s.sizeOr(heads, "num_kv_heads", "n_head_kv")
	case s.flagOr(true, "multi_query"):
		groups = 1
	}
	arrangement := PreNorm
	norms := []string{"post_attention_layernorm", "input_layernorm"}
	if s.flagOr(true, "parallel_attn") {
		arrangement, norms = Parallel, norms[1:]
		if count := s.countOr(0, "num_ln_in_parallel_attn"); count == 2 || count == 0 && grouped {
			norms = []string{"ln_attn", "ln_mlp"}
		}
	}
	body := s.in("transformer")
	stack := s.stack(hidden, Stack{Causal: true})
	stack.TokenEmbedding = body.embedding("word_embeddings", vocabulary, hidden)
	body.blocks(stack, "h", s.size("num_hidden_layers", "n_layer"), func(block scope, _ int64, b *Block) {
		b.Arrangement, b.Dropout = arrangement, s.shareOr(0, "hidden_dropout")
		b.Attention = Attention{Heads: heads, KeyValueHeads: groups, Width: width, ValueWidth: width, Rotary: 1,
			Biased: s.flagOr(false, "alibi"), Dropout: s.shareOr(0, "attention_dropout")}
		if b.Attention.Biased {
			b.Attention.Rotary = 0
		}
		b.Attention.Fused = block.linear("self_attention.query_key_value", hidden, (heads+2*groups)*width, bias)
		b.Attention.Output = block.linear("self_attention.dense", hidden, hidden, bias)
		b.FeedForward = FeedForward{
			Up:    block.linear("mlp.dense_h_to_4h", hidden, inner, bias),
			Down:  block.linear("mlp.dense_4h_to_h", inner, hidden, bias),
			Inner: inner, Activation: s.textOr("gelu", "activation"),
		}
		for i, name := range norms {
			norm := block.layerNorm(name, hidden)
			if name == "post_attention_layernorm" || i == 1 && arrangement == Parallel {
				b.FeedForwardNorm = norm
			} else {
				b.AttentionNorm = norm
			}
		}
	})
	stack.FinalNorm = body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.word_embeddings.weight")
}

// labels returns the number of classes. transformers writes their names into
// id2label if there are more than two.
func (s scope) labels() int64 {
	if v, ok := s.find("id2label"); ok {
		if v.Kind != '{' {
			s.fail(v.At, "", "id2label is %s: expected an object with the name of every class", v)
		}
		return max(1, int64(len(v.Members)))
	}
	return s.sizeOr(2, "num_labels")
}

// t5 has an encoder and a decoder with a shared embedding. In T5 the head is
// tied to it. T5 1.1, Flan-T5 and mT5 have a head of their own, as their config.json
// says.
func t5(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("d_model", "hidden_size"), s.size("d_ff")
	heads, layers := s.size("num_heads", "num_attention_heads"), s.size("num_layers", "num_hidden_layers")
	width := heads * s.sizeOr(64, "d_kv")
	buckets := s.sizeOr(32, "relative_attention_num_buckets")
	dropout := s.shareOr(0.1, "dropout_rate")
	inputs, activate := []string{"wi"}, "relu"
	switch activation := s.textOr("relu", "feed_forward_proj"); {
	case strings.HasPrefix(activation, "gated-"):
		inputs, activate = []string{"wi_0", "wi_1"}, strings.TrimPrefix(activation, "gated-")
		if activate == "gelu" {
			activate = "gelu_new" // as in T5Config
		}
	case strings.Contains(activation, "-"):
		v, _ := s.find("feed_forward_proj")
		s.fail(v.At, "", `feed_forward_proj is %s: expected an activation such as "relu" or "gated-gelu"`,
			v)
	default:
		activate = activation
	}

	attend := func(layer scope, name string, positions bool) (Attention, Norm) {
		a := layer.in(name)
		d := Attention{
			Heads:         heads,
			KeyValueHeads: heads,
			Width:         width / heads,
			ValueWidth:    width / heads,
			Biased:        true,
			WideSoftmax:   true,
			Dropout:       dropout,
		}
		d.Query = a.linear("q", hidden, width, false)
		d.Key = a.linear("k", hidden, width, false)
		d.Value = a.linear("v", hidden, width, false)
		d.Output = a.linear("o", width, hidden, false)
		if positions {
			a.embedding("relative_attention_bias", buckets, heads)
		}
		return d, layer.t5Norm("layer_norm", hidden)
	}
	addStack := func(name string, layers int64, crossAttention bool) {
		body := s.in(name)
		stack := s.stack(hidden, Stack{Causal: crossAttention, EmbeddingDropout: dropout})
		body.add("embed_tokens.weight", "shared.weight", vocabulary, hidden)
		stack.TokenEmbedding = body.module("embed_tokens")
		body.blocks(stack, "block", layers, func(block scope, index int64, b *Block) {
			b.Dropout = dropout
			b.Attention, b.AttentionNorm = attend(block.in("layer").in("0"), "SelfAttention", index == 0)
			last := "1"
			if crossAttention {
				cross, norm := attend(block.in("layer").in("1"), "EncDecAttention", false)
				b.Cross, b.CrossNorm = &cross, norm
				last = "2"
			}
			feedForward := block.in("layer").in(last)
			b.FeedForward = FeedForward{Inner: inner, Activation: activate, Dropout: dropout}
			for i, input := range inputs {
				path := feedForward.linear("DenseReluDense."+input, hidden, inner, false)
				if i+1 < len(inputs) {
					b.FeedForward.Gate = path
				} else {
					b.FeedForward.Up = path
				}
			}
			b.FeedForward.Down = feedForward.linear("DenseReluDense.wo", inner, hidden, false)
			b.FeedForwardNorm = feedForward.t5Norm("layer_norm", hidden)
		})
		stack.FinalNorm = body.t5Norm("final_layer_norm", hidden)
	}
	s.embedding("shared", vocabulary, hidden)
	addStack("encoder", layers, false)
	addStack("decoder", s.sizeOr(layers, "num_decoder_layers"), true)
	s.head("lm_head", hidden, vocabulary, true, "shared.weight")
	s.network.Head.NarrowLoss = true
}

func (s scope) t5Norm(name string, width int64) Norm {
	norm := s.norm(name, width)
	norm.Kind = RMSNormT5
	return norm
}

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
