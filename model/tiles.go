package model

import (
	"strconv"

	"plimsoll/recipe/strict"
)

// tiled adds a parameter between the rows of an image, which a processor cuts into tiles. The image is fitted into
// the best of some sizes. If most is above 0, an image alone in its sequence is cut, and its rows are scaled down to
// those of so many tiles.
func tiled(describe func(root, v scope, hidden int64), sizes [][2]int64, most int64) func(scope, scope, int64) {
	return func(root, v scope, hidden int64) {
		root.tensor("model.image_newline", hidden)
		describe(root, v, hidden)
		t := root.network.Towers[len(root.network.Towers)-1]
		t.After = append(t.After, Step{Kind: Pack, Path: "model.image_newline"})
		t.Image.Sizes, t.Image.MostTiles = sizes, most
		if list := root.list("image_grid_pinpoints"); list != nil {
			t.Image.Sizes = nil
			for _, v := range list {
				t.Image.Sizes = append(t.Image.Sizes, root.pair("image_grid_pinpoints", v))
			}
		}
		if root.textOr("anyres_max_9", "vision_aspect_ratio") != "anyres_max_9" {
			root.fail(root.fields["vision_aspect_ratio"].Value.At, Documented,
				`vision_aspect_ratio is not "anyres_max_9", which is not planned`)
		}
	}
}

// pair returns the two sizes of an element of a list.
func (s scope) pair(name string, v *strict.Value) [2]int64 {
	var pair [2]int64
	ok := v.Kind == '[' && len(v.Elements) == len(pair)
	for i := range pair {
		if ok {
			n, err := strconv.ParseInt(v.Elements[i].Text, 10, 32)
			pair[i], ok = n, err == nil && n > 0
		}
	}
	if !ok {
		s.fail(v.At, "", "%s has %s: expected a height and a width in pixels", name, v)
		return [2]int64{1, 1}
	}
	return pair
}

// nextSizes are those that LLaVA-NeXT fits images into by default.
var nextSizes = [][2]int64{{336, 672}, {672, 336}, {672, 672}, {1008, 336}, {336, 1008}}

// oneVisionSizes are those of LLaVA-OneVision.
func oneVisionSizes() [][2]int64 {
	var sizes [][2]int64
	for height := int64(384); height <= 2304; height += 384 {
		for width := int64(384); width <= 2304; width += 384 {
			sizes = append(sizes, [2]int64{height, width})
		}
	}
	return sizes
}

// llama4Tower adds Llama 4's encoder: patches are unfolded, and four of them become one token.
func llama4Tower(root, v scope, hidden int64) {
	const path = "vision_model"
	e, width, image := v.in(path), v.size("hidden_size"), v.fixed()
	image.Class = 1
	image.Merged = int64(1 / max(v.shareOr(0.5, "pixel_shuffle_ratio"), 1.0/64))
	v.tower(path, width, image, func(t *Tower, stack *Stack) {
		t.Hooked, t.BlockClass, t.AnglesKept = true, "Llama4VisionEncoderLayer", true
		e.tensor("class_embedding", width)
		e.tensor("positional_embedding_vlm", image.Patches(image.Height, image.Width)+1, width)
		patches := Step{Kind: Unfold, Width: width,
			Path: e.linear("patch_embedding.linear", image.Channels*image.Patch*image.Patch, width, false)}
		before, after := e.layerNorm("layernorm_pre", width), e.layerNorm("layernorm_post", width)
		t.Before = []Step{patches, {Kind: Prepend, Path: e.module("class_embedding")},
			{Kind: Locate, Path: e.module("positional_embedding_vlm")}, {Kind: Normalize, Norm: before}}
		e.in("model").blocks(stack, "layers", v.size("num_hidden_layers"), func(s scope, _ int64, b *Block) {
			b.Attention = s.in("self_attn").encoderAttention([4]string{"q_proj", "k_proj", "v_proj", "o_proj"}, true,
				true)
			b.Attention.Rotary, b.Attention.WideRotary = 1, true
			b.FeedForward = s.in("mlp").twoLayers("fc1", "fc2", s.size("intermediate_size"), "gelu")
			b.FeedForward.Activation = "gelu" // whatever hidden_act says
			b.AttentionNorm = s.layerNorm("input_layernorm", width)
			b.FeedForwardNorm = s.layerNorm("post_attention_layernorm", width)
		})
		mlp, in, out := e.in("vision_adapter").in("mlp"), v.size("projector_input_dim"), v.size("projector_output_dim")
		v.refuseSet("projector_dropout")
		gelu := Step{Kind: Activate, Function: "gelu"}
		t.After = []Step{{Kind: Normalize, Norm: after}, {Kind: Crop}, {Kind: Copy}, {Kind: Copy},
			{Kind: Merge, Rows: image.Merged * image.Merged, Width: width * image.Merged * image.Merged},
			{Kind: Project, Path: mlp.linear("fc1", v.size("intermediate_size"), in, false), Width: in}, gelu,
			{Kind: Project, Path: mlp.linear("fc2", out, out, false), Width: out}, gelu}
		t.Projector = "multi_modal_projector"
		t.After = append(t.After, Step{Kind: Project, Width: hidden,
			Path: root.linear("multi_modal_projector.linear_1", v.size("vision_output_dim"), hidden, false)})
	})
}

// glmTower adds GLM-4V's encoder, whose last convolution merges patches.
func glmTower(_, v scope, _ int64) {
	const path = "model.visual"
	class := "Glm4vVisionBlock"
	if v.textOr("", "model_type") == "glm4v_moe_vision" {
		class = "Glm4vMoeVisionBlock"
	}
	e, width, out := v.in(path), v.size("hidden_size"), v.size("out_hidden_size")
	grid := v.fixed()
	image := Image{Channels: v.sizeOr(3, "in_channels"), Frames: v.sizeOr(2, "temporal_patch_size"), Patch: v.patch(),
		Merged: v.sizeOr(2, "spatial_merge_size")}
	v.tower(path, width, image, func(t *Tower, stack *Stack) {
		t.OneSequence, t.Projector, t.BlockClass = true, e.module("merger"), class
		table := e.embedding("embeddings.position_embedding", grid.Patches(grid.Height, grid.Width), width)
		patches := e.in("patch_embed").convolution("proj", image, width, true)
		e.blocks(stack, "blocks", v.size("depth"), func(s scope, _ int64, b *Block) {
			b.AttentionNorm, b.FeedForwardNorm = s.norm("norm1", width), s.norm("norm2", width)
			heads := s.size("num_heads")
			b.Attention = Attention{Heads: heads, KeyValueHeads: heads, WideSoftmax: true, Rotary: 1, WideRotary: true,
				Divided: true, Dropout: s.shareOr(0, "attention_dropout")}
			b.Attention.Width = s.divide(width, "hidden_size", heads, "num_heads")
			b.Attention.ValueWidth = b.Attention.Width
			b.Attention.Fused = s.in("attn").linear("qkv", width, 3*width, s.flagOr(false, "attention_bias"))
			b.Attention.Output = s.in("attn").linear("proj", width, width, false)
			b.FeedForward = gated(s.in("mlp"), out, false)
		})
		merger, inner := e.in("merger"), v.size("intermediate_size")
		project := Step{Kind: Project, Path: merger.linear("proj", out, out, false), Width: out}
		norm := merger.layerNorm("post_projection_norm", out)
		network := FeedForward{Gate: merger.linear("gate_proj", out, inner, false),
			Up: merger.linear("up_proj", out, inner, false), Down: merger.linear("down_proj", inner, out, false),
			Inner: inner, Activation: v.activation("silu"), Width: out}
		first := e.norm("post_conv_layernorm", width)
		e.tensor("downsample.weight", out, width, image.Merged, image.Merged)
		e.tensor("downsample.bias", out)
		last := e.norm("post_layernorm", width)
		t.Before = []Step{patches, {Kind: Normalize, Norm: first}, {Kind: Interpolate, Path: table}}
		t.After = []Step{{Kind: Normalize, Norm: last},
			{Kind: Downsample, Path: e.module("downsample"), Rows: image.Merged * image.Merged, Width: out},
			project, {Kind: Normalize, Norm: norm}, {Kind: Activate, Function: "gelu"},
			{Kind: Gate, FeedForward: &network}}
	})
}
