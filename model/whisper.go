package model

// whisper is Whisper: an encoder of sound and a decoder of text.
func whisper(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("d_model")
	e := s.in("model.encoder")
	rows := s.size("max_source_positions")
	encoder := s.stack(hidden, Stack{EmbeddingDropout: s.shareOr(0, "dropout")})
	e.convolutions(hidden)
	e.frozen("embed_positions.weight", rows, hidden)
	encoder.Sound = &Sound{First: e.module("conv1"), Second: e.module("conv2"), Positions: e.module("embed_positions"),
		Bins: s.size("num_mel_bins"), Rows: rows}
	e.blocks(encoder, "layers", s.size("encoder_layers"), func(block scope, _ int64, b *Block) {
		b.ClampsHalf = true
		block.whisperBlock("encoder", hidden, b)
	})
	encoder.FinalNorm = e.layerNorm("layer_norm", hidden)

	d := s.in("model.decoder")
	decoder := s.stack(hidden, Stack{Causal: true, CopiesPositions: true, EmbeddingDropout: s.shareOr(0, "dropout")})
	decoder.TokenEmbedding = d.embedding("embed_tokens", vocabulary, hidden)
	decoder.PositionEmbedding = d.embedding("embed_positions", s.size("max_target_positions"), hidden)
	d.blocks(decoder, "layers", s.size("decoder_layers"), func(block scope, _ int64, b *Block) {
		block.whisperBlock("decoder", hidden, b)
	})
	decoder.FinalNorm = d.layerNorm("layer_norm", hidden)
	s.head("proj_out", hidden, vocabulary, true, "model.decoder.embed_tokens.weight")
	s.network.Head.NarrowLoss = true
}

// whisperBlock adds a block of the encoder or the decoder.
func (s scope) whisperBlock(stack string, hidden int64, b *Block) {
	heads, inner := s.size(stack+"_attention_heads"), s.size(stack+"_ffn_dim")
	width := s.divide(hidden, "d_model", heads, stack+"_attention_heads")
	attend := func(name string) Attention {
		a := s.in(name)
		return Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width,
			Dropout: s.shareOr(0, "attention_dropout"), ScalesQueries: true, ByHead: true,
			Key: a.linear("k_proj", hidden, hidden, false), Value: a.linear("v_proj", hidden, hidden, true),
			Query: a.linear("q_proj", hidden, hidden, true), Output: a.linear("out_proj", hidden, hidden, true)}
	}
	b.Dropout = s.shareOr(0, "dropout")
	b.Attention = attend("self_attn")
	b.AttentionNorm = s.layerNorm("self_attn_layer_norm", hidden)
	if stack == "decoder" {
		cross := attend("encoder_attn")
		b.Cross, b.CrossNorm = &cross, s.layerNorm("encoder_attn_layer_norm", hidden)
	}
	b.FeedForward = FeedForward{
		Up:    s.linear("fc1", hidden, inner, true),
		Down:  s.linear("fc2", inner, hidden, true),
		Inner: inner, Activation: s.activation("gelu"), Dropout: s.shareOr(0, "activation_dropout"),
	}
	b.FeedForwardNorm = s.layerNorm("final_layer_norm", hidden)
}
