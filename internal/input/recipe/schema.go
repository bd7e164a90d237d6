package recipe

import (
	"math"

	"plimsoll/internal/input/recipe/strict"
)

// deepSpeedRule lists every key of DeepSpeed 0.19.6 (commit edaa72212, August
// 2026): deepspeed/runtime/config.py, constants.py and the models that they
// read. It omits keys that hold Python objects (tensor_parallel's dtype, mpu,
// tp_group), as no file can give them.
//
// Of sections that are pydantic models, it names the release that made them so, and the releases that brought keys: the
// tags of DeepSpeed's repository from 0.6.7 to 0.19.5.
var deepSpeedRule = object(
	size.OrAuto().OrNull().For(trainKey+" "+microKey+" "+accumulationKey),
	size.For("data_parallel_size"),
	boolean.For(`zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients sparse_gradients
		disable_allgather use_data_before_expert_parallelism wall_clock_breakdown memory_breakdown dump_state
		dataloader_drop_last graph_harvesting`),
	oneOf("fp32", "fp16", "bf16").InAnyCase().OrNull().For("communication_data_type"),
	free.For("quantize_training"),
	keys{
		"managed_gradient_accumulation":        boolean.Default(true),
		"sequence_parallel_size":               size.To(1 << 12).Default(1),
		"seq_parallel_communication_data_type": oneOf("fp32", "fp16", "bf16").InAnyCase().OrNull().Default("fp32"),

		"optimizer": dictionary(text.For("type"), boolean.For("legacy_fusion"),
			free.For("params")), // checked by type: see optimizers
		"scheduler":         dictionary(text.For("type"), free.For("params")), // checked by type: see schedulers
		"gradient_clipping": amount.OrAuto().Default(1),

		"fp16":     fp16Rule,
		"bf16":     bf16Rule,
		"bfloat16": bf16Rule.Noting(instead("bf16")),
		"amp":      object(boolean.OrAuto().For("enabled"), text.OrAuto().For("opt_level")).AndOthers(), // Apex's
		"torch_autocast": dictionary(enabled, elementType.For("dtype"),
			names.For("lower_precision_safe_modules")).Since("0.17.2"),
		"data_types": dictionary(elementType.OrNull().For("grad_accum_dtype param_dtype buffer_dtype")),

		"zero_optimization": zeroRule.Or(boolean),
		"allgather_size":    count.Default(5e8).Noting(instead("zero_optimization.allgather_bucket_size")),
		"aio": dictionary(size.For("block_size queue_depth intra_op_parallelism"),
			boolean.For("single_submit overlap_events use_gds")).OrNull(),
		"activation_checkpointing": dictionary(size.OrNull().For("number_checkpoints"),
			boolean.For(`partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile
				cpu_checkpointing`)),

		"gradient_predivide_factor": number.Default(1),
		"gradient_allreduce_op":     oneOf("mean", "sum").InAnyCase(),

		"steps_per_print": size.OrNull().Or(text), // accelerate sets it
		"log_level":       text.OrNull(),
		"vocabulary_size": count.OrNull(),

		"elasticity": dictionary(enabled, boolean.For("prefer_larger_batch ignore_non_elastic_batch_info"),
			size.For("max_train_batch_size num_gpus_per_node model_parallel_size"),
			keys{"min_gpus": size.Default(1), "max_gpus": size.Default(10000), "micro_batch_sizes": list(size)},
			amount.For("min_time"), number.For("version")),
		"tensor_parallel": pydantic("0.16.4", integer.For("autotp_size"),
			text.OrNull().Since("0.18.6").For("preset_model"),
			boolean.Since("0.16.6").For("tp_overlap_comm"),
			boolean.For("keep_module_on_host kernel_inject replace_with_kernel_inject"),
			pydantic("0.16.4", integer.For("tp_size tp_grain_size")).For("tp tensor_parallel"),
			list(strict.Rule{}).OrNull().For("injection_policy_tuple"),
			free.OrNull().Since("0.18.6").For("partition_config")).Since("0.16.4"),
		"expert_parallel": expertRule,
		"pipeline": object(size.OrAuto().For("stages"), text.For("partition"),
			boolean.For("seed_layers pipe_partitioned grad_partitioned"),
			boolean.Default(true).For("use_reentrant"),
			count.For("activation_checkpoint_interval")).AndOthers(), // passed to the pipeline engine
		"compile": pydantic("0.13.2", boolean.For(`deepcompile free_activation offload_activation offload_opt_states
			offload_parameters double_buffer symmetric_memory debug_log sync_before_reduce sync_after_reduce
			sync_before_allgather sync_after_allgather`),
			boolean.Since("0.17.2").For("keep_int_input_tensors keep_all_input_tensors"),
			boolean.Since("0.19.6").For("offload_activation_pin_memory"),
			integer.Since("0.18.0").For("free_activation_threshold"),
			keys{"passes": list(oneOf("z1", "z3", "autosp", "autotp")).OrNull().Since("0.18.9")}),

		"eigenvalue": free.Noting(`has no effect: DeepSpeed reads it inside of "quantize_training"`),
	},
	monitors, sections,
).AndComments().NotingOthers()

// elementType lists the names of deepspeed.runtime.config.DtypeEnum.
var elementType = oneOf("fp32", "float32", "float", "torch.float32", "fp16", "float16", "half", "torch.float16",
	"bf16", "bfloat16", "torch.bfloat16", "int8", "torch.int8")

var enabled = boolean.For("enabled")

var fp16Rule = pydantic("0.17.1", boolean.For("enabled fp16_master_weights_and_grads"), keys{
	"auto_cast":              boolean.Since("0.7.0"),
	"consecutive_hysteresis": boolean.Since("0.9.3"),
	"loss_scale":             amount,
	"initial_scale_power":    count.To(127).Default(16),
	"loss_scale_window":      integer.Default(1000),
	"hysteresis":             integer.Default(2),
	"min_loss_scale":         number.Default(1.), // whole since 0.17.1
})

var bf16Rule = pydantic("0.17.1", enabled, boolean.Since("0.13.3").For("immediate_grad_update"),
	boolean.Since("0.17.1").For("check_grad_overflow"),
	boolean.Since("0.18.3").For("bf16_master_weights_and_grads bf16_optimizer_states"))

var zeroRule = pydantic("0.7.0",
	boolean.For(`contiguous_gradients allgather_partitions load_from_fp32_weights elastic_checkpoint
		ignore_unused_parameters legacy_stage1 round_robin_gradients`),
	boolean.Default(true).Since("0.9.0").For("memory_efficient_linear"),
	boolean.Since("0.9.2").For("mics_hierarchical_params_gather"),
	boolean.Since("0.10.0").For("zero_quantized_weights zero_quantized_gradients"),
	boolean.Since("0.10.1").For("pipeline_loading_checkpoint override_module_apply"),
	boolean.Since("0.10.2").For("zero_quantized_nontrainable_weights"),
	boolean.Since("0.12.4").For("use_multi_rank_bucket_allreduce"),
	boolean.Since("0.16.4").For("log_trace_cache_warnings"),
	boolean.Since("0.17.6").For("enable_sanity_checks"),
	boolean.Since("0.18.9").For("save_muon_momentum_buffer_in_memory"),
	keys{
		"stage":                   count.To(3),
		"reduce_scatter":          boolean.Default(true),
		"reduce_bucket_size":      count.Default(5e8),
		"allgather_bucket_size":   count.Default(5e8),
		"overlap_comm":            boolean.OrNull(), // the default depends on the stage
		"sub_group_size":          count.Default(1e9),
		"zero_hpz_partition_size": count.Default(1).Since("0.10.0"),
		"zeropp_loco_param":       free.OrNull().Since("0.16.2"),
		"mics_shard_size":         integer.Default(-1).Since("0.9.2"),

		"stage3_prefetch_bucket_size":        count.Default(5e7).Alias("prefetch_bucket_size"),
		"stage3_param_persistence_threshold": count.Default(1e5).Alias("param_persistence_threshold"),
		"stage3_model_persistence_threshold": count.Default(math.MaxInt64).Alias("model_persistence_threshold"),
		"stage3_max_live_parameters":         count.Default(1e9).Alias("max_live_parameters"),
		"stage3_max_reuse_distance":          count.Default(1e9).Alias("max_reuse_distance"),
		"stage3_gather_16bit_weights_on_model_save": boolean.Alias("gather_16bit_weights_on_model_save").
			Deprecated("stage3_gather_fp16_weights_on_model_save"),
		"stage3_module_granularity_threshold":    integer.Alias("module_granularity_threshold").Since("0.16.0"),
		"stage3_use_all_reduce_for_fetch_params": boolean.Alias("use_all_reduce_for_fetch_params").Since("0.14.3"),
		"stage3_allgather_sequential":            boolean.Alias("allgather_sequential").Since("0.18.5"),

		"offload_param": offloadRule(keys{
			"buffer_count": count.Default(5),
			"buffer_size":  count.Default(1e8),
			"max_in_cpu":   count.Default(1e9),
		}),
		"offload_optimizer": offloadRule(boolean.For("pipeline_read pipeline_write fast_init"),
			boolean.Since("0.18.0").For("super_offload"), keys{
				"buffer_count":       count.Default(4),
				"ratio":              share.Default(1).Since("0.12.3"),
				"cpuadam_cores_perc": share.Since("0.18.0"),
			}),
		"zenflow": pydantic("0.17.5", boolean.For("overlap_step offload"), share.For("auto_ratio"),
			share.Since("0.17.6").For("pt_reserved_cores_perc"),
			integer.For("select_interval update_interval full_warm_up_rounds"), keys{
				"topk_ratio":      share.Default(.1),
				"select_strategy": oneOf("auto", "step", "epoch").Default("auto"),
				"steps_per_epoch": integer.OrNull(),
			}).OrNull().Since("0.17.5"),
		"leaf_module": pydantic("0.18.0", names.Or(text).For("classes names name_suffixes")).OrNull().Since("0.18.0"),

		"cpu_offload":       boolean.OrNull().Noting(`is deprecated: use "offload_optimizer": {"device": "cpu"}`),
		"cpu_offload_param": boolean.OrNull().Noting(`is deprecated: use "offload_param": {"device": "cpu"}`),
		"cpu_offload_use_pin_memory": boolean.OrNull().Noting(
			`is deprecated and has no effect: use "pin_memory" of "offload_optimizer" and "offload_param"`),
	})

// offloadRule returns the rule of an offload section with further keys.
func offloadRule(further ...keys) strict.Rule {
	return pydantic("0.7.0", append(further, keys{
		"device":     oneOf("none", "cpu", "nvme").Default("none"),
		"nvme_path":  text.OrNull(),
		"pin_memory": boolean.Default(true),
	})...).OrNull()
}

var expertRule = dictionary(enabled, size.For("autoep_size expert_tensor_parallel_size"),
	boolean.For("validate_folding_routing use_grouped_mm disable_triton_grouped_mm"),
	boolean.OrNull().For("route_norm has_shared_experts"),
	text.OrNull().For(`preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3
		num_experts_attr top_k_attr shared_experts_pattern shared_experts_gate_pattern`),
	integer.OrNull().For("num_expert_groups num_limited_groups"),
	integer.OrAuto().For("top_k"),
	number.For("route_scale"), number.OrNull().For("load_balance_coeff"), number.OrAuto().For("routed_scaling_factor"),
	keys{
		"score_apply":  oneOf("auto", "pre", "post"),
		"combine_impl": oneOf("auto", "weighted_sum", "legacy_bmm"),
		"score_func":   oneOf("auto", "softmax", "sigmoid"),
	})

// monitors are the sections that report and profile.
var monitors = keys{
	"tensorboard": pydantic("0.6.6", enabled, text.For("output_path job_name")),
	"csv_monitor": pydantic("0.6.6", enabled, text.For("output_path job_name")),
	"wandb":       pydantic("0.6.6", enabled, text.OrNull().For("group team"), text.For("project")),
	"comet": pydantic("0.14.3", enabled, integer.For("samples_log_interval"), boolean.OrNull().For("online"),
		text.OrNull().For("project workspace api_key experiment_name experiment_key mode")),
	"comms_logger": pydantic("0.7.0", boolean.For("enabled prof_all verbose debug"),
		list(strict.Rule{}).For("prof_ops")),
	"timers": dictionary(pydantic("0.14.3", boolean.For("enabled synchronized")).For("throughput")),
	"flops_profiler": dictionary(boolean.For("enabled detailed"), number.For("recompute_fwd_factor"),
		integer.For("profile_step module_depth top_modules"), text.OrNull().For("output_file")),
}

// sections are the sections that change neither precision nor sharding.
var sections = keys{
	"checkpoint": dictionary(boolean.For("load_universal use_node_local_storage checkpoint_serialization"), keys{
		"tag_validation": oneOf("Warn", "Ignore", "Fail").InAnyCase(),
		"parallel_write": dictionary(boolean.For("pipeline_stage")),
		"writer": dictionary(boolean.For("decoupled io_buffer_double show_statistics"),
			size.For("io_buffer_size io_multiplier"), keys{
				"type":          oneOf("mock", "python", "fast").InAnyCase().OrNull(),
				"data_parallel": oneOf("replica", "socket", "machine").InAnyCase().OrNull(),
			}).OrNull(),
	}),
	"nebula": dictionary(boolean.For("enabled enable_nebula_load"),
		text.OrNull().For("nebula_load_path persistent_storage_path"),
		number.For("persistent_time_interval"), integer.For("num_of_version_in_retention")),
	"datastates_ckpt": {},
	"autotuning": dictionary(boolean.For("enabled fast overwrite"), text.For("results_dir exps_dir metric"),
		text.OrNull().For("metric_path model_info_path"), free.OrNull().For("arg_mappings"),
		integer.For(`start_profile_step end_profile_step tuner_early_stopping tuner_num_trials min_train_batch_size
			max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size`),
		integer.OrNull().For("max_train_batch_size"), keys{
			"tuner_type": oneOf("gridsearch", "random", "model_based"),
			"model_info": dictionary(boolean.For("profile"),
				integer.OrNull().For("num_params hidden_size num_layers")).OrNull(),
		}),
	"hybrid_engine": pydantic("0.9.0", integer.For("max_out_tokens inference_tp_size tp_gather_partition_size"),
		boolean.For("enabled release_inference_cache pin_parameters"),
		boolean.Since("0.19.6").For("enable_cuda_graph")),
	"sparse_attention": dictionary(boolean.For("different_layout_per_head horizontal_global_attention"),
		integer.For(`block num_local_blocks num_global_blocks num_different_global_patterns num_random_blocks
			num_sliding_window_blocks`), text.For("attention"),
		list(integer).For("local_window_blocks global_block_indices"), keys{
			"mode":                     oneOf("dense", "fixed", "variable", "bigbird", "bslongformer"),
			"global_block_end_indices": list(integer).OrNull(),
		}),
	"progressive_layer_drop": object(enabled, number.For("theta gamma")),
	"curriculum_learning":    object(enabled).AndOthers(),
	"data_efficiency": dictionary(enabled, integer.For("seed"), keys{
		"data_sampling": dictionary(boolean.For("enabled pin_memory"), integer.For("num_epochs num_workers"),
			object(enabled).AndOthers().For("curriculum_learning dynamic_batching")),
		"data_routing": dictionary(enabled, object(enabled).AndOthers().For("random_ltd")),
	}),
	"compression_training": dictionary(
		free.For("shared_parameters"), // get_quantize_enabled reads it at this level, too
		object(enabled).AndOthers().For("layer_reduction"),
		dictionary(free.For("shared_parameters different_groups")).For(`weight_quantization activation_quantization
			sparse_pruning row_pruning head_pruning channel_pruning`)),
	"weight_quantization": pydantic("0.10.3", enabled, integer.For("num_bits q_groups"),
		oneOf("asymmetric", "symmetric").For("q_type"), free.For("quantized_initialization post_init_quant")),
}
