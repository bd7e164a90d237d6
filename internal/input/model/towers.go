package model

import (
	"strconv"

	"plimsoll/internal/input/recipe/strict"
)

// The methods of scope below describe encoders of images.

// tower describes an encoder of this width. The parameters that follow until it is
// done are of the tower.
func (s scope) tower(path string, width int64, image Image, describe func(t *Tower, stack *Stack)) {
	t := &Tower{Path: path, Network: &Network{}, Image: image}
	text := s.network
	s.network = t.Network
	describe(t, s.stack(width, Stack{}))
	s.network = text
	text.Towers = append(text.Towers, t)
}

// imageSides returns height and width of a field that is one number or two.
func (s scope) sides(name string) (height, width int64) {
	v, ok := s.find(name)
	if !ok || v.Kind != '[' {
		side := s.size(name)
		return side, side
	}
	sides := s.list(name)
	if len(sides) != 2 || sides[0].Kind != '0' || sides[1].Kind != '0' {
		s.fail(v.At, "", "%s is %s: expected one size or two", name, v)
		return 1, 1
	}
	one := func(i int) int64 {
		var n int64
		for _, digit := range sides[i].Text {
			n = min(maxSize, 10*n+int64(digit-'0'))
		}
		return max(1, n)
	}
	return one(0), one(1)
}

// patch returns the side of a patch, which has to be a square.
func (s scope) patch() int64 {
	height, width := s.sides("patch_size")
	if height != width {
		v, _ := s.find("patch_size")
		s.fail(v.At, "", "patch_size is %s: expected a square", v)
	}
	return height
}

// fixed returns how images of the size that the configuration names are cut.
func (s scope) fixed() Image {
	height, width := s.sides("image_size")
	i := Image{Channels: s.sizeOr(3, "num_channels"), Frames: 1, Patch: s.patch(), Merged: 1, Height: height,
		Width: width}
	if i.Patches(height, width) == 0 {
		v, _ := s.find("image_size")
		s.fail(v.At, "", "image_size is %s: expected at least patch_size, which is %d", v, i.Patch)
		i.Height, i.Width = i.Patch, i.Patch
	}
	return i
}

// encoderAttention adds the attention of an encoder of images.
func (s scope) encoderAttention(names [4]string, bias, outputBias bool) Attention {
	hidden, heads := s.size("hidden_size"), s.size("num_attention_heads", "num_heads")
	width := s.divide(hidden, "hidden_size", heads, "num_attention_heads")
	a := Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width, WideSoftmax: true,
		Dropout: s.shareOr(0, "attention_dropout")}
	paths := map[string]string{}
	for _, name := range names {
		b := bias
		if name == names[3] {
			b = outputBias
		}
		paths[name] = s.linear(name, hidden, hidden, b)
	}
	return a.with(paths)
}

// with sets the modules of attention by the last letter-group of their names.
func (a Attention) with(paths map[string]string) Attention {
	for name, path := range paths {
		switch name[0] {
		case 'q':
			a.Query = path
		case 'k':
			a.Key = path
		case 'v':
			a.Value = path
		default:
			a.Output = path
		}
	}
	return a
}

// twoLayers adds a feed-forward network of two projections.
func (s scope) twoLayers(first, second string, inner int64, activation string) FeedForward {
	hidden := s.size("hidden_size")
	return FeedForward{Up: s.linear(first, hidden, inner, true), Down: s.linear(second, inner, hidden, true),
		Inner: inner, Activation: s.activation(activation)}
}

// clipLike adds the encoders of CLIP, SigLIP and Idefics 3, which differ by few
// modules.
type clipLike struct {
	class      bool // a row for the whole image, and a norm before the blocks
	normsFirst bool // the norms of a block are its first modules
	activation string
	resized    bool // positions of every image by an index
	block      string
}

func (e clipLike) describe(s scope, path string, complete func(t *Tower)) {
	v := s.in(path)
	hidden, image := s.size("hidden_size"), s.fixed()
	if e.class {
		image.Class = 1
	}
	s.tower(path, hidden, image, func(t *Tower, stack *Stack) {
		t.Hooked, t.BlockClass, t.Unwrapped = true, e.block, e.resized
		embeddings := v.in("embeddings")
		if e.class {
			embeddings.tensor("class_embedding", hidden)
		}
		patches := embeddings.convolution("patch_embedding", image, hidden, !e.class)
		t.Before = []Step{patches}
		if e.class {
			t.Before = append(t.Before, Step{Kind: Prepend, Path: embeddings.module("class_embedding")})
		}
		rows := image.Patches(image.Height, image.Width) + image.Class
		table := embeddings.embedding("position_embedding", rows, hidden)
		t.Before = append(t.Before, Step{Kind: Position, Path: table, Rows: rows})
		if e.resized {
			t.Before[len(t.Before)-1].Rows = 0
		}
		if e.class {
			t.Before = append(t.Before, Step{Kind: Normalize, Norm: v.layerNorm("pre_layrnorm", hidden)})
		}
		v.in("encoder").blocks(stack, "layers", s.size("num_hidden_layers"), e.fill)
		after := v.layerNorm("post_layernorm", hidden)
		if !e.class {
			t.After = append(t.After, Step{Kind: Normalize, Norm: after})
		}
		complete(t)
	})
}

// fill adds the modules of a block.
func (e clipLike) fill(s scope, _ int64, b *Block) {
	hidden := s.size("hidden_size")
	if e.normsFirst {
		b.AttentionNorm = s.layerNorm("layer_norm1", hidden)
	}
	b.Attention = s.in("self_attn").encoderAttention([4]string{"k_proj", "v_proj", "q_proj", "out_proj"}, true, true)
	if e.normsFirst {
		b.FeedForwardNorm = s.layerNorm("layer_norm2", hidden)
	} else {
		b.AttentionNorm = s.layerNorm("layer_norm1", hidden)
	}
	b.FeedForward = s.in("mlp").twoLayers("fc1", "fc2", s.size("intermediate_size"), e.activation)
	if !e.normsFirst {
		b.FeedForwardNorm = s.layerNorm("layer_norm2", hidden)
	}
}

// convolution adds the convolution that makes rows of patches.
func (s scope) convolution(name string, i Image, width int64, bias bool) Step {
	shape := []int64{width, i.Channels, i.Patch, i.Patch}
	if i.Frames > 1 {
		shape = []int64{width, i.Channels, i.Frames, i.Patch, i.Patch}
	}
	s.tensor(name+".weight", shape...)
	if bias {
		s.tensor(name+".bias", width)
	}
	return Step{Kind: Convolve, Path: s.module(name), Width: width}
}

// pixtral adds Pixtral's encoder: norms without means, gated networks and rotary positions.
func pixtral(s scope, path string, complete func(t *Tower)) {
	v, hidden := s.in(path), s.size("hidden_size")
	height, width := s.sides("image_size")
	image := Image{Channels: s.sizeOr(3, "num_channels"), Frames: 1, Patch: s.patch(), Merged: 1,
		Most: max(height, width)}
	s.tower(path, hidden, image, func(t *Tower, stack *Stack) {
		t.OneSequence, t.MasksImages, t.Hooked, t.BlockClass = true, true, true, "PixtralAttentionLayer"
		t.Before = []Step{v.convolution("patch_conv", image, hidden, false), {Kind: Copy},
			{Kind: Normalize, Norm: v.norm("ln_pre", hidden)}}
		v.in("transformer").blocks(stack, "layers", s.size("num_hidden_layers"), func(s scope, _ int64, b *Block) {
			b.AttentionNorm = s.norm("attention_norm", hidden)
			b.FeedForward = gated(s.in("feed_forward"), s.size("intermediate_size"), false)
			b.FeedForward.Activation = s.activation("gelu")
			b.Attention = s.in("attention").encoderAttention([4]string{"k_proj", "v_proj", "q_proj", "o_proj"}, false,
				false)
			b.Attention.Rotary = 1
			b.FeedForwardNorm = s.norm("ffn_norm", hidden)
		})
		complete(t)
	})
}

// internVision adds InternVL's encoder: the halves of its blocks are scaled.
func internVision(s scope, path string, complete func(t *Tower)) {
	for _, name := range []string{"use_mask_token", "hidden_dropout_prob", "projection_dropout"} {
		s.refuseSet(name)
	}
	v, hidden, image := s.in(path), s.size("hidden_size"), s.fixed()
	image.Class = 1
	norm := scope.layerNorm
	if s.textOr("layer_norm", "norm_type") == "rms_norm" {
		norm = scope.norm
	}
	s.tower(path, hidden, image, func(t *Tower, stack *Stack) {
		t.Hooked, t.BlockClass = true, "InternVLVisionLayer"
		embeddings := v.in("embeddings")
		embeddings.tensor("cls_token", 1, 1, hidden)
		rows := image.Patches(image.Height, image.Width) + 1
		if s.flagOr(true, "use_absolute_position_embeddings") {
			embeddings.tensor("position_embeddings", 1, rows, hidden)
		}
		t.Before = []Step{embeddings.convolution("patch_embeddings.projection", image, hidden, true),
			{Kind: Prepend, Path: embeddings.module("cls_token")}}
		if s.flagOr(true, "use_absolute_position_embeddings") {
			t.Before = append(t.Before, Step{Kind: Locate, Path: embeddings.module("position_embeddings")})
		}
		v.in("encoder").blocks(stack, "layer", s.size("num_hidden_layers"), func(s scope, _ int64, b *Block) {
			b.AttentionScale, b.FeedForwardScale = s.module("lambda_1"), s.module("lambda_2")
			s.tensor("lambda_1", hidden)
			s.tensor("lambda_2", hidden)
			b.Attention = s.internAttention(hidden)
			b.FeedForward = s.in("mlp").twoLayers("fc1", "fc2", s.size("intermediate_size"), "gelu")
			b.AttentionNorm, b.FeedForwardNorm = norm(s, "layernorm_before", hidden), norm(s, "layernorm_after", hidden)
		})
		if !s.flagOr(true, "use_mean_pooling") {
			t.After = append(t.After, Step{Kind: Normalize, Norm: v.layerNorm("layernorm", hidden)})
		}
		complete(t)
	})
}

// internAttention adds the attention of InternVL's encoder.
func (s scope) internAttention(hidden int64) Attention {
	a := s.in("attention")
	d := a.encoderAttention([4]string{"q_proj", "k_proj", "v_proj", "projection_layer"},
		s.flagOr(false, "attention_bias"), true)
	d.WideSoftmax = false
	if s.flagOr(false, "use_qk_norm") {
		d.QueryNorm, d.KeyNorm = a.norm("q_norm", hidden), a.norm("k_norm", hidden)
	}
	return d
}

// qwenVision adds the encoder of Qwen-VL, of any of its versions.
type qwenVision struct {
	rms        bool
	gated      bool
	names      [2]string // of the projections of a feed-forward network that is not gated
	bias       bool      // of the convolution
	activation string
	windows    bool
	positions  bool
	class      string // of the blocks
	merger     func(s scope, width, merged, out int64) []Step
}

func (q qwenVision) describe(s scope, path string) {
	width := s.size("hidden_size")
	out := width
	if _, ok := s.find("embed_dim"); ok { // Qwen2-VL's hidden_size is that of the language model
		width = s.size("embed_dim")
	} else {
		out = s.size("out_hidden_size")
	}
	s.fields["hidden_size"] = sizeMember("hidden_size", width)
	v := s.in(path)
	image := Image{Channels: s.sizeOr(3, "in_channels", "in_chans"), Frames: s.sizeOr(2, "temporal_patch_size"),
		Patch: s.patch(), Merged: s.sizeOr(2, "spatial_merge_size")}
	s.tower(path, width, image, func(t *Tower, stack *Stack) {
		t.OneSequence, t.Projector, t.Hooked, t.BlockClass = true, v.module("merger"), !q.positions, q.class
		t.Before = []Step{v.in("patch_embed").convolution("proj", image, width, q.bias)}
		if q.positions {
			table := v.embedding("pos_embed", s.size("num_position_embeddings"), width)
			t.Before = append(t.Before, Step{Kind: Resample, Path: table})
		}
		if q.windows {
			t.Before = append(t.Before, Step{Kind: Reorder})
		}
		full := s.numbers("fullatt_block_indexes")
		v.blocks(stack, "blocks", s.size("num_hidden_layers", "depth"), func(b scope, index int64, made *Block) {
			q.block(b, made)
			if q.windows && !full[index] {
				side := s.size("window_size") / image.Patch
				made.Attention.Parts = side * side
			}
		})
		merged := width * image.Merged * image.Merged
		t.After = q.merger(v.in("merger"), width, merged, out)
		if q.windows {
			t.After = append(t.After, Step{Kind: Reorder})
		}
		if q.positions {
			for i, v := range s.list("deepstack_visual_indexes") {
				index, _ := strconv.Atoi(v.Text)
				deep := Deep{Block: index, Steps: qwen3Merger(true)(
					s.in(path).in("deepstack_merger_list").in(decimal(int64(i))), width, merged, out)}
				t.Deep = append(t.Deep, deep)
			}
		}
	})
}

// sizeMember returns a field with a size.
func sizeMember(name string, size int64) strict.Member {
	return strict.Member{Name: name, Value: strict.Of(int(size))}
}

func (q qwenVision) block(s scope, b *Block) {
	hidden, heads := s.size("hidden_size"), s.size("num_attention_heads", "num_heads")
	width := s.divide(hidden, "hidden_size", heads, "num_heads")
	norm := scope.layerNorm
	if q.rms {
		norm = scope.norm
	}
	b.AttentionNorm, b.FeedForwardNorm = norm(s, "norm1", hidden), norm(s, "norm2", hidden)
	b.Attention = Attention{Heads: heads, KeyValueHeads: heads, Width: width, ValueWidth: width, WideSoftmax: true,
		Rotary: 1, WideRotary: true, Divided: true}
	b.Attention.Fused = s.in("attn").linear("qkv", hidden, 3*hidden, true)
	b.Attention.Output = s.in("attn").linear("proj", hidden, hidden, true)
	mlp := s.in("mlp")
	if q.gated {
		b.FeedForward = gated(mlp, s.size("intermediate_size"), true)
		return
	}
	inner := hidden * s.sizeOr(4, "mlp_ratio")
	if _, ok := s.find("intermediate_size"); ok {
		inner = s.size("intermediate_size")
	}
	b.FeedForward = mlp.twoLayers(q.names[0], q.names[1], inner, q.activation)
}

// numbers returns the elements of a list of numbers.
func (s scope) numbers(name string) map[int64]bool {
	of := map[int64]bool{}
	for _, v := range s.list(name) {
		n, err := strconv.ParseInt(v.Text, 10, 64)
		if err != nil {
			s.fail(v.At, "", "%s has %s: expected the number of a layer", name, v)
		}
		of[n] = true
	}
	return of
}

// qwenMerger is the projector of Qwen2-VL and Qwen2.5-VL.
func qwenMerger(norm func(s scope, name string, width int64) Norm) func(scope, int64, int64, int64) []Step {
	return func(s scope, width, merged, out int64) []Step {
		return []Step{{Kind: Normalize, Norm: norm(s, "ln_q", width)},
			{Kind: Merge, Rows: merged / width, Width: merged},
			{Kind: Project, Path: s.linear("mlp.0", merged, merged, true), Width: merged},
			{Kind: Activate, Function: "gelu"},
			{Kind: Project, Path: s.linear("mlp.2", merged, out, true), Width: out}}
	}
}

// qwen3Merger is the projector of Qwen3-VL. Those after blocks have the norm behind.
func qwen3Merger(late bool) func(scope, int64, int64, int64) []Step {
	return func(s scope, width, merged, out int64) []Step {
		merge := Step{Kind: Merge, Rows: merged / width, Width: merged}
		var steps []Step
		if late {
			steps = []Step{merge, {Kind: Normalize, Norm: s.layerNorm("norm", merged)}}
		} else {
			steps = []Step{{Kind: Normalize, Norm: s.layerNorm("norm", width)}, merge}
		}
		return append(steps, Step{Kind: Project, Path: s.linear("linear_fc1", merged, merged, true), Width: merged},
			Step{Kind: Activate, Function: "gelu"},
			Step{Kind: Project, Path: s.linear("linear_fc2", merged, out, true), Width: out})
	}
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
