package recipe

import "plimsoll/internal/input/recipe/strict"

// trainingSchema lists the fields of TrainingArguments in transformers 5.23,
// 4.57 and 4.40 (training_args.py). Unknown keys become notes: they may be
// fields of a derived class, such as TRL's SFTConfig.
var trainingSchema = strict.Schema{Program: "TrainingArguments",
	Rule: object(textual(strict.Merge(trainingKeys, otherTrainingKeys))).NotingOthers()}

// textual lets numbers be strings: YAML 1.1 reads 2e-5 as one, and argument parsers convert it.
func textual(of keys) keys {
	converted := keys{}
	for name, rule := range of {
		converted[name] = rule
		if rule.IsNumber() {
			converted[name] = rule.Lax()
		}
	}
	return converted
}

// trainingKeys are the fields that change memory, and those that go with them.
var trainingKeys = strict.Merge(
	size.OrNull().For("eval_accumulation_steps torch_empty_cache_steps dataloader_prefetch_factor"),
	boolean.For(`auto_find_batch_size bf16 bf16_full_eval fp16 fp16_full_eval dataloader_persistent_workers eval_on_start
		load_best_model_at_end prediction_loss_only save_only_model torch_compile use_cpu use_liger_kernel`),
	boolean.OrNull().For("activation_checkpointing gradient_checkpointing tf32"),
	checkpointingRule.For("activation_checkpointing_kwargs gradient_checkpointing_kwargs"),
	text.OrNull().For("torch_compile_backend torch_compile_mode"),
	keys{
		"per_device_train_batch_size": size.Default(8),
		"per_device_eval_batch_size":  size.Default(8),
		accumulationKey:               size.Default(1),
		"max_grad_norm":               amount.OrNull().Default(1.),
		"ddp_bucket_cap_mb":           size.OrNull().Default(25), // PyTorch's default
		"dataloader_num_workers":      count,
		"dataloader_pin_memory":       boolean.Default(true),
		"train_sampling_strategy":     oneOf("random", "sequential", "group_by_length", "batch_rebalance"),

		"optim":                text.Default("adamw_torch_fused"), // since PyTorch 2.8
		"optim_args":           text.OrNull(),
		"optim_target_modules": NameOrNames,
		"learning_rate":        amount.Default(5e-5),
		"adam_beta1":           number.From(0).Under(1).Default(.9),
		"adam_beta2":           number.From(0).Under(1).Default(.999),
		"adam_epsilon":         amount.Default(1e-8),
		"weight_decay":         amount,
		"lr_scheduler_type": oneOf("linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
			"constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr",
			"cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy").Default("linear"),

		"logging_strategy": oneOf("no", "steps", "epoch").Default("steps"),
		"logging_steps":    amount.Default(500.),
		"eval_strategy":    oneOf("no", "steps", "epoch"),
		"eval_steps":       amount.OrNull(),
		"save_strategy":    oneOf("no", "steps", "epoch", "best").Default("steps"),
		"save_steps":       amount.Default(500.),

		"accelerator_config": acceleratorRule.Or(text).OrNull(),
		"deepspeed":          free.Or(text).OrNull(),
		"parallelism_config": free.Or(text).OrNull(),
		"fsdp":               boolean.Or(text).Or(names).OrNull(),
		"fsdp_config":        trainerFSDPRule.Or(text).OrNull(),
		// Both moved into fsdp_config before 4.40.
		"fsdp_min_num_params":                count,
		"fsdp_transformer_layer_cls_to_wrap": text.OrNull(),

		// Fields of 4.x that later versions removed.
		"per_gpu_train_batch_size": size.OrNull().Noting(instead("per_device_train_batch_size")),
		"per_gpu_eval_batch_size":  size.OrNull().Noting(instead("per_device_eval_batch_size")),
		"evaluation_strategy": oneOf("no", "steps", "epoch").OrNull().Default("no").
			Noting(instead("eval_strategy")),
		"adafactor":       boolean,
		"group_by_length": boolean.OrNull(),
		"no_cuda":         boolean.OrNull(),
		"split_batches":   boolean.OrNull(),
	})

// otherTrainingKeys are fields that no plan depends on.
var otherTrainingKeys = strict.Merge(
	boolean.For(`average_tokens_across_devices batch_eval_metrics dataloader_drop_last dataloader_in_order
		do_predict do_train enable_jit_checkpoint eval_do_concat_batches eval_use_gather_object full_determinism
		hub_always_push ignore_data_skip log_on_each_node logging_first_step logging_nan_inf_filter push_to_hub
		remove_unused_columns restore_callback_states_from_checkpoint save_on_each_node skip_memory_metrics use_cache`),
	boolean.OrNull().For(`disable_tqdm greater_is_better hub_private_repo ddp_broadcast_buffers
		ddp_find_unused_parameters ddp_static_graph`),
	number.OrNull().For(`num_train_epochs max_steps seed data_seed local_rank ddp_timeout eval_delay
		label_smoothing_factor neftune_noise_alpha save_total_limit`),
	text.OrNull().For(`output_dir run_name project trackio_space_id trackio_bucket_id hub_token hub_model_id
		hub_revision log_level log_level_replica metric_for_best_model resume_from_checkpoint length_column_name
		ddp_backend`),
	// Fields of 4.x that later versions removed.
	boolean.OrNull().For(`overwrite_output_dir save_safetensors use_mps_device jit_mode_eval use_ipex tpu_metrics_debug
		use_legacy_prediction_loop include_inputs_for_metrics include_tokens_per_second dispatch_batches`),
	number.OrNull().For("past_index tpu_num_cores _n_gpu"),
	text.OrNull().For(`logging_dir fp16_opt_level half_precision_backend fp16_backend push_to_hub_model_id
		push_to_hub_organization push_to_hub_token mp_parameters torchdynamo ray_scope`),
	free.Or(text).OrNull().For("lr_scheduler_kwargs"),
	strict.Rule{}.For("do_eval"), // any value that is true in Python
	NameOrNames.For("debug report_to"),
	keys{
		"warmup_ratio":                       share.OrNull(),
		"warmup_steps":                       amount,
		"hub_strategy":                       oneOf("end", "every_save", "checkpoint", "all_checkpoints"),
		"dataloader_multiprocessing_context": oneOf("fork", "spawn", "forkserver").OrNull(),
		"liger_kernel_config":                free.OrNull(),
		"include_num_input_tokens_seen":      boolean.Or(oneOf("all", "non_padding", "no")),
		"trackio_static_space_id":            text.Or(boolean).OrNull(),
		"include_for_metrics":                names,
		"label_names":                        names.OrNull(),
	})

// acceleratorRule lists the fields of AcceleratorConfig (trainer_pt_utils.py), and those of accelerate's
// GradientAccumulationPlugin in it.
var acceleratorRule = object(boolean.OrNull().For("dispatch_batches non_blocking use_configured_state"),
	boolean.For("split_batches even_batches use_seedable_sampler"),
	keys{"gradient_accumulation_kwargs": object(size.OrNull().For("num_steps"),
		boolean.For("adjust_scheduler sync_with_dataloader sync_each_batch")).OrNull()})

// checkpointingRule lists the arguments of torch.utils.checkpoint.checkpoint
// and two keys of transformers.
var checkpointingRule = object(boolean.For("use_reentrant preserve_rng_state debug early_stop offload"),
	text.For("determinism_check"), size.Default(1).For("every_n_layers")).OrNull()
