package recipe

import (
	"cmp"
	"strconv"
	"strings"
)

// silentNeMo are keys of NeMo's models that change no memory, or that others have the say over.
var silentNeMo = strings.Fields(`name mcore_gpt megatron_legacy init_method_std use_scaled_init_method
	layernorm_epsilon do_layer_norm_weight_decay pre_process post_process persist_layer_norm
	normalize_attention_scores attention_type rotary_percentage rotary_base native_amp_init_scale
	native_amp_growth_interval hysteresis grad_allreduce_chunk_size_mb grad_div_ar_fusion bias_dropout_add_fusion
	masked_softmax_fusion get_attention_mask_from_fusion apply_rope_fusion seed resume_from_checkpoint
	use_cpu_initialization onnx_safe apex_transformer_log_level gradient_as_bucket_view sync_batch_comm
	nccl_communicator_config_path transformer_engine use_flash_attention fp8_margin fp8_interval
	fp8_amax_history_len fp8_amax_compute_algo reduce_amax use_emha data nsys_profile optim overlap_p2p_comm
	batch_p2p_comm gc_interval tokenizer seq_len_interpolation_factor apply_query_key_layer_scaling fp8_e4m3
	fp8_hybrid dist_ckpt_format dist_ckpt_load_on_device dist_ckpt_parallel_save dist_ckpt_torch_dist_multiproc
	precision transformer_block_type ub_tp_comm_overlap_cfg fsdp_sharding_strategy fsdp_grad_reduce_dtype
	mcore_version fp8_wgrad use_te_rng_tracker moe_aux_loss_coeff moe_router_load_balancing_type
	scale_positional_embedding activations_checkpoint_method activations_checkpoint_num_layers activation
	normalization ffn_dropout memory_profile rotary_interleaved data_prefix answer_only_loss log_train_loss
	defer_embedding_wgrad_compute_limit`)

// ownLayers are keys of NeMo's models with other layers than those of a GPT of Megatron core.
const ownLayers = `encoder decoder mm_cfg bert_binary_head mcore_bert img_h vision retro hybrid_override_pattern
	hybrid_attention_ratio mamba_ssm_ngroups first_stage_config unet_config hyena logits_scaling embedding_scale
	add_position_embedding retro_train_from`

// nemo reads a training of NeMo 1: megatron_gpt_config.yaml and its kin, which the NeMo framework launcher has, too
// (nemo/collections/nlp/models/language_modeling/megatron_base_model.py and megatron_gpt_model.py of September 2025).
func (s *megatronSections) nemo() error {
	switch {
	case s.find("model.num_layers") == nil && s.is("model.restore_from_path"):
		return s.fault("model.restore_from_path", "a .nemo file says the model")
	case s.find("model.num_layers") == nil && s.find("model.encoder") == nil:
		return s.Inputf(s.Root.At, "this NeMo configuration is of no language model of Megatron core: "+
			"model.num_layers is absent").WithHint("plimsoll plans megatron_gpt_config.yaml and its kin")
	}
	if err := cmp.Or(s.refuse("model", "its layers are not those of a GPT of Megatron core", ownLayers),
		s.refuse("model", "it changes what is trained", "peft"),
		s.refuse("model", "it shards the model by PyTorch", "fsdp"),
		s.refuse("model", "it changes which activations are kept", `num_micro_batches_with_partial_activation_checkpoints
			activations_checkpoint_layers_per_pipeline headscale drop_layers cpu_offloading`)); err != nil {
		return err
	}
	if !s.is("model.mcore_gpt") {
		return s.fault("model.mcore_gpt", "NeMo's own layers, not those of Megatron core, are trained")
	}
	if name := s.word("model.name"); name != "" && name != "te_gpt" && name != "megatron_gpt" {
		return s.fault("model.name", "it names layers of its own")
	}
	if s.is("model.transformer_block_type") && s.word("model.transformer_block_type") != "pre_ln" {
		return s.fault("model.transformer_block_type", "norms stand elsewhere")
	}
	return cmp.Or(s.nemoSizes(), s.nemoLayers(), s.nemoTypes(), s.nemoOptimizer(), s.nemoRanks())
}

func (s *megatronSections) nemoSizes() error {
	return s.same("model", `micro_batch_size global_batch_size tensor_model_parallel_size pipeline_model_parallel_size
		context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel num_layers
		hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups max_position_embeddings
		hidden_dropout attention_dropout position_embedding_type make_vocab_size_divisible_by moe_router_topk
		moe_grouped_gemm moe_token_dispatcher_type moe_ffn_hidden_size moe_expert_capacity_factor
		moe_pad_expert_input_to_capacity moe_shared_expert_intermediate_size qk_layernorm deterministic_mode
		account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split cross_entropy_loss_fusion
		attention_backend fp32_residual_connection fp16_lm_cross_entropy rampup_batch_size multi_latent_attention
		q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim distribute_saved_activations
		encoder_seq_length=seq_length num_layers_in_first_pipeline_stage=decoder_first_pipeline_num_layers
		num_layers_in_last_pipeline_stage=decoder_last_pipeline_num_layers num_moe_experts=num_experts
		qkv_bias=add_qkv_bias fp8_params=fp8_param_gather ub_tp_comm_overlap=tp_comm_overlap
		override_vocab_size=vocab_size enable_cuda_graph defer_embedding_wgrad_compute`)
}

// nemoLayers reads what words of NeMo say of layers.
func (s *megatronSections) nemoLayers() error {
	s.negated("model", `bias=disable_bias_linear
		share_embeddings_and_output_weights=untie_embeddings_and_output_weights
		bias_activation_fusion=no_bias_swiglu_fusion bias_activation_fusion=no_bias_gelu_fusion`)
	model := s.lookUp("model")
	if !s.is("model.gradient_accumulation_fusion") {
		s.give("no_gradient_accumulation_fusion", model, true)
	}
	if !s.is("model.transformer_engine") {
		s.give("transformer_impl", model, "local")
	}
	if groups := s.find("model.num_query_groups"); On(groups) {
		s.give("group_query_attention", groups, true)
	}
	if chunks := s.find("model.virtual_pipeline_model_parallel_size"); On(chunks) && chunks.Text != "1" {
		s.give("num_virtual_stages_per_pipeline_rank", chunks, chunks.Text)
	}
	switch s.word("model.activation") {
	case "", "gelu":
	case "swiglu", "fast-swiglu":
		s.give("swiglu", s.find("model.activation"), true)
	case "squared-relu":
		s.give("squared_relu", s.find("model.activation"), true)
	default:
		return s.fault("model.activation", "plimsoll plans gelu, swiglu and squared-relu")
	}
	switch s.word("model.normalization") {
	case "", "layernorm", "layernorm1p":
	case "rmsnorm":
		s.give("normalization", s.find("model.normalization"), "RMSNorm")
	default:
		return s.fault("model.normalization", "plimsoll plans layernorm, layernorm1p and rmsnorm")
	}
	names := "activations_checkpoint_granularity=recompute_granularity"
	if s.word("model.activations_checkpoint_granularity") == "full" {
		names += ` activations_checkpoint_method=recompute_method activations_checkpoint_num_layers=recompute_num_layers`
	}
	return cmp.Or(s.same("model", names), s.nemoTokenizer())
}

// nemoTokenizer gives the tokenizer, whose vocabulary the plan looks up or asks for.
func (s *megatronSections) nemoTokenizer() error {
	name := s.find("model.tokenizer.type")
	switch library := s.word("model.tokenizer.library"); {
	case library == "megatron" && On(name):
		s.give("tokenizer_type", name, name.Text)
	case library == "huggingface" && On(name):
		s.give("tokenizer_type", name, "HuggingFaceTokenizer")
		s.give("tokenizer_model", name, name.Text)
	case library != "":
		s.give("tokenizer_type", s.find("model.tokenizer.library"), library)
		if model := s.find("model.tokenizer.model"); On(model) {
			s.give("tokenizer_model", model, model.Text)
		}
	}
	return nil
}

// nemoTypes reads the types of parameters and of fp8.
func (s *megatronSections) nemoTypes() error {
	precision := s.word("trainer.precision")
	switch at := s.find("trainer.precision"); precision {
	case "bf16", "bf16-mixed":
		s.give("bf16", at, true)
	case "16", "16-mixed":
		s.give("fp16", at, true)
	case "", "32", "32-true":
	default:
		return s.fault("trainer.precision", "plimsoll plans bf16, 16 and 32")
	}
	if strings.HasSuffix(precision, "16") || strings.HasSuffix(precision, "mixed") {
		if !s.is("model.megatron_amp_O2") {
			return s.fault("model.megatron_amp_O2", "parameters stay in fp32 and PyTorch's autocast converts them")
		}
	}
	if !s.is("model.fp8") {
		return nil
	}
	format := "hybrid"
	if s.is("model.fp8_e4m3") {
		format = "e4m3"
	}
	s.give("fp8_format", s.find("model.fp8"), format)
	return nil
}

// nemoOptimizer reads model.optim: setup_mcore_distributed_parallel and configure_optimizers.
func (s *megatronSections) nemoOptimizer() error {
	at := s.find("model.optim.name")
	switch name := s.word("model.optim.name"); name {
	case "mcore_distributed_optim":
		s.give("use_distributed_optimizer", at, true)
	case "distributed_fused_adam":
		s.give("use_distributed_optimizer", at, true)
		s.note(at, "distributed_fused_adam is planned as Megatron core's distributed optimizer, which takes 12 bytes "+
			"for each parameter where Apex takes 10 with bf16 parameters")
	case "fused_adam":
	default:
		return s.fault("model.optim.name",
			"plimsoll plans mcore_distributed_optim, distributed_fused_adam and fused_adam")
	}
	if v := s.find("model.optim.grad_sync_dtype"); On(v) && v.Text != "fp32" {
		s.give("grad_reduce_in_bf16", v, true)
	} else {
		s.give("accumulate_allreduce_grads_in_fp32", at, true)
	}
	defer s.rest("model", silentNeMo)
	return s.same("model.optim", `overlap_grad_sync=overlap_grad_reduce overlap_param_sync=overlap_param_gather
		ddp_bucket_size num_distributed_optimizer_instances overlap_param_gather_with_optimizer_step`)
}

// nemoRanks reads how many ranks the trainer starts.
func (s *megatronSections) nemoRanks() error {
	each, err := strconv.ParseInt(s.word("trainer.devices"), 10, 32)
	nodes, err2 := strconv.ParseInt(cmp.Or(s.word("trainer.num_nodes"), "1"), 10, 32)
	if err == nil && err2 == nil && each > 0 && nodes > 0 {
		s.ranks, s.perNode = each*nodes, each
	}
	return nil
}
