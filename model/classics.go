package model

import "strings"

// The architectures from before Llama, each with a frame of its own.

func gpt2(s scope) {
	s.refuse("add_cross_attention")
	vocabulary, hidden := s.size("vocab_size"), s.size("n_embd", "hidden_size")
	inner := s.sizeOr(4*hidden, "n_inner")
	// GPT-2's projections are stored input first.
	project := func(s scope, name string, in, out int64) {
		s.tensor(name+".weight", in, out)
		s.tensor(name+".bias", out)
	}
	body := s.in("transformer")
	body.embedding("wte", vocabulary, hidden)
	body.embedding("wpe", s.size("n_positions", "max_position_embeddings"), hidden)
	body.repeat("h", s.size("n_layer", "num_hidden_layers"), func(block scope, _ int64) {
		block.layerNorm("ln_1", hidden)
		project(block, "attn.c_attn", hidden, 3*hidden)
		project(block, "attn.c_proj", hidden, hidden)
		block.layerNorm("ln_2", hidden)
		project(block, "mlp.c_fc", hidden, inner)
		project(block, "mlp.c_proj", inner, hidden)
	})
	body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.wte.weight")
}

func gptNeoX(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("intermediate_size")
	bias := s.flagOr(true, "attention_bias")
	body := s.in("gpt_neox")
	body.embedding("embed_in", vocabulary, hidden)
	body.repeat("layers", s.size("num_hidden_layers"), func(block scope, _ int64) {
		block.layerNorm("input_layernorm", hidden)
		block.layerNorm("post_attention_layernorm", hidden)
		block.linear("attention.query_key_value", hidden, 3*hidden, bias)
		block.linear("attention.dense", hidden, hidden, bias)
		block.linear("mlp.dense_h_to_4h", hidden, inner, true)
		block.linear("mlp.dense_4h_to_h", inner, hidden, true)
	})
	body.layerNorm("final_layer_norm", hidden)
	s.head("embed_out", hidden, vocabulary, false, "gpt_neox.embed_in.weight")
}

func opt(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("ffn_dim")
	embedded := s.sizeOr(hidden, "word_embed_proj_dim")
	bias := s.flagOr(true, "enable_bias")
	norm := scope.layerNorm
	if !s.flagOr(true, "layer_norm_elementwise_affine") {
		norm = func(scope, string, int64) {}
	}
	body := s.in("model").in("decoder")
	body.embedding("embed_tokens", vocabulary, embedded)
	body.embedding("embed_positions", s.size("max_position_embeddings")+2, hidden) // the first two stand for padding
	if embedded != hidden {
		body.linear("project_out", hidden, embedded, false)
		body.linear("project_in", embedded, hidden, false)
	}
	if s.flagOr(true, "do_layer_norm_before") && !s.flagOr(false, "_remove_final_layer_norm") {
		norm(body, "final_layer_norm", hidden)
	}
	body.repeat("layers", s.size("num_hidden_layers"), func(block scope, _ int64) {
		for _, name := range []string{"k_proj", "v_proj", "q_proj", "out_proj"} {
			block.in("self_attn").linear(name, hidden, hidden, bias)
		}
		norm(block, "self_attn_layer_norm", hidden)
		block.linear("fc1", hidden, inner, bias)
		block.linear("fc2", inner, hidden, bias)
		norm(block, "final_layer_norm", hidden)
	})
	s.head("lm_head", embedded, vocabulary, true, "model.decoder.embed_tokens.weight")
}

func bloom(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size", "n_embed")
	body := s.in("transformer")
	body.embedding("word_embeddings", vocabulary, hidden)
	body.layerNorm("word_embeddings_layernorm", hidden)
	body.repeat("h", s.size("n_layer", "num_hidden_layers"), func(block scope, _ int64) {
		block.layerNorm("input_layernorm", hidden)
		block.linear("self_attention.query_key_value", hidden, 3*hidden, true)
		block.linear("self_attention.dense", hidden, hidden, true)
		block.layerNorm("post_attention_layernorm", hidden)
		block.linear("mlp.dense_h_to_4h", hidden, 4*hidden, true)
		block.linear("mlp.dense_4h_to_h", 4*hidden, hidden, true)
	})
	body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.word_embeddings.weight")
}

func falcon(s scope) {
	vocabulary, hidden, heads := s.size("vocab_size"), s.size("hidden_size", "n_embed"), s.size("num_attention_heads", "n_head")
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
	norms := []string{"post_attention_layernorm", "input_layernorm"}
	if s.flagOr(true, "parallel_attn") {
		norms = norms[1:]
		if count := s.countOr(0, "num_ln_in_parallel_attn"); count == 2 || count == 0 && grouped {
			norms = []string{"ln_attn", "ln_mlp"}
		}
	}
	body := s.in("transformer")
	body.embedding("word_embeddings", vocabulary, hidden)
	body.repeat("h", s.size("num_hidden_layers", "n_layer"), func(block scope, _ int64) {
		block.linear("self_attention.query_key_value", hidden, (heads+2*groups)*width, bias)
		block.linear("self_attention.dense", hidden, hidden, bias)
		block.linear("mlp.dense_h_to_4h", hidden, inner, bias)
		block.linear("mlp.dense_4h_to_h", inner, hidden, bias)
		for _, name := range norms {
			block.layerNorm(name, hidden)
		}
	})
	body.layerNorm("ln_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.word_embeddings.weight")
}

// bert has its encoder at path, and behind it the head for masked words, the
// pooler, and the head for the next sentence where both are there.
func bert(s scope, path string, maskedHead, pooler bool) {
	s.refuse("add_cross_attention")
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("intermediate_size")
	body := s
	if path != "" {
		body = s.in(path)
	}
	embeddings := body.in("embeddings")
	embeddings.embedding("word_embeddings", vocabulary, hidden)
	embeddings.embedding("position_embeddings", s.size("max_position_embeddings"), hidden)
	embeddings.embedding("token_type_embeddings", s.sizeOr(2, "type_vocab_size"), hidden)
	embeddings.layerNorm("LayerNorm", hidden)
	body.in("encoder").repeat("layer", s.size("num_hidden_layers"), func(block scope, _ int64) {
		attention := block.in("attention")
		attention.linear("self.query", hidden, hidden, true)
		attention.linear("self.key", hidden, hidden, true)
		attention.linear("self.value", hidden, hidden, true)
		attention.linear("output.dense", hidden, hidden, true)
		attention.layerNorm("output.LayerNorm", hidden)
		block.linear("intermediate.dense", hidden, inner, true)
		block.linear("output.dense", inner, hidden, true)
		block.layerNorm("output.LayerNorm", hidden)
	})
	if pooler {
		body.linear("pooler.dense", hidden, hidden, true)
	}
	if !maskedHead {
		return
	}
	predictions := s.in("cls").in("predictions")
	predictions.tensor("bias", vocabulary)
	predictions.linear("transform.dense", hidden, hidden, true)
	predictions.layerNorm("transform.LayerNorm", hidden)
	predictions.head("decoder", hidden, vocabulary, true, "bert.embeddings.word_embeddings.weight")
	predictions.add("decoder.bias", "cls.predictions.bias", vocabulary)
	if pooler {
		s.in("cls").linear("seq_relationship", hidden, 2, true)
	}
}

// t5 has an encoder and a decoder that read the same embedding. The head is
// the embedding too in T5, and a tensor of its own in T5 1.1 and Flan-T5,
// whose config.json says so.
func t5(s scope) {
	vocabulary, hidden, inner := s.size("vocab_size"), s.size("d_model", "hidden_size"), s.size("d_ff")
	heads, layers := s.size("num_heads", "num_attention_heads"), s.size("num_layers", "num_hidden_layers")
	width := heads * s.sizeOr(64, "d_kv")
	buckets := s.sizeOr(32, "relative_attention_num_buckets")
	inputs := []string{"wi"}
	switch activation := s.textOr("relu", "feed_forward_proj"); {
	case strings.HasPrefix(activation, "gated-"):
		inputs = []string{"wi_0", "wi_1"}
	case strings.Contains(activation, "-"):
		v, _ := s.find("feed_forward_proj")
		s.fail(v.at, "", `feed_forward_proj is %s: an activation such as "relu" or "gated-gelu" was expected`, v.shown())
	}

	attend := func(layer scope, name string, positions bool) {
		a := layer.in(name)
		a.linear("q", hidden, width, false)
		a.linear("k", hidden, width, false)
		a.linear("v", hidden, width, false)
		a.linear("o", width, hidden, false)
		if positions {
			a.embedding("relative_attention_bias", buckets, heads)
		}
		layer.norm("layer_norm", hidden)
	}
	stack := func(name string, layers int64, crossAttention bool) {
		body := s.in(name)
		body.add("embed_tokens.weight", "shared.weight", vocabulary, hidden)
		body.repeat("block", layers, func(block scope, index int64) {
			attend(block.in("layer").in("0"), "SelfAttention", index == 0)
			last := "1"
			if crossAttention {
				attend(block.in("layer").in("1"), "EncDecAttention", false)
				last = "2"
			}
			feedForward := block.in("layer").in(last)
			for _, input := range inputs {
				feedForward.linear("DenseReluDense."+input, hidden, inner, false)
			}
			feedForward.linear("DenseReluDense.wo", inner, hidden, false)
			feedForward.norm("layer_norm", hidden)
		})
		body.norm("final_layer_norm", hidden)
	}
	s.embedding("shared", vocabulary, hidden)
	stack("encoder", layers, false)
	stack("decoder", s.sizeOr(layers, "num_decoder_layers"), true)
	s.head("lm_head", hidden, vocabulary, true, "shared.weight")
}
