package recipe

// accelerateSchema lists the fields of accelerate 1.15: ClusterConfig in
// commands/config/config_args.py, which refuses all others, and the options of
// commands/launch.py that its sections set.
var accelerateSchema = schema{"accelerate", isObject(map[string]rule{
	"compute_environment": isText("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
	"distributed_type": isText("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
		"MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM"),
	"mixed_precision": isText("no", "fp16", "bf16", "fp8").inAnyCase().orNull(),
	"fp16":            isFlag().noting(deprecatedFor("mixed_precision")),
	"num_processes":   isInteger().from(1).orNull(),
	"num_machines":    isInteger().from(1),
	"machine_rank":    isInteger().from(0),
	"gpu_ids":         isText().orNull(),
	"use_cpu":         isFlag(),
	"debug":           isFlag(),
	"downcast_bf16":   isFlag(),

	"main_process_ip":        isText().orNull(),
	"main_process_port":      isCount().orNull(),
	"main_training_function": isText(),
	"rdzv_backend":           isText().orNull(),
	"same_network":           isFlag().orNull(),
	"enable_cpu_affinity":    isFlag(),

	"dynamo_backend": dynamoBackends.noting(`is deprecated: use "dynamo_config"`),
	"dynamo_config": isPrefixed("dynamo_", map[string]rule{
		"backend":                  dynamoBackends,
		"mode":                     isText("default", "reduce-overhead", "max-autotune"),
		"use_fullgraph":            isFlag(),
		"use_dynamic":              isFlag(),
		"use_regional_compilation": isFlag(),
	}).orNull(),
	"fp8_config": isPrefixed("fp8_", map[string]rule{
		"backend": isText("TE", "AO", "MSAMP", "MS-AMP").inAnyCase(),
	}).andOthers().orNull(),
	"fsdp_config": accelerateFSDPSchema,
	"deepspeed_config": isObject(map[string]rule{
		"deepspeed_config_file":         isText(),
		"zero_stage":                    isCount().from(0).to(3),
		"offload_optimizer_device":      isText("none", "cpu", "nvme"),
		"offload_param_device":          isText("none", "cpu", "nvme"),
		"offload_optimizer_nvme_path":   isText().orNull(),
		"offload_param_nvme_path":       isText().orNull(),
		accumulationKey:                 isCount().from(1).orAuto(),
		"gradient_clipping":             isAmount().from(0).orAuto(),
		"zero3_init_flag":               isFlag(),
		"zero3_save_16bit_model":        isFlag(),
		"deepspeed_moe_layer_cls_names": isText().orNull(),
		"deepspeed_hostfile":            isText().orNull(),
		"deepspeed_exclusion_filter":    isText().orNull(),
		"deepspeed_inclusion_filter":    isText().orNull(),
		"deepspeed_multinode_launcher": isText(
			"pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm").orNull(),
	}).orNull(),
	"parallelism_config": isObject(map[string]rule{
		"parallelism_config_dp_replicate_size":         isInteger().from(1).to(1 << 12),
		"parallelism_config_dp_shard_size":             isInteger().from(1).to(1 << 12),
		"parallelism_config_tp_size":                   isInteger().from(1).to(1 << 12),
		"parallelism_config_cp_size":                   isInteger().from(1).to(1 << 12),
		"parallelism_config_sp_size":                   isInteger().from(1).to(1 << 12),
		"parallelism_config_cp_backend":                isText("torch"),
		"parallelism_config_cp_comm_strategy":          isText("allgather", "alltoall"),
		"parallelism_config_sp_backend":                isText("deepspeed"),
		"parallelism_config_sp_seq_length":             isCount().orNull(),
		"parallelism_config_sp_seq_length_is_variable": isFlag(),
		"parallelism_config_sp_attn_implementation":    isText(),
	}).orNull(),
	"megatron_lm_config": isFree().orNull(),
	"mpirun_config":      isFree().orNull(),

	"tpu_name":        isText().orNull(),
	"tpu_zone":        isText().orNull(),
	"tpu_use_cluster": isFlag(),
	"tpu_use_sudo":    isFlag(),
	"tpu_vm":          {},
	"tpu_env":         {},
	"commands":        {},
	"command_file":    {},
})}

var dynamoBackends = isText("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS",
	"OFI", "FX2TRT", "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM", "HPU_BACKEND",
	"NEURON").inAnyCase()
