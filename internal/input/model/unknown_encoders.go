package model

import "plimsoll/internal/input/recipe/strict"

// Language models with encoders whose operations are not planned: their parameters
// alone are.

// Encoder is where an encoder and the module between it and the language model are.
type Encoder struct{ Path, Projector string }

// encodes notes an encoder of a model without operations.
func (s scope) encodes(path, projector string) {
	s.encoders = append(s.encoders, Encoder{path, projector})
}

var (
	mllama = multimodal{text: "language_model", model: "mllama_text_model", towered: "mllama_vision_model",
		unknown: true, tower: mllamaTower, last: func(s, v scope, hidden int64) {
			s.linear("model.multi_modal_projector", v.size("vision_output_dim"), hidden, true)
		}}
	qwen2Audio = multimodal{text: "language_model", either: true, model: "qwen2", config: "audio_config",
		towered: "qwen2_audio_encoder", unknown: true, tower: func(s, v scope, hidden int64) {
			e := v.in("model.audio_tower")
			e.convolutions(v.size("d_model"))
			e.frozen("embed_positions.weight", v.size("max_source_positions"), v.size("d_model"))
			e.audioLayers(v.size("d_model"), v.size("encoder_layers"), v.size("encoder_ffn_dim"))
			e.layerNorm("layer_norm", v.size("d_model"))
			s.linear("model.multi_modal_projector.linear", v.size("d_model"), hidden, true)
			s.encodes("model.audio_tower", projectorPath)
		}}
	voxtral = multimodal{text: "language_model", either: true, model: "llama", config: "audio_config",
		towered: "voxtral_encoder", unknown: true, tower: func(s, v scope, _ int64) {
			e, width := v.in("model.audio_tower"), v.size("hidden_size")
			e.convolutions(width)
			e.frozen("embed_positions.weight", v.size("max_source_positions"), width)
			e.audioLayers(width, v.size("num_hidden_layers"), v.size("intermediate_size"))
			e.layerNorm("layer_norm", width)
			s.encodes("model.audio_tower", projectorPath)
		}, last: func(s, v scope, hidden int64) {
			p := s.in(projectorPath)
			p.linear("linear_1", v.size("intermediate_size"), hidden, false)
			p.linear("linear_2", hidden, hidden, false)
		}}
	qwenOmniThinker = multimodal{text: "language_model", model: "qwen2_5_omni_text",
		config: "audio_config", towered: "qwen2_5_omni_audio_encoder", unknown: true, tower: omniTowers}
	gemma4 = multimodal{text: "language_model", tied: true, model: "gemma4_text", towered: "gemma4_vision",
		unknown: true, tower: gemma4Tower, last: func(s, v scope, hidden int64) {
			_, hears := s.find("audio_config")
			var sound int64
			if hears {
				sound = s.gemma4Audio()
			}
			s.linear("model.embed_vision.embedding_projection", v.size("hidden_size"), hidden, false)
			if hears {
				s.linear("model.embed_audio.embedding_projection", sound, hidden, false)
			}
		}}
	gemma4Unified = multimodal{text: "language_model", tied: true, model: "gemma4_unified_text",
		towered: "gemma4_unified_vision", unknown: true, tower: func(s, _ scope, _ int64) {
			s.encodes("model.embed_vision", "model.embed_vision.multimodal_embedder")
		}, last: func(s, v scope, hidden int64) {
			e, width := s.in("model.embed_vision"), v.size("mm_embed_dim")
			side := v.patch() * v.size("pooling_kernel_size")
			e.tensor("pos_embedding", v.size("mm_posemb_size"), 2, width)
			e.layerNorm("patch_ln1", 3*side*side)
			e.linear("patch_dense", 3*side*side, width, true)
			e.layerNorm("patch_ln2", width)
			e.layerNorm("pos_norm", width)
			e.linear("multimodal_embedder.embedding_projection", v.size("output_proj_dims"), hidden, false)
			if _, hears := s.find("audio_config"); hears {
				a := s.inside("audio_config", "gemma4_unified_audio", "", nil)
				width := a.size("output_proj_dims", "audio_embed_dim")
				s.linear("model.embed_audio.embedding_projection", width, hidden, false)
			}
		}}
	paddleOCR = multimodal{text: "language_model", tied: true, model: "paddleocr_vl_text", unknown: true,
		towered: "paddleocr_vl_vision", tower: func(s, v scope, _ int64) {
			hidden, image := v.size("hidden_size"), v.fixed()
			e := v.in("model.visual.vision_model")
			e.in("embeddings").convolution("patch_embedding", image, hidden, true)
			e.in("embeddings").embedding("position_embedding", image.Patches(image.Height, image.Width), hidden)
			e.siglipLayers(v)
			s.encodes("model.visual", "model.projector")
		}, last: func(s, v scope, hidden int64) {
			p, side := s.in("model.projector"), v.sizeOr(2, "spatial_merge_size")
			merged := v.size("hidden_size") * side * side
			p.layerNorm("pre_norm", v.size("hidden_size"))
			p.linear("linear_1", merged, merged, true)
			p.linear("linear_2", merged, hidden, true)
		}}
	lfm2VL = multimodal{text: "language_model", tied: true, model: "lfm2", towered: "siglip2_vision_model",
		unknown: true, tower: func(s, v scope, out int64) {
			hidden, side := v.size("hidden_size"), v.patch()
			v.refuse("vision_use_head")
			e := v.in("model.vision_tower")
			e.linear("embeddings.patch_embedding", v.sizeOr(3, "num_channels")*side*side, hidden, true)
			e.embedding("embeddings.position_embedding", v.size("num_patches"), hidden)
			e.siglipLayers(v)
			merged := hidden * s.sizeOr(2, "downsample_factor") * s.sizeOr(2, "downsample_factor")
			p, inner, bias := s.in(projectorPath), s.sizeOr(2560, "projector_hidden_size"),
				s.flagOr(true, "projector_bias")
			if s.flagOr(true, "projector_use_layernorm") {
				p.layerNorm("layer_norm", merged)
			}
			p.linear("linear_1", merged, inner, bias)
			p.linear("linear_2", inner, out, bias)
			s.encodes("model.vision_tower", projectorPath)
		}}
)

// convolutions adds the two that Whisper's encoder begins with.
func (s scope) convolutions(width int64) {
	s.tensor("conv1.weight", width, s.size("num_mel_bins"), 3)
	s.tensor("conv1.bias", width)
	s.tensor("conv2.weight", width, width, 3)
	s.tensor("conv2.bias", width)
}

// audioLayers adds the blocks of Whisper's encoder.
func (s scope) audioLayers(width, count, inner int64) {
	s.repeat("layers", count, func(s scope, _ int64) {
		a := s.in("self_attn")
		a.linear("k_proj", width, width, false)
		for _, name := range []string{"v_proj", "q_proj", "out_proj"} {
			a.linear(name, width, width, true)
		}
		s.layerNorm("self_attn_layer_norm", width)
		s.linear("fc1", width, inner, true)
		s.linear("fc2", inner, width, true)
		s.layerNorm("final_layer_norm", width)
	})
}

// omniTowers adds the encoders of Qwen2.5-Omni's thinker: one of sound, and
// Qwen2.5-VL's with three projections for queries, keys and values.
func omniTowers(root, audio scope, _ int64) {
	e, width := audio.in("model.audio_tower"), audio.size("d_model")
	e.convolutions(width)
	e.embedding("audio_bos_eos_token", 2, audio.size("output_dim"))
	e.audioLayers(width, audio.size("encoder_layers"), audio.size("encoder_ffn_dim"))
	e.layerNorm("ln_post", width)
	e.linear("proj", width, audio.size("output_dim"), true)
	root.encodes("model.audio_tower", "model.audio_tower.proj")

	v := root.inside("vision_config", "qwen2_5_omni_vision_encoder", "", nil)
	i, hidden, inner := v.in("model.visual"), v.size("hidden_size"), v.size("intermediate_size")
	image := Image{Channels: v.sizeOr(3, "in_channels", "in_chans"), Frames: v.sizeOr(2, "temporal_patch_size"),
		Patch: v.patch(), Merged: v.sizeOr(2, "spatial_merge_size")}
	i.in("patch_embed").convolution("proj", image, hidden, false)
	i.repeat("blocks", v.size("depth"), func(s scope, _ int64) {
		s.norm("norm1", hidden)
		s.norm("norm2", hidden)
		for _, name := range []string{"q", "k", "v", "proj"} {
			s.in("attn").linear(name, hidden, hidden, true)
		}
		gated(s.in("mlp"), inner, true)
	})
	qwenMerger(scope.norm)(i.in("merger"), hidden, hidden*image.Merged*image.Merged, v.size("out_hidden_size"))
	root.encodes("model.visual", "model.visual.merger")
}

// mllamaTower adds the encoder of Llama 3.2 Vision, which reads up to four tiles of
// an image at once.
func mllamaTower(root, v scope, _ int64) {
	const path = "model.vision_model"
	e, hidden, image, tiles := v.in(path), v.size("hidden_size"), v.fixed(), v.size("max_num_tiles")
	rows, ratios := image.Patches(image.Height, image.Width)+1, int64(9)
	if list := v.list("supported_aspect_ratios"); list != nil {
		ratios = int64(len(list)) + 1
	}
	e.tensor("class_embedding", hidden)
	e.convolution("patch_embedding", image, hidden, false)
	g := e.in("gated_positional_embedding")
	g.tensor("gate", 1)
	g.tensor("embedding", rows, hidden)
	g.embedding("tile_embedding", ratios, tiles*rows*hidden)
	for _, name := range []string{"pre_tile_positional_embedding", "post_tile_positional_embedding"} {
		e.in(name).tensor("gate", 1)
		e.in(name).embedding("embedding", ratios, tiles*hidden)
	}
	e.layerNorm("layernorm_pre", hidden)
	e.layerNorm("layernorm_post", hidden)
	layers := func(name string, count int64, gates bool) {
		e.in(name).repeat("layers", count, func(s scope, _ int64) {
			if gates {
				s.tensor("gate_attn", 1)
				s.tensor("gate_ffn", 1)
			}
			for _, name := range []string{"q_proj", "k_proj", "v_proj", "o_proj"} {
				s.in("self_attn").linear(name, hidden, hidden, false)
			}
			s.in("mlp").linear("fc1", hidden, v.size("intermediate_size"), true)
			s.in("mlp").linear("fc2", v.size("intermediate_size"), hidden, true)
			s.layerNorm("input_layernorm", hidden)
			s.layerNorm("post_attention_layernorm", hidden)
		})
	}
	layers("transformer", v.size("num_hidden_layers"), false)
	layers("global_transformer", v.size("num_global_layers"), true)
	root.encodes(path, projectorPath)
}

// mllamaText adds the language model of Llama 3.2 Vision: some layers attend to the
// image instead of the text.
func mllamaText(s scope) {
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
	cross := s.numbers("cross_attention_layers")
	if s.list("cross_attention_layers") == nil {
		cross = map[int64]bool{3: true, 8: true, 13: true, 18: true, 23: true, 28: true, 33: true, 38: true}
	}
	body := s.in(s.body)
	body.embedding("embed_tokens", vocabulary+8, hidden)
	body.repeat("layers", s.size("num_hidden_layers"), func(s scope, index int64) {
		if !cross[index] {
			attention{keyValueHeads: 8}.describe(s.in("self_attn"))
			gated(s.in("mlp"), s.size("intermediate_size"), false)
			s.norm("input_layernorm", hidden)
			s.norm("post_attention_layernorm", hidden)
			return
		}
		s.tensor("cross_attn_attn_gate", 1)
		s.tensor("cross_attn_mlp_gate", 1)
		attention{keyValueHeads: 8, norms: true}.describe(s.in("cross_attn"))
		s.norm("input_layernorm", hidden)
		gated(s.in("mlp"), s.size("intermediate_size"), false)
		s.norm("post_attention_layernorm", hidden)
	})
	body.norm("norm", hidden)
	s.head("lm_head", hidden, vocabulary, false, "")
}

// gemma4Tower adds Gemma 4's encoder of images.
func gemma4Tower(root, v scope, _ int64) {
	v.refuse("attention_bias")
	const path = "model.vision_tower"
	e, hidden, inner := v.in(path), v.size("hidden_size"), v.size("intermediate_size")
	heads, groups := v.size("num_attention_heads"), v.size("num_key_value_heads")
	width := v.sizeOr(hidden/heads, "head_dim")
	e.tensor("patch_embedder.position_embedding_table", 2, v.size("position_embedding_size"), hidden)
	e.linear("patch_embedder.input_proj", 3*v.patch()*v.patch(), hidden, false)
	e.in("encoder").repeat("layers", v.size("num_hidden_layers"), func(s scope, _ int64) {
		a, m := s.in("self_attn"), s.in("mlp")
		a.linear("q_proj.linear", hidden, heads*width, false)
		a.linear("k_proj.linear", hidden, groups*width, false)
		a.linear("v_proj.linear", hidden, groups*width, false)
		a.linear("o_proj.linear", heads*width, hidden, false)
		a.norm("q_norm", width)
		a.norm("k_norm", width)
		m.linear("gate_proj.linear", hidden, inner, false)
		m.linear("up_proj.linear", hidden, inner, false)
		m.linear("down_proj.linear", inner, hidden, false)
		for _, n := range gemmaNorms {
			s.norm(n.name, hidden)
		}
	})
	root.encodes(path, "model.embed_vision")
}

// gemma4Audio adds Gemma 4's encoder of sound, and returns the width of its outputs.
func (s scope) gemma4Audio() int64 {
	v := s.inside("audio_config", "gemma4_audio", "", nil)
	hidden, channels := v.size("hidden_size"), [2]int64{128, 32}
	if f, ok := v.find("subsampling_conv_channels"); ok {
		channels = v.pair("subsampling_conv_channels", f.Value)
	}
	e := v.in("model.audio_tower")
	first := e.in("subsample_conv_projection")
	first.tensor("layer0.conv.weight", channels[0], 1, 3, 3)
	first.norm("layer0.norm", channels[0])
	first.tensor("layer1.conv.weight", channels[1], channels[0], 3, 3)
	first.norm("layer1.norm", channels[1])
	first.linear("input_proj_linear", channels[0]/4*channels[1], hidden, false)
	e.repeat("layers", v.size("num_hidden_layers"), func(s scope, _ int64) {
		for _, name := range []string{"feed_forward1", "feed_forward2"} {
			f := s.in(name)
			f.linear("ffw_layer_1.linear", hidden, 4*hidden, false)
			f.linear("ffw_layer_2.linear", 4*hidden, hidden, false)
			f.norm("pre_layer_norm", hidden)
			f.norm("post_layer_norm", hidden)
		}
		a, c := s.in("self_attn"), s.in("lconv1d")
		a.tensor("per_dim_scale", s.divide(hidden, "hidden_size", s.size("num_attention_heads"), "num_attention_heads"))
		for _, name := range []string{"q_proj.linear", "k_proj.linear", "v_proj.linear", "post.linear",
			"relative_k_proj"} {
			a.linear(name, hidden, hidden, false)
		}
		c.linear("linear_start.linear", hidden, 2*hidden, false)
		c.linear("linear_end.linear", hidden, hidden, false)
		c.tensor("depthwise_conv1d.weight", hidden, 1, s.sizeOr(5, "conv_kernel_size"))
		c.norm("pre_layer_norm", hidden)
		c.norm("conv_norm", hidden)
		for _, name := range []string{"norm_pre_attn", "norm_post_attn", "norm_out"} {
			s.norm(name, hidden)
		}
	})
	out := v.size("output_proj_dims")
	e.linear("output_proj", hidden, out, true)
	s.encodes("model.audio_tower", "model.embed_audio")
	return out
}

// siglipLayers adds the blocks of SigLIP and the norm behind them.
func (s scope) siglipLayers(v scope) {
	hidden, inner := v.size("hidden_size"), v.size("intermediate_size")
	s.in("encoder").repeat("layers", v.size("num_hidden_layers"), func(s scope, _ int64) {
		s.layerNorm("layer_norm1", hidden)
		for _, name := range []string{"k_proj", "v_proj", "q_proj", "out_proj"} {
			s.in("self_attn").linear(name, hidden, hidden, true)
		}
		s.layerNorm("layer_norm2", hidden)
		s.in("mlp").linear("fc1", hidden, inner, true)
		s.in("mlp").linear("fc2", inner, hidden, true)
	})
	s.layerNorm("post_layernorm", hidden)
}

// gemma4Text adds Gemma 4's language model. Its last layers may take keys and values
// of layers before, and every layer may have embeddings of its own.
func gemma4Text(s scope) {
	vocabulary, hidden, layers := s.size("vocab_size"), s.size("hidden_size"), s.size("num_hidden_layers")
	each, types := s.countOr(0, "hidden_size_per_layer_input"), s.list("layer_types")
	if types != nil && int64(len(types)) != layers {
		s.fail(s.fields["layer_types"].Value.At, "", "layer_types has %d elements: expected one for each layer",
			len(types))
	}
	if f, ok := s.find("per_layer_config"); ok {
		s.fail(f.At, Documented, "per_layer_config is not planned")
	}
	body := s.in(s.body)
	body.embedding("embed_tokens", vocabulary, hidden)
	body.repeat("layers", layers, func(s scope, index int64) {
		s.gemma4Layer(index, layers, types)
		if each > 0 {
			s.linear("per_layer_input_gate", hidden, each, false)
			s.linear("per_layer_projection", each, hidden, false)
			s.norm("post_per_layer_input_norm", hidden)
		}
		if s.flagOr(false, "enable_moe_block") {
			s.gemma4Experts()
		}
	})
	body.norm("norm", hidden)
	if each > 0 {
		body.embedding("embed_tokens_per_layer", s.size("vocab_size_per_layer_input"), layers*each)
		body.linear("per_layer_model_projection", hidden, layers*each, false)
		body.norm("per_layer_projection_norm", each)
	}
	s.head("lm_head", hidden, vocabulary, true, s.body+".embed_tokens.weight")
}

// gemma4Layer adds the attention, the network and the norms of a layer. Every sixth
// layer, and the last, has wider heads.
func (s scope) gemma4Layer(index, layers int64, types []*strict.Value) {
	hidden, bias := s.size("hidden_size"), s.flagOr(false, "attention_bias")
	full := (index+1)%6 == 0
	if types != nil {
		full = types[index].Text == "full_attention"
	}
	full = full || index == layers-1
	heads, groups, width := s.size("num_attention_heads"), s.size("num_key_value_heads"), s.size("head_dim")
	same := full && s.flagOr(false, "attention_k_eq_v")
	if full {
		width = s.sizeOr(512, "global_head_dim")
	}
	if same {
		groups = s.sizeOr(groups, "num_global_key_value_heads")
	}
	shared, a := index >= layers-s.countOr(0, "num_kv_shared_layers"), s.in("self_attn")
	a.linear("q_proj", hidden, heads*width, bias)
	a.norm("q_norm", width)
	if !shared {
		a.norm("k_norm", width)
		a.linear("k_proj", hidden, groups*width, bias)
		if !same {
			a.linear("v_proj", hidden, groups*width, bias)
		}
	}
	a.linear("o_proj", heads*width, hidden, bias)
	inner := s.size("intermediate_size")
	if shared && s.flagOr(false, "use_double_wide_mlp") {
		inner *= 2
	}
	gated(s.in("mlp"), inner, false)
	for _, n := range gemmaNorms {
		s.norm(n.name, hidden)
	}
}

// gemma4Experts adds the experts beside the dense network of a layer.
func (s scope) gemma4Experts() {
	hidden, count, inner := s.size("hidden_size"), s.size("num_experts"), s.size("moe_intermediate_size")
	r := s.in("router")
	r.tensor("scale", hidden)
	r.tensor("per_expert_scale", count)
	r.linear("proj", hidden, count, false)
	s.tensor("experts.gate_up_proj", count, 2*inner, hidden)
	s.tensor("experts.down_proj", count, hidden, inner)
	for _, name := range []string{"post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
		"pre_feedforward_layernorm_2"} {
		s.norm(name, hidden)
	}
}
