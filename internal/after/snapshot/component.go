package snapshot

import (
	"regexp"
	"strings"

	"plimsoll/internal/base/ledger"
)

// rule says what memory is for that a function allocates. A pattern that is empty matches everything.
type rule struct {
	file, function string
	component      ledger.Component
}

// rules are tried in order for every frame of a stack, the innermost first. The first that matches decides. Functions
// that allocate several things have a rule that leaves their memory unattributed.
var rules = []rule{
	{`torch/optim/sgd\.py$`, `_sgd$`, ledger.Unattributed}, // momentum and temporaries alike
	{`torch/optim/`, `^(_init_group|_init_state|init_state)$`, ledger.OptimizerStates},
	{`torch/optim/`, `^_(single_tensor|multi_tensor|fused)`, ledger.OptimizerTemporaries},
	{`torch/optim/optimizer\.py$`, `^zero_grad$`, ledger.Gradients},
	{`bitsandbytes/optim/`, `init_state|get_state_buffer`, ledger.OptimizerStates},
	{`apex/optimizers/|transformer_engine/pytorch/optimizers/`, `init.*state`, ledger.OptimizerStates},
	{`deepspeed/ops/(adam|lion|adagrad|lamb)/`, `^step$`, ledger.OptimizerStates},
	{`torch/nn/utils/clip_grad\.py$`, ``, ledger.OptimizerTemporaries},

	{`deepspeed/runtime/zero/stage3\.py$`, `^_create_fp32_partitions$`, ledger.MasterWeights},
	{`deepspeed/runtime/zero/stage3\.py$`, `fp16_partitions|^defragment$`, ledger.Parameters},
	{`deepspeed/runtime/zero/stage3\.py$`, `avg_scatter_grads|reduce_and_partition`, ledger.ReductionTemporaries},
	{`deepspeed/runtime/zero/partition_parameters\.py$`, `all_?gather|^wait$`, ledger.GatheredParameters},
	{`deepspeed/runtime/zero/partition_parameters\.py$`, `^_partition_param`, ledger.Parameters},
	{`deepspeed/runtime/zero/stage_1_and_2\.py$`, `ipg|bucket|average_tensor`, ledger.CommunicationBuckets},
	{`deepspeed/runtime/zero/stage_1_and_2\.py$`, `^flatten_dense_tensors`, ledger.Parameters},
	{`deepspeed/runtime/zero/(stage_1_and_2|stage3)\.py$`, `^initialize_optimizer_states$`, ledger.MasterGradients},
	{`deepspeed/runtime/zero/stage_1_and_2\.py$`, `^__init__$`, ledger.MasterWeights},
	{`deepspeed/runtime/comm/coalesced_collectives\.py$`, ``, ledger.ReductionTemporaries},

	{`torch/distributed/fsdp/_flat_param\.py$`, `unsharded|unshard|all_gather`, ledger.GatheredParameters},
	{`torch/distributed/fsdp/_flat_param\.py$`, `shard|flatten|init`, ledger.Parameters},
	{`torch/distributed/fsdp/_runtime_utils\.py$`, `reduce|post_backward`, ledger.ReductionTemporaries},
	{`torch/distributed/fsdp/_fully_shard/_fsdp_collectives\.py$`, `reduce`, ledger.ReductionTemporaries},
	{`torch/distributed/fsdp/_fully_shard/_fsdp_collectives\.py$`, `gather`, ledger.GatheredParameters},
	{`torch/distributed/fsdp/_fully_shard/_fsdp_param\.py$`, `all_gather|unsharded`, ledger.GatheredParameters},
	{`torch/distributed/fsdp/_fully_shard/_fsdp_param\.py$`, `init_sharded`, ledger.Parameters},
	{`torch/distributed/(fsdp/_(state_dict|optim)_utils\.py$|checkpoint/)`, ``, ledger.FullStateDict},
	{`torch/distributed/utils\.py$`, `^_recursive_to$`, ledger.Batch},
	{`torch/nn/parallel/distributed\.py$`, `^_ddp_init_helper$`, ledger.CommunicationBuckets},
	{`torch/nn/parallel/distributed\.py$`, `^_pre_forward$`, ledger.CommunicationBuckets}, // made anew in the second step
	{`megatron/core/optimizer/distrib_optimizer\.py$`, `main_param_and_shard_groups`, ledger.MasterWeights},
	{`megatron/core/distributed/param_and_grad_buffer\.py$`, `^__init__$`, ledger.Unattributed}, // both buffers

	{`torch/nn/modules/module\.py$`, `^(convert|_apply|to_empty)$`, ledger.Parameters},
	{`torch/nn/parameter\.py$`, ``, ledger.Parameters},
	{`torch/nn/modules/`, `^(__init__|reset_parameters)$`, ledger.Parameters},
	{`transformers/(modeling_utils|core_model_loading)\.py$`, ``, ledger.Parameters},
	{`accelerate/utils/modeling\.py$`, `set_module_tensor|load_checkpoint`, ledger.Parameters},
	{`peft/tuners/`, `^(update_layer|__init__)$`, ledger.Parameters},
	{`torch/serialization\.py$`, ``, ledger.LoadStaging},
	{`torch/utils/data/|transformers/data/`, ``, ledger.Batch},
	{`accelerate/utils/operations\.py$`, `send_to_device`, ledger.Batch},
	{`transformers/trainer\.py$`, `_prepare_inputs?$`, ledger.Batch},

	{`torch/nn/functional\.py$`, `^embedding`, ledger.EmbeddingActivations},
	{`torch/nn/modules/sparse\.py$`, `^forward$`, ledger.EmbeddingActivations},
	{`torch/nn/functional\.py$`, `_norm$`, ledger.NormActivations},
	{`torch/nn/modules/(normalization|batchnorm)\.py$`, `^forward$`, ledger.NormActivations},
	{``, `^eager_attention_forward$`, ledger.AttentionScores},
	{`transformers/(integrations/\w*attention|modeling_flash_attention_utils)`, ``, ledger.AttentionActivations},
	{``, `^(apply_rotary_pos_emb|rotate_half|repeat_kv)$`, ledger.AttentionActivations},
	{``, `scaled_dot_product_attention|multi_head_attention_forward|flash_attn`, ledger.AttentionActivations},
	{`torch/nn/functional\.py$`, `cross_entropy|nll_loss|kl_div|mse_loss`, ledger.LogitsAndLoss},
	{`torch/nn/modules/loss\.py$|transformers/loss/`, ``, ledger.LogitsAndLoss},
	{`peft/tuners/`, `^forward$`, ledger.AdapterActivations},
	{`torch/autograd/graph\.py$`, `_engine_run_backward`, ledger.BackwardPass},
	{``, `AccumulateGrad::apply`, ledger.Gradients},
	{``, `^torch::autograd::(python::Python)?Engine::`, ledger.BackwardPass},
	{``, `(getCurrentCUDABlasHandle|allocateCUDASolverWorkspace|getCUDABlasLtWorkspace|CublasHandlePool)`,
		ledger.MatmulWorkspaces},
	{``, `^forward$`, ledger.Activations},
	{`torch/nn/modules/module\.py$`, `^_call_impl$`, ledger.Activations},
}

// recomputing is the frame below which activations are those of a checkpointed region, computed again.
var recomputing = rule{`torch/utils/checkpoint\.py$|deepspeed/runtime/activation_checkpointing/`,
	`^(recompute_fn|unpack_hook|backward)$`, ledger.RecomputedActivations}

// classifier finds the component of a stack. It looks at every frame and every stack once.
type classifier struct {
	*records
	rules     []compiledRule
	recompute compiledRule
	frames    []classified // by frame
	stacks    map[uint32]ledger.Component
}

type compiledRule struct {
	file, function *regexp.Regexp
	component      ledger.Component
}

func (r rule) compiled() compiledRule {
	return compiledRule{regexp.MustCompile(r.file), regexp.MustCompile(r.function), r.component}
}

func (r *compiledRule) matches(file, function string) bool {
	return r.file.MatchString(file) && r.function.MatchString(function)
}

// classified is what a frame says.
type classified struct {
	known      bool
	component  ledger.Component // empty if the frame says nothing
	recomputes bool
}

func newClassifier(r *records) *classifier {
	c := &classifier{records: r, recompute: recomputing.compiled(), frames: make([]classified, len(r.frames.all)),
		stacks: map[uint32]ledger.Component{}}
	for _, rule := range rules {
		c.rules = append(c.rules, rule.compiled())
	}
	return c
}

func (c *classifier) frame(n uint32) classified {
	f := &c.frames[n]
	if !f.known {
		f.known = true
		frame := c.records.frames.all[n]
		file := strings.ReplaceAll(c.texts.all[frame.file], `\`, "/")
		function := c.texts.all[frame.name]
		for i := range c.rules {
			if c.rules[i].matches(file, function) {
				f.component = c.rules[i].component
				break
			}
		}
		f.recomputes = c.recompute.matches(file, function)
	}
	return *f
}

// of returns the component that a stack's memory is for, or Unattributed.
func (c *classifier) of(stack uint32) ledger.Component {
	if component, known := c.stacks[stack]; known {
		return component
	}
	component := ledger.Unattributed
	found := false
	for _, n := range c.records.stacks.of(stack) {
		f := c.frame(n)
		if !found && f.component != "" {
			component, found = f.component, true
		}
		activation := component == ledger.Activations || component.PartOf() == ledger.Activations
		if f.recomputes && (!found || activation) {
			component = ledger.RecomputedActivations
			break
		}
	}
	c.stacks[stack] = component
	return component
}
