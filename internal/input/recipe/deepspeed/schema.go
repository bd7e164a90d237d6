package deepspeed

import (
	"math"

	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Rule lists every key of DeepSpeed 0.19.6 (commit edaa72212, August
// 2026): deepspeed/runtime/config.py, constants.py and the models that they
// read. It omits keys that hold Python objects (tensor_parallel's dtype, mpu,
// tp_group), as no file can give them.
//
// Of sections that are pydantic models, it names the release that made them so, and the releases that brought keys: the
// tags of DeepSpeed's repository from 0.6.7 to 0.19.5.
var Rule = strict.Object(
	rule.Size.OrAuto().OrNull().For(TrainKey+" "+MicroKey+" "+AccumulationKey),
	rule.Size.For("data_parallel_size"),
	rule.Boolean.For(`zero_allow_untested_optimizer prescale_gradients sparse_gradients
		disable_allgather use_data_before_expert_parallelism wall_clock_breakdown memory_breakdown dump_state
		dataloader_drop_last graph_harvesting`),
	strict.Text("fp32", "fp16", "bf16").InAnyCase().OrNull().For("communication_data_type"),
	rule.Free.For("quantize_training"),
	strict.Keys{
		"managed_gradient_accumulation": rule.Boolean.Default(true),
		"zero_force_ds_cpu_optimizer":   rule.Boolean.Default(true),
		"sequence_parallel_size":        rule.Size.To(1 << 12).Default(1),
		"seq_parallel_communication_data_type": strict.Text("fp32", "fp16",
			"bf16").InAnyCase().OrNull().Default("fp32"),

		"optimizer": dictionary(rule.Text.For("type"), rule.Boolean.For("legacy_fusion"),
			rule.Free.For("params")), // checked by type: see optimizers
		"scheduler": dictionary(rule.Text.For("type"), rule.Free.For("params")),
		// checked by type: see schedulers
		"gradient_clipping": rule.Amount.OrAuto().Default(1),

		"fp16":     fp16Rule,
		"bf16":     bf16Rule,
		"bfloat16": bf16Rule.Noting(rule.Instead("bf16")),
		"amp": strict.Object(rule.Boolean.OrAuto().For("enabled"),
			rule.Text.OrAuto().For("opt_level")).AndOthers(), // Apex's
		"torch_autocast": dictionary(enabled, elementType.For("dtype"),
			rule.Names.For("lower_precision_safe_modules")).Since("0.17.2"),
		"data_types": dictionary(elementType.OrNull().For("grad_accum_dtype param_dtype buffer_dtype")),

		"zero_optimization": zeroRule.Or(rule.Boolean),
		"allgather_size":    rule.Count.Default(5e8).Noting(rule.Instead("zero_optimization.allgather_bucket_size")),
		"aio": dictionary(rule.Size.For("block_size queue_depth intra_op_parallelism"),
			rule.Boolean.For("single_submit overlap_events use_gds")).OrNull(),
		"activation_checkpointing": dictionary(rule.Size.OrNull().For("number_checkpoints"),
			rule.Boolean.For(`partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile
				cpu_checkpointing`)),

		"gradient_predivide_factor": rule.Number.Default(1),
		"gradient_allreduce_op":     strict.Text("mean", "sum").InAnyCase(),

		"steps_per_print": rule.Size.OrNull().Or(rule.Text), // accelerate sets it
		"log_level":       rule.Text.OrNull(),
		"vocabulary_size": rule.Count.OrNull(),

		"elasticity": dictionary(enabled, rule.Boolean.For("prefer_larger_batch ignore_non_elastic_batch_info"),
			rule.Size.For("max_train_batch_size num_gpus_per_node model_parallel_size"),
			strict.Keys{"min_gpus": rule.Size.Default(1), "max_gpus": rule.Size.Default(10000),
				"micro_batch_sizes": strict.List(rule.Size)},
			rule.Amount.For("min_time"), rule.Number.For("version")),
		"tensor_parallel": pydantic("0.16.4", rule.Integer.For("autotp_size"),
			rule.Text.OrNull().Since("0.18.6").For("preset_model"),
			rule.Boolean.Since("0.16.6").For("tp_overlap_comm"),
			rule.Boolean.For("keep_module_on_host kernel_inject replace_with_kernel_inject"),
			pydantic("0.16.4", rule.Integer.For("tp_size tp_grain_size")).For("tp tensor_parallel"),
			strict.List(strict.Rule{}).OrNull().For("injection_policy_tuple"),
			rule.Free.OrNull().Since("0.18.6").For("partition_config")).Since("0.16.4"),
		"expert_parallel": expertRule,
		"pipeline": strict.Object(rule.Size.OrAuto().For("stages"), rule.Text.For("partition"),
			rule.Boolean.For("seed_layers pipe_partitioned grad_partitioned"),
			rule.Boolean.Default(true).For("use_reentrant"),
			rule.Count.For("activation_checkpoint_interval")).AndOthers(), // passed to the pipeline engine
		"compile": pydantic("0.13.2",
			rule.Boolean.For(`deepcompile free_activation offload_activation offload_opt_states
			offload_parameters double_buffer symmetric_memory debug_log sync_before_reduce sync_after_reduce
			sync_before_allgather sync_after_allgather`),
			rule.Boolean.Since("0.17.2").For("keep_int_input_tensors keep_all_input_tensors"),
			rule.Boolean.Since("0.19.6").For("offload_activation_pin_memory"),
			rule.Integer.Since("0.18.0").For("free_activation_threshold"),
			strict.Keys{"passes": strict.List(strict.Text("z1", "z3", "autosp", "autotp")).OrNull().Since("0.18.9")}),

		"eigenvalue": rule.Free.Noting(`has no effect: DeepSpeed reads it inside of "quantize_training"`),
	},
	monitors, sections,
).AndComments().NotingOthers()

// elementType lists the names of deepspeed.runtime.config.DtypeEnum.
var elementType = strict.Text("fp32", "float32", "float", "torch.float32", "fp16", "float16", "half", "torch.float16",
	"bf16", "bfloat16", "torch.bfloat16", "int8", "torch.int8")

var enabled = rule.Boolean.For("enabled")

var fp16Rule = pydantic("0.17.1", rule.Boolean.For("enabled fp16_master_weights_and_grads"), strict.Keys{
	"auto_cast":              rule.Boolean.Since("0.7.0"),
	"consecutive_hysteresis": rule.Boolean.Since("0.9.3"),
	"loss_scale":             rule.Amount,
	"initial_scale_power":    rule.Count.To(127).Default(16),
	"loss_scale_window":      rule.Integer.Default(1000),
	"hysteresis":             rule.Integer.Default(2),
	"min_loss_scale":         rule.Number.Default(1.), // whole since 0.17.1
})

var bf16Rule = pydantic("0.17.1", enabled, rule.Boolean.Since("0.13.3").For("immediate_grad_update"),
	rule.Boolean.Since("0.17.1").For("check_grad_overflow"),
	rule.Boolean.Since("0.18.3").For("bf16_master_weights_and_grads bf16_optimizer_states"))

var zeroRule = pydantic("0.7.0",
	rule.Boolean.For(`contiguous_gradients allgather_partitions load_from_fp32_weights elastic_checkpoint
		ignore_unused_parameters legacy_stage1 round_robin_gradients`),
	rule.Boolean.Default(true).Since("0.9.0").For("memory_efficient_linear"),
	rule.Boolean.Since("0.9.2").For("mics_hierarchical_params_gather"),
	rule.Boolean.Since("0.10.0").For("zero_quantized_weights zero_quantized_gradients"),
	rule.Boolean.Since("0.10.1").For("pipeline_loading_checkpoint override_module_apply"),
	rule.Boolean.Since("0.10.2").For("zero_quantized_nontrainable_weights"),
	rule.Boolean.Since("0.12.4").For("use_multi_rank_bucket_allreduce"),
	rule.Boolean.Since("0.16.4").For("log_trace_cache_warnings"),
	rule.Boolean.Since("0.17.6").For("enable_sanity_checks"),
	rule.Boolean.Since("0.18.9").For("save_muon_momentum_buffer_in_memory"),
	strict.Keys{
		"stage":                   rule.Count.To(3),
		"reduce_scatter":          rule.Boolean.Default(true),
		"reduce_bucket_size":      rule.Count.Default(5e8),
		"allgather_bucket_size":   rule.Count.Default(5e8),
		"overlap_comm":            rule.Boolean.OrNull(), // the default depends on the stage
		"sub_group_size":          rule.Count.Default(1e9),
		"zero_hpz_partition_size": rule.Count.Default(1).Since("0.10.0"),
		"zeropp_loco_param":       rule.Free.OrNull().Since("0.16.2"),
		"mics_shard_size":         rule.Integer.Default(-1).Since("0.9.2"),

		"stage3_prefetch_bucket_size":        rule.Count.Default(5e7).Alias("prefetch_bucket_size"),
		"stage3_param_persistence_threshold": rule.Count.Default(1e5).Alias("param_persistence_threshold"),
		"stage3_model_persistence_threshold": rule.Count.Default(math.MaxInt64).Alias("model_persistence_threshold"),
		"stage3_max_live_parameters":         rule.Count.Default(1e9).Alias("max_live_parameters"),
		"stage3_max_reuse_distance":          rule.Count.Default(1e9).Alias("max_reuse_distance"),
		"stage3_gather_16bit_weights_on_model_save": rule.Boolean.Alias("gather_16bit_weights_on_model_save").
			Deprecated("stage3_gather_fp16_weights_on_model_save"),
		"stage3_module_granularity_threshold":    rule.Integer.Alias("module_granularity_threshold").Since("0.16.0"),
		"stage3_use_all_reduce_for_fetch_params": rule.Boolean.Alias("use_all_reduce_for_fetch_params").Since("0.14.3"),
		"stage3_allgather_sequential":            rule.Boolean.Alias("allgather_sequential").Since("0.18.5"),

		"offload_param": offloadRule(strict.Keys{
			"buffer_count": rule.Count.Default(5),
			"buffer_size":  rule.Count.Default(1e8),
			"max_in_cpu":   rule.Count.Default(1e9),
		}),
		"offload_optimizer": offloadRule(rule.Boolean.For("pipeline_read pipeline_write fast_init"),
			rule.Boolean.Since("0.18.0").For("super_offload"), strict.Keys{
				"buffer_count":       rule.Count.Default(4),
				"ratio":              rule.Share.Default(1).Since("0.12.3"),
				"cpuadam_cores_perc": rule.Share.Since("0.18.0"),
			}),
		"zenflow": pydantic("0.17.5", rule.Boolean.For("overlap_step offload"), rule.Share.For("auto_ratio"),
			rule.Share.Since("0.17.6").For("pt_reserved_cores_perc"),
			rule.Integer.For("select_interval update_interval full_warm_up_rounds"), strict.Keys{
				"topk_ratio":      rule.Share.Default(.1),
				"select_strategy": strict.Text("auto", "step", "epoch").Default("auto"),
				"steps_per_epoch": rule.Integer.OrNull(),
			}).OrNull().Since("0.17.5"),
		"leaf_module": pydantic("0.18.0",
			rule.Names.Or(rule.Text).For("classes names name_suffixes")).OrNull().Since("0.18.0"),

		"cpu_offload":       rule.Boolean.OrNull().Noting(`is deprecated: use "offload_optimizer": {"device": "cpu"}`),
		"cpu_offload_param": rule.Boolean.OrNull().Noting(`is deprecated: use "offload_param": {"device": "cpu"}`),
		"cpu_offload_use_pin_memory": rule.Boolean.OrNull().Noting(
			`is deprecated and has no effect: use "pin_memory" of "offload_optimizer" and "offload_param"`),
	})

// offloadRule returns the rule of an offload section with further keys.
func offloadRule(further ...strict.Keys) strict.Rule {
	return pydantic("0.7.0", append(further, strict.Keys{
		"device":     strict.Text("none", "cpu", "nvme").Default("none"),
		"nvme_path":  rule.Text.OrNull(),
		"pin_memory": rule.Boolean.Default(true),
	})...).OrNull()
}

var expertRule = dictionary(enabled, rule.Size.For("autoep_size expert_tensor_parallel_size"),
	rule.Boolean.For("validate_folding_routing use_grouped_mm disable_triton_grouped_mm"),
	rule.Boolean.OrNull().For("route_norm has_shared_experts"),
	rule.Text.OrNull().For(`preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3
		num_experts_attr top_k_attr shared_experts_pattern shared_experts_gate_pattern`),
	rule.Integer.OrNull().For("num_expert_groups num_limited_groups"),
	rule.Integer.OrAuto().For("top_k"),
	rule.Number.For("route_scale"), rule.Number.OrNull().For("load_balance_coeff"),
	rule.Number.OrAuto().For("routed_scaling_factor"),
	strict.Keys{
		"score_apply":  strict.Text("auto", "pre", "post"),
		"combine_impl": strict.Text("auto", "weighted_sum", "legacy_bmm"),
		"score_func":   strict.Text("auto", "softmax", "sigmoid"),
	})

// monitors are the sections that report and profile.
var monitors = strict.Keys{
	"tensorboard": pydantic("0.6.6", enabled, rule.Text.For("output_path job_name")),
	"csv_monitor": pydantic("0.6.6", enabled, rule.Text.For("output_path job_name")),
	"wandb":       pydantic("0.6.6", enabled, rule.Text.OrNull().For("group team"), rule.Text.For("project")),
	"comet": pydantic("0.14.3", enabled, rule.Integer.For("samples_log_interval"), rule.Boolean.OrNull().For("online"),
		rule.Text.OrNull().For("project workspace api_key experiment_name experiment_key mode")),
	"comms_logger": pydantic("0.7.0", rule.Boolean.For("enabled prof_all verbose debug"),
		strict.List(strict.Rule{}).For("prof_ops")),
	"timers": dictionary(pydantic("0.14.3", rule.Boolean.For("enabled synchronized")).For("throughput")),
	"flops_profiler": dictionary(rule.Boolean.For("enabled detailed"), rule.Number.For("recompute_fwd_factor"),
		rule.Integer.For("profile_step module_depth top_modules"), rule.Text.OrNull().For("output_file")),
}

// sections are the sections that change neither precision nor sharding.
var sections = strict.Keys{
	"checkpoint": dictionary(rule.Boolean.For("load_universal use_node_local_storage checkpoint_serialization"),
		strict.Keys{
			"tag_validation": strict.Text("Warn", "Ignore", "Fail").InAnyCase(),
			"parallel_write": dictionary(rule.Boolean.For("pipeline_stage")),
			"writer": dictionary(rule.Boolean.For("decoupled io_buffer_double show_statistics"),
				rule.Size.For("io_buffer_size io_multiplier"), strict.Keys{
					"type":          strict.Text("mock", "python", "fast").InAnyCase().OrNull(),
					"data_parallel": strict.Text("replica", "socket", "machine").InAnyCase().OrNull(),
				}).OrNull(),
		}),
	"nebula": dictionary(rule.Boolean.For("enabled enable_nebula_load"),
		rule.Text.OrNull().For("nebula_load_path persistent_storage_path"),
		rule.Number.For("persistent_time_interval"), rule.Integer.For("num_of_version_in_retention")),
	"datastates_ckpt": {},
	"autotuning": dictionary(rule.Boolean.For("enabled fast overwrite"), rule.Text.For("results_dir exps_dir metric"),
		rule.Text.OrNull().For("metric_path model_info_path"), rule.Free.OrNull().For("arg_mappings"),
		rule.Integer.For(`start_profile_step end_profile_step tuner_early_stopping tuner_num_trials min_train_batch_size
			max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size`),
		rule.Integer.OrNull().For("max_train_batch_size"), strict.Keys{
			"tuner_type": strict.Text("gridsearch", "random", "model_based"),
			"model_info": dictionary(rule.Boolean.For("profile"),
				rule.Integer.OrNull().For("num_params hidden_size num_layers")).OrNull(),
		}),
	"hybrid_engine": pydantic("0.9.0", rule.Integer.For("max_out_tokens inference_tp_size tp_gather_partition_size"),
		rule.Boolean.For("enabled release_inference_cache pin_parameters"),
		rule.Boolean.Since("0.19.6").For("enable_cuda_graph")),
	"sparse_attention": dictionary(rule.Boolean.For("different_layout_per_head horizontal_global_attention"),
		rule.Integer.For(`block num_local_blocks num_global_blocks num_different_global_patterns num_random_blocks
			num_sliding_window_blocks`), rule.Text.For("attention"),
		strict.List(rule.Integer).For("local_window_blocks global_block_indices"), strict.Keys{
			"mode":                     strict.Text("dense", "fixed", "variable", "bigbird", "bslongformer"),
			"global_block_end_indices": strict.List(rule.Integer).OrNull(),
		}),
	"progressive_layer_drop": strict.Object(enabled, rule.Number.For("theta gamma")),
	"curriculum_learning":    strict.Object(enabled).AndOthers(),
	"data_efficiency": dictionary(enabled, rule.Integer.For("seed"), strict.Keys{
		"data_sampling": dictionary(rule.Boolean.For("enabled pin_memory"), rule.Integer.For("num_epochs num_workers"),
			strict.Object(enabled).AndOthers().For("curriculum_learning dynamic_batching")),
		"data_routing": dictionary(enabled, strict.Object(enabled).AndOthers().For("random_ltd")),
	}),
	"compression_training": dictionary(
		rule.Free.For("shared_parameters"), // get_quantize_enabled reads it at this level, too
		strict.Object(enabled).AndOthers().For("layer_reduction"),
		dictionary(rule.Free.For("shared_parameters different_groups")).For(`weight_quantization activation_quantization
			sparse_pruning row_pruning head_pruning channel_pruning`)),
	"weight_quantization": pydantic("0.10.3", enabled, rule.Integer.For("num_bits q_groups"),
		strict.Text("asymmetric", "symmetric").For("q_type"),
		rule.Free.For("quantized_initialization post_init_quant")),
}

// dictionary returns the rule of an object of which DeepSpeed looks up keys and ignores others.
func dictionary(lists ...strict.Keys) strict.Rule { return strict.Object(lists...).NotingAll() }

// pydantic returns the rule of an object that DeepSpeed reads with a pydantic model since a release, and as a section
// before. Conversions are lax, and every key accepts "auto" for its default.
func pydantic(since string, lists ...strict.Keys) strict.Rule {
	relaxed := strict.Keys{}
	for _, list := range lists {
		for name, rule := range list {
			relaxed[name] = rule.Lax().OrAuto()
		}
	}
	return strict.Object(relaxed).StrictSince(since)
}
