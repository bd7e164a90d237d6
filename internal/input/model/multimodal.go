package model

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/strict"
)

// multimodal is a language model with an encoder of images.
type multimodal struct {
	text    string   // the module of the language model
	headed  bool     // this module has the head, too
	tied    bool     // the default for tie_word_embeddings
	either  bool     // text_config ties word embeddings, too
	model   string   // the default model_type of text_config
	towered string   // the default model_type of vision_config
	others  []string // further ones
	config  string   // the field of the encoder, if it is not vision_config
	unknown bool     // the operations of the encoder are not planned
	// last adds what comes after the language model.
	last    func(root, v scope, hidden int64)
	renamed map[string]string
	flat    bool // the fields of the language model may be outside of text_config
	// tower adds the encoder and the projector. v has the fields of vision_config,
	// root those of the file, and hidden is the width of the language model.
	tower func(root, v scope, hidden int64)
}

var (
	qwen2VL = multimodal{text: "language_model", either: true, flat: true, model: "qwen2_vl_text",
		towered: "qwen2_vl_vision", renamed: map[string]string{"qwen2_vl": "qwen2_vl_vision"},
		tower: func(_, v scope, _ int64) {
			qwenVision{names: [2]string{"fc1", "fc2"}, activation: "quick_gelu", class: "Qwen2VLVisionBlock",
				merger: qwenMerger(scope.layerNorm)}.describe(v, "model.visual")
		}}
	qwen25VL = multimodal{text: "language_model", either: true, flat: true, model: "qwen2_5_vl_text",
		towered: "qwen2_5_vl_vision", renamed: map[string]string{"qwen2_5_vl": "qwen2_5_vl_vision"},
		tower: func(_, v scope, _ int64) {
			q := qwenVision{rms: true, gated: true, windows: true, class: "Qwen2_5_VLVisionBlock",
				merger: qwenMerger(scope.norm)}
			q.describe(v, "model.visual")
		}}
	qwen3VL = multimodal{text: "language_model", model: "qwen3_vl_text", towered: "qwen3_vl_vision",
		renamed: map[string]string{"qwen3_vl": "qwen3_vl_vision"}, tower: qwen3Tower}
	qwen3VLMoE = multimodal{text: "language_model", model: "qwen3_vl_moe_text", towered: "qwen3_vl_moe_vision",
		renamed: map[string]string{"qwen3_vl_moe": "qwen3_vl_moe_vision"}, tower: qwen3Tower}
	qwen35VL = multimodal{text: "language_model", model: "qwen3_5_text", towered: "qwen3_5_vision",
		renamed: map[string]string{"qwen3_5": "qwen3_5_vision"}, tower: qwen3Tower}
	qwen35VLMoE = multimodal{text: "language_model", model: "qwen3_5_moe_text", towered: "qwen3_5_moe_vision",
		renamed: map[string]string{"qwen3_5_moe": "qwen3_5_moe_vision"}, tower: qwen3Tower}
	llava = multimodal{text: "language_model", either: true, model: "llama", towered: "clip_vision_model",
		others: []string{"siglip_vision_model", "pixtral"}, tower: llavaTower(-2, "default")}
	llavaNext = multimodal{text: "language_model", either: true, model: "llama", towered: "clip_vision_model",
		others: []string{"siglip_vision_model"}, tower: tiled(llavaTower(-2, "default"), nextSizes, 0)}
	llavaOneVision = multimodal{text: "language_model", either: true, model: "qwen2", towered: "siglip_vision_model",
		others: []string{"clip_vision_model"}, tower: tiled(llavaTower(-1, "full"), oneVisionSizes(), 9)}
	llama4Vision = multimodal{text: "language_model", headed: true, either: true, model: "llama4_text",
		towered: "llama4_vision_model", tower: llama4Tower}
	glm4V = multimodal{text: "language_model", model: "glm4v_text", towered: "glm4v_vision",
		renamed: map[string]string{"glm4v": "glm4v_vision"}, tower: glmTower}
	glm4VMoE = multimodal{text: "language_model", model: "glm4v_moe_text", towered: "glm4v_moe_vision",
		renamed: map[string]string{"glm4v_moe": "glm4v_moe_vision"}, tower: glmTower}
	gemma3Vision = multimodal{text: "language_model", tied: true, model: "gemma3_text", towered: "siglip_vision_model",
		tower: gemma3Tower}
	paliGemma = multimodal{text: "language_model", tied: true, model: "gemma", towered: "siglip_vision_model",
		tower: paliGemmaTower}
	mistral3 = multimodal{text: "language_model", tied: true, model: "mistral", towered: "pixtral",
		tower: mistral3Tower}
	internVL = multimodal{text: "language_model", tied: true, model: "qwen2", towered: "internvl_vision",
		tower: internTower}
	idefics3 = multimodal{text: "text_model", model: "llama", towered: "idefics3_vision", tower: idefics3Tower}
	smolVLM  = multimodal{text: "text_model", model: "llama", towered: "smolvlm_vision", tower: idefics3Tower}
)

// textOf returns the description of a language model inside of a multimodal one.
func (s scope) textOf(modelType string) (func(scope), bool) {
	switch modelType {
	case "qwen2_vl_text", "qwen2_5_vl_text":
		modelType = "qwen2"
	case "qwen3_vl_text":
		modelType = "qwen3"
	case "qwen3_vl_moe_text":
		return decoder(false, qwen3VLMoEBlock), true
	case "qwen2_5_omni_text":
		modelType = "qwen2"
	case "paddleocr_vl_text":
		return ernie.describe, true
	case "mllama_text_model":
		return mllamaText, true
	case "gemma3n_text":
		return gemma3nText, true
	case "gemma4_text", "gemma4_unified_text":
		return gemma4Text, true
	case "glm4v_text":
		return glm4VText.describe, true
	case "glm4v_moe_text":
		return glm4VMoEText.describe, true
	}
	for _, a := range s.known {
		if a.modelType == modelType && strings.HasSuffix(a.name, "ForCausalLM") {
			return a.describe, true
		}
	}
	return nil, false
}

// describe describes the model.
func (m multimodal) describe(s scope) {
	if m.unknown {
		s.withoutOperations()
	}
	path, body := "", "model."+m.text
	if m.headed {
		path, body = m.text+".", "model"
		s.network.HoldsEmbeddings = true
	}
	text := s
	if _, ok := s.find("text_config"); ok || !m.flat {
		text = s.inside("text_config", m.model, body, m.renamed)
	} else {
		text = s.nested(s.members(), m.model, body, map[string]string{s.textOr("", "model_type"): m.model})
	}
	text.path = path
	tied := s.flagOr(m.tied, "tie_word_embeddings") || m.either && text.flagOr(false, "tie_word_embeddings")
	text.fields["tie_word_embeddings"] = truthMember("tie_word_embeddings", tied)
	modelType := text.textOr("", "model_type")
	describe, ok := s.textOf(modelType)
	if !ok {
		s.fail(0, Documented, "text_config is of %q, which is not planned as a part of a multimodal model", modelType)
	}
	s.textType = modelType
	config := cmp.Or(m.config, "vision_config")
	v := s.inside(config, m.towered, "", m.renamed)
	if got := v.textOr("", "model_type"); got != m.towered && !slices.Contains(m.others, got) {
		s.fail(0, Documented, "%s is of %q, expected %s", config, got,
			fault.OneOf(append([]string{m.towered}, m.others...)...))
	}
	m.tower(s, v, text.size("hidden_size"))
	describe(text)
	if m.last == nil {
		return
	}
	head := s.parameters[len(s.parameters)-1] // comes last
	s.parameters = s.parameters[:len(s.parameters)-1]
	m.last(s, v, text.size("hidden_size"))
	s.parameters = append(s.parameters, head)
}

// truthMember returns a field that is true or false.
func truthMember(name string, truth bool) strict.Member {
	return strict.Member{Name: name, Value: strict.Of(truth)}
}

// members returns the fields of the configuration.
func (c *config) members() []strict.Member {
	var members []strict.Member
	for _, name := range slices.Sorted(maps.Keys(c.fields)) {
		members = append(members, c.fields[name])
	}
	return members
}

func qwen3VLMoEBlock(s scope, index int64, b *Block) {
	bias := s.flagOr(false, "attention_bias")
	a := attention{keyValueHeads: 16, inputBias: bias, outputBias: bias, norms: true}
	b.Attention = a.describe(s.in("self_attn"))
	if qwenSparse(s, index) {
		b.FeedForward = experts{count: []string{"num_local_experts", "num_experts"}, chosen: 4,
			normalized: setting{otherwise: true}, stacked: stackedByInput}.describe(s)
	} else {
		b.FeedForward = gated(s.in("mlp"), s.size("intermediate_size"), false)
	}
	blockNorms(s, b)
}

// stackedByInput adds the weights of all experts with a row for each output.
func stackedByInput(s scope, m *Mixture, count, inner int64) {
	hidden := s.size("hidden_size")
	s.tensor("experts.gate_up_proj", count, 2*inner, hidden)
	s.tensor("experts.down_proj", count, hidden, inner)
	m.GateUp, m.Down = s.module("experts.gate_up_proj"), s.module("experts.down_proj")
}

func qwen3Tower(_, v scope, _ int64) {
	class := map[string]string{"qwen3_vl_vision": "Qwen3VLVisionBlock", "qwen3_vl_moe_vision": "Qwen3VLMoeVisionBlock",
		"qwen3_5_vision":     "Qwen3_5VisionBlock",
		"qwen3_5_moe_vision": "Qwen3_5MoeVisionBlock"}[v.textOr("", "model_type")]
	qwenVision{names: [2]string{"linear_fc1", "linear_fc2"}, activation: "gelu_pytorch_tanh", bias: true,
		positions: true, class: class, merger: qwen3Merger(false)}.describe(v, "model.visual")
}

// unread sets how many last blocks of the encoder nothing reads, by
// vision_feature_layer, and what comes before the projector.
func (s scope) unread(t *Tower, layer int, strategy string) {
	if v, ok := s.find("vision_feature_layer"); ok {
		n, err := strconv.Atoi(v.Text)
		if err != nil || n >= 0 || -n > len(t.Network.Blocks()) {
			s.fail(v.At, Documented, "vision_feature_layer is %s: only one layer is planned, counted from the last", v)
		}
		layer = n
	}
	t.Unread = -1 - layer
	s.freezeUnread(t)
	if s.textOr(strategy, "vision_feature_select_strategy") == "default" {
		t.After = append(t.After, Step{Kind: Crop})
	} else {
		t.Image.Kept = t.Image.Class
	}
}

// freezeUnread freezes the parameters of the encoder that nothing reads: no gradient
// reaches them.
func (s scope) freezeUnread(t *Tower) {
	blocks := t.Network.Blocks()
	read := blocks[:len(blocks)-t.Unread]
	for i := range s.parameters {
		p := &s.parameters[i]
		if !strings.HasPrefix(p.Name, t.Path+".") {
			continue
		}
		list, index := blockOf(p.Name)
		if index >= len(read) && strings.HasPrefix(blocks[0].Path, list) || strings.Contains(p.Name, "post_layernorm") {
			p.Frozen = true
		}
	}
}

// projector adds two linear modules with a function between them.
func (s scope) projector(t *Tower, in, hidden int64, bias bool) {
	t.After = append(t.After, Step{Kind: Project, Path: s.linear("linear_1", in, hidden, bias), Width: hidden},
		Step{Kind: Activate, Function: s.textOr("gelu", "projector_hidden_act")},
		Step{Kind: Project, Path: s.linear("linear_2", hidden, hidden, bias), Width: hidden})
}

const projectorPath = "model.multi_modal_projector"

// llavaTower adds an encoder of any type, of which one layer is read, and LLaVA's projector.
func llavaTower(layer int, strategy string) func(root, v scope, hidden int64) {
	return func(root, v scope, hidden int64) {
		const path = "model.vision_tower"
		complete := func(t *Tower) {
			t.After = nil // the layer is read before the norm after the last block
			root.unread(t, layer, strategy)
			t.Projector = projectorPath
			bias := root.flagOr(true, "multimodal_projector_bias")
			root.in(projectorPath).projector(t, v.size("hidden_size"), hidden, bias)
		}
		switch v.textOr("", "model_type") {
		case "pixtral":
			pixtral(v, path, complete)
		case "siglip_vision_model":
			siglip(v, complete)
		default:
			clipLike{class: true, activation: "quick_gelu", block: "CLIPEncoderLayer"}.describe(v, path, complete)
		}
	}
}

// siglip adds SigLIP's encoder without the head for the whole image.
func siglip(v scope, complete func(t *Tower)) {
	v.refuse("vision_use_head")
	e := clipLike{normsFirst: true, activation: "gelu_pytorch_tanh", block: "SiglipEncoderLayer"}
	e.describe(v, "model.vision_tower", complete)
}

func gemma3Tower(root, v scope, hidden int64) {
	siglip(v, func(t *Tower) {
		p, width := root.in(projectorPath), v.size("hidden_size")
		t.Projector, t.MasksText = projectorPath, true
		t.Image.Tokens = root.sizeOr(256, "mm_tokens_per_image")
		p.tensor("mm_input_projection_weight", width, hidden)
		norm := p.norm("mm_soft_emb_norm", width)
		norm.Kind = RMSNormF32
		patches := t.Image.Patches(t.Image.Height, t.Image.Width)
		t.After = append(t.After, Step{Kind: Copy},
			Step{Kind: Average, Rows: root.divide(patches, "image_size", t.Image.Tokens, "mm_tokens_per_image")},
			Step{Kind: Normalize, Norm: norm}, Step{Kind: Copy},
			Step{Kind: Multiply, Path: p.module("mm_input_projection_weight"), Width: hidden})
	})
}

func paliGemmaTower(root, v scope, hidden int64) {
	siglip(v, func(t *Tower) {
		t.Projector, t.MasksText = projectorPath, true
		out := root.sizeOr(2048, "projection_dim")
		if out != hidden {
			f, _ := root.find("projection_dim")
			root.fail(f.At, "", "projection_dim is %d: expected the language model's hidden_size, which is %d", out,
				hidden)
		}
		t.After = append(t.After, Step{Kind: Project,
			Path: root.in(projectorPath).linear("linear", v.size("hidden_size"), out, true), Width: out})
	})
}

func mistral3Tower(root, v scope, hidden int64) {
	pixtral(v, "model.vision_tower", func(t *Tower) {
		root.unread(t, -1, "")
		t.Projector, t.Image.Merged = projectorPath, root.sizeOr(2, "spatial_merge_size")
		p, width := root.in(projectorPath), v.size("hidden_size")
		merged := width * t.Image.Merged * t.Image.Merged
		t.After = append(t.After, Step{Kind: Normalize, Norm: p.norm("norm", width)},
			Step{Kind: Merge, Rows: merged / width, Width: merged}, Step{Kind: Copy}, Step{Kind: Copy},
			Step{Kind: Project, Path: p.linear("patch_merger.merging_layer", merged, width, false), Width: width})
		p.projector(t, width, hidden, root.flagOr(false, "multimodal_projector_bias"))
	})
}

func internTower(root, v scope, hidden int64) {
	internVision(v, "model.vision_tower", func(t *Tower) {
		root.unread(t, -1, "default")
		if t.Unread > 0 {
			root.fail(root.fields["vision_feature_layer"].Value.At, Documented,
				"vision_feature_layer is not -1, which is not planned for InternVL")
		}
		ratio := root.shareOr(0.5, "downsample_ratio")
		side := int64(1 / max(ratio, 1.0/64))
		t.Projector, t.Image.Merged = projectorPath, side
		p, merged := root.in(projectorPath), v.size("hidden_size")*side*side
		t.After = append(t.After, Step{Kind: Copy}, Step{Kind: Copy},
			Step{Kind: Merge, Rows: side * side, Width: merged},
			Step{Kind: Normalize, Norm: p.layerNorm("layer_norm", merged)})
		p.projector(t, merged, hidden, true)
	})
}

func idefics3Tower(root, v scope, hidden int64) {
	e := clipLike{activation: "gelu_pytorch_tanh", resized: true, block: "Idefics3EncoderLayer"}
	if v.textOr("", "model_type") == "smolvlm_vision" {
		e.block = "SmolVLMEncoderLayer"
	}
	e.describe(v, "model.vision_model", func(t *Tower) {
		side := root.sizeOr(2, "scale_factor")
		t.Projector, t.Image.Merged = "model.connector", side
		merged := v.size("hidden_size") * side * side
		t.After = append(t.After, Step{Kind: Copy}, Step{Kind: Copy},
			Step{Kind: Merge, Rows: side * side, Width: merged},
			Step{Kind: Project, Path: root.linear("model.connector.modality_projection.proj", merged, hidden, false),
				Width: hidden})
	})
}
