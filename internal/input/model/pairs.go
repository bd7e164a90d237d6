package model

// BART and its descendants: an encoder and a decoder with layer norms.

// bartVariant is a descendant by its differences from BART.
type bartVariant struct {
	before    bool  // norms come before both halves, and one is the last
	embedding bool  // the embedding has a norm
	offset    int64 // positions that are for padding
	frozen    bool  // sines as positions
}

var (
	bart    = bartVariant{embedding: true, offset: 2}
	mBART   = bartVariant{before: true, embedding: true, offset: 2}
	pegasus = bartVariant{before: true, frozen: true}
)

// describe describes the model with its language modeling head.
func (v bartVariant) describe(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("d_model", "hidden_size")
	s.in("model").embedding("shared", vocabulary, hidden)
	for _, name := range []string{"encoder", "decoder"} {
		body := s.in("model").in(name)
		stack := s.stack(hidden, Stack{Causal: name == "decoder", EmbeddingDropout: s.shareOr(0.1, "dropout"),
			ScalesEmbedding: true})
		body.add("embed_tokens.weight", "model.shared.weight", vocabulary, hidden)
		stack.TokenEmbedding = body.module("embed_tokens")
		positions := s.size("max_position_embeddings") + v.offset
		stack.PositionEmbedding = body.embedding("embed_positions", positions, hidden)
		if v.frozen {
			s.parameters[len(s.parameters)-1].Frozen = true
		}
		body.blocks(stack, "layers", s.size(name+"_layers", "num_hidden_layers"), func(block scope, _ int64, b *Block) {
			v.block(block, name, hidden, b)
		})
		if v.embedding {
			stack.EmbeddingNorm = body.layerNorm("layernorm_embedding", hidden)
		}
		if v.before {
			stack.FinalNorm = body.layerNorm("layer_norm", hidden)
		}
	}
	s.head("lm_head", hidden, vocabulary, true, "model.shared.weight")
	s.network.Head.NarrowLoss, s.network.Head.AddsBuffer = true, true // final_logits_bias
}

func (v bartVariant) block(s scope, stack string, hidden int64, b *Block) {
	if !v.before {
		b.Arrangement = PostNorm
	}
	b.Dropout = s.shareOr(0.1, "dropout")
	s.pairBlock(stack, hidden, b, Attention{}, true)
}

// pairBlock adds what blocks of BART and of Whisper have alike, in the encoder or the decoder. The argument like has
// what is the same for all attention of the block, and keyBias says whether keys have a bias.
func (s scope) pairBlock(stack string, hidden int64, b *Block, like Attention, keyBias bool) {
	heads, inner := s.size(stack+"_attention_heads"), s.size(stack+"_ffn_dim")
	width := s.divide(hidden, "d_model", heads, stack+"_attention_heads")
	attend := func(name string) Attention {
		a, d := s.in(name), like
		d.Heads, d.KeyValueHeads, d.Width, d.ValueWidth = heads, heads, width, width
		d.Dropout = s.shareOr(0, "attention_dropout")
		d.Key = a.linear("k_proj", hidden, hidden, keyBias)
		d.Value = a.linear("v_proj", hidden, hidden, true)
		d.Query = a.linear("q_proj", hidden, hidden, true)
		d.Output = a.linear("out_proj", hidden, hidden, true)
		return d
	}
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
