package model

import "slices"

// llama4Block is a block of Llama 4's text model. Every n-th layer has experts.
// Layers with rotary positions attend to their chunk of the sequence and have
// norms of queries and keys without weights.
func llama4Block(s scope, index int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	b.Attention = attention{keyValueHeads: 8, width: 128, inputBias: bias, outputBias: bias}.describe(s.in("self_attn"))
	a := &b.Attention
	a.WideRotary, a.WideSoftmax = true, false
	if listed(s, index, false) {
		a.Window = s.countOr(8192, "attention_chunk_size")
		if s.flagOr(true, "use_qk_norm") {
			norm := Norm{Kind: RMSNorm, Width: a.Width}
			a.QueryNorm, a.KeyNorm, a.NormsRotated = norm, norm, true
		}
	} else {
		a.Rotary, a.ScalesQueries = 0, s.flagOr(true, "attn_temperature_tuning")
		if s.isNull("attn_temperature_tuning") {
			a.ScalesQueries = false
		}
	}
	mlp := s.in("feed_forward")
	if s.llama4Sparse(index) {
		b.FeedForward = llama4Experts.describe(s)
	} else {
		b.FeedForward = gated(mlp, s.sizeOr(16384, "intermediate_size_mlp"), false)
	}
	blockNorms(s, b)
}

// llama4Sparse reports whether a layer has experts.
func (s scope) llama4Sparse(index int64) bool {
	layers := s.list("moe_layers")
	if layers == nil {
		return (index+1)%s.sizeOr(1, "interleave_moe_layer_step") == 0
	}
	for _, v := range layers {
		if v.Text == decimal(index) {
			return true
		}
	}
	return false
}

var llama4Experts = experts{
	module: "feed_forward", held: "feed_forward", router: "router", heldRouter: "router",
	count: []string{"num_local_experts"}, chosen: 1, inner: "intermediate_size", routing: SigmoidOfChosen,
	stacked: func(s scope, m *Mixture, count, inner int64) {
		e, hidden := s.in("experts"), s.size("hidden_size")
		e.tensor("gate_up_proj", count, hidden, 2*inner)
		e.tensor("down_proj", count, inner, hidden)
		m.GateUp, m.Down = e.module("gate_up_proj"), e.module("down_proj")
	},
	shared: func(block scope) FeedForward {
		return gated(block.in("feed_forward").in("shared_expert"), block.size("intermediate_size"), false)
	},
}

// Linearized returns the model with three linear modules for each of Llama 4's experts in place of the parameters that
// hold all: axolotl's Llama4TextExperts (src/axolotl/monkeypatch/models/llama4/modeling.py). It returns false for other
// models.
func (m *Model) Linearized() (*Model, bool) {
	network := m.Network.clone()
	instead := map[string][]Parameter{}
	for _, b := range network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil && x.Routing == SigmoidOfChosen && x.Fused() {
			x.linearize(network.Hidden, instead)
		}
	}
	if len(instead) == 0 {
		return m, false
	}
	linearized := *m
	linearized.Network, linearized.Parameters = network, replaced(m.Parameters, instead)
	return &linearized, true
}

// linearize replaces the two parameters of all experts.
func (x *Mixture) linearize(hidden int64, instead map[string][]Parameter) {
	inner, path := x.Experts[0].Inner, x.ExpertsPath()
	var gates, ups, downs []Parameter
	for i := range x.Experts {
		e, number := &x.Experts[i], decimal(int64(i))
		e.Gate, e.Up, e.Down = path+".gate_projs."+number, path+".up_projs."+number, path+".down_projs."+number
		gates = append(gates, Parameter{Name: e.Gate + ".weight", Shape: []int64{inner, hidden}})
		ups = append(ups, Parameter{Name: e.Up + ".weight", Shape: []int64{inner, hidden}})
		downs = append(downs, Parameter{Name: e.Down + ".weight", Shape: []int64{hidden, inner}})
	}
	instead[x.GateUp], instead[x.Down] = slices.Concat(gates, ups), downs
	x.GateUp, x.Down, x.Separate = "", "", true
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
