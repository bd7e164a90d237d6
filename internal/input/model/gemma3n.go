package model

import (
	"plimsoll/internal/input/recipe/strict"
)

// gemma3n is Gemma 3n: MobileNetV5 reads images, and a conformer reads sound. Its operations are not planned.
var gemma3n = multimodal{text: "language_model", tied: true, model: "gemma3n_text", towered: "gemma3n_vision",
	unknown: true, tower: func(s, v scope, _ int64) {
		const planned = "mobilenetv5_300m_enc"
		if got := v.textOr(planned, "architecture"); got != planned {
			s.fail(0, Documented, "vision_config: the architecture is %q: plimsoll plans %s", got, planned)
		}
		const path = "model.vision_tower"
		mobileNetV5(s.in(path + ".timm_model"))
		s.encodes(path, "model.embed_vision")
	}, last: func(s, v scope, hidden int64) {
		sound := s.inside("audio_config", "gemma3n_audio", "", nil)
		conformer(s.in("model.audio_tower"), sound)
		s.encodes("model.audio_tower", "model.embed_audio")
		for _, e := range []struct {
			name string
			of   scope
		}{{"model.embed_vision", v}, {"model.embed_audio", sound}} {
			m, width := s.in(e.name), e.of.size("hidden_size")
			m.embedding("embedding", e.of.size("vocab_size"), width)
			m.norm("hard_embedding_norm", width)
			m.norm("soft_embedding_norm", width)
			m.linear("embedding_projection", width, hidden, false)
		}
	}}

// mobileNetV5 adds timm's mobilenetv5_300m_enc, by the tables in timm/models/mobilenetv5.py.
func mobileNetV5(t scope) {
	t.pointwise("conv_stem.conv", 3, 64, 3)
	t.tensor("conv_stem.conv.bias", 64)
	t.norm("conv_stem.bn", 64)
	for i, width := range []int64{64, 128, 128} {
		b := t.in("blocks.0." + decimal(int64(i)))
		b.pointwise("conv_exp", width, 4*width, 3)
		b.norm("bn1", 4*width)
		b.pointwise("conv_pwl", 4*width, 128, 1)
		b.norm("bn2", 128)
	}
	u := inverted{t: t, stage: 1, width: 128}
	u.block(3, 5, 6, 256)
	for _, kernel := range []int64{5, 3, 5, 3} {
		u.block(kernel, 0, 4, 256)
	}
	u.stage, u.index = 2, 0
	u.block(5, 5, 6, 640)
	for range 7 {
		u.block(5, 0, 4, 640)
	}
	u.block(0, 0, 1, 640)
	for range 14 {
		u.attention(12, 64, true)
		u.block(0, 0, 2, 640)
	}
	u.stage, u.index = 3, 0
	u.block(5, 5, 6, 1280)
	for range 19 {
		u.attention(16, 96, false)
		u.block(0, 0, 2, 1280)
	}
	f := t.in("msfa.ffn")
	f.pointwise("pw_exp.conv", 640+1280, 2*(640+1280), 1)
	f.norm("pw_exp.bn", 2*(640+1280))
	f.pointwise("pw_proj.conv", 2*(640+1280), 2048, 1)
	f.norm("pw_proj.bn", 2048)
	t.norm("msfa.norm", 2048)
}

// pointwise adds the weight of a convolution.
func (s scope) pointwise(name string, in, out, kernel int64) {
	s.tensor(name+".weight", out, in, kernel, kernel)
}

// inverted adds the blocks of a stage of MobileNetV5, one after the other.
type inverted struct {
	t            scope
	stage, index int64
	width        int64 // of the block before
}

func (u *inverted) next() scope {
	s := u.t.in("blocks." + decimal(u.stage) + "." + decimal(u.index))
	u.index++
	return s
}

// block adds a universal inverted residual. A kernel of 0 leaves its depthwise convolution out.
func (u *inverted) block(start, middle, expansion, out int64) {
	s, inner := u.next(), expansion*u.width
	if start > 0 {
		s.pointwise("dw_start.conv", 1, u.width, start)
		s.norm("dw_start.bn", u.width)
	}
	s.pointwise("pw_exp.conv", u.width, inner, 1)
	s.norm("pw_exp.bn", inner)
	if middle > 0 {
		s.pointwise("dw_mid.conv", 1, inner, middle)
		s.norm("dw_mid.bn", inner)
	}
	s.pointwise("pw_proj.conv", inner, out, 1)
	s.norm("pw_proj.bn", out)
	s.tensor("layer_scale.gamma", out)
	u.width = out
}

// attention adds attention whose heads share keys and values, which a convolution may make fewer.
func (u *inverted) attention(heads, width int64, fewer bool) {
	s := u.next()
	s.norm("norm", u.width)
	a := s.in("attn")
	a.pointwise("query.proj", u.width, heads*width, 1)
	for _, name := range []string{"key", "value"} {
		if fewer {
			a.pointwise(name+".down_conv", 1, u.width, 3)
			a.norm(name+".norm", u.width)
		}
		a.pointwise(name+".proj", u.width, width, 1)
	}
	a.pointwise("output.proj", heads*width, u.width, 1)
	s.tensor("layer_scale.gamma", u.width)
}

// conformer adds Gemma 3n's encoder of sound.
func conformer(e, v scope) {
	hidden, channels := v.size("hidden_size"), [2]int64{128, 32}
	if f, ok := v.find("sscp_conv_channel_size"); ok {
		channels = v.pair("sscp_conv_channel_size", f.Value)
	}
	first := e.in("subsample_conv_projection")
	first.pointwise("conv_0.conv", 1, channels[0], 3)
	first.norm("conv_0.norm", channels[0])
	first.pointwise("conv_1.conv", channels[0], channels[1], 3)
	first.norm("conv_1.norm", channels[1])
	first.linear("input_proj_linear", channels[1]*v.size("input_feat_size")/4, hidden, false)
	e.repeat("conformer", v.size("conf_num_hidden_layers"), func(s scope, _ int64) {
		s.conformerForward("ffw_layer_start", hidden)
		a := s.in("attention")
		a.norm("pre_attn_norm", hidden)
		heads := v.size("conf_num_attention_heads")
		a.tensor("attn.per_dim_scale", s.divide(hidden, "hidden_size", heads, "conf_num_attention_heads"))
		for _, name := range []string{"attn.relative_position_embedding.pos_proj", "attn.q_proj", "attn.k_proj",
			"attn.v_proj", "post"} {
			a.linear(name, hidden, hidden, false)
		}
		a.norm("post_norm", hidden)
		c := s.in("lconv1d")
		c.norm("pre_layer_norm", hidden)
		c.linear("linear_start", hidden, 2*hidden, false)
		c.tensor("depthwise_conv1d.weight", hidden, 1, v.size("conf_conv_kernel_size"))
		c.norm("conv_norm", hidden)
		c.linear("linear_end", hidden, hidden, false)
		s.conformerForward("ffw_layer_end", hidden)
		s.norm("norm", hidden)
	})
}

// conformerForward adds a feed-forward network of the conformer.
func (s scope) conformerForward(name string, hidden int64) {
	f := s.in(name)
	f.norm("pre_layer_norm", hidden)
	f.linear("ffw_layer_1", hidden, 4*hidden, false)
	f.linear("ffw_layer_2", 4*hidden, hidden, false)
	f.norm("post_layer_norm", hidden)
}

// gemma3nText adds Gemma 3n's language model. Its last layers take keys and values of layers before, every layer has
// embeddings of its own, and the residual stream is several streams (AltUp).
func gemma3nText(s scope) {
	hidden, layers, each := s.size("hidden_size"), s.size("num_hidden_layers"), s.size("hidden_size_per_layer_input")
	streams := s.size("altup_num_inputs")
	body, inner := s.in(s.body), s.list("intermediate_size")
	if inner != nil && int64(len(inner)) != layers {
		s.fail(s.fields["intermediate_size"].Value.At, "", "intermediate_size has %d elements: expected one for each "+
			"layer", len(inner))
	}
	body.embedding("embed_tokens", s.size("vocab_size"), hidden)
	body.repeat("layers", layers, func(b scope, index int64) {
		width := int64(0)
		if inner != nil {
			width = b.element("intermediate_size", inner[index])
		} else {
			width = b.size("intermediate_size")
		}
		b.gemma3nAttention(index >= layers-s.countOr(0, "num_kv_shared_layers"))
		gated(b.in("mlp"), width, false)
		for _, n := range gemmaNorms {
			b.norm(n.name, hidden)
		}
		b.altUp(hidden, streams)
		l := b.in("laurel")
		l.linear("linear_left", hidden, s.size("laurel_rank"), false)
		l.linear("linear_right", s.size("laurel_rank"), hidden, false)
		l.norm("post_laurel_norm", hidden)
		b.linear("per_layer_input_gate", hidden, each, false)
		b.linear("per_layer_projection", each, hidden, false)
		b.norm("post_per_layer_input_norm", hidden)
	})
	body.norm("norm", hidden)
	body.embedding("embed_tokens_per_layer", s.size("vocab_size_per_layer_input"), layers*each)
	body.linear("per_layer_model_projection", hidden, layers*each, false)
	body.norm("per_layer_projection_norm", each)
	for _, name := range []string{"altup_projections", "altup_unembed_projections"} {
		for i := range streams - 1 {
			body.linear(name+"."+decimal(i), hidden, hidden, false)
		}
	}
	s.head("lm_head", hidden, s.size("vocab_size"), true, s.body+".embed_tokens.weight")
}

// gemma3nAttention adds attention. A layer that takes keys and values of another has no projections to them.
func (s scope) gemma3nAttention(shared bool) {
	hidden, heads, groups := s.size("hidden_size"), s.size("num_attention_heads"), s.size("num_key_value_heads")
	width, bias, a := s.size("head_dim"), s.flagOr(false, "attention_bias"), s.in("self_attn")
	a.linear("q_proj", hidden, heads*width, bias)
	a.norm("q_norm", width)
	if !shared {
		a.linear("k_proj", hidden, groups*width, bias)
		a.linear("v_proj", hidden, groups*width, bias)
		a.norm("k_norm", width)
	}
	a.linear("o_proj", heads*width, hidden, bias)
}

// altUp adds the modules that predict and correct the streams of a layer.
func (s scope) altUp(hidden, streams int64) {
	a := s.in("altup")
	if s.flagOr(true, "altup_correct_scale") {
		a.tensor("correct_output_scale", hidden)
	}
	a.linear("correction_coefs", streams, streams, false)
	a.linear("prediction_coefs", streams, streams*streams, false)
	a.linear("modality_router", hidden, streams, false)
	a.norm("router_norm", hidden)
}

// element returns an element of a list of sizes.
func (s scope) element(name string, v *strict.Value) int64 {
	one := scope{&construction{config: &config{Document: s.Document,
		fields: map[string]strict.Member{name: {Name: name, Value: v}}}, made: s.made}, ""}
	return one.size(name)
}
