package llamafactory

import (
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// quantize reads the quantization: configure_quantization in model/model_utils/quantization.py.
func (r *reader) quantize() error {
	const key = "quantization_bit"
	switch bits := r.Integer(key); {
	case !r.Gives(key):
		return nil
	case r.Word("finetuning_type") != "lora" && r.Word("finetuning_type") != "oft":
		return r.Fault(key, "is given, but LLaMA-Factory quantizes only for LoRA and OFT",
			"remove it, or set finetuning_type to lora")
	case bits == 8:
		return r.Quantize(key, map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	case bits != 4:
		return r.Fault(key, fmt.Sprintf("is %d: bitsandbytes quantizes to 4 or 8 bits", bits), "set it to 4 or 8")
	}
	computed := strict.Of(recipe.ElementNames[r.To.Weights])
	if r.To.Weights == "" {
		computed = nil
	}
	return r.Quantize(key, map[string]*strict.Value{"load_in_4bit": strict.Of(true),
		"bnb_4bit_quant_type":       strict.Of(r.Word("quantization_type")),
		"bnb_4bit_use_double_quant": strict.Of(r.Truth("double_quantization")),
		"bnb_4bit_compute_dtype":    computed, "bnb_4bit_quant_storage": computed})
}

// freeze reads which part of the model is trained.
func (r *reader) freeze() bool {
	if r.Word("finetuning_type") != "freeze" {
		return false
	}
	freezePart(r.Reader, "")
	r.To.Freeze.Spread, r.To.Freeze.Widens = r.Truth("use_llama_pro"), !r.Truth("pure_bf16")
	return true
}

// freezePart reads the keys of a section that say which layers and modules are trained.
func freezePart(r *recipe.Reader, section string) {
	key := section + "freeze_trainable_layers"
	r.To.Freeze = &recipe.Freeze{Layers: int(r.Integer(key)), Modules: []string{"all"}, Place: r.Place(key)}
	if v := recipe.Separated(r.Find(section + "freeze_trainable_modules")); recipe.On(v) {
		r.To.Freeze.Modules = v.Texts()
	}
	if v := recipe.Separated(r.Find(section + "freeze_extra_modules")); recipe.On(v) {
		r.To.Freeze.Extra = v.Texts()
	}
}

// adapt reads the adapter: _setup_lora_tuning in model/adapter.py.
func (r *reader) adapt() error {
	alpha := r.Find("lora_alpha")
	if alpha == nil {
		alpha = strict.Of(int(2 * r.Integer("lora_rank")))
	}
	targets := recipe.Separated(r.Value("lora_target"))
	if len(targets.Elements) == 1 && strings.EqualFold(targets.Elements[0].Text, "all") {
		targets = strict.Of("all-linear")
	}
	r.To.AddsInFull = true // peft 0.18
	if r.Truth("use_llama_pro") {
		r.Note("use_llama_pro", "is true: the plan adapts all layers, and LLaMA-Factory only the expanded ones")
	}
	if r.Word("finetuning_type") == "oft" { // oft_target is read by nothing
		return r.Adapt("oft_block_size", map[string]*strict.Value{"peft_type": strict.Of("OFT"),
			"r": strict.Of(int(r.Integer("oft_rank"))), "oft_block_size": r.Value("oft_block_size"),
			"target_modules": targets, "module_dropout": r.Find("module_dropout"),
			"modules_to_save": recipe.Separated(r.Find("additional_target"))})
	}
	return r.Adapt("lora_target", map[string]*strict.Value{"r": r.Value("lora_rank"), "lora_alpha": alpha,
		"target_modules": targets, "lora_dropout": r.Find("lora_dropout"), "use_rslora": r.Find("use_rslora"),
		"use_dora": r.Find("use_dora"), "modules_to_save": recipe.Separated(r.Find("additional_target"))})
}
