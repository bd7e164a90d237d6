package recipe

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of axolotl's configurations.
var AxolotlKind = &Kind{Name: "axolotl configuration", Flag: ConfigFlag, Program: &axolotl,
	Marks: "base_model base_model_config sequence_len sample_packing dataset_prepared_path micro_batch_size",
	Settings: map[Setting]SettingKey{MicroBatch: {Path: "micro_batch_size"},
		Accumulation:          {Path: "gradient_accumulation_steps"},
		GradientCheckpointing: {Path: "gradient_checkpointing"}, OptimizerName: {Path: "optimizer"}}}

// axolotl is axolotl's configuration of July 2026 (commit 067b021c): src/axolotl/utils/schemas, with the older names of
// keys that it still takes.
var axolotl = Program{Name: "axolotl", Read: readAxolotl,
	Keys: strict.Merge(
		Measured.For("cpo_alpha"),
		NameOrNames.For("dpo_loss_type"),
		Worded.For("base_model model_type rl lora_model_dir attn_implementation"),
		Switched.Or(oneOf("legacy", "disk", "hidden_states")).OrNull().For("activation_offloading"),
		Switched.For(`precompute_ref_log_probs load_in_8bit load_in_4bit fp16 bfloat16 float16 lora_target_linear
			peft_use_dora peft_use_rslora quantize_moe_experts
			sample_packing tf32 flash_attention sdp_attention eager_attention flex_attention xformers_attention lora_fan_in_fan_out
			flash_optimum reward_model process_reward_model liger_fused_linear_cross_entropy torch_compile auto_find_batch_size
			group_by_length dataloader_pin_memory save_only_model`),
		NameOrNames.For("lora_target_modules lora_target_parameters lora_modules_to_save unfrozen_parameters"),
		Counted.For(`batch_size gradient_accumulation_steps lora_r tensor_parallel_size context_parallel_size
			sequence_parallel_degree dp_shard_size dp_replicate_size ddp_bucket_cap_mb
			eval_batch_size torch_empty_cache_steps fsdp_version num_labels`),
		count.Lax().OrNull().For("dataloader_num_workers dataloader_prefetch_factor"),
		Measured.For(`lora_alpha lora_dropout learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
			max_grad_norm`),
		keys{
			"bf16":                             oneOf("auto", "full").Or(Switched).OrNull().Default("auto"),
			"adapter":                          Worded,
			"sequence_len":                     Counted.Default(512),
			"micro_batch_size":                 Counted.Default(1),
			"optimizer":                        Worded.Default("adamw_torch_fused"),
			"gradient_checkpointing":           Switched.Or(oneOf("offload", "offload_disk")).OrNull(),
			"gradient_checkpointing_kwargs":    free.OrNull(),
			"deepspeed":                        text.Or(free).OrNull(),
			"fsdp":                             text.Or(names).OrNull(),
			"fsdp_config":                      free.OrNull(),
			"accelerator_config":               free.OrNull(),
			"bnb_config_kwargs":                free.OrNull(),
			"model_quantization_config":        Worded,
			"model_quantization_config_kwargs": free.OrNull(),
			"plugins":                          names.OrNull(),
			"qat": object(Worded.For("activation_dtype weight_dtype"),
				Switched.For("quantize_embedding"), Counted.Default(32).For("group_size")).AndOthers().OrNull(),
			"optim_target_modules":  NameOrNames,
			"gptq":                  Switched,
			"freeze_mm_modules":     Switched,
			"torch_compile_backend": Worded,
		},
		Anything.For(strings.Join([]string{unplannedAxolotlStages, unplannedAxolotlModels, unplannedAxolotlPasses,
			unplannedAxolotlAdapters, unplannedAxolotlRest, unplannedAxolotlAnswers, unplannedAxolotlKernels}, " ")),
		Worded.For("expert_backend experts_implementation"), Switched.For("use_scattermoe use_sonicmoe moe_bnb_fast"),
		Switched.For("llama4_linearized_experts tiled_mlp tiled_mlp_use_original_mlp"),
		Counted.For("tiled_mlp_num_shards"),
		Anything.For(savingAxolotl+" "+ignoredAxolotl),
	)}

// Keys that change memory and are not planned.
const (
	unplannedAxolotlStages  = "ebft trl"
	unplannedAxolotlAnswers = "rl_adapter_ref_model dpo_use_weighting dpo_use_liger_kernel"
	unplannedAxolotlModels  = `use_onebitllms fp32_norms shrink_embeddings`
	unplannedAxolotlPasses  = `layer_offloading selective_checkpointing
		chunked_cross_entropy sage_attention
		s2_attention unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o`
	unplannedAxolotlAdapters = `lora_rank_pattern lora_alpha_pattern peft_layers_to_transform
		peft_layers_pattern peft_layer_replication peft_trainable_token_indices peft_ensure_weight_tying lora_on_cpu`
	unplannedAxolotlKernels = `use_dsv4_kernels use_glm_dsa_kernels dsv4_fp8_nonexpert_mode dsv4_fp8_lora_kernel
		dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode gemma4_fp8_nonexpert gemma4_nf4_nonexpert
		nonexpert_quantization nvfp4_merge_aware`
	unplannedAxolotlRest = "fp8 expert_parallel_size gpu_memory_limit max_memory"

	// Keys of kernels that take less memory than those that are planned.
	savingAxolotl = `liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_cross_entropy liger_swiglu
		lora_mlp_kernel lora_qkv_kernel lora_o_kernel flash_attn_cross_entropy flash_attn_fuse_mlp`

	// Keys that change no memory of the training.
	ignoredAxolotl = `processor_type strict resume_from_checkpoint auto_resume_from_checkpoints resize_token_embeddings_to_32x
		mean_resizing_embeddings embeddings_skip_upcast reinit_weights trainer_cls vllm quantization dynamic_checkpoint
		center_rewards_coefficient dpo_loss_weights dpo_padding_free rpo_alpha dpo_label_smoothing simpo_gamma kto_desirable_weight kto_undesirable_weight
		rl_beta dpo_beta orpo_alpha datasets test_datasets
		shuffle_merged_datasets shuffle_before_merging_datasets dataset_prepared_path dataset_shard_num dataset_shard_idx
		skip_prepare_dataset num_dataset_shards_to_save pretraining_dataset dataset_processes dataset_num_proc
		moe_grouped_backend moe_dequant_chunk_size nvfp4_merge_aware_start_step
		dataset_exact_deduplication dataset_keep_in_memory dataloader_drop_last remove_unused_columns
		push_dataset_to_hub hf_use_auth_token device device_map world_size local_rank ddp seed ddp_timeout
		ddp_broadcast_buffers ddp_find_unused_parameters do_causal_lm_eval eval_causal_lm_metrics do_bench_eval
		bench_dataset bench_split metric_for_best_model greater_is_better loss_watchdog_threshold loss_watchdog_patience
		gc_steps gc_collect_steps float32 excess_length_strategy eval_sequence_len min_sample_len
		max_prompt_len sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
		sample_packing_mp_start_method eval_sample_packing pad_to_sequence_len pad_to_multiple_of curriculum_sampling
		multipack_real_batches batch_flattening use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks
		pretrain_multipack_buffer_size pretrain_multipack_attn pretraining_sample_concatenation streaming
		streaming_multipack_buffer_size flex_attn_compile_kwargs scaling_softmax
		fsdp_final_state_dict_type val_set_size heads_k_stride ring_attn_func special_tokens tokens
		added_tokens_overrides torch_compile_mode max_steps warmup_steps warmup_ratio eval_steps evals_per_epoch
		eval_strategy evaluation_strategy save_steps saves_per_epoch save_strategy save_total_limit save_first_step
		logging_steps early_stopping_patience load_best_model_at_end use_tensorboard profiler_steps
		profiler_steps_start include_tokens_per_second include_tkps neftune_noise_alpha low_cpu_mem_usage chat_template
		chat_template_jinja chat_template_kwargs eot_tokens default_system_message fix_untrained_tokens
		is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model total_num_tokens
		sample_packing_eff_est base_model_config cls_model_config tokenizer_config tokenizer_use_fast tokenizer_legacy
		tokenizer_use_mistral_common tokenizer_type tokenizer_save_jinja_files trust_remote_code
		experimental_skip_move_to_device use_kernels base_model_ignore_patterns revision_of_model
		overrides_of_model_config model_config output_dir hub_model_id hub_strategy hub_revision save_safetensors peft
		peft_init_lora_weights peft_autocast_adapter_dtype qlora_sharded_model_loading loraplus_lr_ratio
		loraplus_lr_embedding train_on_inputs embedding_lr embedding_lr_scale optim_args torchdistx_path lr_scheduler
		lr_scheduler_kwargs lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_groups
		adam_epsilon2 adam_beta3 num_epochs max_packed_sequence_len gptq_groupsize gptq_model_v1 wandb_mode wandb_project
		wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model mlflow_tracking_uri mlflow_experiment_name
		mlflow_run_name hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name
		comet_experiment_key comet_mode comet_online comet_experiment_config use_wandb use_mlflow use_trackio
		trackio_project_name trackio_run_name trackio_space_id eval_table_size eval_max_new_tokens debug
		is_preprocess dataset_is_preprocessed relora relora_steps jagged_restart_steps jagged_restart_warmup_steps
		jagged_restart_anneal_steps relora_prune_method relora_warmup_steps relora_anneal_steps relora_cpu_offload relora_prune_ratio cut_cross_entropy deepcompile`
)

func readAxolotl(r *Reader) error {
	r.Model("base_model")
	if err := r.refuseAxolotl(); err != nil {
		return err
	}
	if name := r.Value("optimizer"); name.Text == "muon" { // _configure_custom_optimizer in core/builders/base.py
		r.To.Optimizer = "muon-dion"
	} else if !slices.Contains(TrainerOptimizers, name.Text) {
		return r.Fault("optimizer", fmt.Sprintf("is %s, which is not planned yet", name),
			cmp.Or(strict.DidYouMean(name.Text, TrainerOptimizers), "plimsoll plans the Trainer's optimizers"))
	}
	r.Longest("sequence_len")
	if r.Truth("freeze_mm_modules") { // utils/freeze.py
		r.To.Freezes = &Freezes{Vision: true, Projector: true,
			Named: strings.Fields("vision_tower vision_model multi_modal_projector visual")}
	}
	if r.Truth("tiled_mlp") {
		r.To.TilesMLP = &Tiles{Count: int(r.Integer("tiled_mlp_num_shards"))}
		if r.To.ScattersExperts {
			return r.Fault("tiled_mlp", "is true with use_scattermoe: blocks of experts run in tiles, which is not "+
				"planned yet", "set one of the two to false")
		}
		if !r.Truth("tiled_mlp_use_original_mlp") {
			r.Note("tiled_mlp", "is true: axolotl compiles the tiles, which may keep less than the plan says")
		}
	}
	r.To.LinearizesExperts = r.Truth("llama4_linearized_experts")
	if r.Truth("gptq") {
		r.To.Packed = "gptq"
	}
	r.argumentsOfAxolotl()
	r.typesOfAxolotl()
	return cmp.Or(r.shardAxolotl(), r.attentionOfAxolotl(), r.checkpointAxolotl(), r.quantizeAxolotl(),
		r.adaptAxolotl(), r.qatAxolotl(), r.readUnfrozen())
}

// qatAxolotl reads quantization-aware training: prepare_model_for_qat in src/axolotl/utils/quantization.py.
func (r *Reader) qatAxolotl() error {
	if !On(r.Find("qat")) {
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
	r.To.QAT = &QAT{Group: int(r.Integer("qat.group_size")), Activations: true, Learned: !packed, Packed: packed}
	return nil
}

func (r *Reader) refuseAxolotl() error {
	if err := r.answersOfAxolotl(); err != nil {
		return err
	}
	if On(r.Find("flash_optimum")) {
		return r.Fault("flash_optimum", "is true: axolotl then imports BetterTransformer of optimum 1.16.2, which it "+
			"pins, and which cannot be imported beside transformers 5", "remove the key, or set attn_implementation")
	}
	if err := cmp.Or(r.Unplanned("it is of another training than that of a language model", unplannedAxolotlStages),
		r.rewardAxolotl(),
		r.Unplanned("it changes the model's weights or parts", unplannedAxolotlModels),
		r.Unplanned("it changes what the passes hold", unplannedAxolotlPasses),
		r.Unplanned("it changes what the adapter holds", unplannedAxolotlAdapters),
		r.Unplanned("training goes on with an adapter whose adapter_config.json says its rank", "lora_model_dir"),
		r.Unplanned("it divides or moves the model", unplannedAxolotlRest)); err != nil {
		return err
	}
	return r.pluginsOfAxolotl()
}

// answersOfAxolotl reads what the key rl trains on answers: TRL's trainers (src/axolotl/core/builders/rl.py).
func (r *Reader) answersOfAxolotl() error {
	stage := r.Find("rl")
	if !On(stage) {
		return nil
	}
	switch stage.Text {
	case "dpo", "ipo":
		r.To.Answers = &Answers{Pairs: true, Reference: true, LogsEntropy: true,
			CrossEntropy: slices.Contains(r.List("dpo_loss_type"), "sft")}
	case "kto":
		r.To.Answers = &Answers{Reference: true, Mismatched: true, LogsEntropy: true}
	case "orpo":
		r.To.Answers = &Answers{Pairs: true, CrossEntropy: true}
	case "simpo": // CPOTrainer, with cpo_alpha of 1 unless it is given
		alpha := r.Find("cpo_alpha")
		r.To.Answers = &Answers{Pairs: true, CrossEntropy: alpha == nil || On(alpha)}
	default:
		return r.Fault("rl", fmt.Sprintf("is %s: it generates answers, which is not planned yet", stage), "")
	}
	if err := r.Unplanned("it changes the passes over answers", unplannedAxolotlAnswers); err != nil {
		return err
	}
	if !r.Gives("adapter") && (stage.Text == "kto" || stage.Text == "simpo") {
		r.Note("rl", "is given without an adapter: axolotl then loads a copy of the model for no trainer, "+
			"which is not planned")
	}
	r.To.Answers.Selected = true
	if r.Truth("precompute_ref_log_probs") {
		r.To.Answers.Reference = false
	}
	if r.Truth("liger_fused_linear_cross_entropy") || r.pluginNamed("CutCrossEntropyPlugin") {
		r.Note("rl", "is given: the fused cross entropy is not used, as the loss needs the logits")
	}
	r.NoteAnswers("rl")
	return nil
}

// stepsAxolotl reads a process reward model: TRL's PRMTrainer, which turns the dropout of the head off.
func (r *Reader) stepsAxolotl(labels int64, class string) error {
	const tokens = "AutoModelForTokenClassification"
	switch {
	case r.To.Rewards:
		return r.Fault("process_reward_model", "is true beside reward_model: they train other heads",
			"remove one of them")
	case class != "" && class != tokens:
		return r.Fault("model_type", fmt.Sprintf("is %q, which has no label of a token", class), "set it to "+tokens)
	case r.Word("adapter") != "":
		return r.Fault("adapter", "is given beside process_reward_model, which is not planned yet",
			"remove one of them")
	}
	r.To.TokenLabels = cmp.Or(labels, 2)
	r.Note("process_reward_model",
		fmt.Sprintf("is true: the head has %d labels for every token, and its dropout is off", r.To.TokenLabels))
	return nil
}

// rewardAxolotl reads whether a reward model is trained: TRL's RewardTrainer.
func (r *Reader) rewardAxolotl() error {
	r.To.Rewards = r.Truth("reward_model")
	labels, class := r.Integer("num_labels"), r.Word("model_type")
	if r.Truth("process_reward_model") {
		return r.stepsAxolotl(labels, class)
	}
	const (
		sequences  = "AutoModelForSequenceClassification"
		classifies = "a classifier is trained, which is not planned yet"
	)
	switch {
	case !r.To.Rewards && labels > 0:
		return r.Fault("num_labels", fmt.Sprintf("is %d: %s", labels, classifies), "")
	case !r.To.Rewards && strings.HasSuffix(class, "Classification"):
		return r.Fault("model_type", fmt.Sprintf("is %q: %s", class, classifies), "")
	case !r.To.Rewards:
		return nil
	case labels > 1:
		return r.Fault("num_labels", fmt.Sprintf("is %d, but a reward model has one label", labels), "remove the key")
	case class != "" && class != sequences:
		return r.Fault("model_type", fmt.Sprintf("is %q, which has no reward: this is not planned yet", class),
			"set it to "+sequences)
	}
	r.Note("reward_model",
		"is true: the head has one label, and passes have two sequences for each of a micro batch")
	return nil
}

// argumentsOfAxolotl sets what axolotl gives to TrainingArguments: src/axolotl/core/builders/base.py.
func (r *Reader) argumentsOfAxolotl() {
	for _, pair := range [][2]string{{"micro_batch_size", "per_device_train_batch_size"},
		{"gradient_accumulation_steps", "gradient_accumulation_steps"}, {"optimizer", "optim"}} {
		if pair[1] == "optim" && r.To.Optimizer != "" {
			continue
		}
		Give(r.Arguments, pair[1], r.At(pair[0]), cmp.Or(r.Value(pair[0]), strict.Of(1)))
	}
	if r.Gives("batch_size") && !r.Gives("gradient_accumulation_steps") { // normalize_config
		r.Set("gradient_accumulation_steps", "batch_size",
			max(1, int(r.Integer("batch_size")/r.Integer("micro_batch_size"))))
	}
	for _, key := range strings.Fields(`learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm tf32
		torch_compile torch_compile_backend group_by_length dataloader_pin_memory dataloader_num_workers
		dataloader_prefetch_factor ddp_bucket_cap_mb accelerator_config torch_empty_cache_steps auto_find_batch_size
		optim_target_modules save_only_model`) {
		r.Pass(key, key)
	}
	for _, key := range strings.Fields(savingAxolotl) {
		if On(r.Find(key)) {
			r.Note(key, "has kernels that keep less for the backward pass than the plan says")
		}
	}
	if v := r.Find("optim_args"); On(v) {
		joined := v.Text
		for i, m := range v.Members {
			joined += strings.Repeat(",", min(1, i)) + m.Name + "=" + m.Value.Text
		}
		r.Set("optim_args", "optim_args", joined)
	}
	if On(r.Find("relora")) || On(r.Find("relora_steps")) {
		r.Note("relora", "merges the adapter into the model every so many steps: the plan is of the steps between")
	}
	for _, key := range []string{"model_config", "overrides_of_model_config"} {
		if v := r.Find(key); v != nil {
			r.RouterLoss(v.Find("output_router_logits"))
		}
	}
	if r.Truth("liger_fused_linear_cross_entropy") || r.pluginNamed("CutCrossEntropyPlugin") {
		r.To.FusedLoss = true
	}
}

func (r *Reader) pluginNamed(name string) bool {
	return slices.ContainsFunc(r.List("plugins"), func(p string) bool { return strings.HasSuffix(p, name) })
}

// typesOfAxolotl reads the types of weights and of autocast: resolve_dtype in src/axolotl/utils/config.
func (r *Reader) typesOfAxolotl() {
	bf16 := r.Value("bf16")
	if bf16.IsAuto() {
		r.Note("bf16", "is auto: the plan is for GPUs that compute in bf16")
	}
	brain := On(bf16)
	half := r.Truth("fp16") && !brain
	r.Set("bf16", "bf16", brain || r.Truth("bfloat16"))
	r.Set("fp16", "fp16", half)
	switch {
	case brain || r.Truth("bfloat16"):
		r.To.Weights = "bf16"
	case r.Truth("load_in_8bit") || half || r.Truth("float16"):
		r.To.Weights = "fp16"
	default:
		r.To.Weights = "fp32"
	}
	// axolotl replaces accelerate's preparation for FSDP2, which converts weights.
	r.To.TrainedIn32, r.To.UnitsAtEnds = UnderFSDP1, &UnitsAtEnds{}
}

// shardAxolotl reads how the model is divided.
func (r *Reader) shardAxolotl() error {
	r.Pass("deepspeed", "deepspeed")
	r.parallelAxolotl()
	config := r.Find("fsdp_config")
	if r.Find("fsdp") == nil && config == nil {
		return nil
	}
	r.Set("fsdp", "fsdp", "full_shard auto_wrap")
	r.Pass("fsdp", "fsdp")
	section := &strict.Value{Kind: '{'}
	if config != nil {
		section.At = config.At
		for _, m := range config.Members {
			switch name := strings.TrimPrefix(m.Name, "fsdp_"); name {
			case "offload_params":
				Give(section, "cpu_offload", m.At, m.Value)
			case "sharding_strategy", "final_state_dict_type", "mixed_precision_policy", "cpu_offload_pin_memory":
			default:
				Give(section, name, m.At, m.Value)
			}
		}
	}
	if v := cmp.Or(r.Find("fsdp_version"), valueOf(section.Member("version"))); v != nil {
		Give(section, "version", r.At("fsdp_version"), v)
	} else {
		Give(section, "version", r.At("fsdp_config"), strict.Of(1))
	}
	Give(r.Arguments, "fsdp_config", r.At("fsdp_config"), section)
	return nil
}

// parallelAxolotl reads how ranks divide the work: setup_parallelism_envs in src/axolotl/utils/trainer.py.
func (r *Reader) parallelAxolotl() {
	size := func(keys ...string) int {
		most := 1
		for _, key := range keys {
			most = max(most, int(r.Integer(key)))
		}
		return most
	}
	p := Parallelism{Replicate: size("dp_replicate_size"), Shard: size("dp_shard_size"), Sequence: 1,
		Tensor: size("tensor_parallel_size"), Context: size("context_parallel_size", "sequence_parallel_degree")}
	if p.Ranks() > 1 {
		r.To.Parallelism = &p
	}
}

// valueOf returns the value of a member, or nil if there is none.
func valueOf(m *strict.Member) *strict.Value {
	if m == nil {
		return nil
	}
	return m.Value
}

// attentionOfAxolotl reads the attention.
func (r *Reader) attentionOfAxolotl() error {
	const key = "attn_implementation"
	casts := true // to the type of the other weights, after norms and embeddings have been converted to fp32
	switch name := r.Word(key); {
	case name == "xformers" || r.Truth("xformers_attention"):
		r.takenForSDPA("xformers' attention", "")
	case name == "flex_attention" || r.Truth("flex_attention"):
		r.takenForSDPA("flex attention", "; the mask of its blocks comes on top")
	case r.Gives(key):
		if err := r.ReadAttention(key); err != nil {
			return err
		}
		casts = name != "sdpa" && name != "eager"
	case r.Truth("flash_attention"):
		r.To.Attention = "flash"
	case r.Truth("sdp_attention"):
		r.To.Attention, casts = "sdpa", false
	case r.Truth("eager_attention"):
		r.To.Attention, casts = "eager", false
	default:
		casts = false
	}
	if casts || r.Gives("adapter") || r.To.Weights == "fp32" || r.Find("fsdp_config") != nil ||
		r.Find("deepspeed") != nil || On(r.Find("cut_cross_entropy")) || r.pluginNamed("CutCrossEntropyPlugin") {
		return nil
	}
	if r.Compute() == "" {
		return r.Fault("base_model", "is trained in full without flash attention and without autocast: axolotl then "+
			"keeps norms and embeddings in fp32, which its other weights cannot be multiplied with",
			"set bf16 to true, or add attn_implementation: flash_attention_2")
	}
	r.To.WidensNorms = true
	r.Note("base_model", "is trained in full without flash attention: axolotl keeps norms, embeddings and the head in "+
		"fp32")
	return nil
}

// takenForSDPA notes an attention that saves what SDPA saves.
func (r *Reader) takenForSDPA(name, but string) {
	r.To.Attention = "sdpa"
	r.Notes = append(r.Notes, Note{Where: r.Place("base_model"),
		What: name + " is planned as sdpa, which saves the same for the backward pass" + but})
}

// checkpointAxolotl reads what the backward pass recomputes, and what waits for it on the host.
func (r *Reader) checkpointAxolotl() error {
	const key, offloading = "gradient_checkpointing", "activation_offloading"
	v, mode, from := r.Find(key), r.Find(offloading), offloading
	if v != nil && strings.HasPrefix(v.Text, "offload") { // older words: schemas/validation.py
		mode, from = strict.Of(true), key
	}
	if On(mode) && !On(v) {
		return r.Fault(offloading, fmt.Sprintf("is %s, but axolotl needs gradient_checkpointing with it", mode),
			"add gradient_checkpointing: true")
	}
	kwargs := r.Find(key + "_kwargs")
	if kwargs == nil {
		kwargs = &strict.Value{Kind: '{'} // normalize_config in utils/config/__init__.py
		Give(kwargs, "use_reentrant", r.At(key), strict.Of(!On(r.Find("unfrozen_parameters")) &&
			!(On(mode) && mode.Text == "hidden_states")))
	}
	if On(mode) {
		if kwargs = r.offloadAxolotl(mode, kwargs); kwargs == nil {
			return r.Fault(from, fmt.Sprintf("is %s with reentrant checkpointing or torch.compile, which is not "+
				"planned yet", mode), "set use_reentrant to false, and torch_compile, too")
		}
	}
	r.Set(key, key, On(v) && (r.To.Offloading == nil || r.To.Offloading.InputsOnly || !r.Gives("adapter")))
	Give(r.Arguments, key+"_kwargs", r.At(key), kwargs)
	return nil
}

// offloadAxolotl reads how activations go to the host, and returns the arguments of checkpoints, nil if that is not
// planned: ActivationOffloadingMixin in core/trainers/mixins, and _configure_gradient_checkpointing in
// core/builders/base.py. An adapter's training recomputes nothing then, and other trainings wrap every block.
func (r *Reader) offloadAxolotl(mode, kwargs *strict.Value) *strict.Value {
	r.To.Offloading = NewOffloading()
	r.To.Offloading.Weights = r.Gives("adapter") // get_lora_act_offloading_ctx_manager knows no parameters
	reentrant := kwargs.Find("use_reentrant")
	switch {
	case r.Truth("torch_compile"):
		return nil
	case mode.Text == "hidden_states":
		r.To.Offloading.InputsOnly, r.To.Offloading.Stash = true, 2
		if reentrant != nil && On(reentrant) {
			return nil
		}
	case mode.Text == "legacy":
		r.To.Offloading.Streams = false
	}
	kwargs = &strict.Value{Kind: '{'}
	Give(kwargs, "use_reentrant", r.At("gradient_checkpointing"), strict.Of(false))
	return kwargs
}

// quantizeAxolotl reads the quantization: _set_quantization_config in src/axolotl/loaders/model.py.
func (r *Reader) quantizeAxolotl() error {
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
			"bnb_4bit_compute_dtype": strict.Of(ElementNames[r.To.Weights])}
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

// adaptAxolotl reads the adapter: src/axolotl/loaders/adapter.py.
func (r *Reader) adaptAxolotl() error {
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
		if On(targets) {
			r.Note("lora_target_modules", "is given beside lora_target_linear: the plan adapts all linear modules")
		}
		targets = strict.Of("all-linear")
	}
	r.To.AddsInFull = true // peft 0.19
	err := r.Adapt("adapter", map[string]*strict.Value{"r": r.Find("lora_r"), "lora_alpha": r.Find("lora_alpha"),
		"target_parameters": AsList(r.Find("lora_target_parameters")),
		"lora_dropout":      r.Find("lora_dropout"), "target_modules": targets,
		"fan_in_fan_out":  r.Find("lora_fan_in_fan_out"),
		"modules_to_save": AsList(r.Find("lora_modules_to_save")), "use_dora": r.Find("peft_use_dora"),
		"use_rslora": r.Find("peft_use_rslora")})
	if r.To.Adapter != nil {
		r.To.Adapter.ListsLinear = r.Truth("lora_target_linear") // find_all_linear_names
	}
	return err
}
