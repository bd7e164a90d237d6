package recipe

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of ms-swift's configurations.
var SwiftKind = &Kind{Name: "ms-swift configuration", Flag: ConfigFlag, Program: &swift, Settings: TrainerKeys,
	Marks: `train_type tuner_type tuner_backend sft_type rlhf_type split_dataset_ratio attn_impl swift_sft
		swift_rlhf`,
	Commands: []Command{{"swift sft", "swift_sft"}, {"swift pt", "swift_sft"}, {"swift/cli/sft.py", "swift_sft"},
		{"swift/cli/pt.py", "swift_sft"}, {"swift rlhf", "swift_rlhf"}, {"swift/cli/rlhf.py", "swift_rlhf"}}}

// Preset is the kind of files that --fsdp names.
var PresetKind = &Kind{Name: "file that --fsdp of ms-swift names", Marks: "_param_docs _requires"}

// swift is ms-swift of August 2026 (commit 3602360a): swift/arguments and swift/trainers/arguments.py.
var swift = Program{Name: "ms-swift", Hosts: true, Read: readSwift,
	Keys: strict.Merge(
		Worded.For("model torch_dtype attn_impl tuner_type train_type sft_type tuner_backend target_regex task_type "+
			"quant_method lora_dtype optimizer bnb_4bit_quant_storage bnb_4bit_compute_dtype"),
		Switched.For("use_rslora use_dora fp16 bf16"),
		NameOrNames.For("target_modules target_parameters modules_to_save adapters"),
		Counted.For("gradient_accumulation_steps max_length"),
		keys{
			"lora_rank":                   Counted.Default(8),
			"lora_alpha":                  Measured.Default(32.),
			"lora_dropout":                Measured.Default(.05),
			"lora_bias":                   oneOf("none", "all").OrNull().Default("none"),
			"quant_bits":                  size.Lax().Or(text).OrNull(),
			"bnb_4bit_quant_type":         oneOf("fp4", "nf4").OrNull().Default("nf4"),
			"bnb_4bit_use_double_quant":   Switched.Default(true),
			"per_device_train_batch_size": Counted.Default(1),
			"gradient_checkpointing":      Switched.Default(true),
			"weight_decay":                Measured.Default(.1),
			"adam_beta2":                  Measured.Default(.95),
			"fsdp":                        text.Or(names).OrNull(),
			"deepspeed":                   text.Or(free).OrNull(),
			"sequence_parallel_size":      count.Lax().OrNull(),
			"rlhf_type": oneOf("dpo", "orpo", "simpo", "kto", "cpo", "rm", "ppo", "grpo",
				"gkd").OrNull().Default("dpo"),
			"cpo_alpha":                Measured.Default(1.),
			"ref_model":                Worded,
			"precompute_ref_log_probs": Switched,
			"lisa_activated_layers":    count.Lax().OrNull(),
			"freeze_parameters_ratio":  Measured,
		},
		Anything.For(`ref_adapters use_galore freeze_parameters freeze_parameters_regex trainable_parameters
			trainable_parameters_regex freeze_llm zero_hpz_partition_size deepspeed_autotp_size external_plugins device_map
			max_memory new_special_tokens loss_type num_labels init_weights hqq_axis`),
		// Keys that change no memory of the training.
		Anything.For(`swift_rlhf beta rpo_alpha label_smoothing simpo_gamma sft_alpha max_completion_length ld_alpha discopop_tau
			loss_weights center_rewards_coefficient ref_model_type ref_model_revision f_divergence_type
			acc_strategy adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r
			adalora_orth_reg_weight adalora_target_r adalora_tfinal adalora_tinit adapter_act
			adapter_length add_non_thinking_prefix add_version agent_template aligner_lr args
			boft_block_num boft_block_size boft_dropout boft_n_butterfly_factor cached_dataset
			cached_val_dataset callbacks check_model ckpt_dir columns create_checkpoint_symlink
			custom_dataset_info custom_register_path custom_train_dataset_path dataset
			dataset_num_proc dataset_seed dataset_shuffle device_count device_groups
			disable_auto_column_mapping disable_ignore_empty_think download_mode
			ds3_gather_for_generation early_stop_interval enable_channel_loss enable_dft_loss
			enable_npu_model_patch enable_thinking eval_dataset eval_dataset_args
			eval_generation_config eval_human eval_limit eval_metric eval_use_evalscope experts_impl
			extra_eval_args fourier_n_frequency fourier_scaling freeze_aligner freeze_vit
			galore_cos_threshold galore_gamma_proj galore_optim_per_parameter galore_proj_bits
			galore_proj_group_size galore_proj_quant galore_proj_type galore_quantization
			galore_queue_size galore_rank galore_scale galore_target_modules galore_update_proj_gap
			galore_with_embedding global_world_size hub ignore_args_error init_strategy
			interleave_prob is_binary_loss_scale lazy_tokenize lisa_step_interval llamapro_num_groups
			llamapro_num_new_blocks load_args load_data_args load_from_cache_file local_repo_path
			local_world_size logprobs lora_ga_batch_size lora_ga_direction lora_ga_iters
			lora_ga_max_length lora_ga_scale lora_ga_stable_gamma lorap_lr_ratio loss_scale
			max_epochs max_model_len max_new_tokens max_pixels max_shard_size model_author model_dir
			model_id_or_path model_info model_kwargs model_meta model_name model_revision
			model_suffix model_type mrl_dims nodes norm_bbox num_beams output_router_logits packing
			packing_cache packing_length packing_num_proc packing_strategy padding_free padding_side
			preserve_thinking problem_type rank ray_exp_name reft_args reft_intervention_type
			reft_layer_key reft_layers reft_rank repetition_penalty resource_manager response_prefix
			resume_only_model rope_scaling router_aux_loss_coef safe_serialization save_model
			self_cognition_sample shuffle_buffer_size split_dataset_ratio stop_words
			stopping_strategy stream streaming structured_outputs_regex swanlab_email_language
			swanlab_exp_name swanlab_mode swanlab_notification_method swanlab_project
			swanlab_receiver_email swanlab_secret swanlab_sender_email swanlab_smtp_port
			swanlab_smtp_server swanlab_token swanlab_webhook_url swanlab_workspace swift_pt
			swift_sft swift_version system temperature template template_backend top_k top_logprobs
			top_p train_args train_dataloader_shuffle truncation_strategy use_chat_template
			use_flash_ckpt use_hf use_logits_to_keep use_ray use_swift_lora val_dataset
			val_dataset_sample val_dataset_shuffle vera_d_initial vera_dropout
			vera_projection_prng_key vera_rank vit_gradient_checkpointing vit_lr worker_cls
			worker_instance`),
	)}

func readSwift(r *Reader) error {
	r.Model("model")
	r.RouterLoss(r.Find("router_aux_loss_coef"))
	r.To.Attention = map[string]string{"flash_attn": "flash", "flash_attention_4": "flash"}[r.Word("attn_impl")]
	tuner := cmp.Or(r.Word("tuner_type"), r.Word("train_type"), r.Word("sft_type"), "lora")
	if err := r.refuseSwift(tuner); err != nil {
		return err
	}
	if r.To.Attention == "" {
		if err := r.ReadAttention("attn_impl"); err != nil {
			return err
		}
	}
	if r.Gives("max_length") {
		r.Longest("max_length")
	} else {
		r.Note("max_length", "is not given: ms-swift cuts samples only where the model ends, so give --seq-len")
	}
	if err := cmp.Or(r.typesOfSwift(), r.shardSwift()); err != nil {
		return err
	}
	r.batchOfSwift()
	if err := r.quantizeSwift(); err != nil || tuner == "full" {
		return err
	}
	return r.adaptSwift()
}

// refuseSwift refuses what changes memory and is not planned.
func (r *Reader) refuseSwift(tuner string) error {
	for _, key := range []string{"tuner_type", "train_type", "sft_type"} {
		if r.Gives(key) && tuner != "lora" && tuner != "full" {
			return r.Fault(key, fmt.Sprintf("is %s, which is not planned yet", r.Find(key)),
				"plimsoll plans lora and full")
		}
	}
	if v := r.Find("task_type"); v != nil && v.Text != "causal_lm" && r.Word("rlhf_type") != "rm" {
		return r.Fault("task_type", fmt.Sprintf("is %s: it trains another head, which is not planned yet", v), "")
	}
	if v := r.Find("sequence_parallel_size"); v != nil && v.Integer > 1 {
		return r.Fault("sequence_parallel_size", "divides sequences over ranks, which is not planned yet",
			"plan without it for an upper bound: full sequences on every rank")
	}
	if v := r.Find("tuner_backend"); v != nil && v.Text != "peft" {
		return r.Fault("tuner_backend", fmt.Sprintf("is %s, which is not planned yet", v), "plimsoll plans peft")
	}
	if r.Number("freeze_parameters_ratio") > 0 || r.Integer("lisa_activated_layers") > 0 {
		return r.Fault(map[bool]string{true: "freeze_parameters_ratio", false: "lisa_activated_layers"}[r.Number(
			"freeze_parameters_ratio") > 0], "trains a part of the layers, which is not planned yet", "")
	}
	return cmp.Or(r.answersOfSwift(),
		r.Unplanned("the optimizer has states of its own", "use_galore"),
		r.Unplanned("it trains a part of the parameters", `freeze_parameters freeze_parameters_regex
			trainable_parameters trainable_parameters_regex freeze_llm`),
		r.Unplanned("plugins may change the model or the loss", "external_plugins optimizer"),
		r.Unplanned("it divides the model in another way", `zero_hpz_partition_size deepspeed_autotp_size device_map
			max_memory`),
		r.Unplanned("it makes the vocabulary longer", "new_special_tokens"),
		r.Unplanned("training goes on with an adapter whose adapter_config.json says its rank", "adapters"))
}

// answersOfSwift reads what 'swift rlhf' trains on answers: swift/rlhf_trainers, and swift/arguments/rlhf_args.py.
func (r *Reader) answersOfSwift() error {
	if !r.Gives("swift_rlhf") && !r.Gives("rlhf_type") {
		return r.Unplanned("plugins may change the model or the loss", "loss_type")
	}
	const key = "rlhf_type"
	kind := r.Word(key)
	why := map[string]string{"ppo": "it generates answers", "grpo": "it generates answers",
		"gkd": "it trains on the logits of a teacher", "kto": "its passes are those of TRL before 1.0"}[kind]
	switch {
	case why != "":
		return r.Fault(key, fmt.Sprintf("is %s: %s, which is not planned yet", kind, why), "")
	case kind == "rm":
		r.To.Rewards = true
		r.Note(key, "is rm: the head has one label, and passes have two sequences for each of a micro batch")
		return nil
	}
	a := &Answers{Pairs: true, Selected: true, DropsLogits: kind == "dpo",
		Reference:    kind == "dpo" && !r.Truth("precompute_ref_log_probs"),
		Model:        r.Word("ref_model"),
		CrossEntropy: kind == "orpo" || kind != "dpo" && r.Number("cpo_alpha") > 0}
	r.To.Answers = a
	r.NoteAnswers(key)
	return r.Unplanned("the reference model has an adapter", "ref_adapters")
}

// typesOfSwift reads the type of weights, which decides that of autocast: _init_mixed_precision in model_args.py.
func (r *Reader) typesOfSwift() error {
	const key = "torch_dtype"
	v := r.Find(key)
	switch {
	case v == nil || v.Text == "auto":
		r.Note(key, "is not given: ms-swift takes the type of config.json, and the plan is for autocast in bf16")
	case PrecisionNames[v.Text] == "":
		return r.Fault(key, fmt.Sprintf("is %s, expected bfloat16, float16 or float32", v), "")
	default:
		r.To.Weights = PrecisionNames[v.Text]
	}
	half := r.To.Weights == "fp16" || r.To.Weights == "fp32"
	for name, is := range map[string]bool{"fp16": half, "bf16": !half} {
		if r.Gives(name) {
			is = r.Truth(name)
		}
		r.Set(name, name, is)
	}
	return nil
}

// shardSwift reads how the model is divided: _init_deepspeed and _init_fsdp in sft_args.py.
func (r *Reader) shardSwift() error {
	r.Pass("deepspeed", "deepspeed")
	if preset := swiftPresets[r.Word("deepspeed")]; preset != "" {
		d, err := strict.ParseJSON(r.File, []byte(preset))
		if err != nil {
			return err
		}
		Give(r.Arguments, "deepspeed", r.At("deepspeed"), d.Root)
	}
	r.Set("gradient_checkpointing", "gradient_checkpointing", r.Truth("gradient_checkpointing"))
	if err := r.fsdpOfSwift(); err != nil {
		return err
	}
	kwargs := r.Arguments.Member("gradient_checkpointing_kwargs")
	if kwargs == nil || kwargs.Value.Kind != '{' || kwargs.Value.Member("use_reentrant") == nil {
		// _fix_gradient_checkpointing in swift/trainers/mixin.py
		reentrant := &strict.Value{Kind: '{'}
		shards := r.Gives("deepspeed") || r.Gives("fsdp")
		Give(reentrant, "use_reentrant", r.At("gradient_checkpointing"), strict.Of(shards))
		Give(r.Arguments, "gradient_checkpointing_kwargs", r.At("gradient_checkpointing"), reentrant)
	}
	return nil
}

// fsdpOfSwift reads the preset of FSDP2, or a file with the keys fsdp and fsdp_config.
func (r *Reader) fsdpOfSwift() error {
	v := r.Find("fsdp")
	if v == nil || v.IsEmpty() {
		return nil
	}
	section := &strict.Document{File: r.File, Root: &strict.Value{Kind: '{'}}
	switch {
	case v.Text == "fsdp2":
		d, err := strict.ParseJSON(r.File, []byte(`{"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2,
			"reshard_after_forward": true, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": true,
			"state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": true}}`))
		if err != nil {
			return err
		}
		section = d
	case strings.HasSuffix(v.Text, ".json"):
		var err error
		if section, err = r.Companion("fsdp", FSDPKind); err != nil {
			return err
		}
	default:
		r.Pass("fsdp", "fsdp")
		return nil
	}
	for _, m := range section.Root.Members {
		if m.Name == "fsdp" || m.Name == "fsdp_config" {
			Give(r.Arguments, m.Name, r.At("fsdp"), m.Value)
		}
	}
	if v := section.Root.Find("fsdp_config.activation_checkpointing"); On(v) {
		r.Set("gradient_checkpointing", "fsdp", false) // _check_fsdp2_compatibility
	}
	return nil
}

// swiftPresets are the files in swift/config, without the keys that change no memory.
var swiftPresets = func() map[string]string {
	const text = `{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "zero_optimization": %s,
		"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
		"train_micro_batch_size_per_gpu": "auto"}`
	const buckets = `"allgather_bucket_size": 2e8, "overlap_comm": false, "reduce_bucket_size": 2e8`
	const parameters = `"overlap_comm": false, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
		"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
		"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9`
	const offload = `"offload_optimizer": {"device": "cpu", "pin_memory": true}`
	return map[string]string{
		"zero0":         fmt.Sprintf(text, `{"stage": 0, `+buckets+`}`),
		"zero1":         fmt.Sprintf(text, `{"stage": 1, `+buckets+`}`),
		"zero2":         fmt.Sprintf(text, `{"stage": 2, `+buckets+`}`),
		"zero3":         fmt.Sprintf(text, `{"stage": 3, `+parameters+`}`),
		"zero2_offload": fmt.Sprintf(text, `{"stage": 2, `+offload+`, `+buckets+`}`),
		"zero3_offload": fmt.Sprintf(text, `{"stage": 3, `+offload+`, "offload_param": {"device": "cpu",
			"pin_memory": true}, `+parameters+`}`),
	}
}()

// batchOfSwift sets ms-swift's own defaults of TrainingArguments.
func (r *Reader) batchOfSwift() {
	for _, key := range []string{"per_device_train_batch_size", "weight_decay", "adam_beta2"} {
		Give(r.Arguments, key, r.At(key), r.Value(key))
	}
	const key = "gradient_accumulation_steps"
	if r.Gives(key) {
		r.Pass(key, key)
		return
	}
	steps := max(1, 16/int(r.Integer("per_device_train_batch_size")))
	r.Set(key, key, steps)
	r.Note(key, fmt.Sprintf("is not given: ms-swift makes batches of 16 on all ranks; planned are the %d steps of one "+
		"rank", steps))
}

// quantizeSwift reads the quantization: get_quantization_config in quant_args.py.
func (r *Reader) quantizeSwift() error {
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

// adaptSwift reads the adapter: prepare_adapter in pipelines/train/tuner.py.
func (r *Reader) adaptSwift() error {
	if v := r.Find("init_weights"); v != nil && strings.HasPrefix(v.Text, "lora-ga") {
		return r.Fault("init_weights", "is lora-ga, which is not planned yet", "")
	}
	targets := OneName(AsList(r.Find("target_modules")))
	if targets == nil {
		targets = strict.Of("all-linear")
	}
	if regex := r.Find("target_regex"); regex != nil {
		targets = regex
	}
	if v := r.Find("lora_dtype"); v != nil {
		r.To.AdapterPrecision = PrecisionNames[v.Text]
	}
	bias := r.Value("lora_bias")
	r.To.AddsInFull = true // peft before 0.21
	return r.Adapt("tuner_type", map[string]*strict.Value{"r": r.Value("lora_rank"),
		"lora_alpha":   r.Value("lora_alpha"),
		"lora_dropout": r.Value("lora_dropout"), "bias": bias, "target_modules": targets,
		"target_parameters": AsList(r.Find("target_parameters")), "use_rslora": r.Find("use_rslora"),
		"use_dora": r.Find("use_dora"), "modules_to_save": AsList(r.Find("modules_to_save"))})
}
