package model

// Contrast is the head of a model that compares images with texts: CLIP's and SigLIP's.
type Contrast struct {
	Projection string // of a row for each text
	Width      int64  // of what is compared
	Scale      string // a parameter that all comparisons are multiplied by
	// Sigmoid reports whether every pair has a loss of its own. Otherwise the rows and the columns of all pairs are
	// normalized.
	Sigmoid bool
}

// contrastive is a model with an encoder of images and one of texts, by its differences from CLIP.
type contrastive struct {
	text, image string // the default types of the configurations
	tower       clipLike
	positions   int64 // the default number
	sigmoid     bool
}

var (
	clipPair = contrastive{text: "clip_text_model", image: "clip_vision_model", positions: 77,
		tower: clipLike{class: true, activation: "quick_gelu", block: "CLIPEncoderLayer"}}
	siglipPair = contrastive{text: "siglip_text_model", image: "siglip_vision_model", positions: 64, sigmoid: true,
		tower: clipLike{normsFirst: true, activation: "gelu_pytorch_tanh", block: "SiglipEncoderLayer"}}
)

func (c contrastive) describe(s scope) {
	t := s.inside("text_config", c.text, "", nil)
	s.textType = c.text
	v := s.inside("vision_config", c.image, "", nil)
	h := &Contrast{Scale: s.module("logit_scale"), Sigmoid: c.sigmoid}
	if c.sigmoid {
		s.tensor("logit_scale", 1)
		s.tensor("logit_bias", 1)
	} else {
		s.tensor("logit_scale")
	}
	hidden := t.size("hidden_size")
	h.Width = hidden
	c.texts(t, hidden)
	if c.sigmoid {
		h.Width = t.sizeOr(hidden, "projection_size")
		h.Projection = t.in("text_model").linear("head", hidden, h.Width, true)
	}
	c.tower.describe(v, "vision_model", func(w *Tower) {
		if c.sigmoid {
			w.After = append(w.After, v.in("vision_model").poolingHead())
			return
		}
		w.After = []Step{{Kind: First},
			{Kind: Normalize, Norm: Norm{Path: v.in("vision_model").module("post_layernorm"), Kind: LayerNorm}}}
	})
	if !c.sigmoid {
		h.Width = s.sizeOr(512, "projection_dim")
		w := s.network.Towers[0]
		w.Projector = s.linear("visual_projection", w.Network.Hidden, h.Width, false)
		w.After = append(w.After, Step{Kind: Project, Path: w.Projector, Width: h.Width})
		h.Projection = s.linear("text_projection", hidden, h.Width, false)
	}
	s.network.Head.Contrast, s.network.Head.NarrowLoss = h, true
}

// texts adds the encoder of texts.
func (c contrastive) texts(t scope, hidden int64) {
	body := t.in("text_model")
	stack := t.stack(hidden, Stack{Causal: !c.sigmoid})
	e := body.in("embeddings")
	stack.TokenEmbedding = e.embedding("token_embedding", t.size("vocab_size"), hidden)
	positions := t.sizeOr(c.positions, "max_position_embeddings")
	stack.PositionEmbedding = e.embedding("position_embedding", positions, hidden)
	body.in("encoder").blocks(stack, "layers", t.size("num_hidden_layers"), c.tower.fill)
	stack.FinalNorm = body.layerNorm("final_layer_norm", hidden)
}

// poolingHead adds the head that makes one row of those of an image.
func (s scope) poolingHead() Step {
	hidden, head := s.size("hidden_size"), s.in("head")
	head.tensor("probe", 1, 1, hidden)
	head.tensor("attention.in_proj_weight", 3*hidden, hidden)
	head.tensor("attention.in_proj_bias", 3*hidden)
	head.linear("attention.out_proj", hidden, hidden, true)
	norm := head.layerNorm("layernorm", hidden)
	f := head.in("mlp").twoLayers("fc1", "fc2", s.size("intermediate_size"), "gelu_pytorch_tanh")
	return Step{Kind: Pool, Path: head.module(""), Norm: norm, FeedForward: &f, Rows: s.size("num_attention_heads")}
}
