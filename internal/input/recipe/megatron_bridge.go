package recipe

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// silentBridge are keys of Megatron-Bridge's sections that change no memory.
var silentBridge = strings.Fields(`init_method output_layer_init_method init_method_std layernorm_epsilon
	params_dtype pipeline_dtype autocast_dtype rotary_base rotary_percent rotary_scaling_factor scale_factor
	generation_config hf_model_id should_pad_vocab timers finalize_model_grads_func grad_scale_func no_sync_func
	grad_sync_func param_sync_func average_in_collective check_for_nan_in_grad data_parallel_sharding_strategy lr
	min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad sgd_momentum log_num_zeros_in_grad train_iters
	eval_iters eval_interval exit_interval manual_gc manual_gc_interval manual_gc_eval perform_initialization
	apply_rope_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm softmax_scale
	attention_softmax_in_fp32 activation_func deallocate_pipeline_outputs batch_p2p_comm variable_seq_lengths
	parallel_output fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad cp_comm_type
	hidden_act transformer_layer_spec gated_linear_unit share_embeddings_and_output_weights add_bias_linear
	enable_autocast batch_p2p_sync use_te_rng_tracker barrier_with_L1_time decoupled_weight_decay
	store_param_remainders optimizer pin_cpu_grads pin_cpu_params cpu_offloading_activations
	scatter_embedding_sequence_parallel clone_scatter_output_in_embedding low_freq_factor high_freq_factor
	old_context_len vocab_size mamba_head_dim mamba_num_groups mamba_state_dim moe_router_bias_update_rate
	inference_sampling_seed embedding_init_method_std use_mamba_mem_eff_path mlp_chunks_for_prefill
	gradient_reduce_div_fusion preserve_fp32_weights moe_deepep_num_sms moe_hybridep_num_sms moe_token_drop_policy
	cuda_graph_scope softmax_type grad_reduce_in_fp32 main_grads_dtype main_params_dtype bf16 fp16
	gradient_accumulation_fusion bias_activation_fusion fp8_recipe fp4_recipe loss_scale initial_loss_scale min_loss_scale loss_scale_window
	hysteresis exp_avg_dtype exp_avg_sq_dtype num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 autocast_enabled
	_pipeline_model_parallel_layout_builder enable_megatron_core_experimental`)

// bridge reads a configuration of Megatron-Bridge: the run_config.yaml that it writes beside checkpoints, or one of
// this form that says the model (src/megatron/bridge/training/config.py of August 2026).
func (s *megatronSections) bridge() error {
	if err := s.computedSections(); err != nil {
		return err
	}
	if v := s.find("model." + bridgeUnplanned); v != nil {
		return s.unplannedModel(v)
	}
	if v := s.find(bridgeGPUs); v != nil {
		s.ranks, _ = strconv.ParseInt(v.Text, 10, 64)
	}
	if v := s.find(nemoEach); v != nil {
		s.perNode, _ = strconv.ParseInt(v.Text, 10, 64)
	}
	if v := s.find("comm_overlap.tp_comm_overlap"); On(v) {
		s.note(v, "tp_comm_overlap of comm_overlap: its user buffers are not planned")
	}
	if s.find("model.num_layers") == nil || s.find("model.hidden_size") == nil {
		return s.Inputf(s.Root.At, "this file changes settings of a recipe of %s, and does not say the model: "+
			"model.num_layers is absent", s.program).WithHint(s.instead())
	}
	if err := cmp.Or(s.refuse("model", "it is a part of another model",
		"teacher vision_config kd_config language_model"),
		s.refuse("dist", "it shards the model in another way", "use_megatron_fsdp use_torch_fsdp2"),
		s.refuse("ddp", "it shards the model in another way", "use_megatron_fsdp use_custom_fsdp")); err != nil {
		return err
	}
	return cmp.Or(s.bridgeAdapter(), s.bridgeModel(), s.bridgeTypes(),
		s.same("train", "micro_batch_size global_batch_size rampup_batch_size empty_unused_memory_level"),
		s.same("optimizer", `optimizer use_distributed_optimizer use_precision_aware_optimizer
			optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
			overlap_param_gather_with_optimizer_step`), s.bridgeStates(),
		s.same("ddp", `use_distributed_optimizer overlap_grad_reduce overlap_param_gather bucket_size=ddp_bucket_size
			num_distributed_optimizer_instances fp8_param_gather
			pad_buckets_for_high_nccl_busbw=ddp_pad_buckets_for_high_nccl_busbw`), s.bridgeDistributed(), s.bridgeRest())
}

// unplannedModel refuses a recipe for its model.
func (s *megatronSections) unplannedModel(why *strict.Value) error {
	planned := CoreTypes + " in Megatron core"
	if s.program == nemo2Program {
		planned = strings.Join(nemoModels, ", ") + " of NeMo 2 with MegatronStrategy and MegatronMixedPrecision"
	}
	return s.Inputf(why.At, "the model of this recipe of %s is not planned: %s", s.program, why.Text).
		WithHint("plimsoll plans " + planned + "; or " + s.instead())
}

// instead says what to give in place of a recipe that is not planned.
func (s *megatronSections) instead() string {
	if s.program == nemo2Program {
		return "give the arguments of Megatron-LM that say the same, as --megatron"
	}
	return bridgeInstead
}

// bridgeDistributed makes the optimizer distributed where one of two keys says so
// (_validate_and_sync_distributed_optimizer_settings in training/config.py).
func (s *megatronSections) bridgeDistributed() error {
	for key := range strings.FieldsSeq("optimizer.use_distributed_optimizer ddp.use_distributed_optimizer") {
		if v := s.find(key); On(v) {
			s.give("use_distributed_optimizer", v, true)
		}
	}
	return nil
}

// bridgeModel reads the provider of the model, whose keys are those of megatron-core's TransformerConfig.
func (s *megatronSections) bridgeModel() error {
	model := s.lookUp("model")
	flags := strings.Fields(megatronFlags)
	for _, key := range modelKeys(model) {
		if key == "activation_func" || key == "attention_backend" || slices.Contains(silentBridge, key) ||
			!slices.Contains(flags, key) || key == "bf16" || key == "fp16" || key == "fp8" {
			continue
		}
		v := s.lookUp("model." + key)
		if key == "pipeline_model_parallel_layout" && v.Kind == '[' {
			if err := s.bridgeLayout(v); err != nil {
				return err
			}
			continue
		}
		isZero := v.Kind == '0' && strings.Trim(v.Text, "0.") == ""
		if v.Kind != '{' && On(v) && !isZero || isZero && strings.HasSuffix(key, "_dropout") {
			Give(s.made, key, v.At, v)
		}
	}
	s.bridgeLength()
	s.negated("model", `add_bias_linear=disable_bias_linear
		share_embeddings_and_output_weights=untie_embeddings_and_output_weights
		gradient_accumulation_fusion=no_gradient_accumulation_fusion bias_activation_fusion=no_bias_swiglu_fusion
		bias_activation_fusion=no_bias_gelu_fusion`)
	if groups := s.find("model.num_query_groups"); On(groups) {
		s.give("group_query_attention", groups, true)
	}
	activation, gated := strings.ToLower(target(s.find("model.activation_func"))), s.is("model.gated_linear_unit")
	switch {
	case strings.HasSuffix(activation, "silu") && gated:
		s.give("swiglu", s.find("model.activation_func"), true)
	case strings.HasSuffix(activation, "squared_relu") && !gated:
		s.give("squared_relu", s.find("model.activation_func"), true)
	case (activation == "" || strings.HasSuffix(activation, "gelu")) && !gated:
	default:
		return s.fault("model.activation_func", "plimsoll plans gelu, gated silu and squared_relu")
	}
	s.bridgeExperts()
	return s.same("model", `virtual_pipeline_model_parallel_size=num_virtual_stages_per_pipeline_rank
		num_layers_in_first_pipeline_stage=decoder_first_pipeline_num_layers num_moe_experts=num_experts
		microbatch_group_size_per_vp_stage=microbatch_group_size_per_virtual_pipeline_stage
		num_layers_in_last_pipeline_stage=decoder_last_pipeline_num_layers`)
}

// bridgeExperts makes experts undivided by tensor parallelism where nothing says more, unlike Megatron-LM
// (_set_moe_expert_tensor_parallel_default in models/transformer_config.py).
func (s *megatronSections) bridgeExperts() {
	ranks := s.find("model.expert_model_parallel_size")
	said := s.find("model.expert_tensor_parallel_size")
	if On(ranks) && ranks.Text != "1" && (said == nil || said.IsEmpty()) {
		s.give("expert_tensor_parallel_size", ranks, 1)
	}
}

// layoutLetters are those of --pipeline-model-parallel-layout for the layers of a list.
var layoutLetters = map[string]string{"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}

// bridgeLayout gives the layers of each pipeline stage, which are lists of their names.
func (s *megatronSections) bridgeLayout(v *strict.Value) error {
	var stages []string
	for _, stage := range v.Elements {
		var letters strings.Builder
		for _, layer := range stage.Elements {
			if layoutLetters[layer.Text] == "" {
				return s.Inputf(v.At, "pipeline_model_parallel_layout has %v, expected embedding, decoder, mtp or loss",
					layer).WithHint("give lists of the layers of each stage")
			}
			letters.WriteString(layoutLetters[layer.Text])
		}
		stages = append(stages, letters.String())
	}
	s.give("pipeline_model_parallel_layout", v, strings.Join(stages, "|"))
	return nil
}

func modelKeys(model *strict.Value) []string {
	var list []string
	for _, m := range model.Members {
		list = append(list, m.Name)
	}
	return list
}

// bridgeLength takes the length of sequences from the data set, whose batches are what the model sees, and the
// vocabulary as the provider pads it.
func (s *megatronSections) bridgeLength() {
	if v := s.find("model.seq_length"); On(v) && s.find("model.max_position_embeddings") == nil {
		s.give("max_position_embeddings", v, v.Text) // the provider's positions
	}
	for key := range strings.FieldsSeq("dataset.seq_length dataset.sequence_length") {
		if v := s.find(key); On(v) && v.Kind == '0' {
			s.give("seq_length", v, v.Text)
		}
	}
	if v := s.find("model.vocab_size"); On(v) {
		argument := "padded_vocab_size"
		if s.is("model.should_pad_vocab") {
			argument = "vocab_size"
		}
		s.give(argument, v, v.Text)
	}
}

// bridgeStates reads the types of the precision-aware optimizer and what is pinned.
func (s *megatronSections) bridgeStates() error {
	s.negated("optimizer", "pin_cpu_grads=no_pin_cpu_grads pin_cpu_params=no_pin_cpu_params")
	words := map[string]string{"bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
	for key := range strings.FieldsSeq("main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype") {
		v := s.find("optimizer." + key)
		if word := words[strings.TrimPrefix(target(v), "torch.")]; word != "" {
			s.give(key, v, word)
		}
	}
	return nil
}

// target returns the name of a function or a type: a text, or what OmegaConf instantiates.
func target(v *strict.Value) string {
	if v != nil && v.Member("_target_") != nil {
		return v.Member("_target_").Value.Text
	}
	if v == nil || v.IsEmpty() {
		return ""
	}
	return v.Text
}

// bridgeTypes reads mixed_precision, a name or a section, and what the model says where it is absent.
func (s *megatronSections) bridgeTypes() error {
	section := "mixed_precision"
	mixed := s.find(section)
	switch {
	case mixed == nil || mixed.IsEmpty():
		section = "model"
	case mixed.Kind == '"' && mixed.Text == "bf16_mixed":
		s.give("bf16", mixed, true)
		return nil
	case mixed.Kind == '"' && mixed.Text == "fp16_mixed":
		s.give("fp16", mixed, true)
		return nil
	case mixed.Kind != '{':
		return s.fault(section, "plimsoll plans bf16_mixed and fp16_mixed")
	}
	at := s.find("ddp.grad_reduce_in_fp32")
	if section == "mixed_precision" { // which setup writes into ddp (training/mixed_precision.py)
		at = s.find(section + ".grad_reduce_in_fp32")
	}
	if at != nil && !On(at) && s.is(section+".bf16") {
		s.give("grad_reduce_in_bf16", at, true)
	}
	return s.same(section, `bf16 fp16 fp8=fp8_format fp8_recipe fp8_param_gather first_last_layers_bf16 fp4=fp4_format
		fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag`)
}

// bridgeRest notes what nobody has read.
func (s *megatronSections) bridgeRest() error {
	for section := range strings.FieldsSeq("model train optimizer ddp mixed_precision") {
		if v := s.lookUp(section); v != nil && v.Kind == '{' {
			s.rest(section, silentBridge)
		}
	}
	return nil
}
