package recipe

import (
	"cmp"
	"fmt"

	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of configurations of TRL's scripts, and of those that are made like them.
var TRLKind = &Kind{Name: "configuration of a training script, such as TRL's", Flag: ConfigFlag, Program: &trl,
	Settings: TrainerKeys,
	Marks: `trl_sft trl_dpo trl_kto trl_reward model_name_or_path dataset_name dataset_mixture dataset_mixer
		use_peft lora_r+learning_rate lora_r+per_device_train_batch_size lora_r+num_train_epochs lora_r+output_dir`,
	Commands: map[string]string{"trl sft": "trl_sft", "trl dpo": "trl_dpo", "trl kto": "trl_kto",
		"trl reward": "trl_reward"}}

// trl is the configuration of TRL's SFT script and of those that are made like it, such as the alignment-handbook's:
// SFTConfig, ModelConfig and ScriptArguments of TRL (July 2026, commit f2cd5771).
var trl = Program{Name: "TRL", Hosts: true, Read: readTRL,
	Keys: strict.Merge(
		Anything.For(pairKeys+" "+unpairedKeys+" "+cpoKeys+" "+rewardKeys+" "+unplannedGeneration),
		Worded.For("lora_task_type model_name_or_path dtype torch_dtype attn_implementation ref_model"),
		NameOrNames.For("loss_type"),
		Measured.For("cpo_alpha rpo_alpha"),
		Switched.For("reference_free precompute_ref_log_probs"),
		Switched.For(`activation_offloading use_peft load_in_8bit load_in_4bit use_bnb_nested_quant use_rslora
			use_dora`),
		NameOrNames.For("lora_target_modules lora_target_parameters lora_modules_to_save"),
		// This script's own defaults of two keys of TrainingArguments.
		Switched.Default(true).For("gradient_checkpointing"),
		Switched.For("bf16 fp16"),
		keys{
			"max_length":             Counted.Default(1024),
			"max_seq_length":         Counted,
			"lora_r":                 Counted.Default(16),
			"lora_alpha":             Measured.Default(32.),
			"lora_dropout":           Measured.Default(.05),
			"bnb_4bit_quant_type":    oneOf("fp4", "nf4").OrNull().Default("nf4"),
			"bnb_4bit_quant_storage": Worded,
		},
		Anything.For("use_unsloth use_weighting use_liger_loss"),
		Anything.For(`disable_dropout padding_value label_pad_token_id precompute_ref_batch_size use_logits_to_keep
			tools ref_model_init_kwargs sync_ref_model ref_model_mixup_alpha ref_model_sync_steps loss_weights ld_alpha
			discopop_tau f_alpha_divergence_coef max_target_length is_encoder_decoder base_model_attribute_name
			force_use_ref_model generate_during_eval model_adapter_name ref_adapter_name`),
		Anything.For(`trl_sft model_revision trust_remote_code dataset_name dataset_config dataset_train_split
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

func readTRL(r *Reader) error {
	r.Model("model_name_or_path")
	if err := cmp.Or(
		r.Unplanned("answers are generated and rewarded", unplannedGeneration),
		r.Unplanned("it changes what the passes hold", "use_unsloth use_weighting use_liger_loss")); err != nil {
		return err
	}
	r.answersTRL()
	length := "max_length"
	if r.Gives("max_seq_length") { // its name before 0.16
		length = "max_seq_length"
	}
	r.Longest(length)
	r.mixedTRL()
	if r.Truth("activation_offloading") {
		r.To.Offloading = NewOffloading()
	}
	quantized := r.Truth("load_in_4bit") || r.Truth("load_in_8bit")
	if err := cmp.Or(r.weightsTRL(quantized), r.ReadAttention("attn_implementation"), r.quantizeTRL()); err != nil {
		return err
	}
	if !r.Truth("use_peft") {
		return nil
	}
	if quantized {
		r.To.AdapterPrecision = "bf16" // SFTTrainer converts adapters of quantized models
	}
	return r.Adapt("use_peft", map[string]*strict.Value{"r": r.Value("lora_r"), "lora_alpha": r.Value("lora_alpha"),
		"lora_dropout": r.Value("lora_dropout"), "target_modules": OneName(r.Find("lora_target_modules")),
		"target_parameters": AsList(r.Find("lora_target_parameters")), "use_rslora": r.Find("use_rslora"),
		"use_dora": r.Find("use_dora"), "modules_to_save": AsList(r.Find("lora_modules_to_save"))})
}

// mixedTRL sets TRL's own defaults of TrainingArguments.
func (r *Reader) mixedTRL() {
	half := r.Truth("fp16")
	r.Pass("fp16", "fp16")
	r.Set("bf16", "bf16", r.Truth("bf16") || !r.Gives("bf16") && !half)
	r.Set("gradient_checkpointing", "gradient_checkpointing", r.Truth("gradient_checkpointing"))
	for _, key := range []string{"bf16", "gradient_checkpointing"} {
		if !r.Gives(key) && !(key == "bf16" && half) {
			r.Note(key, "is not given: it is true by default in TRL of 2026, and was false in earlier releases")
		}
	}
	if r.Arguments.Member("gradient_checkpointing_kwargs") == nil {
		kwargs := &strict.Value{Kind: '{'}
		Give(kwargs, "use_reentrant", r.At("gradient_checkpointing"), strict.Of(false))
		Give(r.Arguments, "gradient_checkpointing_kwargs", r.At("gradient_checkpointing"), kwargs)
	}
	if r.Arguments.Member("learning_rate") == nil {
		r.Set("learning_rate", "max_length", 2e-5)
	}
	if r.To.Answers == nil && !r.To.Rewards && !r.Gives("loss_type") && r.Arguments.Member("use_liger_kernel") == nil {
		r.Note("loss_type", `is not given: TRL of 2026 computes the loss in chunks ("chunked_nll"), which takes less `+
			"memory than the plan says; earlier releases compute it at once, as planned")
	}
}

// weightsTRL reads the type that the model is loaded in.
func (r *Reader) weightsTRL(quantized bool) error {
	r.To.TrainedIn32 = UnderFSDP
	key := "dtype"
	if r.Has("torch_dtype") { // its name before 0.24
		key = "torch_dtype"
	}
	v := r.Find(key)
	switch {
	case v == nil && !r.Has(key) && !quantized:
		r.To.Weights = "fp32"
		r.Note(key, "is not given: TRL of 2026 loads the weights in fp32 by default")
	case v == nil || v.IsAuto():
	case PrecisionNames[v.Text] == "":
		return r.Fault(key, fmt.Sprintf("is %s, expected bfloat16, float16, float32 or auto", v), "")
	default:
		r.To.Weights = PrecisionNames[v.Text]
	}
	return nil
}

// quantizeTRL reads the quantization: get_quantization_config in trl/trainer/utils.py.
func (r *Reader) quantizeTRL() error {
	switch {
	case r.Truth("load_in_4bit"):
		computed := strict.Of(ElementNames[r.To.Weights])
		if r.To.Weights == "" {
			computed = nil
		}
		return r.Quantize("load_in_4bit", map[string]*strict.Value{"load_in_4bit": strict.Of(true),
			"load_in_8bit": r.Find("load_in_8bit"), "bnb_4bit_quant_type": r.Value("bnb_4bit_quant_type"),
			"bnb_4bit_use_double_quant": strict.Of(r.Truth("use_bnb_nested_quant")),
			"bnb_4bit_compute_dtype":    computed, "bnb_4bit_quant_storage": r.Find("bnb_4bit_quant_storage")})
	case r.Truth("load_in_8bit"):
		return r.Quantize("load_in_8bit", map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	}
	return nil
}
