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
	answers // the first and the last token of an answer
	electraMasked
	electraPreTraining
	electraClassification
	albertMasked
)

// bert returns BERT with its encoder at path, a pooler and the head. Models for
// masked words alone, for tokens and RoBERTa's classifier have no pooler.
func bert(path string, head bertHead) func(scope) { return encoder{}.with(path, head) }

// encoder is an encoder by its differences from BERT.
type encoder struct {
	ownPositions  bool // every sequence counts the tokens that are no padding
	positionsLast bool // their table comes after the norm
	headFirst     bool // the head is the first module
	narrow        bool // embeddings may have a width of their own (ELECTRA, ALBERT)
	shares        bool // blocks share their weights (ALBERT)
}

var (
	roberta    = encoder{ownPositions: true, positionsLast: true}
	xlmRoberta = encoder{ownPositions: true, positionsLast: true, headFirst: true}
	electra    = encoder{narrow: true}
	albert     = encoder{narrow: true, shares: true}
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
		embedded := hidden
		if e.narrow {
			embedded = s.size("embedding_size")
			stack.EmbeddingWidth, stack.ProjectsLast = embedded, true
		}
		stack.TokenEmbedding = embeddings.embedding("word_embeddings", vocabulary, embedded)
		positions := func() {
			stack.PositionEmbedding = embeddings.embedding("position_embeddings", s.size("max_position_embeddings"),
				embedded)
		}
		if !e.positionsLast {
			positions()
		}
		stack.TypeEmbedding = embeddings.embedding("token_type_embeddings", s.sizeOr(2, "type_vocab_size"), embedded)
		stack.EmbeddingNorm = embeddings.layerNorm("LayerNorm", embedded)
		if e.positionsLast {
			positions()
		}
		attention := Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width,
			Dropout: s.shareOr(0.1, "attention_probs_dropout_prob")}
		switch {
		case e.shares:
			attention.Dropout = s.shareOr(0, "attention_probs_dropout_prob")
			dropout = s.shareOr(0, "hidden_dropout_prob")
			stack.EmbeddingDropout = dropout
			stack.ProjectIn = body.linear("encoder.embedding_hidden_mapping_in", embedded, hidden, true)
			body.in("encoder").albertBlocks(stack, Block{Arrangement: PostNorm, Dropout: dropout, Attention: attention},
				hidden, inner)
		case e.narrow && embedded != hidden:
			stack.ProjectIn = body.linear("embeddings_project", embedded, hidden, true)
		}
		body.in("encoder").blocks(stack, "layer", s.blocksOf(e), func(block scope, _ int64, b *Block) {
			b.Arrangement, b.Dropout = PostNorm, dropout
			a := block.in("attention")
			b.Attention = attention
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
			name := "pooler.dense"
			if e.shares {
				name = "pooler"
			}
			s.network.Head.Pooler = body.linear(name, hidden, hidden, true)
		}
		if !e.headFirst {
			s.bertHead(head, path, hidden, vocabulary)
		}
		s.ownFirst()
	}
}

// blocksOf returns the number of the blocks with weights of their own.
func (s scope) blocksOf(e encoder) int64 {
	if e.shares {
		return 0
	}
	return s.size("num_hidden_layers")
}

// albertBlocks adds ALBERT's groups of blocks. The blocks of a group have one after
// the other the same weights.
func (s scope) albertBlocks(stack *Stack, like Block, hidden, inner int64) {
	groups, layers := s.sizeOr(1, "num_hidden_groups"), s.size("num_hidden_layers")
	if s.sizeOr(1, "inner_group_num") > 1 {
		v, _ := s.find("inner_group_num")
		s.fail(v.At, Documented, "inner_group_num is %s, which is not supported", v)
	}
	var blocks []Block
	s.repeat("albert_layer_groups", groups, func(group scope, _ int64) {
		b, block := like, group.in("albert_layers.0")
		b.Path = block.module("")
		b.FeedForwardNorm = block.layerNorm("full_layer_layer_norm", hidden)
		a := block.in("attention")
		b.Attention.Query = a.linear("query", hidden, hidden, true)
		b.Attention.Key = a.linear("key", hidden, hidden, true)
		b.Attention.Value = a.linear("value", hidden, hidden, true)
		b.Attention.Output = a.linear("dense", hidden, hidden, true)
		b.AttentionNorm = a.layerNorm("LayerNorm", hidden)
		b.FeedForward = FeedForward{Up: block.linear("ffn", hidden, inner, true),
			Down: block.linear("ffn_output", inner, hidden, true), Inner: inner, Activation: s.activation("gelu_new")}
		b.UndroppedFeedForward = true
		blocks = append(blocks, b)
	})
	for index := range layers {
		stack.Blocks = append(stack.Blocks, blocks[index*groups/layers])
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
	case answers:
		h.Outputs, h.Classes, h.Spans = 2, true, true
		h.Projection = s.linear("qa_outputs", hidden, 2, true)
		h.Dropout = s.shareOr(0, "qa_dropout")
	case electraMasked:
		embedded := s.size("embedding_size")
		h.Norm = s.layerNorm("generator_predictions.LayerNorm", embedded)
		h.Dense, h.Width = s.linear("generator_predictions.dense", hidden, embedded, true), embedded
		s.head("generator_lm_head", embedded, vocabulary, true, table)
		s.tensor("generator_lm_head.bias", vocabulary)
		h.NarrowLoss = true
	case albertMasked:
		embedded, predictions := s.size("embedding_size"), s.in("predictions")
		predictions.tensor("bias", vocabulary)
		h.Norm = predictions.layerNorm("LayerNorm", embedded)
		h.Dense, h.Width = predictions.linear("dense", hidden, embedded, true), embedded
		predictions.head("decoder", embedded, vocabulary, true, table)
		predictions.tiedBias("decoder.bias", "predictions.bias", vocabulary)
		h.NarrowLoss, h.Activation = true, s.activation("gelu_new")
	case electraPreTraining:
		predictions := s.in("discriminator_predictions")
		h.Outputs, h.Classes, h.NarrowLoss = 1, true, true
		h.Dense, h.Activation = predictions.linear("dense", hidden, hidden, true), s.activation("gelu")
		h.Projection = predictions.linear("dense_prediction", hidden, 1, true)
	case electraClassification:
		h.Outputs, h.Classes, h.PerSequence, h.Activation = s.labels(), true, true, "gelu"
		h.Dense, h.Dropout = s.linear("classifier.dense", hidden, hidden, true), s.classifierDropout()
		h.Projection = s.linear("classifier.out_proj", hidden, h.Outputs, true)
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
	return s.shareOr(s.shareOr(0.1, "hidden_dropout_prob"), "classifier_dropout", "classifier_dropout_prob")
}

// distilBERT returns DistilBERT with a head. It has no types of tokens.
func distilBERT(head bertHead) func(scope) {
	return func(s scope) {
		vocabulary, hidden, inner := s.size("vocab_size"), s.size("dim", "hidden_size"), s.size("hidden_dim")
		heads := s.size("n_heads", "num_attention_heads")
		width := s.divide(hidden, "dim", heads, "n_heads")
		dropout := s.shareOr(0.1, "dropout")
		body := s.in("distilbert")
		embeddings := body.in("embeddings")
		stack := s.stack(hidden, Stack{EmbeddingDropout: dropout})
		stack.TokenEmbedding = embeddings.embedding("word_embeddings", vocabulary, hidden)
		stack.PositionEmbedding = embeddings.embedding("position_embeddings", s.size("max_position_embeddings"), hidden)
		if s.flagOr(false, "sinusoidal_pos_embds") {
			s.parameters[len(s.parameters)-1].Frozen = true
		}
		stack.EmbeddingNorm = embeddings.layerNorm("LayerNorm", hidden)
		body.in("transformer").blocks(stack, "layer", s.size("n_layers", "num_hidden_layers"),
			func(block scope, _ int64, b *Block) {
				a, f := block.in("attention"), block.in("ffn")
				b.Arrangement = PostNorm
				b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width,
					Dropout: s.shareOr(0.1, "attention_dropout")}
				b.Attention.Query = a.linear("q_lin", hidden, hidden, true)
				b.Attention.Key = a.linear("k_lin", hidden, hidden, true)
				b.Attention.Value = a.linear("v_lin", hidden, hidden, true)
				b.Attention.Output = a.linear("out_lin", hidden, hidden, true)
				b.AttentionNorm = block.layerNorm("sa_layer_norm", hidden)
				b.FeedForward = FeedForward{Up: f.linear("lin1", hidden, inner, true),
					Down: f.linear("lin2", inner, hidden, true), Inner: inner, Activation: s.activationOr("gelu"),
					OutputDropout: dropout}
				b.FeedForwardNorm = block.layerNorm("output_layer_norm", hidden)
			})
		h := &s.network.Head
		switch head {
		case bertMasked:
			h.Dense = s.linear("vocab_transform", hidden, hidden, true)
			h.Norm = s.layerNorm("vocab_layer_norm", hidden)
			s.head("vocab_projector", hidden, vocabulary, true, "distilbert.embeddings.word_embeddings.weight")
			s.tensor("vocab_projector.bias", vocabulary)
			h.NarrowLoss, h.Activation = true, s.activationOr("gelu")
		case bertClassification:
			h.Outputs, h.Classes, h.PerSequence, h.Activation = s.labels(), true, true, "relu"
			h.Pooler = s.linear("pre_classifier", hidden, hidden, true)
			h.Dropout = s.shareOr(0.2, "seq_classif_dropout")
			h.Projection = s.linear("classifier", hidden, h.Outputs, true)
		case bertTokens:
			h.Outputs, h.Classes, h.NarrowLoss, h.Dropout = s.labels(), true, true, dropout
			h.Projection = s.linear("classifier", hidden, h.Outputs, true)
		case answers:
			h.Outputs, h.Classes, h.Spans, h.Dropout = 2, true, true, s.shareOr(0.1, "qa_dropout")
			h.Projection = s.linear("qa_outputs", hidden, 2, true)
		}
	}
}

// activationOr returns the field "activation".
func (s scope) activationOr(otherwise string) string { return s.textOr(otherwise, "activation") }

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
