package model

// visionModel is a model that reads images and nothing else, by its differences from ViT.
type visionModel struct {
	name      string // of the encoder's module
	bare      bool   // without a head: the module is the model
	distilled bool   // DeiT: one more row before those of the patches
	dino      bool   // DINOv2: scaled halves of blocks, and a head that reads the average of the patches, too
	pooled    bool   // the bare model has a pooler
}

var (
	vit        = visionModel{name: "vit"}
	vitBare    = visionModel{bare: true, pooled: true}
	deit       = visionModel{name: "deit", distilled: true}
	dinov2     = visionModel{name: "dinov2", dino: true}
	dinov2Bare = visionModel{dino: true, bare: true}
)

// usualSide is the side of the images that DINOv2's processor makes, whatever the table of positions was made for.
const usualSide = 224

func (v visionModel) describe(s scope) {
	body, hidden, image := s, s.size("hidden_size"), s.fixed()
	if !v.bare {
		body = s.in(v.name)
	}
	image.Class = 1
	if v.distilled {
		image.Class = 2
	}
	rows := image.Patches(image.Height, image.Width) + image.Class
	if v.dino {
		image.Height, image.Width, image.Usual = 0, 0, usualSide
	}
	dropout := s.shareOr(0, "hidden_dropout_prob")
	s.network.Hidden = hidden
	s.tower(body.module(""), hidden, image, func(t *Tower, stack *Stack) {
		t.Hooked, t.BlockClass = true, "ViTLayer"
		e := body.in("embeddings")
		e.tensor("cls_token", 1, 1, hidden)
		first := Step{Kind: Prepend, Path: e.module("cls_token")}
		switch {
		case v.dino && s.flagOr(true, "use_mask_token"):
			e.frozen("mask_token", 1, hidden) // nothing reads it, so it has no gradient
		case v.distilled:
			first.Second = e.module("distillation_token")
		}
		e.tensor("position_embeddings", 1, rows, hidden)
		if v.distilled {
			e.tensor("distillation_token", 1, 1, hidden)
		}
		t.Before = []Step{e.convolution("patch_embeddings.projection", image, hidden, true), first,
			{Kind: Locate, Path: e.module("position_embeddings"), Rows: rows}, {Kind: Dropout, Share: dropout}}
		list, name := body, "layers"
		switch {
		case v.dino:
			t.BlockClass, list, name = "Dinov2Layer", body.in("encoder"), "layer"
		case v.distilled:
			t.BlockClass = "DeiTLayer"
		}
		list.blocks(stack, name, s.size("num_hidden_layers"), func(s scope, _ int64, b *Block) {
			b.Dropout = dropout
			v.block(s, hidden, b)
		})
		t.After = []Step{{Kind: Normalize, Norm: body.layerNorm("layernorm", hidden)}}
	})
	v.head(s, hidden)
}

// block adds a block of the encoder.
func (v visionModel) block(s scope, hidden int64, b *Block) {
	heads := s.size("num_attention_heads")
	width := s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	attend := func() {
		a, bias := s.in("attention"), s.flagOr(true, "qkv_bias")
		b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width,
			WideSoftmax: !v.dino, Dropout: s.shareOr(0, "attention_probs_dropout_prob"),
			Query: a.linear("q_proj", hidden, hidden, bias), Key: a.linear("k_proj", hidden, hidden, bias),
			Value: a.linear("v_proj", hidden, hidden, bias), Output: a.linear("o_proj", hidden, hidden, true)}
	}
	if !v.dino {
		attend()
		b.AttentionNorm = s.layerNorm("layernorm_before", hidden)
		b.FeedForwardNorm = s.layerNorm("layernorm_after", hidden)
		b.FeedForward = s.in("mlp").twoLayers("fc1", "fc2", s.size("intermediate_size"), "gelu")
		return
	}
	s.refuseSet("drop_path_rate")
	b.Dropout = 0 // that of the embeddings only
	b.AttentionNorm = s.layerNorm("norm1", hidden)
	attend()
	b.AttentionScale = s.scale("layer_scale1", hidden)
	b.FeedForwardNorm = s.layerNorm("norm2", hidden)
	inner := hidden * s.sizeOr(4, "mlp_ratio")
	if s.flagOr(false, "use_swiglu_ffn") {
		b.FeedForward = gated(s.in("mlp"), (inner*2/3+7)/8*8, true)
		b.FeedForward.Activation = "silu"
	} else {
		b.FeedForward = s.in("mlp").twoLayers("fc1", "fc2", inner, "gelu")
	}
	b.FeedForwardScale = s.scale("layer_scale2", hidden)
}

// scale adds a parameter that scales half of a block.
func (s scope) scale(name string, hidden int64) string {
	s.tensor(name+".lambda1", hidden)
	return s.module(name + ".lambda1")
}

// head adds what comes after the encoder.
func (v visionModel) head(s scope, hidden int64) {
	h := &s.network.Head
	if v.pooled {
		h.Pooler = s.linear("pooler.dense", hidden, s.sizeOr(hidden, "pooler_output_size"), true)
	}
	if v.bare {
		return
	}
	width := hidden
	if v.dino {
		width, h.Average = 2*hidden, true
	}
	h.Outputs, h.Classes, h.PerSequence, h.NarrowLoss = s.labels(), true, true, true
	h.Projection = s.linear("classifier", width, h.Outputs, true)
}
