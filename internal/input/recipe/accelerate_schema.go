package recipe

import (
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// accelerateSchema lists the fields of accelerate 1.15: ClusterConfig in
// commands/config/config_args.py, which refuses all others, and the options of
// commands/launch.py that its sections set.
var accelerateSchema = strict.Schema{Program: "accelerate", Rule: strict.Object(
	anyBoolean.For("use_cpu debug downcast_bf16 enable_cpu_affinity tpu_use_cluster tpu_use_sudo"),
	rule.Text.For("main_training_function"),
	rule.Text.OrNull().For("main_process_ip rdzv_backend tpu_name tpu_zone"),
	rule.Free.OrNull().For("megatron_lm_config mpirun_config"),
	strict.Rule{}.For("tpu_vm tpu_env commands command_file"),
	strict.Keys{
		"compute_environment": strict.Text("LOCAL_MACHINE", "AMAZON_SAGEMAKER").Default("LOCAL_MACHINE"),
		"distributed_type": strict.Text("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
			"MULTI_MUSA",
			"MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM"),
		"mixed_precision":   strict.Text("no", "fp16", "bf16", "fp8").InAnyCase().OrNull().Default("no"),
		"fp16":              anyBoolean.Noting(rule.Instead("mixed_precision")),
		"num_processes":     rule.Size.OrNull(),
		"num_machines":      rule.Size.Default(1),
		"machine_rank":      rule.Count,
		"gpu_ids":           rule.Text.OrNull().Default("all"),
		"main_process_port": anyInteger.OrNull(),
		"same_network":      anyBoolean.OrNull(),

		"dynamo_backend": dynamoBackend.Noting(`is deprecated: use "dynamo_config"`),
		"dynamo_config": strict.Object(anyBoolean.For("use_fullgraph use_dynamic use_regional_compilation"),
			strict.Keys{
				"backend": dynamoBackend,
				"mode":    strict.Text("default", "reduce-overhead", "max-autotune"),
			}).Prefixed("dynamo_").OrNull(),
		"fp8_config": strict.Object(strict.Keys{
			"backend": strict.Text("TE", "AO", "MSAMP", "MS-AMP").InAnyCase().Default("TE"),
		}).Prefixed("fp8_").AndOthers().OrNull(),
		"fsdp_config": accelerateFSDPRule,
		"deepspeed_config": strict.Object(
			strict.Text("none", "cpu", "nvme").Default("none").For("offload_optimizer_device offload_param_device"),
			rule.Text.For("deepspeed_config_file"),
			rule.Text.OrNull().For(`offload_optimizer_nvme_path offload_param_nvme_path deepspeed_moe_layer_cls_names
				deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter`),
			rule.Text.OrNull().
				Noting("has no effect: accelerate 1.15 does not pass it to DeepSpeed, which reduces in fp32").
				For("seq_parallel_communication_data_type"),
			anyBoolean.For("zero3_init_flag zero3_save_16bit_model"),
			strict.Keys{
				"zero_stage":              anyInteger.From(0).To(3),
				deepspeed.AccumulationKey: anyInteger.From(1).OrAuto(),
				"gradient_clipping":       rule.Amount.Lax().OrAuto(),
				"deepspeed_multinode_launcher": strict.Text(
					"pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm").OrNull(),
			}).NotingOthers().OrNull(),
		"parallelism_config": parallelismRule,
	},
)}

var dynamoBackend = strict.Text("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER",
	"CUDAGRAPHS",
	"OFI", "FX2TRT", "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM", "HPU_BACKEND",
	"NEURON").InAnyCase().Default("NO")

var parallelismRule = strict.Object(
	rule.Size.To(1<<12).Default(1).For(`parallelism_config_dp_replicate_size parallelism_config_dp_shard_size
		parallelism_config_tp_size parallelism_config_cp_size parallelism_config_sp_size`),
	strict.Keys{
		"parallelism_config_cp_backend":                strict.Text("torch"),
		"parallelism_config_cp_comm_strategy":          strict.Text("allgather", "alltoall"),
		"parallelism_config_sp_backend":                strict.Text("deepspeed"),
		"parallelism_config_sp_seq_length":             anyInteger.OrNull(),
		"parallelism_config_sp_seq_length_is_variable": anyBoolean,
		"parallelism_config_sp_attn_implementation":    rule.Text,
	}).OrNull()
