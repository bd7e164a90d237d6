package llamafactory

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// ktKeys are the keys of KTransformers in LLaMA-Factory: KTransformersArguments in hparams/model_args.py.
var ktKeys = strict.Merge(
	rule.Switched.For("use_kt kt_use_lora_experts"),
	rule.Worded.For("kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path"),
	rule.Anything.For("kt_lora_expert_num kt_lora_expert_intermediate_size"),
	strict.Keys{
		"kt_cpu_activation": strict.Text("retain", "recompute").OrNull(),
		"kt_config": strict.Object(strict.Keys{
			"kt_backend":              rule.Worded,
			"kt_expert_weight_format": rule.Worded,
			"kt_weight_lifecycle":     strict.Text("persistent", "ephemeral").OrNull().Default("persistent"),
			"kt_threadpool_count":     rule.Counted.Default(1),
			"kt_max_cache_depth":      rule.Counted.Default(2),
			"kt_model_max_length":     rule.Counted,
			"kt_num_gpu_experts":      rule.Integer.Lax().OrNull(),
		}, rule.Switched.For(`enabled kt_skip_expert_loading kt_tp_enabled kt_share_backward_bb
			kt_force_fused_expert_lora`),
			rule.Anything.For("kt_num_threads kt_share_cache_pool kt_checkpoint_files kt_sharded_metadata")).OrNull(),
	})

// ktBackends are the formats that kernels have weights in, by their names in lower case: backend.py.
var ktBackends = map[string]string{"amxbf16": "bf16", "int8": "int8", "amxint8": "int8", "fp8": "fp8", "amxfp8": "fp8"}

// hostExperts reads how KTransformers runs experts, if it does.
func (r *reader) hostExperts() error {
	const config = "kt_config."
	if !r.Truth("use_kt") {
		return nil
	}
	retains := r.Word("kt_cpu_activation") == "retain"
	if r.Truth("disable_gradient_checkpointing") {
		if r.Word("kt_cpu_activation") == "recompute" {
			return r.Fault("kt_cpu_activation", "is recompute, which requires gradient checkpointing",
				"remove disable_gradient_checkpointing, or use kt_cpu_activation: retain")
		}
		retains = true
	}
	format, err := r.ktFormat()
	if err := cmp.Or(err, r.refuseKT(format)); err != nil {
		return err
	}
	h := &recipe.HostExperts{Place: r.Place("use_kt"), Format: format, Rank: r.Integer("lora_rank"), Pools: 1,
		Slots: r.Integer(config + "kt_max_cache_depth"), Retains: retains,
		Tokens:          r.Integer(config + "kt_model_max_length"),
		FromKT:          r.Gives("kt_weight_path") && format != "fp8",
		ForcesFused:     r.Truth(config + "kt_force_fused_expert_lora"),
		KeepsTransposed: r.Gives(config+"kt_share_backward_bb") && !r.Truth(config+"kt_share_backward_bb")}
	if r.Truth(config + "kt_tp_enabled") {
		h.Pools = r.Integer(config + "kt_threadpool_count")
	}
	r.To.HostExperts = h
	r.Note("use_kt", fmt.Sprintf("is true: KTransformers has the experts in %s on the host of the first rank, which "+
		"computes with the tokens of all ranks", format))
	return nil
}

// ktFormat returns the format of the experts' weights: __post_init__ of KTConfig.
func (r *reader) ktFormat() (string, error) {
	const key, beside = "kt_config.kt_expert_weight_format", "kt_config.kt_backend"
	format, backend := strings.ToLower(r.Word(key)), strings.ToLower(r.Word(beside))
	named, known := ktBackends[backend]
	switch {
	case !slices.Contains([]string{"", "bf16", "int8", "fp8"}, format):
		return "", r.Fault(key, fmt.Sprintf("is %q", format), "expected bf16, int8 or fp8")
	case backend == "" || backend == "auto":
		return cmp.Or(format, "bf16"), nil
	case !known:
		return "", r.Fault(beside, fmt.Sprintf("is %q, which is not planned yet", r.Word(beside)),
			"plimsoll plans AMXBF16, INT8, FP8 and auto")
	case format != "" && format != named:
		return "", r.Fault(key, fmt.Sprintf("is %s, but kt_backend is %s", format, r.Word(beside)),
			"remove one of the two")
	}
	return named, nil
}

// refuseKT refuses what KTransformers refuses, and what is not planned.
func (r *reader) refuseKT(format string) error {
	const only = ", which is not planned yet"
	const config = "kt_config."
	for _, c := range []struct {
		is              bool
		key, what, hint string
	}{
		{r.Word("stage") != "sft" && r.Word("stage") != "pt", "use_kt",
			"is true beside stage " + r.Word("stage") + only,
			"plimsoll plans KTransformers for sft and pt"},
		{r.Word("finetuning_type") == "full", "use_kt", "is true beside finetuning_type full" + only,
			"plimsoll plans KTransformers for lora"},
		{r.Word("finetuning_type") != "lora", "use_kt", "is true, but KTransformers trains no " +
			r.Word("finetuning_type"), "set finetuning_type to lora"},
		{r.Gives("quantization_bit"), "use_kt", "is true beside quantization_bit" + only, "remove quantization_bit"},
		{r.asks("deepspeed"), "use_kt", "is true, and KTransformers runs on one GPU or with FSDP2", "remove deepspeed"},
		{r.Truth("kt_use_lora_experts"), "kt_use_lora_experts",
			"is true: small experts lie on the GPU beside the others" + only, "set it to false"},
		{r.Integer(config+"kt_num_gpu_experts") != 0, config + "kt_num_gpu_experts", "is not 0" + only, "set it to 0"},
		{format == "int8" && !r.Gives("kt_weight_path"), config + "kt_expert_weight_format", "is int8, which needs " +
			"weights that were quantized before", "add kt_weight_path"},
		{format != "bf16" && r.Gives(config+"kt_share_backward_bb") && !r.Truth(config+"kt_share_backward_bb"),
			config + "kt_share_backward_bb", "is false, and KTransformers requires true for " + format, "remove it"},
		{format != "int8" && r.Word(config+"kt_weight_lifecycle") == "ephemeral", config + "kt_weight_lifecycle",
			"is ephemeral, which KTransformers supports for int8 only", "remove it"},
		{format != "int8" && r.Gives("kt_non_expert_weight_path"), "kt_non_expert_weight_path", "is given, which " +
			"KTransformers supports for int8 only", "remove it"},
		{r.Truth("use_muon") || r.Truth("use_galore") || r.Truth("use_apollo") || r.Truth("use_badam") ||
			r.Truth("use_adam_mini") || recipe.On(r.Find("loraplus_lr_ratio")), "use_kt",
			"is true beside an optimizer that LLaMA-Factory makes: it would not get the adapters of the experts",
			"use one of the Trainer's"},
	} {
		if c.is {
			return r.Fault(c.key, c.what, c.hint)
		}
	}
	return nil
}
