package megatron

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
)

// Every argument is one of four: planned, because recipe.Megatron has it; refused, because it changes memory in a way
// that is not planned; without effect on memory; or noted in the plan. What is new is noted, so no argument is taken
// to cost nothing without a word.

// notPlanned are arguments that change memory in ways that are not planned yet.
var notPlanned = strings.Fields(`use_megatron_fsdp use_torch_fsdp2 fine_grained_activation_offloading
	hybrid_override_pattern hybrid_layer_pattern is_hybrid_model spec fp4_format fp4_param_gather perform_rl_step
	cpu_offloading_num_layers heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json moe_latent_size
	moe_use_upcycling fp32_residual_connection distribute_saved_activations experimental_attention_variant
	init_model_with_meta_device defer_embedding_wgrad_compute enable_cuda_graph external_cuda_graph optimizer_cuda_graph
	delay_wgrad_compute hybrid_context_parallel overlap_moe_expert_parallel_comm attention_output_gate
	fp16_lm_cross_entropy tp_comm_overlap freeze_all_layers ddp_reduce_scatter_with_fp32_accumulation
	ddp_param_name_patterns_for_fp32_local_accumulation fp8_output_proj
	first_last_layers_bf16 te_precision_config_file enable_mhc_connections linear_attention_freq
	tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards gtp_remat_opt_in_modules
	use_kitchen_attention moe_paged_stash moe_expert_rank_capacity_factor mtp_use_repeated_layer
	mtp_hybrid_override_pattern mlp_chunks_for_training logits_load_dir
	num_channels num_classes`)

// elsewhere are arguments that say that others are in another place.
var elsewhere = []string{"use_checkpoint_args", "use_mp_args_from_checkpoint_args", "yaml_cfg"}

// gone are arguments that Megatron-LM only knows to refuse them, and what it has instead.
var gone = map[string]string{"batch_size": "--micro-batch-size", "warmup": "--lr-warmup-fraction",
	"model_parallel_size": "--tensor-model-parallel-size", "checkpoint_activations": "--recompute-activations"}

// noted say what is left out of the plan.
var noted = map[string]string{
	"moe_enable_deepep":             "the buffers of DeepEP are not in the plan",
	"moe_flex_dispatcher_backend":   "the buffers of DeepEP, HybridEP and NCCL EP are not in the plan",
	"moe_router_dtype":              "the scores of the router are planned in fp32",
	"empty_unused_memory_level":     "blocks of PyTorch's allocator are planned as if they stayed",
	"rampup_batch_size":             "steps are planned with the full global batch",
	"step_batch_size_schedule":      "steps are planned with the full global batch",
	"eval_micro_batch_size":         "evaluation is not in the plan",
	"moe_shared_expert_overlap":     "shared experts are planned as if they ran after the others",
	"cp_comm_type":                  "context parallelism is planned with keys and values that are exchanged (p2p)",
	"overlap_cpu_optimizer_d2h_h2d": "copies between GPU and host are planned without temporaries",

	"overlap_param_gather_with_optimizer_step": "the optimizers of all chunks are planned as one",
}

// silentArguments are those that do not change memory: data, schedules, logs, checkpoints, and what only others use
// that are refused.
//
//go:embed silent.txt
var silentArguments string

// effects refuses or notes the arguments that the plan does not have.
func (j *Job) effects() error {
	silent := strings.Fields(silentArguments)
	for _, key := range j.Others() {
		if instead, is := gone[key]; is {
			return j.Fault(key, "is no longer valid in Megatron-LM", "give "+instead)
		}
		switch {
		case slices.Contains(elsewhere, key):
			return j.Fault(key, "takes arguments from another place", "give all arguments here")
		case slices.Contains(notPlanned, key):
			return j.Fault(key, "is not planned yet",
				"remove it, and expect the job's memory to differ from the plan")
		case noted[key] != "":
			j.assume("--%s: %s", dashed(key), noted[key])
			if what, left := strings.CutSuffix(noted[key], " are not in the plan"); left {
				j.LeftOut = append(j.LeftOut, what)
			}
		case !slices.Contains(silent, key):
			j.assume("--%s: planned as without it, and it may change memory a little", dashed(key))
		}
	}
	if j.Dispatcher == "flex" {
		j.assume("--moe-token-dispatcher-type flex: tokens are planned as with alltoall, without buffers of its own")
	}
	return nil
}

// aliases gives older names of arguments their meaning.
func (j *Job) aliases() error {
	if j.Rotary {
		j.PositionType = "rope"
	}
	if j.NoPositions && j.PositionType != "rope" {
		return j.Fault("no_position_embedding", "is given without rotary positions",
			"Megatron-LM asserts this: give --position-embedding-type none")
	}
	if j.RecomputesAttention {
		j.Recompute = "selective"
	}
	if !j.RecomputesMixture {
		return nil
	}
	if j.Recompute == "full" {
		return j.Fault("moe_layer_recompute", "is given beside full recomputation", "Megatron-LM asserts this")
	}
	j.Recompute = "selective"
	if len(j.RecomputeModules) == 0 {
		j.RecomputeModules = []string{"core_attn"}
	}
	j.RecomputeModules = append(slices.Clone(j.RecomputeModules), "moe")
	return nil
}

// unplanned refuses values that the plan does not know.
func (j *Job) unplanned() error {
	const reuse = "reuse_grad_buf_for_mxfp8_param_ag"
	switch {
	case j.ReusesGradients && (!j.FP8Gather || j.FP8Recipe != "mxfp8"):
		return j.Fault(reuse, "is given without --fp8-param-gather and --fp8-recipe mxfp8",
			"Megatron-LM asserts this: only such parameters are gathered in the gradient buffer")
	case j.CUDAGraph != "" && j.CUDAGraph != "none":
		return j.Fault("cuda_graph_impl", "is given, and memory of CUDA graphs is not planned yet", "")
	case j.Optimizer != "adam":
		return j.Fault("optimizer", fmt.Sprintf("is %s, which is not planned yet", j.Optimizer), "plimsoll plans adam")
	case j.PositionType != "learned_absolute" && j.PositionType != "rope" && j.PositionType != "none" &&
		j.PositionType != "yarn":
		return j.Fault("position_embedding_type", fmt.Sprintf("is %s, which is not planned yet", j.PositionType),
			"plimsoll plans learned_absolute, rope, yarn and none")
	case j.Implement == "inference_optimized":
		return j.Fault("transformer_impl", "is for inference", "plimsoll plans transformer_engine and local")
	case j.Recompute == "full" && j.Kind == T5:
		return j.Fault("recompute_granularity", "is full, which is not planned yet for a T5",
			"plimsoll plans selective")
	case j.Recompute == "selective" && len(j.RecomputeModules) > 0:
		for name := range strings.FieldsSeq(strings.Join(j.RecomputeModules, " ")) {
			if !slices.Contains(recomputed, name) {
				return j.Fault("recompute_modules", fmt.Sprintf("has %s, which is not planned yet", name), "")
			}
		}
	}
	return nil
}

// recomputed are the modules of selective recomputation that are planned.
var recomputed = []string{"core_attn", "moe_act", "layernorm", "mlp", "moe", "mla_up_proj", "shared_experts"}
