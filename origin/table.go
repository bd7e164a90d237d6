package origin

import (
	"plimsoll/ledger"
	"plimsoll/version"
)

// places are the places of components.
type places map[ledger.Component][]Place

func torch(file, function string) []Place {
	return []Place{{Project: PyTorch, File: file, Function: function}}
}

func deepSpeed(file, function string) []Place {
	return []Place{{Project: DeepSpeed, File: "deepspeed/" + file, Function: function}}
}

// oneBit returns a place in an optimizer of few bits, which DeepSpeed 0.19.7 has no more.
func oneBit(file, function string) []Place {
	list := deepSpeed("runtime/fp16/onebit/"+file, function)
	list[0].Until = version.Version{Minor: 19, Patch: 7}
	return list
}

// after adds a place of later releases.
func after(before []Place, major, minor int, file, function string) []Place {
	return append(before, Place{Project: before[0].Project, File: file, Function: function,
		Since: version.Version{Major: major, Minor: minor}})
}

var (
	stages12  = "runtime/zero/stage_1_and_2.py"
	stage3    = "runtime/zero/stage3.py"
	flatParam = "torch/distributed/fsdp/_flat_param.py"
	runtime   = "torch/distributed/fsdp/_runtime_utils.py"
	composed  = "torch/distributed/_composable/fsdp/" // until torch 2.5
	sharding  = "torch/distributed/fsdp/_fully_shard/"
)

// fully returns a place in FSDP2, whose folder has moved in torch 2.6.
func fully(file, function string) []Place {
	return after(torch(composed+file, function), 2, 6, sharding+file, function)
}

// pinning is the copy to pinned memory, which all accelerators share in later releases.
var pinning = []Place{
	{Project: DeepSpeed, File: "deepspeed/accelerator/cuda_accelerator.py", Function: "CUDA_Accelerator.pin_memory"},
	{Project: DeepSpeed, File: "deepspeed/accelerator/abstract_accelerator.py",
		Function: "DeepSpeedAccelerator.pin_memory", Since: version.Version{Minor: 19, Patch: 3}},
}

// ofEngines are the places of engines.
var ofEngines = map[string]places{
	Plain: {
		ledger.DtypeConversions: ours,
		ledger.CommunicationBuckets: torch("torch/nn/parallel/distributed.py",
			"DistributedDataParallel._ddp_init_helper"),
	},
	FSDP1: {
		ledger.Parameters:           torch(flatParam, "FlatParamHandle.shard"),
		ledger.UndividedUnits:       torch(flatParam, "FlatParamHandle.flatten_tensors_into_flat_param"),
		ledger.GatheredParameters:   torch(flatParam, "FlatParamHandle.unshard"),
		ledger.Gradients:            torch(runtime, "_reduce_grad"),
		ledger.CommunicationBuckets: torch(runtime, "_reduce_grad"),
	},
	FSDP2: {
		ledger.DtypeConversions:     ours,
		ledger.Parameters:           fully("_fsdp_param.py", "FSDPParam._init_sharded_param"),
		ledger.UndividedUnits:       fully("_fsdp_param.py", "FSDPParam._init_sharded_param"),
		ledger.GatheredParameters:   fully("_fsdp_collectives.py", "foreach_all_gather"),
		ledger.Gradients:            fully("_fsdp_collectives.py", "foreach_reduce"),
		ledger.CommunicationBuckets: fully("_fsdp_collectives.py", "foreach_reduce"),
	},
	FP16: {
		ledger.Parameters:      deepSpeed("runtime/engine.py", "DeepSpeedEngine._configure_distributed_model"),
		ledger.MasterWeights:   deepSpeed("runtime/fp16/fused_optimizer.py", "FP16_Optimizer.__init__"),
		ledger.MasterGradients: deepSpeed("runtime/fp16/fused_optimizer.py", "FP16_Optimizer.step"),
		ledger.FlatteningCopies: deepSpeed("runtime/fp16/unfused_optimizer.py",
			"FP16_UnfusedOptimizer.step_fused_lamb"),
		ledger.ReductionTemporaries: deepSpeed("runtime/utils.py", "get_weight_norm"),
		ledger.CommunicationBuckets: deepSpeed("runtime/engine.py", "DeepSpeedEngine.buffered_allreduce_fallback"),
	},
	BF16: {
		ledger.Parameters: deepSpeed("runtime/bf16_optimizer.py", "BF16_Optimizer._setup_for_real_optimizer"),
		ledger.MasterWeights: deepSpeed("runtime/bf16_optimizer.py",
			"BF16_Optimizer._setup_for_real_optimizer"),
		ledger.MasterGradients: deepSpeed("runtime/bf16_optimizer.py",
			"BF16_Optimizer._setup_for_real_optimizer"),
		ledger.AccumulatedGradients: deepSpeed("runtime/bf16_optimizer.py",
			"BF16_Optimizer._setup_for_real_optimizer"),
		ledger.CommunicationBuckets: deepSpeed("runtime/engine.py", "DeepSpeedEngine.buffered_allreduce_fallback"),
	},
	ZeRO12: {
		ledger.Parameters:           deepSpeed(stages12, "DeepSpeedZeroOptimizer.__init__"),
		ledger.MasterWeights:        deepSpeed(stages12, "DeepSpeedZeroOptimizer.__init__"),
		ledger.Gradients:            deepSpeed(stages12, "DeepSpeedZeroOptimizer.get_flat_partition"),
		ledger.MasterGradients:      deepSpeed(stages12, "DeepSpeedZeroOptimizer.step"),
		ledger.StagingBuffers:       deepSpeed(stages12, "DeepSpeedZeroOptimizer.__init__"),
		ledger.Bit16Staging:         deepSpeed(stages12, "DeepSpeedZeroOptimizer.__init__"),
		ledger.ReductionTemporaries: deepSpeed(stages12, "DeepSpeedZeroOptimizer.get_grad_norm_direct"),
		ledger.AccumulatedGradients: deepSpeed(stages12, "DeepSpeedZeroOptimizer.fill_grad_accum_attribute"),
		ledger.PinningCopies:        pinning,
	},
	ZeRO3: {
		ledger.Parameters:           deepSpeed("runtime/zero/partition_parameters.py", "Init.__init__"),
		ledger.SecondaryParameters:  deepSpeed("runtime/zero/partition_parameters.py", "Init.__init__"),
		ledger.MasterWeights:        deepSpeed(stage3, "DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions"),
		ledger.MasterGradients:      deepSpeed(stage3, "DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states"),
		ledger.CommunicationBuckets: deepSpeed(stage3, "DeepSpeedZeroOptimizer_Stage3.__init__"),
		ledger.AccumulatedGradients: deepSpeed(stage3, "DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer"),
		ledger.Gradients:            deepSpeed(stage3, "DeepSpeedZeroOptimizer_Stage3.partition_grads"),
		ledger.ReductionTemporaries: deepSpeed(stage3, "DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct"),
		ledger.FlatteningCopies: after(deepSpeed(stage3, "DeepSpeedZeroOptimizer_Stage3.defragment"), 0, 19,
			"deepspeed/runtime/zero/utils.py", "defragment"),
		ledger.GatheredParameters: deepSpeed("runtime/zero/partitioned_param_coordinator.py",
			"PartitionedParameterCoordinator.fetch_sub_module"),
		ledger.PinningCopies: pinning,
	},
	Megatron: {},
}

// loss is the loss of causal language models since transformers has one for all.
var loss = []Place{{Project: Transformers, File: "transformers/loss/loss_utils.py",
	Function: "ForCausalLMLoss", Since: version.Version{Major: 4, Minor: 46}}}

var (
	adam = torch("torch/optim/adam.py", "Adam._init_group")
	// AdamW has been an Adam of its own until torch 2.6.
	adamW = after(torch("torch/optim/adamw.py", "AdamW._init_group"), 2, 7, "torch/optim/adam.py",
		"Adam._init_group")
	twoState = []Place{{Project: BitsAndBytes, File: "bitsandbytes/optim/optimizer.py",
		Function: "Optimizer2State.init_state"}}
	oneState = []Place{{Project: BitsAndBytes, File: "bitsandbytes/optim/optimizer.py",
		Function: "Optimizer1State.init_state"}}
)

// ofOptimizers are the places that make the states of optimizers, by the optimizer's name.
var ofOptimizers = map[string][]Place{
	"adamw": adamW, "adam": adam,
	CPUAdam:   deepSpeed("ops/adam/cpu_adam.py", "DeepSpeedCPUAdam.step"),
	FusedAdam: deepSpeed("ops/adam/fused_adam.py", "FusedAdam.step"),
	"sgd":     torch("torch/optim/sgd.py", "SGD.step"), "sgd-momentum": torch("torch/optim/sgd.py", "SGD.step"),
	"adagrad":     torch("torch/optim/adagrad.py", "Adagrad.__init__"),
	"rmsprop":     torch("torch/optim/rmsprop.py", "RMSprop._init_group"),
	"muon":        torch("torch/optim/_muon.py", "Muon._init_group"),
	"adafactor":   {{Project: Transformers, File: "transformers/optimization.py", Function: "Adafactor.step"}},
	"lamb":        deepSpeed("ops/lamb/fused_lamb.py", "FusedLamb.step"),
	"onebitadam":  oneBit("adam.py", "OnebitAdam.step"),
	"onebitlamb":  oneBit("lamb.py", "OnebitLamb.step"),
	"zerooneadam": oneBit("zoadam.py", "ZeroOneAdam.step"),
	"adamw-8bit":  twoState, "adamw-32bit": twoState, "ademamix-8bit": twoState, "ademamix-32bit": twoState,
	"lion-8bit": oneState, "lion-32bit": oneState,
	"adamw-4bit": {{Project: TorchAO, File: "torchao/optim/adam.py", Function: "_AdamBase._new_buffer"}},
}

// always are the places of components that are the same in all engines.
var always = places{
	ledger.Parameters:            fromPretrained,
	ledger.LoadStaging:           fromPretrained,
	ledger.ReferenceModel:        fromPretrained,
	ledger.Gradients:             torch("torch/autograd/__init__.py", "backward"),
	ledger.ActivationGradients:   torch("torch/autograd/__init__.py", "backward"),
	ledger.OffloadedActivations:  torch("torch/autograd/graph.py", "save_on_cpu.__init__"),
	ledger.RecomputedActivations: torch("torch/utils/checkpoint.py", "checkpoint"),
	ledger.AutocastWeights:       torch("torch/amp/autocast_mode.py", "autocast.__enter__"),
	ledger.MatmulWorkspaces:      torch("torch/include/ATen/cuda/CUDAContextLight.h", "getCurrentCUDABlasHandle"),
	ledger.PinnedRounding:        torch("torch/include/ATen/core/CachingHostAllocator.h", "CachingHostAllocatorImpl"),
	ledger.CUDAContext:           torch("torch/cuda/__init__.py", "_lazy_init"),
	ledger.HeldStates:            ours,
	ledger.HeldControl:           ours,
	ledger.StatesWindow:          ours,
}

var fromPretrained = []Place{{Project: Transformers, File: "transformers/modeling_utils.py",
	Function: "PreTrainedModel.from_pretrained"}}

// ours is where Plimsoll's own offload of states lays them out.
var ours = []Place{{Project: Plimsoll, File: "states/layout.go", Function: "Layout"}}
