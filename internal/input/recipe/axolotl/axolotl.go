// Package axolotl reads configurations of axolotl.
package axolotl

import (
	"cmp"
	_ "embed"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of axolotl's configurations.
var Kind = &recipe.Kind{Name: "axolotl configuration", Flag: recipe.ConfigFlag, Program: &axolotl,
	ConfigIn: "1", OnlyByFile: true, EveryDevice: true, ByAccelerate: true,
	Commands: map[string]string{"axolotl train": "axolotl_train", "axolotl/cli/train.py": "axolotl_train",
		"scripts/finetune.py": "axolotl_train"},
	Marks: "axolotl_train base_model base_model_config sequence_len sample_packing dataset_prepared_path " +
		"micro_batch_size",
	Settings: recipe.SettingKeys{recipe.MicroBatch: {Path: "micro_batch_size"},
		recipe.Accumulation:          {Path: "gradient_accumulation_steps"},
		recipe.EvaluationBatch:       {Path: "eval_batch_size"},
		recipe.SavesModelOnly:        {Path: "save_only_model", Unset: false},
		recipe.BF16:                  recipe.TrainerKeys[recipe.BF16],
		recipe.FP16:                  recipe.TrainerKeys[recipe.FP16],
		recipe.GradientCheckpointing: {Path: "gradient_checkpointing"}, recipe.OptimizerName: {Path: "optimizer"}}}

// axolotl is axolotl's configuration: src/axolotl/utils/schemas, with the older names of keys that it still takes.
var axolotl = recipe.Program{Name: "axolotl", Package: "axolotl", Release: version.Version{Minor: 19},
	Oldest: version.Version{Minor: 8, Patch: 1}, Read: func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: strict.Merge(rule.Ignored(ignored),
		rule.Measured.For("cpo_alpha"),
		rule.NameOrNames.For("dpo_loss_type"),
		rule.Worded.For("base_model model_type rl lora_model_dir attn_implementation eval_strategy"),
		rule.Switched.Or(strict.Text("legacy", "disk", "hidden_states")).OrNull().For("activation_offloading"),
		rule.Switched.For(`precompute_ref_log_probs load_in_8bit load_in_4bit fp16 bfloat16 float16
			lora_target_linear peft_use_dora peft_use_rslora quantize_moe_experts sample_packing tf32
			flash_attention sdp_attention eager_attention flex_attention xformers_attention
			lora_fan_in_fan_out flash_optimum reward_model process_reward_model liger_fused_linear_cross_entropy torch_compile auto_find_batch_size
			group_by_length dataloader_pin_memory save_only_model`),
		rule.NameOrNames.For("lora_target_modules lora_target_parameters lora_modules_to_save unfrozen_parameters"),
		rule.Counted.For(`batch_size gradient_accumulation_steps lora_r tensor_parallel_size context_parallel_size
			sequence_parallel_degree dp_shard_size dp_replicate_size ddp_bucket_cap_mb
			eval_batch_size torch_empty_cache_steps fsdp_version num_labels`),
		rule.Switched.For("use_ray"),
		rule.Counted.Default(1).For("ray_num_workers"),
		rule.Count.Lax().OrNull().For("dataloader_num_workers dataloader_prefetch_factor"),
		rule.Measured.For(`lora_alpha lora_dropout learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
			max_grad_norm val_set_size`),
		strict.Keys{
			"bf16": strict.Text("auto", "full").Or(rule.Switched).OrNull().
				Default("auto"),
			"adapter":                          rule.Worded,
			"sequence_len":                     rule.Counted.Default(512),
			"micro_batch_size":                 rule.Counted.Default(1),
			"optimizer":                        rule.Worded.Default("adamw_torch_fused"),
			"gradient_checkpointing":           rule.Switched.Or(strict.Text("offload", "offload_disk")).OrNull(),
			"gradient_checkpointing_kwargs":    rule.Free.OrNull(),
			"deepspeed":                        rule.Text.Or(rule.Free).OrNull(),
			"fsdp":                             rule.Text.Or(rule.Names).OrNull(),
			"fsdp_config":                      rule.Free.OrNull(),
			"accelerator_config":               rule.Free.OrNull(),
			"bnb_config_kwargs":                rule.Free.OrNull(),
			"model_quantization_config":        rule.Worded,
			"model_quantization_config_kwargs": rule.Free.OrNull(),
			"plugins":                          rule.Names.OrNull(),
			"qat": strict.Object(rule.Worded.For("activation_dtype weight_dtype"),
				rule.Switched.For("quantize_embedding"),
				rule.Counted.Default(32).For("group_size")).AndOthers().OrNull(),
			"optim_target_modules":  rule.NameOrNames,
			"gptq":                  rule.Switched,
			"freeze_mm_modules":     rule.Switched,
			"torch_compile_backend": rule.Worded,
			"torch_compile_mode":    rule.Worded,
			"cut_cross_entropy":     rule.Switched.Default(true),
			"eval_sequence_len":     rule.Counted,
			"pad_to_multiple_of":    rule.Counted,

			"peft_autocast_adapter_dtype": rule.Switched.Default(true),
			"overrides_of_model_config":   rule.Free.OrNull(),
		},
		rule.Anything.For(unplannedLoading+" "+noted+" optim_args test_datasets"),
		rule.Anything.For(strings.Join([]string{unplannedStages, unplannedModels, unplannedPasses,
			unplannedAdapters, unplannedRest, unplannedPart, removed, unplannedAnswers, unplannedKernels}, " ")),
		rule.Worded.For("expert_backend experts_implementation"),
		rule.Switched.For(`use_scattermoe use_sonicmoe moe_bnb_fast llama4_linearized_experts tiled_mlp
			tiled_mlp_use_original_mlp`),
		rule.Counted.For("tiled_mlp_num_shards"),
		rule.Anything.For(saving),
	)}

//go:embed ignored.txt
var ignored string

// Keys that change memory and are not planned.
const (
	unplannedStages  = "ebft trl"
	unplannedAnswers = "rl_adapter_ref_model dpo_use_weighting dpo_use_liger_kernel"
	unplannedModels  = `use_onebitllms fp32_norms shrink_embeddings`
	unplannedPasses  = `layer_offloading selective_checkpointing
		chunked_cross_entropy sage_attention
		s2_attention unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o use_eaft`
	unplannedAdapters = `lora_rank_pattern lora_alpha_pattern peft_layers_to_transform
		peft_layers_pattern peft_layer_replication peft_trainable_token_indices peft_ensure_weight_tying lora_on_cpu`
	unplannedKernels = `use_dsv4_kernels use_glm_dsa_kernels dsv4_fp8_nonexpert_mode dsv4_fp8_lora_kernel
		dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode gemma4_fp8_nonexpert gemma4_nf4_nonexpert
		nonexpert_quantization nvfp4_merge_aware`
	unplannedRest = "fp8 expert_parallel_size gpu_memory_limit max_memory"
	unplannedPart = "lisa_step_interval lisa_n_layers"

	// removed are keys with which axolotl ends (utils/schemas/deprecated.py).
	removed = "flash_attn_rms_norm rope_scaling dpo_norm_loss dpo_use_logits_to_keep dpo_generate_during_eval"

	unplannedLoading = "deepcompile trainer_cls"

	// Keys that only get a note.
	noted = `use_kernels embeddings_skip_upcast qlora_sharded_model_loading gc_steps gc_collect_steps do_causal_lm_eval
		do_bench_eval eval_table_size device_map ple_cpu_offload overrides_of_model_kwargs type_of_model image_size
		processor_kwargs flash_attn_d512 large_head_attention gemma4_hybrid_attn_impl sdpa_varlen fused_attn_kernel
		noisy_embedding_alpha fp8_config`

	// Keys of kernels that take less memory than those that are planned.
	saving = `liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_cross_entropy liger_swiglu
		liger_rms_norm_gated lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel
		flash_attn_cross_entropy flash_attn_fuse_mlp`
)

// reader reads a configuration.
type reader struct{ *recipe.Reader }

// read reads a file.
func (r *reader) read() error {
	r.Model("base_model")
	if err := r.refuse(); err != nil {
		return err
	}
	if name := r.Value("optimizer"); name.Text == "muon" { // _configure_custom_optimizer in core/builders/base.py
		r.To.Optimizer = "muon-dion"
	} else if !slices.Contains(recipe.TrainerOptimizers, name.Text) {
		return r.Fault("optimizer", fmt.Sprintf("is %s, which is not planned yet", name),
			cmp.Or(strict.DidYouMean(name.Text, recipe.TrainerOptimizers), "plimsoll plans the Trainer's optimizers"))
	}
	r.Longest("sequence_len")
	if r.Gives("pad_to_multiple_of") {
		r.PadTo("pad_to_multiple_of")
	}
	r.remarks()
	r.ray()
	if r.Truth("freeze_mm_modules") { // utils/freeze.py
		r.To.Freezes = &recipe.Freezes{Vision: true, Projector: true,
			Named: strings.Fields("vision_tower vision_model multi_modal_projector visual")}
	}
	if r.Truth("tiled_mlp") {
		r.To.TilesMLP = &recipe.Tiles{Count: int(r.Integer("tiled_mlp_num_shards"))}
		if r.To.ScattersExperts {
			return r.Fault("tiled_mlp", "is true with use_scattermoe: blocks of experts run in tiles, which is not "+
				"planned yet", "set one of the two to false")
		}
		if !r.Truth("tiled_mlp_use_original_mlp") {
			r.Note("tiled_mlp", "is true: axolotl compiles the tiles, which may keep less than the plan says")
		}
	}
	r.To.LinearizesExperts = r.Truth("llama4_linearized_experts")
	if r.Truth("gptq") {
		r.To.Packed = "gptq"
	}
	r.arguments()
	r.types()
	return cmp.Or(r.shard(), r.attention(), r.checkpoint(), r.quantize(),
		r.adapt(), r.qat(), r.unfrozen())
}

func (r *reader) refuse() error {
	if err := r.answers(); err != nil {
		return err
	}
	if recipe.On(r.Find("flash_optimum")) {
		return r.Fault("flash_optimum", "is true: axolotl then imports BetterTransformer of optimum 1.16.2, which it "+
			"pins, and which cannot be imported beside transformers 5", "remove the key, or set attn_implementation")
	}
	if err := cmp.Or(r.Unplanned("it is of another training than that of a language model", unplannedStages),
		r.reward(),
		r.Unplanned("it changes the model's weights or parts", unplannedModels),
		r.Unplanned("it changes what the passes hold", unplannedPasses),
		r.Unplanned("it changes what the adapter holds", unplannedAdapters),
		r.Unplanned("training goes on with an adapter whose adapter_config.json says its rank", "lora_model_dir"),
		r.Unplanned("it divides or moves the model", unplannedRest),
		r.Unplanned("it trains a part of the layers", unplannedPart), r.removed(),
		r.Unplanned("it changes the model or the loop of the training", unplannedLoading), r.placement()); err != nil {
		return err
	}
	return r.plugins()
}

// ray reads the ranks that Ray starts (do_cli in cli/train.py): one GPU each, wherever Ray finds them.
func (r *reader) ray() {
	const key, ranks = "use_ray", "ray_num_workers"
	if r.Truth(key) {
		r.To.PerNode = int(r.Integer(ranks))
		r.Note(ranks, fmt.Sprintf("is %d, and use_ray is true: Ray starts so many ranks, and the plan has them on one "+
			"node; --gpus and --nodes say how they lie", r.To.PerNode))
	} else if r.Gives(ranks) {
		r.Note(ranks, "is given without use_ray: axolotl does not read it")
	}
}

// removed refuses keys that axolotl refuses.
func (r *reader) removed() error {
	for key := range strings.FieldsSeq(removed) {
		if r.Gives(key) && (key != "flash_attn_rms_norm" && key != "rope_scaling" || recipe.On(r.Find(key))) {
			return r.Fault(key, "is no longer supported: axolotl ends with an error", "remove the key")
		}
	}
	return nil
}

// arguments sets what axolotl gives to TrainingArguments: src/axolotl/core/builders/base.py.
func (r *reader) arguments() {
	for _, pair := range [][2]string{{"micro_batch_size", "per_device_train_batch_size"},
		{"gradient_accumulation_steps", "gradient_accumulation_steps"}, {"optimizer", "optim"}} {
		if pair[1] == "optim" && r.To.Optimizer != "" {
			continue
		}
		recipe.Give(r.Arguments, pair[1], r.At(pair[0]), cmp.Or(r.Value(pair[0]), strict.Of(1)))
	}
	if r.Gives("batch_size") && !r.Gives("gradient_accumulation_steps") { // normalize_config
		r.Set("gradient_accumulation_steps", "batch_size",
			max(1, int(r.Integer("batch_size")/r.Integer("micro_batch_size"))))
	}
	for _, key := range strings.Fields(`learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm tf32
		torch_compile torch_compile_backend group_by_length dataloader_pin_memory dataloader_num_workers
		dataloader_prefetch_factor ddp_bucket_cap_mb accelerator_config torch_empty_cache_steps auto_find_batch_size
		optim_target_modules save_only_model torch_compile_mode`) {
		r.Pass(key, key)
	}
	for _, key := range strings.Fields(saving) {
		if recipe.On(r.Find(key)) {
			r.Note(key, "has kernels that keep less for the backward pass than the plan says")
		}
	}
	if v := r.Find("optim_args"); recipe.On(v) {
		joined := v.Text
		for i, m := range v.Members {
			joined += strings.Repeat(",", min(1, i)) + m.Name + "=" + m.Value.Text
		}
		r.Set("optim_args", "optim_args", joined)
	}
	if recipe.On(r.Find("relora")) || recipe.On(r.Find("relora_steps")) {
		r.Note("relora", "merges the adapter into the model every so many steps: the plan is of the steps between")
	}
	for _, key := range []string{"model_config", "overrides_of_model_config"} {
		if v := r.Find(key); v != nil {
			r.RouterLoss(v.Find("output_router_logits"))
		}
	}
	cut := r.pluginNamed("CutCrossEntropyPlugin") && r.Truth("cut_cross_entropy")
	if cut || r.Truth("liger_fused_linear_cross_entropy") {
		r.To.FusedLoss, r.To.FusedInTraining = true, !cut
	}
	r.evaluation()
}

// evaluation reads whether axolotl evaluates: with a share of the data or with data of its own, unless a strategy says
// otherwise (_configure_save_and_eval_strategy in src/axolotl/core/builders/base.py). Its batches are those of the
// training (normalize_config in src/axolotl/utils/config).
func (r *reader) evaluation() {
	evaluates := r.Number("val_set_size") > 0 || recipe.On(r.Find("test_datasets"))
	if !evaluates || r.Word("eval_strategy") == "no" {
		return
	}
	r.Set("eval_strategy", "val_set_size", "epoch")
	r.Set("per_device_eval_batch_size", "eval_batch_size", int(cmp.Or(r.Integer("eval_batch_size"),
		r.Integer("micro_batch_size"))))
	r.Set("prediction_loss_only", "val_set_size", true)
}

func (r *reader) pluginNamed(name string) bool {
	return slices.ContainsFunc(r.List("plugins"), func(p string) bool { return strings.HasSuffix(p, name) })
}

// types reads the types of weights and of autocast: resolve_dtype in src/axolotl/utils/config.
func (r *reader) types() {
	bf16 := r.Value("bf16")
	if bf16.IsAuto() {
		r.Note("bf16", "is auto: the plan is for GPUs that compute in bf16")
	}
	brain := recipe.On(bf16)
	half := r.Truth("fp16") && !brain
	r.Set("bf16", "bf16", brain || r.Truth("bfloat16"))
	r.Set("fp16", "fp16", half)
	switch {
	case brain || r.Truth("bfloat16"):
		r.To.Weights = "bf16"
	case r.Truth("load_in_8bit") || half || r.Truth("float16"):
		r.To.Weights = "fp16"
	default:
		r.To.Weights = "fp32"
	}
	// axolotl replaces accelerate's preparation for FSDP2, which converts weights.
	r.To.TrainedIn32, r.To.UnitsAtEnds = recipe.UnderFSDP1, &recipe.UnitsAtEnds{}
}
