package swift

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Megatron is the kind of the commands of ms-swift that train by Megatron core. Their keys become arguments of
// Megatron-LM (swift/megatron/arguments of August 2026, commit 3602360a).
var Megatron = &recipe.Kind{Name: "training of ms-swift by Megatron core", Flag: recipe.MegatronFlag,
	Marks:           "megatron_sft megatron_rlhf",
	LaunchVariables: []string{"NPROC_PER_NODE", "NNODES"},
	Commands: map[string]string{"megatron sft": "megatron_sft", "megatron pt": "megatron_sft",
		"megatron rlhf": "megatron_rlhf", "cli/_megatron/sft.py": "megatron_sft", "cli/_megatron/pt.py": "megatron_sft",
		"cli/_megatron/rlhf.py": "megatron_rlhf"},
	Arguments: func(d *strict.Document) (recipe.MadeArguments, error) {
		m := &megatronReader{Document: d, made: &strict.Value{Kind: '{'}}
		err := m.read()
		return recipe.MadeArguments{Root: m.made, Notes: m.notes, Reference: m.reference, Pairs: m.pairs,
			Adapter: m.adapter}, err
	}}

//go:embed megatron_ignored.txt
var megatronIgnored string

// megatronSame are keys that Megatron-LM's arguments have, too. megatronRead are those that are read here.
var (
	megatronSame = strings.Fields(`micro_batch_size global_batch_size recompute_method recompute_num_layers
		recompute_modules cross_entropy_fusion_impl optimizer optimizer_cpu_offload optimizer_offload_fraction
		optimizer_cuda_graph use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype
		exp_avg_sq_dtype no_save_optim async_save use_persistent_ckpt_worker use_megatron_fsdp
		tensor_model_parallel_size pipeline_model_parallel_size decoder_first_pipeline_num_layers
		decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split
		account_for_loss_in_pipeline_split context_parallel_size tp_comm_overlap overlap_grad_reduce
		overlap_param_gather overlap_param_gather_with_optimizer_step pipeline_model_parallel_layout
		expert_model_parallel_size expert_tensor_parallel_size fp8_format fp8_recipe fp8_param_gather fp4_format
		fp4_param_gather moe_token_dispatcher_type moe_enable_deepep moe_shared_expert_overlap moe_layer_recompute
		moe_expert_capacity_factor moe_pad_expert_input_to_capacity mtp_num_layers cp_comm_type
		accumulate_allreduce_grads_in_fp32 moe_permute_fusion moe_router_dtype`)
	megatronRead = strings.Fields(`recompute_granularity attention_backend sequence_parallel
		virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage gradient_accumulation_fusion
		bias_activation_fusion model torch_dtype fp16 bf16 max_length packing_length padding_free tuner_type rlhf_type
		task_type save_safetensors merge_lora cross_entropy_loss_fusion use_distributed_optimizer moe_grouped_gemm megatron_sft
		megatron_rlhf lora_rank lora_dropout lora_bias target_modules target_regex modules_to_save`)
)

// megatronRefused are keys that change memory in ways that are not planned, and why.
var megatronRefused = []struct{ keys, why string }{
	{"adapters mcore_adapter ref_adapters mcore_ref_adapter", "it loads adapters"},
	{"freeze_llm freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters " +
		"trainable_parameters_regex", "it trains a part of the parameters"},
	{"new_special_tokens", "it makes the vocabulary longer"},
	{"external_plugins loss_type", "plugins may change the model or the loss"},
	{"megatron_extra_kwargs rope_scaling", "it changes the model of the configuration"},
	{"quant_method quant_bits", "weights are quantized"},
	{"use_cpu_initialization", "weights stay on the host at first"},
	{"sequence_packing_scheduler", "ranks change how they share sequences"},
	{"mhc_recompute_layer_num csa_dense_mode mtp_shared_weights", "it changes layers"},
	{"ref_model mcore_ref_model teacher_model", "another model is loaded"},
	{"config", "it names a file of arguments"}, {"use_ray", "Ray places the ranks"},
	{"bridge_backend", "another program makes the model"},
}

// megatronReader makes arguments of Megatron-LM of a command of ms-swift.
type megatronReader struct {
	*strict.Document
	made      *strict.Value
	notes     []recipe.Note
	reference bool // a second model without gradients
	pairs     bool // of sequences
	adapter   *recipe.CoreAdapter
	release3  bool // it is a command of ms-swift's releases 3
}

func (m *megatronReader) read() error {
	for _, step := range []func() error{m.before, m.known, m.refuse, m.adapt, m.answers, m.lengths, m.same, m.model} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// same gives what Megatron-LM's arguments have, too, and what ms-swift has by default.
func (m *megatronReader) same() error {
	for _, key := range megatronSame {
		if v := m.find(key); v != nil && v.Text != "none" && v.Kind != 'n' {
			recipe.Give(m.made, key, v.At, v)
		}
	}
	m.rename("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
	m.rename("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_virtual_pipeline_stage")
	if v := m.find("virtual_pipeline_model_parallel_size"); v != nil && v.Text == "1" {
		m.made.Members = slices.DeleteFunc(m.made.Members, func(member strict.Member) bool {
			return member.Name == "num_virtual_stages_per_pipeline_rank"
		})
	}
	m.defaults()
	return nil
}

// find returns the value of a key, or nil.
func (m *megatronReader) find(key string) *strict.Value {
	if member := m.Root.Member(key); member != nil {
		return member.Value
	}
	return nil
}

// give sets an argument of Megatron-LM at the place of a key, or of the command.
func (m *megatronReader) give(argument, of string, is any) {
	at := m.Root.At
	if v := m.find(of); v != nil {
		at = v.At
	}
	recipe.Give(m.made, argument, at, strict.Of(is))
}

func (m *megatronReader) rename(key, argument string) {
	if v := m.find(key); v != nil && v.Kind != 'n' {
		recipe.Give(m.made, argument, v.At, v)
	}
}

func (m *megatronReader) note(at int64, format string, values ...any) {
	m.notes = append(m.notes, recipe.Note{Where: m.Position(at), What: fmt.Sprintf(format, values...)})
}

// isOff reports whether a switch is given and off. isOn is its counterpart.
func (m *megatronReader) isOff(key string) bool { return m.find(key) != nil && !recipe.On(m.find(key)) }
func (m *megatronReader) isOn(key string) bool  { return recipe.On(m.find(key)) }

// known refuses keys that ms-swift does not have: it ends with an error.
func (m *megatronReader) known() error {
	all := slices.Concat(megatronSame, megatronRead, strings.Fields(rule.Uncommented(megatronIgnored)))
	for _, refused := range megatronRefused {
		all = append(all, strings.Fields(refused.keys)...)
	}
	for _, member := range m.Root.Members {
		if slices.Contains(all, member.Name) {
			continue
		}
		hint := "ms-swift ends with an error for arguments that it does not have"
		if near := fault.Nearest(member.Name, all); near != "" {
			hint = fmt.Sprintf("did you mean %s? %s", near, hint)
		}
		return m.Inputf(member.At, "%s is no argument of ms-swift's megatron commands", member.Name).WithHint(hint)
	}
	return nil
}

// refuse refuses what is not planned.
func (m *megatronReader) refuse() error {
	const instead = "plimsoll plans trainings of a text model, of all parameters or with lora, by megatron sft, pt " +
		"and rlhf with dpo"
	if v := m.find("tuner_type"); v != nil && v.Text != "full" && v.Text != "lora" {
		return m.Inputf(v.At, "tuner_type is %s, which is not planned yet", v).WithHint(instead)
	}
	if v := m.find("task_type"); v != nil && v.Text != "causal_lm" {
		return m.Inputf(v.At, "task_type is %s: it trains another head, which is not planned yet", v).WithHint(instead)
	}
	for _, refused := range megatronRefused {
		for key := range strings.FieldsSeq(refused.keys) {
			isUsual := key == "loss_type" && m.Root.Member("megatron_rlhf") != nil ||
				key == "bridge_backend" && m.find(key) != nil && m.find(key).Text == "mcore-bridge"
			if v := m.find(key); recipe.On(v) && v.Text != "0.0" && !isUsual {
				return m.Inputf(v.At, "%s is %s: %s, which is not planned yet", key, v, refused.why).WithHint(instead)
			}
		}
	}
	return nil
}

// answers reads megatron rlhf. DPO has a second model, and a micro batch of pairs: what was chosen and what was not.
func (m *megatronReader) answers() error {
	command := m.Root.Member("megatron_rlhf")
	v := m.find("rlhf_type")
	switch {
	case command == nil && v == nil:
		return nil
	case v != nil && v.Text != "dpo":
		return m.Inputf(v.At, "rlhf_type is %s, which is not planned yet for Megatron core", v).
			WithHint("plimsoll plans dpo")
	}
	m.pairs, m.reference = true, m.adapter == nil
	if m.isOn("fp8_param_gather") {
		return m.Inputf(m.find("fp8_param_gather").At, "fp8_param_gather is true beside a second model, which is not "+
			"planned yet").WithHint("leave it out")
	}
	other := "the other model's pass"
	if m.adapter != nil {
		other = "the pass without adapters, which stands for another model,"
	}
	m.note(m.Root.At, "DPO: each sequence of a micro batch is a pair, of what was chosen and what was not; %s keeps "+
		"nothing, and its logits are those of the pass after it", other)
	return nil
}

// defaults gives what ms-swift has by default and Megatron-LM has not.
func (m *megatronReader) defaults() {
	granularity := "selective"
	if v := m.find("recompute_granularity"); v != nil {
		granularity = v.Text
	}
	if granularity != "none" {
		m.give("recompute_granularity", "recompute_granularity", granularity)
	}
	for argument, usual := range map[string]any{"micro_batch_size": 1, "global_batch_size": 16,
		"expert_tensor_parallel_size": 1} {
		if m.made.Member(argument) == nil {
			m.give(argument, "", usual)
		}
	}
	for key := range strings.FieldsSeq("cross_entropy_loss_fusion use_distributed_optimizer moe_grouped_gemm") {
		if !m.isOff(key) {
			m.give(key, key, true)
		}
	}
	if m.made.Member("moe_token_dispatcher_type") == nil {
		m.give("moe_token_dispatcher_type", "", "alltoall")
	}
	if m.isOff("gradient_accumulation_fusion") {
		m.give("no_gradient_accumulation_fusion", "gradient_accumulation_fusion", true)
	}
	if m.isOff("bias_activation_fusion") {
		m.give("no_bias_swiglu_fusion", "bias_activation_fusion", true)
	}
	if v := m.find("tensor_model_parallel_size"); m.isOn("sequence_parallel") && v != nil && v.Text != "1" {
		m.give("sequence_parallel", "sequence_parallel", true)
	}
	attention := "flash"
	if v := m.find("attention_backend"); v != nil {
		attention, _, _ = strings.Cut(v.Text, "_")
	}
	m.give("attention_backend", "attention_backend", attention)
	if !m.isOff("padding_free") {
		m.give("no_create_attention_mask_in_dataloader", "padding_free", true)
	}
	switch {
	case m.isOff("save_safetensors"):
	case m.adapter != nil && m.isOff("merge_lora"):
		m.note(m.Root.At, "save_safetensors: the adapters are saved tensor by tensor, and what this takes on the host "+
			"is not in the plan")
	default:
		m.note(m.Root.At, "save_safetensors: the weights are saved tensor by tensor, in files of max_shard_size, and "+
			"what this takes on the host is not in the plan")
	}
}

// lengths gives the length of sequences, which ms-swift cuts or packs samples to.
func (m *megatronReader) lengths() error {
	v := m.find("packing_length")
	if v == nil {
		v = m.find("max_length")
	}
	if v == nil {
		return m.Inputf(m.Root.At, "max_length is not given: ms-swift then cuts samples where the model ends").
			WithHint("add --max_length with the tokens of the longest sample")
	}
	recipe.Give(m.made, "seq_length", v.At, v)
	return nil
}
