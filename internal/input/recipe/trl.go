package recipe

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// trl is the configuration of TRL's SFT script and of those that are made like it, such as the alignment-handbook's:
// SFTConfig, ModelConfig and ScriptArguments of TRL (July 2026, commit f2cd5771).
var trl = family{kind: scriptKind, program: "TRL", hosts: true, read: readTRL,
	own: strict.Merge(
		anything.For(pairKeys+" "+unpairedKeys+" "+cpoKeys+" "+rewardKeys+" "+unplannedGeneration),
		worded.For("lora_task_type model_name_or_path dtype torch_dtype attn_implementation ref_model"),
		nameOrNames.For("loss_type"),
		measured.For("cpo_alpha rpo_alpha"),
		switched.For("reference_free precompute_ref_log_probs"),
		switched.For(`activation_offloading use_peft load_in_8bit load_in_4bit use_bnb_nested_quant use_rslora
			use_dora`),
		nameOrNames.For("lora_target_modules lora_target_parameters lora_modules_to_save"),
		// This script's own defaults of two keys of TrainingArguments.
		switched.Default(true).For("gradient_checkpointing"),
		switched.For("bf16 fp16"),
		keys{
			"max_length":             counted.Default(1024),
			"max_seq_length":         counted,
			"lora_r":                 counted.Default(16),
			"lora_alpha":             measured.Default(32.),
			"lora_dropout":           measured.Default(.05),
			"bnb_4bit_quant_type":    oneOf("fp4", "nf4").OrNull().Default("nf4"),
			"bnb_4bit_quant_storage": worded,
		},
		anything.For("use_unsloth use_weighting use_liger_loss"),
		anything.For(`disable_dropout padding_value label_pad_token_id precompute_ref_batch_size use_logits_to_keep
			tools ref_model_init_kwargs sync_ref_model ref_model_mixup_alpha ref_model_sync_steps loss_weights ld_alpha
			discopop_tau f_alpha_divergence_coef max_target_length is_encoder_decoder base_model_attribute_name
			force_use_ref_model generate_during_eval model_adapter_name ref_adapter_name`),
		anything.For(`trl_sft model_revision trust_remote_code dataset_name dataset_config dataset_train_split
			dataset_test_split dataset_streaming dataset_mixture dataset_mixer dataset_splits dataset_num_proc
			dataset_text_field dataset_kwargs dataset_batch_size dataset_configs datasets streaming test_split_size
			ignore_bias_buffers router_aux_loss_coef model_init_kwargs chat_template chat_template_path eos_token pad_token
			truncation_mode shuffle_dataset packing packing_strategy padding_free pad_to_multiple_of eval_packing
			completion_only_loss assistant_only_loss num_of_sequences chars_per_token text_column system_prompt
			preprocessing_num_workers hub_model_revision overwrite_hub_revision push_to_hub_revision callbacks benchmarks
			wandb_entity wandb_project wandb_run_group auto_insert_empty_system_msg tokenizer_name_or_path
			neftune_noise_alpha logging_first_step`),
	)}

// Keys of TRL's other configurations, which say what a script trains: DPOConfig, KTOConfig, CPOConfig, RewardConfig,
// and those of GRPO, RLOO and PPO.
const (
	pairKeys = `trl_dpo beta max_prompt_length max_completion_length rpo_alpha ref_model precompute_ref_log_probs
		reference_free label_smoothing f_divergence_type`
	unpairedKeys        = "trl_kto desirable_weight undesirable_weight"
	cpoKeys             = "cpo_alpha simpo_gamma"
	rewardKeys          = "trl_reward center_rewards_coefficient"
	unplannedGeneration = `num_generations reward_funcs reward_weights reward_model_path use_vllm vllm_mode
		num_ppo_epochs sft_model_path response_length`
)

func readTRL(r *frameworkReader) error {
	r.model("model_name_or_path")
	if err := cmp.Or(
		r.unplanned("answers are generated and rewarded", unplannedGeneration),
		r.unplanned("it changes what the passes hold", "use_unsloth use_weighting use_liger_loss")); err != nil {
		return err
	}
	r.answersTRL()
	length := "max_length"
	if r.Gives("max_seq_length") { // its name before 0.16
		length = "max_seq_length"
	}
	r.longest(length)
	r.mixedTRL()
	if r.Truth("activation_offloading") {
		r.to.Offloading = offloadingTRL()
	}
	quantized := r.Truth("load_in_4bit") || r.Truth("load_in_8bit")
	if err := cmp.Or(r.weightsTRL(quantized), r.attentionOf("attn_implementation"), r.quantizeTRL()); err != nil {
		return err
	}
	if !r.Truth("use_peft") {
		return nil
	}
	if quantized {
		r.to.AdapterPrecision = "bf16" // SFTTrainer converts adapters of quantized models
	}
	return r.adapt("use_peft", map[string]*strict.Value{"r": r.Value("lora_r"), "lora_alpha": r.Value("lora_alpha"),
		"lora_dropout": r.Value("lora_dropout"), "target_modules": oneName(r.Find("lora_target_modules")),
		"target_parameters": asList(r.Find("lora_target_parameters")), "use_rslora": r.Find("use_rslora"),
		"use_dora": r.Find("use_dora"), "modules_to_save": asList(r.Find("lora_modules_to_save"))})
}

// mixedTRL sets TRL's own defaults of TrainingArguments.
func (r *frameworkReader) mixedTRL() {
	half := r.Truth("fp16")
	r.pass("fp16", "fp16")
	r.set("bf16", "bf16", r.Truth("bf16") || !r.Gives("bf16") && !half)
	r.set("gradient_checkpointing", "gradient_checkpointing", r.Truth("gradient_checkpointing"))
	for _, key := range []string{"bf16", "gradient_checkpointing"} {
		if !r.Gives(key) && !(key == "bf16" && half) {
			r.Note(key, "is not given: it is true by default in TRL of 2026, and was false in earlier releases")
		}
	}
	if r.arguments.Member("gradient_checkpointing_kwargs") == nil {
		kwargs := &strict.Value{Kind: '{'}
		give(kwargs, "use_reentrant", r.At("gradient_checkpointing"), strict.Of(false))
		give(r.arguments, "gradient_checkpointing_kwargs", r.At("gradient_checkpointing"), kwargs)
	}
	if r.arguments.Member("learning_rate") == nil {
		r.set("learning_rate", "max_length", 2e-5)
	}
	if r.to.Answers == nil && !r.to.Rewards && !r.Gives("loss_type") && r.arguments.Member("use_liger_kernel") == nil {
		r.Note("loss_type", `is not given: TRL of 2026 computes the loss in chunks ("chunked_nll"), which takes less `+
			"memory than the plan says; earlier releases compute it at once, as planned")
	}
}

// weightsTRL reads the type that the model is loaded in.
func (r *frameworkReader) weightsTRL(quantized bool) error {
	r.to.TrainedIn32 = UnderFSDP
	key := "dtype"
	if r.Has("torch_dtype") { // its name before 0.24
		key = "torch_dtype"
	}
	v := r.Find(key)
	switch {
	case v == nil && !r.Has(key) && !quantized:
		r.to.Weights = "fp32"
		r.Note(key, "is not given: TRL of 2026 loads the weights in fp32 by default")
	case v == nil || v.IsAuto():
	case precisionNames[v.Text] == "":
		return r.Fault(key, fmt.Sprintf("is %s, expected bfloat16, float16, float32 or auto", v), "")
	default:
		r.to.Weights = precisionNames[v.Text]
	}
	return nil
}

// attentions are the names of attention implementations in transformers.
var attentions = map[string]string{"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash",
	"flash_attention_3": "flash", "kernels-community/flash-attn": "flash", "kernels-community/flash-attn2": "flash",
	"kernels-community/flash-attn3": "flash", "kernels-community/vllm-flash-attn3": "flash"}

// attentionOf reads an attention implementation.
func (r *frameworkReader) attentionOf(key string) error {
	v := r.Find(key)
	if v == nil {
		return nil
	}
	name, _, _ := strings.Cut(v.Text, "@")
	name, _, _ = strings.Cut(name, ":")
	if r.to.Attention = attentions[name]; r.to.Attention == "" {
		return r.Fault(key, fmt.Sprintf("is %s, an attention that is not planned yet", v),
			"plimsoll plans eager, sdpa, flash_attention_2 and flash_attention_3")
	}
	return nil
}

// quantizeTRL reads the quantization: get_quantization_config in trl/trainer/utils.py.
func (r *frameworkReader) quantizeTRL() error {
	switch {
	case r.Truth("load_in_4bit"):
		computed := strict.Of(elementNames[r.to.Weights])
		if r.to.Weights == "" {
			computed = nil
		}
		return r.quantize("load_in_4bit", map[string]*strict.Value{"load_in_4bit": strict.Of(true),
			"load_in_8bit": r.Find("load_in_8bit"), "bnb_4bit_quant_type": r.Value("bnb_4bit_quant_type"),
			"bnb_4bit_use_double_quant": strict.Of(r.Truth("use_bnb_nested_quant")),
			"bnb_4bit_compute_dtype":    computed, "bnb_4bit_quant_storage": r.Find("bnb_4bit_quant_storage")})
	case r.Truth("load_in_8bit"):
		return r.quantize("load_in_8bit", map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	}
	return nil
}

// oneName returns a list of one name as the name, as TRL does for "all-linear".
func oneName(v *strict.Value) *strict.Value {
	if v != nil && len(v.Elements) == 1 && v.Elements[0].Text == "all-linear" {
		return v.Elements[0]
	}
	return v
}

// asList returns a name as a list of one.
func asList(v *strict.Value) *strict.Value {
	if v == nil || v.Kind == '[' {
		return v
	}
	return &strict.Value{At: v.At, Kind: '[', Elements: []*strict.Value{v}}
}
