package swift

import (
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// quantize reads the quantization: get_quantization_config in quant_args.py.
func (r *reader) quantize() error {
	const key = "quant_bits"
	v := r.Find(key)
	switch method := r.Find("quant_method"); {
	case method != nil && method.Text != "bnb":
		return r.Fault("quant_method", fmt.Sprintf("is %s, which is not planned yet", method), "plimsoll plans bnb")
	case method == nil:
		return nil
	case v == nil:
		return r.Fault("quant_method", "is given without quant_bits", "add quant_bits: 4")
	case v.Text == "8":
		return r.Quantize(key, map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	case v.Text != "4":
		return r.Fault(key, fmt.Sprintf("is %s: bitsandbytes quantizes to 4 or 8 bits", v), "set it to 4 or 8")
	}
	computed := r.Find("bnb_4bit_compute_dtype")
	if computed == nil { // __post_init__
		computed = strict.Of("bfloat16")
		if r.To.Weights == "fp16" || r.To.Weights == "fp32" {
			computed = strict.Of("float32")
		}
	}
	return r.Quantize(key, map[string]*strict.Value{"load_in_4bit": strict.Of(true),
		"bnb_4bit_quant_type": r.Value("bnb_4bit_quant_type"), "bnb_4bit_compute_dtype": computed,
		"bnb_4bit_use_double_quant": r.Value("bnb_4bit_use_double_quant"),
		"bnb_4bit_quant_storage":    r.Find("bnb_4bit_quant_storage")})
}

// adapt reads the adapter: prepare_adapter in pipelines/train/tuner.py.
func (r *reader) adapt() error {
	if v := r.Find("init_weights"); v != nil && strings.HasPrefix(v.Text, "lora-ga") {
		return r.Fault("init_weights", "is lora-ga, which is not planned yet", "")
	}
	targets := recipe.OneName(recipe.AsList(r.Find("target_modules")))
	if targets == nil {
		targets = strict.Of("all-linear")
	}
	if regex := r.Find("target_regex"); regex != nil {
		targets = regex
	}
	if v := r.Find("lora_dtype"); v != nil {
		r.To.AdapterPrecision = recipe.PrecisionNames[v.Text]
	}
	bias := r.Value("lora_bias")
	r.To.AddsInFull = true // peft before 0.21
	return r.Adapt("tuner_type", map[string]*strict.Value{"r": r.Value("lora_rank"),
		"lora_alpha":   r.Value("lora_alpha"),
		"lora_dropout": r.Value("lora_dropout"), "bias": bias, "target_modules": targets,
		"target_parameters": recipe.AsList(r.Find("target_parameters")), "use_rslora": r.Find("use_rslora"),
		"use_dora": r.Find("use_dora"), "modules_to_save": recipe.AsList(r.Find("modules_to_save"))})
}
