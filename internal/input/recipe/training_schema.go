package recipe

import (
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// trainingSchema lists the fields of TrainingArguments in transformers 5.23,
// 4.57 and 4.40 (training_args.py). Unknown keys become notes: they may be
// fields of a derived class, such as TRL's SFTConfig.
var trainingSchema = strict.Schema{Program: "TrainingArguments",
	Rule: strict.Object(textual(strict.Merge(trainingKeys, otherTrainingKeys))).NotingOthers()}

// textual lets numbers be strings: YAML 1.1 reads 2e-5 as one, and argument parsers convert it.
func textual(of strict.Keys) strict.Keys {
	converted := strict.Keys{}
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
	rule.Size.OrNull().For("eval_accumulation_steps torch_empty_cache_steps dataloader_prefetch_factor"),
	rule.Boolean.For(`auto_find_batch_size bf16 bf16_full_eval fp16 fp16_full_eval dataloader_persistent_workers eval_on_start
		load_best_model_at_end prediction_loss_only save_only_model torch_compile use_cpu use_liger_kernel`),
	rule.Boolean.OrNull().For("activation_checkpointing gradient_checkpointing tf32"),
	checkpointingRule.For("activation_checkpointing_kwargs gradient_checkpointing_kwargs"),
	rule.Text.OrNull().For("torch_compile_backend torch_compile_mode"),
	strict.Keys{
		"per_device_train_batch_size": rule.Size.Default(8),
		"per_device_eval_batch_size":  rule.Size.Default(8),
		deepspeed.AccumulationKey:     rule.Size.Default(1),
		"label_smoothing_factor":      rule.Amount.OrNull().Default(0.),
		"max_grad_norm":               rule.Amount.OrNull().Default(1.),
		"ddp_bucket_cap_mb":           rule.Size.OrNull().Default(25), // PyTorch's default
		"dataloader_num_workers":      rule.Count,
		"dataloader_pin_memory":       rule.Boolean.Default(true),
		"train_sampling_strategy":     strict.Text("random", "sequential", "group_by_length", "batch_rebalance"),

		"optim":                rule.Text.Default("adamw_torch_fused"), // since PyTorch 2.8
		"optim_args":           rule.Text.OrNull(),
		"optim_target_modules": rule.NameOrNames,
		"learning_rate":        rule.Amount.Default(5e-5),
		"adam_beta1":           rule.Number.From(0).Under(1).Default(.9),
		"adam_beta2":           rule.Number.From(0).Under(1).Default(.999),
		"adam_epsilon":         rule.Amount.Default(1e-8),
		"weight_decay":         rule.Amount,
		"lr_scheduler_type": strict.Text("linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
			"constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr",
			"cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy").Default("linear"),

		"logging_strategy": strict.Text("no", "steps", "epoch").Default("steps"),
		"logging_steps":    rule.Amount.Default(500.),
		"eval_strategy":    strict.Text("no", "steps", "epoch"),
		"eval_steps":       rule.Amount.OrNull(),
		"save_strategy":    strict.Text("no", "steps", "epoch", "best").Default("steps"),
		"save_steps":       rule.Amount.Default(500.),

		"accelerator_config": acceleratorRule.Or(rule.Text).OrNull(),
		"deepspeed":          rule.Free.Or(rule.Text).OrNull(),
		"parallelism_config": rule.Free.Or(rule.Text).OrNull(),
		"fsdp":               rule.Boolean.Or(rule.Text).Or(rule.Names).OrNull(),
		"fsdp_config":        trainerFSDPRule.Or(rule.Text).OrNull(),
		// Both moved into fsdp_config before 4.40.
		"fsdp_min_num_params":                rule.Count,
		"fsdp_transformer_layer_cls_to_wrap": rule.Text.OrNull(),

		// Fields of 4.x that later versions removed.
		"per_gpu_train_batch_size": rule.Size.OrNull().Noting(rule.Instead("per_device_train_batch_size")),
		"per_gpu_eval_batch_size":  rule.Size.OrNull().Noting(rule.Instead("per_device_eval_batch_size")),
		"evaluation_strategy": strict.Text("no", "steps", "epoch").OrNull().Default("no").
			Noting(rule.Instead("eval_strategy")),
		"adafactor":       rule.Boolean,
		"group_by_length": rule.Boolean.OrNull(),
		"no_cuda":         rule.Boolean.OrNull(),
		"split_batches":   rule.Boolean.OrNull(),
	})

// otherTrainingKeys are fields that no plan depends on.
var otherTrainingKeys = strict.Merge(
	rule.Boolean.For(`average_tokens_across_devices batch_eval_metrics dataloader_drop_last dataloader_in_order
		do_predict do_train enable_jit_checkpoint eval_do_concat_batches eval_use_gather_object full_determinism
		hub_always_push ignore_data_skip log_on_each_node logging_first_step logging_nan_inf_filter push_to_hub
		remove_unused_columns restore_callback_states_from_checkpoint save_on_each_node skip_memory_metrics use_cache`),
	rule.Boolean.OrNull().For(`disable_tqdm greater_is_better hub_private_repo ddp_broadcast_buffers
		ddp_find_unused_parameters ddp_static_graph`),
	rule.Number.OrNull().For(`num_train_epochs max_steps seed data_seed local_rank ddp_timeout eval_delay
		neftune_noise_alpha save_total_limit`),
	rule.Text.OrNull().For(`output_dir run_name project trackio_space_id trackio_bucket_id hub_token hub_model_id
		hub_revision log_level log_level_replica metric_for_best_model resume_from_checkpoint length_column_name
		ddp_backend`),
	// Fields of 4.x that later versions removed.
	rule.Boolean.OrNull().For(`overwrite_output_dir save_safetensors use_mps_device jit_mode_eval use_ipex tpu_metrics_debug
		use_legacy_prediction_loop include_inputs_for_metrics include_tokens_per_second dispatch_batches`),
	rule.Number.OrNull().For("past_index tpu_num_cores _n_gpu"),
	rule.Text.OrNull().For(`logging_dir fp16_opt_level half_precision_backend fp16_backend push_to_hub_model_id
		push_to_hub_organization push_to_hub_token mp_parameters torchdynamo ray_scope`),
	rule.Free.Or(rule.Text).OrNull().For("lr_scheduler_kwargs"),
	strict.Rule{}.For("do_eval"), // any value that is true in Python
	rule.NameOrNames.For("debug report_to"),
	strict.Keys{
		"warmup_ratio":                       rule.Share.OrNull(),
		"warmup_steps":                       rule.Amount,
		"hub_strategy":                       strict.Text("end", "every_save", "checkpoint", "all_checkpoints"),
		"dataloader_multiprocessing_context": strict.Text("fork", "spawn", "forkserver").OrNull(),
		"liger_kernel_config":                rule.Free.OrNull(),
		"include_num_input_tokens_seen":      rule.Boolean.Or(strict.Text("all", "non_padding", "no")),
		"trackio_static_space_id":            rule.Text.Or(rule.Boolean).OrNull(),
		"include_for_metrics":                rule.Names,
		"label_names":                        rule.Names.OrNull(),
	})

// acceleratorRule lists the fields of AcceleratorConfig (trainer_pt_utils.py), and those of accelerate's
// GradientAccumulationPlugin in it.
var acceleratorRule = strict.Object(rule.Boolean.OrNull().For("dispatch_batches non_blocking use_configured_state"),
	rule.Boolean.For("split_batches even_batches use_seedable_sampler"),
	strict.Keys{"gradient_accumulation_kwargs": strict.Object(rule.Size.OrNull().For("num_steps"),
		rule.Boolean.For("adjust_scheduler sync_with_dataloader sync_each_batch")).OrNull()})

// checkpointingRule lists the arguments of torch.utils.checkpoint.checkpoint
// and two keys of transformers.
var checkpointingRule = strict.Object(rule.Boolean.For("use_reentrant preserve_rng_state debug early_stop offload"),
	rule.Text.For("determinism_check"), rule.Size.Default(1).For("every_n_layers")).OrNull()
