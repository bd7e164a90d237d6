package model

// The decoders of MosaicML and Databricks.

// unbiased adds a layer norm without bias.
func (s scope) unbiased(name string, width int64) Norm {
	s.tensor(name+".weight", width)
	return Norm{Path: s.module(name), Kind: LayerNorm}
}

// mpt is MPT as transformers has it: with ALiBi and without biases.
func mpt(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("d_model", "hidden_size")
	heads := s.size("n_heads", "num_attention_heads")
	width := s.divide(hidden, "d_model", heads, "n_heads")
	a := s.section("attn_config")
	dropout, clip := a.shareOr(0, "attn_pdrop"), a.isSet("clip_qkv")
	body := s.in("transformer")
	stack := s.stack(hidden, Stack{Causal: true})
	stack.TokenEmbedding = body.embedding("wte", vocabulary, hidden)
	body.blocks(stack, "blocks", s.size("n_layers", "num_hidden_layers"), func(block scope, _ int64, b *Block) {
		b.Dropout = dropout
		b.AttentionNorm = block.unbiased("norm_1", hidden)
		b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width, WideSoftmax: true,
			Dropout: dropout, Biased: true, Clips: clip, SavesMask: true,
			NoSDPA: true, NoFlash: true}
		b.Attention.Fused = block.linear("attn.Wqkv", hidden, 3*hidden, false)
		b.Attention.Output = block.linear("attn.out_proj", hidden, hidden, false)
		b.FeedForwardNorm = block.unbiased("norm_2", hidden)
		b.FeedForward = FeedForward{
			Up:    block.linear("ffn.up_proj", hidden, 4*hidden, false),
			Down:  block.linear("ffn.down_proj", 4*hidden, hidden, false),
			Inner: 4 * hidden, Activation: "gelu",
		}
	})
	stack.FinalNorm = body.unbiased("norm_f", hidden)
	s.head("lm_head", hidden, vocabulary, true, "transformer.wte.weight")
}

// dbrx is DBRX. Its operations are not planned: the program runs one expert after
// the other on views of the weights of all.
func dbrx(s scope) {
	s.withoutOperations()
	vocabulary, hidden := s.size("vocab_size"), s.size("d_model", "hidden_size")
	heads := s.size("n_heads", "num_attention_heads")
	width := s.divide(hidden, "d_model", heads, "n_heads")
	a, f := s.section("attn_config"), s.section("ffn_config")
	groups := a.sizeOr(1, "kv_n_heads")
	inner, count := f.size("ffn_hidden_size"), f.size("moe_num_experts")
	body := s.in("transformer")
	body.embedding("wte", vocabulary, hidden)
	body.repeat("blocks", s.size("n_layers", "num_hidden_layers"), func(block scope, _ int64) {
		block.unbiased("norm_attn_norm.norm_1", hidden)
		block.linear("norm_attn_norm.attn.Wqkv", hidden, hidden+2*groups*width, false)
		block.linear("norm_attn_norm.attn.out_proj", hidden, hidden, false)
		block.unbiased("norm_attn_norm.norm_2", hidden)
		block.linear("ffn.router.layer", hidden, count, false)
		for _, name := range []string{"w1", "v1", "w2"} {
			block.tensor("ffn.experts.mlp."+name, count*inner, hidden)
		}
	})
	body.unbiased("norm_f", hidden)
	s.head("lm_head", hidden, vocabulary, false, "transformer.wte.weight")
}
