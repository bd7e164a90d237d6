package trl

import (
	"fmt"
	"regexp"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// Unsloth's loaders (unsloth/models/loader.py), and the arguments of their from_pretrained and get_peft_model that are
// read here.
const (
	unslothLoaders = "FastLanguageModel FastModel FastVisionModel"
	unslothLoading = `model_name max_seq_length dtype load_in_4bit load_in_8bit load_in_16bit full_finetuning`
	unslothSilent  = `token device_map random_state trust_remote_code fix_tokenizer use_exact_model_name revision
		max_lora_rank unsloth_force_compile`
	unslothAdapter = "r target_modules lora_alpha lora_dropout bias use_rslora modules_to_save"
)

// unslothModules are the modules that Unsloth adapts where nothing names them.
var unslothModules = strings.Fields("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj")

// isUnsloth reports whether a class is one of Unsloth's loaders.
func isUnsloth(class string) bool {
	return strings.HasPrefix(class[strings.LastIndexByte(class, '.')+1:], "Fast")
}

// unsloth reads a model that Unsloth loads: in 4 bits by default, with layers that the backward pass runs again. Its
// kernels are planned as the modules of transformers, which the plan says.
func (r *reader) unsloth() error {
	v := r.Find(recipe.Loaded)
	class := classOf(v)
	class = class[strings.LastIndexByte(class, '.')+1:]
	if !strings.Contains(" "+unslothLoaders+" ", " "+class+" ") {
		return r.Inputf(v.At, "%s of Unsloth loads the model, which is not planned yet", class).
			WithHint(fmt.Sprintf("plimsoll plans FastLanguageModel, FastModel and FastVisionModel; 'plimsoll plan "+
				"--gpu NAME -- python %s' plans the program as it runs, without a GPU, where Unsloth is installed",
				r.File))
	}
	for _, m := range v.Members {
		if known := unslothLoading + " " + unslothSilent + " name class arguments"; strings.Contains(" "+known+" ",
			" "+m.Name+" ") || !recipe.On(m.Value) {
			continue
		}
		if m.Name == checkpointing && r.adapts() { // get_peft_model says it again
			continue
		}
		return r.Inputf(m.At, "%s of Unsloth is %v, which is not planned yet", m.Name, m.Value).
			WithHint("leave it out to plan the job without it, and expect its memory to differ")
	}
	r.To.Weights, r.To.OwnExperts, r.To.OwnAttention = "bf16", true, true
	r.unslothLoss()
	if !r.ReleaseOf("unsloth").AtLeast(2026, 10, 9) { // its make_gqa_sdpa copies keys where no kernel takes groups
		r.To.GroupsWithMask = []string{"gemma3", "gemma3_text"}
	}
	if is := v.Member("dtype"); is != nil && recipe.PrecisionNames[is.Value.Text] != "" {
		r.To.Weights = recipe.PrecisionNames[is.Value.Text]
	} else if fp16 := r.Arguments.Member("fp16"); fp16 != nil && recipe.On(fp16.Value) {
		r.To.Weights = "fp16" // other weights are refused (patch_sft_trainer_tokenizer in unsloth/models/rl.py)
	}
	return r.unslothBits(v)
}

// unslothLoss is a loss without whole logits since Unsloth 2024.11.8 (fused_linear_cross_entropy in
// unsloth/models/llama.py), and before a kernel that writes the gradient over the logits.
func (r *reader) unslothLoss() {
	loss := "a loss without whole logits"
	trainsText := r.To.Answers == nil && !r.To.Rewards
	if is := r.ReleaseOf("unsloth"); trainsText && !is.IsZero() && !is.AtLeast(2024, 11, 8) {
		loss = "a loss that writes its gradient over the logits"
		r.To.Chunks = recipe.InPlace
	} else {
		r.To.FusedLoss = true
	}
	r.Note(recipe.Loaded, "is Unsloth's: its kernels for layers are not planned; the plan has the modules of "+
		"transformers and "+loss+", and a run may take less or more")
	if r.ReleaseOf("unsloth").IsZero() {
		r.Note(recipe.Loaded, "is Unsloth's, whose releases before 2024.11.8 make all logits: --release "+
			"unsloth=VERSION plans them")
	}
}

// unslothBits reads the quantization: 4 bits unless other bits or a full finetuning are asked for.
func (r *reader) unslothBits(v *strict.Value) error {
	for _, ending := range []string{"-unsloth-bnb-4bit", "-bnb-4bit"} {
		if plain, is := strings.CutSuffix(r.To.Model, ending); is {
			r.Note(recipe.Loaded, "names weights in 4 bits: all linear layers are planned so, and Unsloth leaves "+
				"some in 16")
			r.To.Model = plain
			return r.unsloth4()
		}
	}
	on := func(key string) bool { m := v.Member(key); return m != nil && recipe.On(m.Value) }
	said := v.Member("load_in_4bit")
	switch {
	case on("load_in_8bit"):
		return r.unsloth8()
	case on("full_finetuning") || on("load_in_16bit") || said != nil && !recipe.On(said.Value):
		return nil
	}
	return r.unsloth4()
}

// unsloth8 reads load_in_8bit. Unsloth gave it to transformers from a release of September 2025 on; before, weights
// stayed in 16 bits (FastBaseModel.from_pretrained in unsloth/models/vision.py, 2025.4.1 to 2025.9.9).
func (r *reader) unsloth8() error {
	const key, since = "load_in_8bit", "2025.9.10"
	has := r.ReleaseOf("unsloth")
	if !has.IsZero() && !has.AtLeast(2025, 9, 10) {
		r.Note(recipe.Loaded, fmt.Sprintf("says %s, which Unsloth %v does not give to transformers: weights stay in "+
			"16 bits; %s does", key, has, since))
		return nil
	}
	if has.IsZero() {
		r.Note(recipe.Loaded, fmt.Sprintf("says %s, which releases of Unsloth before %s do not give to transformers: "+
			"weights then take twice as much; --release unsloth=VERSION plans them", key, since))
	}
	return r.Quantize(recipe.Loaded, map[string]*strict.Value{key: strict.Of(true)})
}

func (r *reader) unsloth4() error {
	values := map[string]*strict.Value{"load_in_4bit": strict.Of(true),
		"bnb_4bit_quant_type": strict.Of("nf4"), "bnb_4bit_use_double_quant": strict.Of(true),
		"bnb_4bit_compute_dtype": strict.Of(recipe.ElementNames[r.To.Weights])}
	if r.readsImages() {
		skipped := &strict.Value{Kind: '[', At: r.At(recipe.Loaded)}
		for _, name := range unslothUnquantized {
			skipped.Elements = append(skipped.Elements, strict.Of(name))
		}
		values["llm_int8_skip_modules"] = skipped
	}
	return r.Quantize(recipe.Loaded, values)
}

// unslothUnquantized are modules that FastModel and FastVisionModel leave in 16 bits (SKIP_QUANTIZATION_MODULES in
// unsloth_zoo/peft_utils.py): heads, routers, and what reads images and sounds.
var unslothUnquantized = strings.Fields(`lm_head multi_modal_projector merger modality_projection mm_projector router
	mlp.gate block_sparse_moe.gate moe.gate mamba audio_tower vision_tower visual vision_embedder embed_vision
	embed_audio score classifier qa_outputs`)

// readsImages reports whether the loader is one that adapts encoders of images, too.
func (r *reader) readsImages() bool {
	class := r.LoaderClass()
	return strings.HasSuffix(class, "FastModel") || strings.HasSuffix(class, "FastVisionModel")
}

// checkpointing is the argument of Unsloth's functions that says what the backward pass runs again.
const checkpointing = "use_gradient_checkpointing"

// adapts reports whether Unsloth's get_peft_model adapts the model.
func (r *reader) adapts() bool {
	v := r.Find(recipe.Adapted)
	return v != nil && classOf(v) == "get_peft_model"
}

// unslothAdapts reads get_peft_model of Unsloth's loaders.
func (r *reader) unslothAdapts(v *strict.Value) error {
	targets := &strict.Value{Kind: '[', At: v.At}
	for _, name := range unslothModules {
		targets.Elements = append(targets.Elements, strict.Of(name))
	}
	values := map[string]*strict.Value{"r": strict.Of(16), "lora_alpha": strict.Of(16), "target_modules": targets,
		"lora_dropout": strict.Of(0)}
	for name := range strings.FieldsSeq(unslothAdapter) {
		if m := v.Member(name); m != nil && m.Value.Kind != 'n' {
			values[name] = m.Value
		}
	}
	for name := range strings.FieldsSeq(`layers_to_transform layers_pattern use_dora init_lora_weights loftq_config
		qat_scheme`) {
		if m := v.Member(name); m != nil && recipe.On(m.Value) {
			return r.Inputf(m.At, "%s of get_peft_model is %v, which is not planned yet", name, m.Value)
		}
	}
	if err := r.unslothParts(v, values); err != nil {
		return err
	}
	if values["target_modules"].Kind == '[' {
		r.To.Separate = values["target_modules"].Texts()
	}
	checkpoints := strict.Of("unsloth")
	if m := v.Member(checkpointing); m != nil {
		checkpoints = m.Value
	}
	if checkpoints.Text == "unsloth" {
		r.To.Offloading = recipe.NewOffloading()
		r.To.Offloading.InputsOnly, r.To.Offloading.Stash = true, 2
	}
	r.Set("gradient_checkpointing", recipe.Adapted, recipe.On(checkpoints))
	if r.To.Offloading != nil { // the backward pass runs a block in a graph of its own (UnslothCheckpointFunction)
		kwargs := &strict.Value{Kind: '{'}
		recipe.Give(kwargs, "use_reentrant", v.At, strict.Of(true))
		recipe.Give(r.Arguments, "gradient_checkpointing_kwargs", v.At, kwargs)
	}
	return r.Adapt(recipe.Adapted, values)
}

// Names of parts by which Unsloth chooses modules (get_peft_regex in unsloth_zoo/peft_utils.py).
const (
	ofImages    = "vision|image|visual|patch"
	ofLanguage  = "language|text"
	ofAttention = "self_attn|attention|attn|mixer"
	ofMLP       = "mlp|feed_forward|ffn|dense|mixer"
)

// unslothParts reads which parts of a model are adapted. Loaders of models that read images choose modules by the names
// of the parts that they are in, encoders of images among them.
func (r *reader) unslothParts(v *strict.Value, values map[string]*strict.Value) error {
	on := func(key string) bool { m := v.Member(key); return m == nil || recipe.On(m.Value) }
	if !r.readsImages() {
		for name := range strings.FieldsSeq(`finetune_language_layers finetune_attention_modules
			finetune_mlp_modules`) {
			if !on(name) {
				return r.Inputf(v.At, "%s of get_peft_model is false, which is not planned yet for %s", name,
					r.LoaderClass())
			}
		}
		if encoder := v.Member("finetune_vision_layers"); encoder != nil && !recipe.On(encoder.Value) {
			r.To.Freezes = &recipe.Freezes{Vision: true, Projector: true}
		}
		if targets := values["target_modules"]; targets.Text == "all-linear" {
			values["target_modules"] = recipe.OneName(targets)
		}
		return nil
	}
	if m := v.Member("finetune_audio_layers"); m != nil && recipe.On(m.Value) {
		return r.Inputf(m.At, "finetune_audio_layers of get_peft_model is true, which is not planned yet")
	}
	leaves, all := "[^.]+", v.Member("target_modules") == nil
	if m := v.Member("target_modules"); m != nil && m.Value.Kind == '[' {
		var names []string
		for _, name := range m.Value.Texts() {
			names = append(names, regexp.QuoteMeta(name))
		}
		leaves = "(?:" + strings.Join(names, "|") + ")"
	} else if m != nil && m.Value.Kind != 'n' {
		if m.Value.Text != "all-linear" {
			return r.Inputf(m.At, "target_modules of get_peft_model is %v, which is not planned yet", m.Value).
				WithHint("give a list of names, or all-linear")
		}
		all = true
	}
	everything := v.Member("target_modules") != nil && all // all-linear turns every part on
	values["target_modules"] = strict.Of(unslothPattern(leaves, func(key string) bool { return everything || on(key) }))
	values["target_modules"].At = v.At
	return nil
}

// unslothPattern returns the pattern of the modules that are adapted, with the names of parts that are on.
func unslothPattern(leaves string, on func(key string) bool) string {
	var parts, kinds []string
	for _, p := range []struct {
		key, names string
		to         *[]string
	}{{"finetune_vision_layers", ofImages, &parts}, {"finetune_language_layers", ofLanguage, &parts},
		{"finetune_attention_modules", ofAttention, &kinds}, {"finetune_mlp_modules", ofMLP, &kinds}} {
		if on(p.key) {
			*p.to = append(*p.to, p.names)
		}
	}
	kind := "(?:" + strings.Join(kinds, "|") + ")"
	pattern := ".*?(?:" + strings.Join(parts, "|") + ").*?" + kind + `.*?\.` + leaves
	if on("finetune_language_layers") { // models of texts name no part
		pattern = "(?:" + pattern + `|(?:model\.)?layers\.\d+\.` + kind + `.*?\.` + leaves + ")"
	}
	return pattern
}
