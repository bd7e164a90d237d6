package axolotl

import (
	"cmp"
	"fmt"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// quantize reads the quantization: _set_quantization_config in src/axolotl/loaders/model.py.
func (r *reader) quantize() error {
	if method := r.Find("model_quantization_config"); method != nil {
		values := map[string]*strict.Value{"quant_method": strict.Of(map[string]string{"Mxfp4Config": "mxfp4",
			"FineGrainedFP8Config": "fp8"}[method.Text])}
		if given := r.Find("model_quantization_config_kwargs"); given != nil {
			for _, m := range given.Members {
				values[m.Name] = m.Value
			}
		}
		return r.Quantize("model_quantization_config", values)
	}
	const experts = "quantize_moe_experts"
	r.To.QuantizesExperts = r.Truth(experts)
	switch adapter := r.Word("adapter"); {
	case r.To.QuantizesExperts && r.Truth("lora_target_linear"):
		return r.Fault(experts, "is true, which axolotl refuses beside lora_target_linear",
			"list lora_target_modules instead")
	case r.To.QuantizesExperts && (!r.Truth("load_in_4bit") && !r.Truth("load_in_8bit") || adapter == ""):
		return r.Fault(experts, "is true, but axolotl needs an adapter and load_in_4bit or load_in_8bit with it",
			"add both, or set it to false")
	case r.Truth("load_in_4bit") && (adapter == "qlora" || r.To.QuantizesExperts):
		values := map[string]*strict.Value{"load_in_4bit": strict.Of(true), "bnb_4bit_quant_type": strict.Of("nf4"),
			"bnb_4bit_use_double_quant": strict.Of(true), "bnb_4bit_quant_storage": strict.Of("bfloat16"),
			"bnb_4bit_compute_dtype": strict.Of(recipe.ElementNames[r.To.Weights])}
		if given := r.Find("bnb_config_kwargs"); given != nil {
			for _, m := range given.Members {
				values[m.Name] = m.Value
			}
		}
		return r.Quantize("load_in_4bit", values)
	case r.Truth("load_in_4bit"):
		return r.Fault("load_in_4bit", "is true, but axolotl quantizes to 4 bits only with adapter: qlora",
			"set adapter to qlora, or load_in_4bit to false")
	case r.Truth("load_in_8bit") && adapter == "lora":
		return r.Quantize("load_in_8bit", map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	}
	return nil
}

// adapt reads the adapter: src/axolotl/loaders/adapter.py.
func (r *reader) adapt() error {
	adapter := r.Find("adapter")
	switch {
	case adapter == nil || adapter.Text == "":
		return nil
	case adapter.Text != "lora" && adapter.Text != "qlora":
		return r.Fault("adapter", fmt.Sprintf("is %s, which is not planned yet", adapter),
			"plimsoll plans lora and qlora")
	case adapter.Text == "qlora" && !r.Truth("load_in_4bit"):
		return r.Fault("adapter", "is qlora, which needs load_in_4bit", "add load_in_4bit: true")
	}
	targets := r.Find("lora_target_modules")
	if r.Truth("lora_target_linear") {
		if recipe.On(targets) {
			r.Note("lora_target_modules", "is given beside lora_target_linear: the plan adapts all linear modules")
		}
		targets = strict.Of("all-linear")
	}
	r.To.AddsInFull = true // peft 0.19
	if !r.Truth("peft_autocast_adapter_dtype") {
		r.To.AdapterPrecision = r.To.Weights
	}
	err := r.Adapt("adapter", map[string]*strict.Value{"r": r.Find("lora_r"), "lora_alpha": r.Find("lora_alpha"),
		"target_parameters": recipe.AsList(r.Find("lora_target_parameters")),
		"lora_dropout":      r.Find("lora_dropout"), "target_modules": targets,
		"fan_in_fan_out":  r.Find("lora_fan_in_fan_out"),
		"modules_to_save": recipe.AsList(r.Find("lora_modules_to_save")), "use_dora": r.Find("peft_use_dora"),
		"use_rslora": r.Find("peft_use_rslora")})
	if r.To.Adapter != nil {
		r.To.Adapter.ListsLinear = r.Truth("lora_target_linear") // find_all_linear_names
	}
	return err
}

// qat reads quantization-aware training: prepare_model_for_qat in src/axolotl/utils/quantization.py.
func (r *reader) qat() error {
	if !recipe.On(r.Find("qat")) {
		return nil
	}
	inputs, weights := r.Word("qat.activation_dtype"), r.Word("qat.weight_dtype")
	packed := weights == "mxfp4"
	switch {
	case weights == "nvfp4": // NVFP4WeightOnlyConfig, which _infer_fake_quantize_configs does not know
		return r.Fault("qat.weight_dtype", "is nvfp4: axolotl asks torchao for fake quantization of nvfp4 weights "+
			"alone, which torchao 0.17 refuses", "use mxfp4 with a group_size of 32, or int4 weights and int8 inputs")
	case packed && r.Gives("qat.group_size") && r.Integer("qat.group_size") != 32:
		return r.Fault("qat.group_size", fmt.Sprintf("is %d, but axolotl needs 32 for mxfp4",
			r.Integer("qat.group_size")), "set it to 32")
	case !packed && (weights != "int4" || inputs != "int8"):
		return r.Fault("qat", fmt.Sprintf("rounds weights to %s and inputs to %s, which is not planned yet",
			cmp.Or(weights, "int8"), cmp.Or(inputs, "nothing else")),
			"plimsoll plans int4 weights with int8 inputs, and mxfp4")
	case r.Truth("qat.quantize_embedding"):
		return r.Fault("qat.quantize_embedding", "is true, which is not planned yet", "set it to false")
	case r.Gives("adapter"):
		return r.Fault("qat", "is given beside an adapter, which is not planned yet", "remove one of the two")
	}
	r.To.QAT = &recipe.QAT{Group: int(r.Integer("qat.group_size")), Activations: true, Learned: !packed, Packed: packed}
	return nil
}
