package recipe

import (
	"strings"
)

// trainingSchema lists the fields of TrainingArguments in transformers 5.23,
// 4.57 and 4.40 (training_args.py). Unknown keys become notes: they may be
// fields of a derived class, such as TRL's SFTConfig.
var trainingSchema = schema{"TrainingArguments", func() rule {
	keys := map[string]rule{
		"per_device_train_batch_size": isInteger().from(1),
		"per_device_eval_batch_size":  isInteger().from(1),
		"per_gpu_train_batch_size": isInteger().from(1).orNull().noting(
			deprecatedFor("per_device_train_batch_size")),
		"per_gpu_eval_batch_size": isInteger().from(1).orNull().noting(deprecatedFor("per_device_eval_batch_size")),
		accumulationKey:           isInteger().from(1),
		"eval_accumulation_steps": isInteger().from(1).orNull(),
		"torch_empty_cache_steps": isInteger().from(1).orNull(),
		"max_grad_norm":           isNumber().from(0).orNull(),
		"learning_rate":           isNumber().from(0),
		"adam_beta1":              isNumber().from(0).under(1),
		"adam_beta2":              isNumber().from(0).under(1),
		"adam_epsilon":            isNumber().from(0),
		"weight_decay":            isNumber().from(0),
		"warmup_ratio":            isNumber().from(0).to(1).orNull(),
		"warmup_steps":            isNumber().from(0),
		"logging_steps":           isNumber().from(0),
		"eval_steps":              isNumber().from(0).orNull(),
		"save_steps":              isNumber().from(0),
		"optim":                   isText(),
		"optim_args":              isText().orNull(),
		"optim_target_modules":    isText().or(isList(isText())).orNull(),

		"lr_scheduler_type": isText("linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
			"constant_with_warmup", "inverse_sqrt",
			"reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
		"logging_strategy":    isText("no", "steps", "epoch"),
		"eval_strategy":       isText("no", "steps", "epoch"),
		"evaluation_strategy": isText("no", "steps", "epoch").orNull().noting(deprecatedFor("eval_strategy")),
		"save_strategy":       isText("no", "steps", "epoch", "best"),
		"hub_strategy":        isText("end", "every_save", "checkpoint", "all_checkpoints"),

		"activation_checkpointing":        isBoolean().orNull(),
		"activation_checkpointing_kwargs": checkpointingSchema,
		"gradient_checkpointing":          isBoolean().orNull(),
		"gradient_checkpointing_kwargs":   checkpointingSchema,

		"dataloader_num_workers":             isInteger().from(0),
		"dataloader_prefetch_factor":         isInteger().from(1).orNull(),
		"dataloader_multiprocessing_context": isText("fork", "spawn", "forkserver").orNull(),
		"train_sampling_strategy":            isText("random", "sequential", "group_by_length", "batch_rebalance"),
		"ddp_bucket_cap_mb":                  isInteger().from(1).orNull(),
		"ddp_backend":                        isText().orNull(),

		"fsdp":        isBoolean().or(isText()).or(isList(isText())).orNull(),
		"fsdp_config": trainerFSDPSchema.or(isText()).orNull(),
		// Both moved into fsdp_config before 4.40.
		"fsdp_min_num_params":                isInteger().from(0),
		"fsdp_transformer_layer_cls_to_wrap": isText().orNull(),
		"deepspeed":                          isFree().or(isText()).orNull(),
		"accelerator_config":                 isFree().or(isText()).orNull(),
		"parallelism_config":                 isFree().or(isText()).orNull(),
		"liger_kernel_config":                isFree().orNull(),
		"lr_scheduler_kwargs":                isFree().or(isText()).orNull(),
		"include_num_input_tokens_seen":      isBoolean().or(isText("all", "non_padding", "no")),
		"trackio_static_space_id":            isText().or(isBoolean()).orNull(),
		"debug":                              isText().or(isList(isText())).orNull(),
		"report_to":                          isText().or(isList(isText())).orNull(),
		"include_for_metrics":                isList(isText()),
		"label_names":                        isList(isText()).orNull(),
	}
	add := func(r rule, names string) {
		for name := range strings.FieldsSeq(names) {
			keys[name] = r
		}
	}
	add(isBoolean(), `auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval fp16 fp16_full_eval
		dataloader_drop_last dataloader_in_order dataloader_persistent_workers dataloader_pin_memory do_eval do_predict do_train
		enable_jit_checkpoint eval_do_concat_batches eval_on_start eval_use_gather_object full_determinism hub_always_push ignore_data_skip
		load_best_model_at_end log_on_each_node logging_first_step logging_nan_inf_filter prediction_loss_only push_to_hub
		remove_unused_columns restore_callback_states_from_checkpoint save_on_each_node save_only_model skip_memory_metrics
		torch_compile use_cache use_cpu use_liger_kernel`)
	add(isBoolean().orNull(), `tf32 disable_tqdm greater_is_better hub_private_repo
		ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph`)
	add(isNumber().orNull(), `num_train_epochs max_steps seed data_seed local_rank ddp_timeout eval_delay label_smoothing_factor
		neftune_noise_alpha save_total_limit`)
	add(isText().orNull(), `output_dir run_name project trackio_space_id trackio_bucket_id hub_token hub_model_id hub_revision
		log_level log_level_replica metric_for_best_model resume_from_checkpoint length_column_name torch_compile_backend torch_compile_mode`)
	// Fields of 4.x that later versions removed.
	add(isBoolean().orNull(), `overwrite_output_dir save_safetensors no_cuda use_mps_device jit_mode_eval use_ipex tpu_metrics_debug
		group_by_length use_legacy_prediction_loop include_inputs_for_metrics include_tokens_per_second dispatch_batches split_batches`)
	add(isNumber().orNull(), "past_index tpu_num_cores _n_gpu")
	add(isText().orNull(), `logging_dir fp16_opt_level half_precision_backend fp16_backend push_to_hub_model_id push_to_hub_organization
		push_to_hub_token mp_parameters torchdynamo ray_scope`)
	keys["adafactor"] = isBoolean()
	return isObject(keys).notingOthers()
}()}

// checkpointingSchema lists the arguments of torch.utils.checkpoint.checkpoint
// and two keys of transformers.
var checkpointingSchema = isObject(map[string]rule{
	"use_reentrant":      isBoolean(),
	"preserve_rng_state": isBoolean(),
	"determinism_check":  isText(),
	"debug":              isBoolean(),
	"early_stop":         isBoolean(),
	"every_n_layers":     isInteger().from(1),
	"offload":            isBoolean(),
}).orNull()

func deprecatedFor(key string) string { return `is deprecated: use "` + key + `"` }
