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
	b.Dropout = s.shareOr(0, "dropout")
	s.pairBlock(stack, hidden, b, Attention{ScalesQueries: true, ByHead: true}, false)
}
