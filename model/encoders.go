package model

// Encoders: BERT and its descendants.

// bertHead is the head after BERT's encoder.
type bertHead int

const (
	bertBare bertHead = iota
	bertMasked
	bertPreTraining // masked words, and next-sentence prediction
	bertClassification
	bertTokens // a class of every token
	robertaMasked
	robertaClassification
)

// bert returns BERT with its encoder at path, a pooler and the head. Models for
// masked words alone, for tokens and RoBERTa's classifier have no pooler.
func bert(path string, head bertHead) func(scope) { return encoder{}.with(path, head) }

// encoder is an encoder by its differences from BERT.
type encoder struct {
	ownPositions  bool // every sequence counts the tokens that are no padding
	positionsLast bool // their table comes after the norm
	headFirst     bool // the head is the first module
}

var (
	roberta    = encoder{ownPositions: true, positionsLast: true}
	xlmRoberta = encoder{ownPositions: true, positionsLast: true, headFirst: true}
)

// with returns the encoder at path with a head.
func (e encoder) with(path string, head bertHead) func(scope) {
	return func(s scope) {
		s.refuse("add_cross_attention")
		vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("intermediate_size")
		heads := s.size("num_attention_heads")
		width := s.divide(hidden, "hidden_size", heads, "num_attention_heads")
		dropout := s.shareOr(0.1, "hidden_dropout_prob")
		body := s
		if path != "" {
			body = s.in(path)
		}
		if e.headFirst {
			s.bertHead(head, path, hidden, vocabulary)
		}
		embeddings := body.in("embeddings")
		stack := s.stack(hidden, Stack{EmbeddingDropout: dropout, OwnPositions: e.ownPositions})
		stack.TokenEmbedding = embeddings.embedding("word_embeddings", vocabulary, hidden)
		positions := func() {
			stack.PositionEmbedding = embeddings.embedding("position_embeddings", s.size("max_position_embeddings"),
				hidden)
		}
		if !e.positionsLast {
			positions()
		}
		stack.TypeEmbedding = embeddings.embedding("token_type_embeddings", s.sizeOr(2, "type_vocab_size"), hidden)
		stack.EmbeddingNorm = embeddings.layerNorm("LayerNorm", hidden)
		if e.positionsLast {
			positions()
		}
		body.in("encoder").blocks(stack, "layer", s.size("num_hidden_layers"), func(block scope, _ int64, b *Block) {
			b.Arrangement, b.Dropout = PostNorm, dropout
			a := block.in("attention")
			b.Attention = Attention{
				Heads:         heads,
				KeyValueHeads: heads,
				Width:         width,
				ValueWidth:    width,
				Dropout:       s.shareOr(0.1, "attention_probs_dropout_prob"),
			}
			b.Attention.Query = a.linear("self.query", hidden, hidden, true)
			b.Attention.Key = a.linear("self.key", hidden, hidden, true)
			b.Attention.Value = a.linear("self.value", hidden, hidden, true)
			b.Attention.Output = a.linear("output.dense", hidden, hidden, true)
			b.AttentionNorm = a.layerNorm("output.LayerNorm", hidden)
			b.FeedForward = FeedForward{
				Up:    block.linear("intermediate.dense", hidden, inner, true),
				Down:  block.linear("output.dense", inner, hidden, true),
				Inner: inner, Activation: s.activation("gelu"),
			}
			b.FeedForwardNorm = block.layerNorm("output.LayerNorm", hidden)
		})
		if head == bertBare || head == bertPreTraining || head == bertClassification {
			s.network.Head.Pooler = body.linear("pooler.dense", hidden, hidden, true)
		}
		if !e.headFirst {
			s.bertHead(head, path, hidden, vocabulary)
		}
		s.ownFirst()
	}
}

// ownFirst makes the first of tied parameters the owner of the storage.
func (s scope) ownFirst() {
	seen := map[string]int{}
	for i := range s.parameters {
		p := &s.parameters[i]
		if first, ok := seen[p.Name]; ok {
			s.parameters[first].TiedTo, p.TiedTo = "", s.parameters[first].Name
		}
		if p.TiedTo != "" {
			seen[p.TiedTo] = i
		}
	}
}

// tiedBias adds a bias that is tied to another one where embeddings are tied.
func (s scope) tiedBias(name, to string, size int64) {
	if s.flagOr(true, "tie_word_embeddings") {
		s.add(name, to, size)
	} else {
		s.tensor(name, size)
	}
}

// bertHead adds the head after the encoder at path.
func (s scope) bertHead(head bertHead, path string, hidden, vocabulary int64) {
	h := &s.network.Head
	table := path + ".embeddings.word_embeddings.weight"
	switch head {
	case bertMasked, bertPreTraining:
		predictions := s.in("cls").in("predictions")
		predictions.tensor("bias", vocabulary)
		h.Dense = predictions.linear("transform.dense", hidden, hidden, true)
		h.Norm = predictions.layerNorm("transform.LayerNorm", hidden)
		predictions.head("decoder", hidden, vocabulary, true, table)
		predictions.tiedBias("decoder.bias", "cls.predictions.bias", vocabulary)
		if head == bertPreTraining {
			s.in("cls").linear("seq_relationship", hidden, 2, true)
		}
		h.NarrowLoss = true
	case robertaMasked:
		predictions := s.in("lm_head")
		predictions.tensor("bias", vocabulary)
		h.Dense = predictions.linear("dense", hidden, hidden, true)
		h.Norm = predictions.layerNorm("layer_norm", hidden)
		predictions.head("decoder", hidden, vocabulary, true, table)
		predictions.tiedBias("decoder.bias", "lm_head.bias", vocabulary)
		h.NarrowLoss = true
	case bertClassification, bertTokens:
		h.Outputs, h.Classes, h.PerSequence = s.labels(), true, head == bertClassification
		h.Projection = s.linear("classifier", hidden, h.Outputs, true)
		h.Dropout, h.NarrowLoss = s.classifierDropout(), head == bertTokens
	case robertaClassification:
		h.Outputs, h.Classes, h.PerSequence = s.labels(), true, true
		h.Dense, h.Dropout = s.linear("classifier.dense", hidden, hidden, true), s.classifierDropout()
		h.Projection = s.linear("classifier.out_proj", hidden, h.Outputs, true)
	}
}

// classifierDropout is the dropout before a classifier of tokens.
func (s scope) classifierDropout() float64 {
	return s.shareOr(s.shareOr(0.1, "hidden_dropout_prob"), "classifier_dropout")
}

// modernBERTHead is the head after ModernBERT's encoder.
type modernBERTHead int

const (
	modernBERTMasked modernBERTHead = iota
	modernBERTClassification
	modernBERTTokens
)

// modernBERT returns ModernBERT with a head. Its norms have no bias unless
// config.json says so, and the first block has no norm before the attention.
func modernBERT(head modernBERTHead) func(scope) {
	return func(s scope) {
		s.refuseSet("sparse_prediction")
		vocabulary, hidden, inner := s.size("vocab_size"), s.size("hidden_size"), s.size("intermediate_size")
		heads := s.size("num_attention_heads")
		width := s.divide(hidden, "hidden_size", heads, "num_attention_heads")
		norm := func(s scope, name string) Norm {
			s.tensor(name+".weight", hidden)
			if s.flagOr(false, "norm_bias") {
				s.tensor(name+".bias", hidden)
			}
			return Norm{Path: s.module(name), Kind: LayerNorm}
		}
		body := s.in("model")
		stack := s.stack(hidden, Stack{EmbeddingDropout: s.shareOr(0, "embedding_dropout")})
		stack.TokenEmbedding = body.in("embeddings").embedding("tok_embeddings", vocabulary, hidden)
		stack.EmbeddingNorm = norm(body.in("embeddings"), "norm")
		body.blocks(stack, "layers", s.size("num_hidden_layers"), func(block scope, index int64, b *Block) {
			if index > 0 {
				b.AttentionNorm = norm(block, "attn_norm")
			}
			bias, dropout := s.flagOr(false, "attention_bias"), s.shareOr(0, "attention_dropout")
			b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width, Rotary: 1,
				WideRotary: true, WideSoftmax: true, Dropout: dropout, OutputDropout: dropout}
			b.Attention.Fused = block.linear("attn.Wqkv", hidden, 3*hidden, bias)
			b.Attention.Output = block.linear("attn.Wo", hidden, hidden, bias)
			if s.modernBERTWindow(index) {
				b.Attention.Window = s.sizeOr(128, "local_attention") / 2
			}
			b.FeedForwardNorm = norm(block, "mlp_norm")
			bias = s.flagOr(false, "mlp_bias")
			b.FeedForward = FeedForward{
				GateUp: block.linear("mlp.Wi", hidden, 2*inner, bias),
				Down:   block.linear("mlp.Wo", inner, hidden, bias),
				Inner:  inner, Activation: s.textOr("gelu", "hidden_activation"), Dropout: s.shareOr(0, "mlp_dropout"),
			}
		})
		stack.FinalNorm = norm(body, "final_norm")
		h := &s.network.Head
		h.Dense = s.in("head").linear("dense", hidden, hidden, s.flagOr(false, "classifier_bias"))
		h.Norm = norm(s.in("head"), "norm")
		if head == modernBERTMasked {
			s.head("decoder", hidden, vocabulary, true, "model.embeddings.tok_embeddings.weight")
			if s.flagOr(true, "decoder_bias") {
				s.tensor("decoder.bias", vocabulary)
			}
			return
		}
		h.Outputs, h.Classes, h.PerSequence = s.labels(), true, head == modernBERTClassification
		h.Projection, h.Dropout = s.linear("classifier", hidden, h.Outputs, true), s.shareOr(0, "classifier_dropout")
	}
}

// modernBERTWindow reports whether a layer attends to a window.
func (s scope) modernBERTWindow(index int64) bool {
	if s.list("layer_types") == nil {
		return index%s.sizeOr(3, "global_attn_every_n_layers") != 0
	}
	return variant{windows: 1}.windowed(s, index)
}
