package recipe

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of LLaMA-Factory's configurations.
var LLaMAFactoryKind = &Kind{Name: "LLaMA-Factory configuration", Flag: ConfigFlag, Program: &llamaFactory,
	Marks: "llamafactory_train finetuning_type cutoff_len lora_target infer_backend export_dir dataset_dir",
	Settings: SettingKeys{MicroBatch: TrainerKeys[MicroBatch], Accumulation: TrainerKeys[Accumulation],
		GradientCheckpointing: {Path: "disable_gradient_checkpointing", Says: inverse},
		OptimizerName:         TrainerKeys[OptimizerName]},
	Commands: map[string]string{"llamafactory-cli train": "llamafactory_train"}}

func inverse(x any) any { return x != true }

// llamaFactory is LLaMA-Factory of August 2026 (commit ff6d4d12): the arguments in src/llamafactory/hparams.
var llamaFactory = Program{Name: "LLaMA-Factory", Hosts: true, Read: readLLaMAFactory,
	Keys: strict.Merge(
		Worded.For("model_name_or_path adapter_name_or_path additional_target quantization_method"),
		Worded.For("ref_model freeze_trainable_modules freeze_extra_modules"),
		Switched.For(`use_muon use_llama_pro disable_gradient_checkpointing pure_bf16 use_rslora use_dora pissa_init double_quantization fp8
			enable_liger_kernel create_new_adapter use_dft_loss use_eaft_loss use_asft_loss use_galore galore_layerwise use_apollo apollo_layerwise use_badam
			use_adam_mini`),
		keys{
			"stage":                   oneOf("pt", "sft", "rm", "ppo", "dpo", "kto").OrNull().Default("sft"),
			"finetuning_type":         oneOf("lora", "oft", "freeze", "full").OrNull().Default("lora"),
			"cutoff_len":              Counted.Default(2048),
			"lora_rank":               Counted.Default(8),
			"lora_alpha":              Measured,
			"freeze_trainable_layers": integer.Lax().OrNull().Default(2),
			"lora_dropout":            Measured,
			"module_dropout":          Measured,
			"oft_rank":                Counted,
			"oft_block_size":          Counted.Default(32),
			"pref_loss": oneOf("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo").OrNull().
				Default("sigmoid"),
			"lora_target":         Worded.Default("all"),
			"quantization_bit":    Counted,
			"quantization_type":   oneOf("fp4", "nf4").OrNull().Default("nf4"),
			"double_quantization": Switched.Default(true),
			"use_reentrant_gc":    Switched.Default(true),
			"galore_target":       Worded.Default("all"),
			"galore_rank":         Counted.Default(16),
			"galore_proj_type":    oneOf(LowRankProjections...).OrNull().Default("std"),
			"apollo_target":       Worded.Default("all"),
			"apollo_rank":         Counted.Default(16),
			"apollo_proj":         oneOf("svd", "random").OrNull().Default("random"),
			"apollo_proj_type":    oneOf("std", "right", "left").OrNull().Default("std"),
			"apollo_scale_type":   oneOf("channel", "tensor").OrNull().Default("channel"),
			"badam_mode":          oneOf("layer", "ratio").OrNull().Default("layer"),
			"image_max_pixels":    Counted.Default(768 * 768),

			"freeze_vision_tower":          Switched.Default(true),
			"freeze_multi_modal_projector": Switched.Default(true),
			"freeze_language_model":        Switched,
			"train_mm_proj_only":           Switched, // before 0.9.3
			"flash_attn":                   oneOf("auto", "disabled", "sdpa", "fa2", "fa3").OrNull().Default("auto"),
		},
		ktKeys,
		// Unplanned keys; readLLaMAFactory has the reasons.
		Anything.For(unplannedFactoryReferences+" "+unplannedFactoryKeys()),
		Anything.For("export_dir "+megatronKeys),
		Anything.For("task task_dir batch_size lang n_shot save_dir download_mode"), // of llamafactory-cli eval
		// Keys that change no memory of the training, or only that of other stages.
		Anything.For(`llamafactory_train export_size export_device export_quantization_bit export_quantization_dataset
			export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id
			adapter_folder cache_dir
			use_fast_tokenizer split_special_tokens add_tokens add_special_tokens
			new_special_tokens_config init_special_tokens model_revision low_cpu_mem_usage rope_scaling moe_aux_loss_coef
			train_from_scratch infer_backend offload_folder use_kv_cache use_v1_kernels infer_dtype hf_hub_token
			ms_hub_token om_hub_token print_param_status trust_remote_code quantization_device_map
			image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels
			video_fps video_maxlen use_audio_in_video audio_sampling_rate
			template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history streaming buffer_size
			mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples
			eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset packing neat_packing tool_format
			default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system
			loraplus_lr_ratio loraplus_lr_embedding pissa_iter pissa_convert oft_target
			galore_update_interval galore_scale apollo_update_interval apollo_scale apollo_scale_front
			badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose
			pref_beta pref_ftx pref_bco_weight dpo_label_smoothing kto_chosen_weight kto_rejected_weight
			simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_adapters
			reward_model_quantization_bit reward_model_type ld_alpha
			use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir
			swanlab_lark_webhook_url swanlab_lark_secret eaft_alpha asft_alpha
			compute_accuracy disable_shuffling
			early_stopping_steps plot_loss include_effective_tokens_per_second fp8_backend
			fp8_enable_fsdp_float8_all_gather ray_num_workers ray_init_kwargs master_addr master_port
			enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps
			profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules
			predict_with_generate sortish_sampler generation_max_length generation_num_beams generation_config
			do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
			skip_special_tokens ray_run_name ray_storage_path ray_storage_filesystem resources_per_worker
			placement_strategy`),
	)}

const unplannedFactoryReferences = "ref_model_adapters ref_model_quantization_bit"

// unplannedFactory are keys that change memory and are not planned, with their reasons.
var unplannedFactory = []struct{ key, why string }{
	{"use_mca", "Megatron core trains"},
	{"use_megatron_bridge", "Megatron core trains"},
	{"use_hyper_parallel", "HyperParallel shards the model"},
	{"use_unsloth", "unsloth replaces modules, the loss and checkpoints"},
	{"use_unsloth_gc", "unsloth's checkpoints keep the inputs of blocks on the host"},
	{"mixture_of_depths", "blocks leave tokens out"},
	{"shift_attn", "attention goes over shifted groups of tokens"},
	{"upcast_layernorm", "norms stay in fp32"},
	{"upcast_lmhead_output", "the logits are cast to fp32 by themselves"},
	{"resize_vocab", "the vocabulary grows with that of the tokenizer"},
}

// unplannedFactoryKeys returns the keys of unplannedFactory, with spaces between them.
func unplannedFactoryKeys() string {
	var list []string
	for _, u := range unplannedFactory {
		list = append(list, u.key)
	}
	return strings.Join(list, " ")
}

// megatronKeys are keys of trainings by Megatron core, under LLaMA-Factory's USE_MCA and USE_MEGATRON_BRIDGE.
const megatronKeys = `tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
	context_parallel_size virtual_pipeline_model_parallel_size sequence_parallel use_distributed_optimizer
	recompute_granularity moe_grouped_gemm overlap_grad_reduce`

// compositeFactory are the types of models whose parts LLaMA-Factory knows: COMPOSITE_MODELS in
// model/model_utils/visual.py.
const compositeFactory = `gemma3 gemma4 glm4v glm4v_moe internvl llama4 llava llava_next mistral3 mllama paligemma
	qwen2_audio qwen2_5_omni_thinker qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe`

// openFactory are the modules of encoders that it trains though the encoder is frozen: its lists lack those of GLM-4V.
const openFactory = `visual.embeddings. visual.post_conv_layernorm. visual.downsample. visual.post_layernorm.`

func readLLaMAFactory(r *Reader) error {
	r.Model("model_name_or_path")
	for _, purpose := range [][2]string{{"infer_backend", "generates"}, {"export_dir", "exports a model"},
		{"do_predict", "predicts"}, {"n_shot", "evaluates"}} {
		if training := r.Arguments.Member("do_train"); (training == nil || !On(training.Value)) && r.asks(purpose[0]) {
			return r.Fault(purpose[0], "is given without do_train: this file "+purpose[1]+", and trains nothing",
				"give the file of a training, with do_train: true")
		}
	}
	if err := cmp.Or(r.Unplanned("Megatron core trains", megatronKeys), r.refuseFactory()); err != nil {
		return err
	}
	if err := r.hostExperts(); err != nil {
		return err
	}
	r.Longest("cutoff_len")
	r.answersOfFactory()
	if err := r.lossOfFactory(); err != nil {
		return err
	}
	r.To.MostPixels = r.Integer("image_max_pixels")
	only := r.Truth("train_mm_proj_only")
	r.To.Freezes = &Freezes{Vision: only || r.Truth("freeze_vision_tower"),
		Projector:  !only && r.Truth("freeze_multi_modal_projector"),
		Language:   only || r.Truth("freeze_language_model"),
		ModelTypes: strings.Fields(compositeFactory), Contained: true, Open: strings.Fields(openFactory)}
	full := r.Word("finetuning_type") == "full"
	if err := r.optimizerOfFactory(); err != nil {
		return err
	}
	if r.Truth("pure_bf16") {
		r.To.Weights = "bf16"
	} else if r.Truth("use_badam") {
		r.To.Weights = r.Compute()
	} else if r.To.Weights = r.Compute(); full { // _setup_full_tuning in model/adapter.py
		r.To.TrainedIn32 = Always
	}
	// prepare_model_for_training in model/model_utils/checkpointing.py
	r.Set("gradient_checkpointing", "disable_gradient_checkpointing", !r.Truth("disable_gradient_checkpointing"))
	reentrant := &strict.Value{Kind: '{'}
	Give(reentrant, "use_reentrant", r.At("use_reentrant_gc"),
		strict.Of(r.Truth("use_reentrant_gc") && r.To.HostExperts == nil))
	Give(r.Arguments, "gradient_checkpointing_kwargs", r.At("use_reentrant_gc"), reentrant)
	r.To.FSDP2WithoutReentrant = true
	if r.Truth("enable_liger_kernel") && r.ownLoss() {
		r.To.LigerModules = true // the model gets no labels, and returns all logits
	} else if r.Truth("enable_liger_kernel") {
		r.Set("use_liger_kernel", "enable_liger_kernel", true)
	}
	r.To.Attention = map[string]string{"disabled": "eager", "sdpa": "sdpa", "fa2": "flash",
		"fa3": "flash"}[r.Word("flash_attn")]
	r.RouterLoss(r.Find("moe_aux_loss_coef"), "ernie4_5_moe", "granitemoe", "llama4", "mixtral", "olmoe", "qwen2_moe",
		"qwen3_moe") // configure_moe in model/model_utils/moe.py
	if r.Truth("fp8") {
		r.Note("fp8", "is true, which is not planned: the job is planned without it, in the type of the weights")
	}
	if err := r.quantizeFactory(); err != nil || full || r.freezeFactory() {
		return err
	}
	return r.adaptFactory()
}

// ownLoss reports whether LLaMA-Factory gives the Trainer a loss of its own: src/llamafactory/train/sft/trainer.py.
func (r *Reader) ownLoss() bool {
	return r.Word("stage") == "sft" &&
		(r.Truth("use_dft_loss") || r.Truth("use_eaft_loss") || r.Truth("use_asft_loss"))
}

// lossOfFactory reads that loss, in its order. DFT's takes what the model's takes.
func (r *Reader) lossOfFactory() error {
	const key = "use_asft_loss"
	switch {
	case !r.ownLoss() || r.Truth("use_dft_loss") && !r.Truth(key):
	case !r.Truth(key):
		r.To.WeighsEntropy = true
		r.Note("use_eaft_loss", "is true: the plan has labels for all tokens, of whose logits the loss has a copy")
	case r.Truth("use_dft_loss") || r.Truth("use_eaft_loss"):
		return r.Fault(key, "is true beside another loss, which takes no logits of a reference model",
			"remove one of the two")
	case r.Word("finetuning_type") == "lora" && r.Word("ref_model") == "":
		return r.Fault(key, "is true, but LLaMA-Factory makes no reference model for LoRA", "add ref_model")
	case r.Truth("enable_liger_kernel"):
		return r.Fault(key, "is true beside enable_liger_kernel, whose model returns no logits",
			"remove one of the two")
	default:
		r.To.Diverges, r.To.Judge = true, r.Word("ref_model")
		r.Note(key, "is true: a frozen model is loaded, and its logits stay until the loss is computed")
	}
	return nil
}

// answersOfFactory reads what stages train on answers: src/llamafactory/train, and create_ref_model in
// train/trainer_utils.py.
func (r *Reader) answersOfFactory() {
	switch r.Word("stage") {
	case "rm":
		r.To.ValueHead = true
		r.Note("stage", "is rm: a head with one output for every token stands beside the language model's, and passes "+
			"have two sequences for each of a micro batch")
		return
	case "dpo":
		loss := r.Word("pref_loss")
		r.To.Answers = &Answers{Pairs: true, Reference: loss != "orpo" && loss != "simpo"}
	case "kto":
		r.To.Answers = &Answers{Reference: true, Mismatched: true}
	default:
		return
	}
	r.To.Answers.Model = r.Word("ref_model")
	r.NoteAnswers("stage")
}

// asks reports whether a key of the file or of its TrainingArguments asks for something.
func (r *Reader) asks(key string) bool {
	m := r.Arguments.Member(key)
	return m != nil && On(m.Value) || r.Knows(key) && On(r.Find(key))
}

// refuseFactory refuses what changes memory and is not planned.
func (r *Reader) refuseFactory() error {
	stages := map[string]string{"ppo": "holds a reward model, a reference model and a value head, and generates"}
	if err := cmp.Or(r.OneOfThese("stage", stages),
		r.Unplanned("the reference model has an adapter or is quantized by itself", unplannedFactoryReferences),
		r.Unplanned("training goes on with an adapter whose adapter_config.json says its rank",
			"adapter_name_or_path")); err != nil {
		return err
	}
	if v := r.Find("mixture_of_depths"); v != nil && v.Text == "convert" {
		return r.Fault("mixture_of_depths", "is convert: the blocks of mixture-of-depth 1.2.0, the latest release, do "+
			"not run in Llama of transformers 4.55, which LLaMA-Factory needs at least, or later", "remove the key")
	}
	for _, u := range unplannedFactory {
		if err := r.Unplanned(u.why, u.key); err != nil {
			return err
		}
	}
	if v := r.Find("quantization_method"); v != nil && v.Text != "bnb" && v.Text != "bitsandbytes" {
		return r.Fault("quantization_method", fmt.Sprintf("is %s, which is not planned yet", v), "plimsoll plans bnb")
	}
	return nil
}

// quantizeFactory reads the quantization: configure_quantization in model/model_utils/quantization.py.
func (r *Reader) quantizeFactory() error {
	const key = "quantization_bit"
	switch bits := r.Integer(key); {
	case !r.Gives(key):
		return nil
	case r.Word("finetuning_type") != "lora" && r.Word("finetuning_type") != "oft":
		return r.Fault(key, "is given, but LLaMA-Factory quantizes only for LoRA and OFT",
			"remove it, or set finetuning_type to lora")
	case bits == 8:
		return r.Quantize(key, map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	case bits != 4:
		return r.Fault(key, fmt.Sprintf("is %d: bitsandbytes quantizes to 4 or 8 bits", bits), "set it to 4 or 8")
	}
	computed := strict.Of(ElementNames[r.To.Weights])
	if r.To.Weights == "" {
		computed = nil
	}
	return r.Quantize(key, map[string]*strict.Value{"load_in_4bit": strict.Of(true),
		"bnb_4bit_quant_type":       strict.Of(r.Word("quantization_type")),
		"bnb_4bit_use_double_quant": strict.Of(r.Truth("double_quantization")),
		"bnb_4bit_compute_dtype":    computed, "bnb_4bit_quant_storage": computed})
}

// freezeFactory reads which part of the model is trained.
func (r *Reader) freezeFactory() bool {
	if r.Word("finetuning_type") != "freeze" {
		return false
	}
	r.freezePart("")
	r.To.Freeze.Spread, r.To.Freeze.Widens = r.Truth("use_llama_pro"), !r.Truth("pure_bf16")
	return true
}

// freezePart reads the keys of a section that say which layers and modules are trained.
func (r *Reader) freezePart(section string) {
	key := section + "freeze_trainable_layers"
	r.To.Freeze = &Freeze{Layers: int(r.Integer(key)), Modules: []string{"all"}, Place: r.Place(key)}
	if v := Separated(r.Find(section + "freeze_trainable_modules")); On(v) {
		r.To.Freeze.Modules = v.Texts()
	}
	if v := Separated(r.Find(section + "freeze_extra_modules")); On(v) {
		r.To.Freeze.Extra = v.Texts()
	}
}

// adaptFactory reads the adapter: _setup_lora_tuning in model/adapter.py.
func (r *Reader) adaptFactory() error {
	alpha := r.Find("lora_alpha")
	if alpha == nil {
		alpha = strict.Of(int(2 * r.Integer("lora_rank")))
	}
	targets := Separated(r.Value("lora_target"))
	if len(targets.Elements) == 1 && strings.EqualFold(targets.Elements[0].Text, "all") {
		targets = strict.Of("all-linear")
	}
	r.To.AddsInFull = true // peft 0.18
	if r.Truth("use_llama_pro") {
		r.Note("use_llama_pro", "is true: the plan adapts all layers, and LLaMA-Factory only the expanded ones")
	}
	if r.Word("finetuning_type") == "oft" { // oft_target is read by nothing
		return r.Adapt("oft_block_size", map[string]*strict.Value{"peft_type": strict.Of("OFT"),
			"r": strict.Of(int(r.Integer("oft_rank"))), "oft_block_size": r.Value("oft_block_size"),
			"target_modules": targets, "module_dropout": r.Find("module_dropout"),
			"modules_to_save": Separated(r.Find("additional_target"))})
	}
	return r.Adapt("lora_target", map[string]*strict.Value{"r": r.Value("lora_rank"), "lora_alpha": alpha,
		"target_modules": targets, "lora_dropout": r.Find("lora_dropout"), "use_rslora": r.Find("use_rslora"),
		"use_dora": r.Find("use_dora"), "modules_to_save": Separated(r.Find("additional_target"))})
}
