// Package llamafactory reads configurations of LLaMA-Factory, of its trainer and of its trainer v1.
package llamafactory

import (
	"cmp"
	_ "embed"
	"fmt"
	"strings"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of LLaMA-Factory's configurations.
var Kind = &recipe.Kind{Name: "LLaMA-Factory configuration", Flag: recipe.ConfigFlag, Program: &llamaFactory,
	Marks: "llamafactory_train finetuning_type cutoff_len lora_target infer_backend export_dir dataset_dir",
	Settings: recipe.SettingKeys{recipe.MicroBatch: recipe.TrainerKeys[recipe.MicroBatch],
		recipe.Accumulation:          recipe.TrainerKeys[recipe.Accumulation],
		recipe.EvaluationBatch:       recipe.TrainerKeys[recipe.EvaluationBatch],
		recipe.SavesModelOnly:        recipe.TrainerKeys[recipe.SavesModelOnly],
		recipe.GradientCheckpointing: {Path: "disable_gradient_checkpointing", Says: inverse},
		recipe.OptimizerName:         recipe.TrainerKeys[recipe.OptimizerName],
		recipe.BF16:                  recipe.TrainerKeys[recipe.BF16],
		recipe.FP16:                  recipe.TrainerKeys[recipe.FP16],
		recipe.Liger:                 {Path: "enable_liger_kernel"}},
	LaunchVariables: []string{"NPROC_PER_NODE", "NNODES"},
	ConfigIn:        "1", EveryDevice: true, Forced: "FORCE_TORCHRUN", Abbreviates: true,
	Commands: map[string]string{"llamafactory-cli train": "llamafactory_train", "lmf train": "llamafactory_train",
		"src/train.py": "llamafactory_train", "src/train_bash.py": "llamafactory_train",
		"llamafactory/launcher.py": "llamafactory_train"}}

func inverse(x any) any { return x != true }

// llamaFactory is LLaMA-Factory: the arguments in src/llamafactory/hparams.
var llamaFactory = recipe.Program{Name: "LLaMA-Factory", Hosts: true, Package: "llamafactory",
	Ray:     [2]string{"USE_RAY", "ray_num_workers"}, // _ray_training_function in train/tuner.py
	Release: version.Version{Minor: 9, Patch: 5}, Oldest: version.Version{Minor: 9, Patch: 1},
	Read: func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: strict.Merge(rule.Ignored(ignored),
		rule.Worded.For("model_name_or_path adapter_name_or_path additional_target quantization_method"),
		rule.Worded.For("ref_model freeze_trainable_modules freeze_extra_modules"),
		rule.Counted.Default(1).For("ray_num_workers"),
		rule.Switched.For(`use_muon use_llama_pro disable_gradient_checkpointing pure_bf16 use_rslora use_dora pissa_init
			double_quantization fp8 enable_liger_kernel create_new_adapter use_dft_loss use_eaft_loss use_asft_loss
			use_galore galore_layerwise use_apollo apollo_layerwise use_badam use_adam_mini`),
		strict.Keys{
			"stage":                   strict.Text("pt", "sft", "rm", "ppo", "dpo", "kto").OrNull().Default("sft"),
			"finetuning_type":         strict.Text("lora", "oft", "freeze", "full").OrNull().Default("lora"),
			"cutoff_len":              rule.Counted.Default(2048),
			"lora_rank":               rule.Counted.Default(8),
			"lora_alpha":              rule.Measured,
			"freeze_trainable_layers": rule.Integer.Lax().OrNull().Default(2),
			"lora_dropout":            rule.Measured,
			"module_dropout":          rule.Measured,
			"oft_rank":                rule.Counted,
			"oft_block_size":          rule.Counted.Default(32),
			"pref_loss": strict.Text("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo").OrNull().
				Default("sigmoid"),
			"lora_target":         rule.Worded.Default("all"),
			"quantization_bit":    rule.Counted,
			"quantization_type":   strict.Text("fp4", "nf4").OrNull().Default("nf4"),
			"double_quantization": rule.Switched.Default(true),
			"use_reentrant_gc":    rule.Switched.Default(true),
			"galore_target":       rule.Worded.Default("all"),
			"galore_rank":         rule.Counted.Default(16),
			"galore_proj_type":    strict.Text(recipe.LowRankProjections...).OrNull().Default("std"),
			"apollo_target":       rule.Worded.Default("all"),
			"apollo_rank":         rule.Counted.Default(16),
			"apollo_proj":         strict.Text("svd", "random").OrNull().Default("random"),
			"apollo_proj_type":    strict.Text("std", "right", "left").OrNull().Default("std"),
			"apollo_scale_type":   strict.Text("channel", "tensor").OrNull().Default("channel"),
			"badam_mode":          strict.Text("layer", "ratio").OrNull().Default("layer"),
			"image_max_pixels":    rule.Counted.Default(768 * 768),

			"freeze_vision_tower":          rule.Switched.Default(true),
			"freeze_multi_modal_projector": rule.Switched.Default(true),
			"freeze_language_model":        rule.Switched,
			"train_mm_proj_only":           rule.Switched, // before 0.9.3
			"flash_attn": strict.Text("auto", "disabled", "sdpa", "fa2", "fa3").OrNull().
				Default("auto"),
		},
		ktKeys,
		// Unplanned keys; read has the reasons.
		rule.Anything.For(unplannedReferences+" "+unplannedKeys()),
		rule.Anything.For("export_dir "+megatronKeys),
		rule.Anything.For("task task_dir batch_size lang n_shot save_dir download_mode"), // of llamafactory-cli eval
		rule.Anything.For("quantization_device_map train_from_scratch use_v1_kernels moe_aux_loss_coef "+
			"loraplus_lr_ratio "+newTokens),
	)}

// newTokens are keys that make the vocabulary longer by as many entries as they name.
const newTokens = "add_tokens add_special_tokens new_special_tokens_config"

//go:embed ignored.txt
var ignored string

const unplannedReferences = "ref_model_adapters ref_model_quantization_bit"

// unplanned are keys that change memory and are not planned, with their reasons.
var unplanned = []struct{ key, why string }{
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

// unplannedKeys returns the keys of unplanned, with spaces between them.
func unplannedKeys() string {
	var list []string
	for _, u := range unplanned {
		list = append(list, u.key)
	}
	return strings.Join(list, " ")
}

// megatronKeys are keys of trainings by Megatron core, under LLaMA-Factory's USE_MCA and USE_MEGATRON_BRIDGE.
const megatronKeys = `tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
	context_parallel_size virtual_pipeline_model_parallel_size sequence_parallel use_distributed_optimizer
	recompute_granularity moe_grouped_gemm overlap_grad_reduce`

// composite are the types of models whose parts LLaMA-Factory knows: COMPOSITE_MODELS in
// model/model_utils/visual.py.
const composite = `gemma3 gemma4 glm4v glm4v_moe internvl llama4 llava llava_next mistral3 mllama paligemma
	qwen2_audio qwen2_5_omni_thinker qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe`

// open are the modules of encoders that it trains though the encoder is frozen: its lists lack those of GLM-4V.
const open = `visual.embeddings. visual.post_conv_layernorm. visual.downsample. visual.post_layernorm.`

// reader reads a configuration.
type reader struct{ *recipe.Reader }

// read reads a file.
func (r *reader) read() error {
	r.Model("model_name_or_path")
	training := r.Arguments.Member("do_train")
	trains := training != nil && recipe.On(training.Value)
	for _, purpose := range [][2]string{{"infer_backend", "generates"}, {"export_dir", "exports a model"},
		{"do_predict", "predicts"}, {"n_shot", "evaluates"}} {
		if !trains && r.asks(purpose[0]) {
			return r.Fault(purpose[0], "is given without do_train: this file "+purpose[1]+", and trains nothing",
				"give the file of a training, with do_train: true")
		}
	}
	if err := cmp.Or(r.Unplanned("Megatron core trains", megatronKeys), r.refuse()); err != nil {
		return err
	}
	if err := r.hostExperts(); err != nil {
		return err
	}
	r.Longest("cutoff_len")
	r.answers()
	if err := r.loss(); err != nil {
		return err
	}
	r.To.MostPixels = r.Integer("image_max_pixels")
	only := r.Truth("train_mm_proj_only")
	r.To.Freezes = &recipe.Freezes{Vision: only || r.Truth("freeze_vision_tower"),
		Projector:  !only && r.Truth("freeze_multi_modal_projector"),
		Language:   only || r.Truth("freeze_language_model"),
		ModelTypes: strings.Fields(composite), Contained: true, Open: strings.Fields(open)}
	full := r.Word("finetuning_type") == "full"
	if err := r.optimizer(); err != nil {
		return err
	}
	if r.Truth("pure_bf16") {
		r.To.Weights = "bf16"
	} else if r.Truth("use_badam") {
		r.To.Weights = r.Compute()
	} else if r.To.Weights = r.Compute(); full { // _setup_full_tuning in model/adapter.py
		r.To.TrainedIn32 = recipe.Always
	}
	// prepare_model_for_training in model/model_utils/checkpointing.py
	r.Set("gradient_checkpointing", "disable_gradient_checkpointing", !r.Truth("disable_gradient_checkpointing"))
	reentrant := &strict.Value{Kind: '{'}
	recipe.Give(reentrant, "use_reentrant", r.At("use_reentrant_gc"),
		strict.Of(r.Truth("use_reentrant_gc") && r.To.HostExperts == nil))
	recipe.Give(r.Arguments, "gradient_checkpointing_kwargs", r.At("use_reentrant_gc"), reentrant)
	r.To.FSDP2WithoutReentrant = true
	if r.Truth("enable_liger_kernel") && r.ownLoss() {
		r.To.LigerModules = true // the model gets no labels, and returns all logits
	} else if r.Truth("enable_liger_kernel") {
		r.Set("use_liger_kernel", "enable_liger_kernel", true)
	}
	r.To.Attention = map[string]string{"disabled": "eager", "sdpa": "sdpa", "fa2": "flash",
		"fa3": "flash3"}[r.Word("flash_attn")]
	r.RouterLoss(r.Find("moe_aux_loss_coef"), "ernie4_5_moe", "granitemoe", "llama4", "mixtral", "olmoe", "qwen2_moe",
		"qwen3_moe") // configure_moe in model/model_utils/moe.py
	if r.Truth("fp8") {
		r.Note("fp8", "is true, which is not planned: the job is planned without it, in the type of the weights")
	}
	if err := r.quantize(); err != nil || full || r.freeze() {
		return err
	}
	return r.adapt()
}

// asks reports whether a key of the file or of its TrainingArguments asks for something.
func (r *reader) asks(key string) bool {
	m := r.Arguments.Member(key)
	return m != nil && recipe.On(m.Value) || r.Knows(key) && recipe.On(r.Find(key))
}

// refuse refuses what changes memory and is not planned.
func (r *reader) refuse() error {
	stages := map[string]string{"ppo": "holds a reward model, a reference model and a value head, and generates"}
	if err := cmp.Or(r.OneOfThese("stage", stages),
		r.Unplanned("the reference model has an adapter or is quantized by itself", unplannedReferences),
		r.Unplanned("training goes on with an adapter whose adapter_config.json says its rank",
			"adapter_name_or_path")); err != nil {
		return err
	}
	if v := r.Find("mixture_of_depths"); v != nil && v.Text == "convert" {
		return r.Fault("mixture_of_depths", "is convert: the blocks of mixture-of-depth 1.2.0, the latest release, do "+
			"not run in Llama of transformers 4.55, which LLaMA-Factory needs at least, or later", "remove the key")
	}
	for key := range strings.FieldsSeq(newTokens) {
		if recipe.On(r.Find(key)) {
			r.Note(key, "makes the vocabulary longer, to a multiple of 64: the plan has it as it was published")
		}
	}
	if recipe.On(r.Find("use_v1_kernels")) {
		r.Note("use_v1_kernels", "has kernels that keep less for the backward pass than the plan says")
	}
	if n := r.Integer("ray_num_workers"); n > 1 {
		r.Note("ray_num_workers", fmt.Sprintf("is %d, and counts only where the environment has USE_RAY=1: --gpus %d "+
			"plans so many ranks, and so does a script that sets it", n, n))
	}
	if recipe.On(r.Find("train_from_scratch")) {
		r.Note("train_from_scratch", "has weights made instead of loaded: the plan loads them")
	}
	if v := r.Find("quantization_device_map"); recipe.On(v) {
		return r.Fault("quantization_device_map", "spreads the quantized model over the GPUs of one process, which is "+
			"not planned", "remove the key")
	}
	for _, u := range unplanned {
		if err := r.Unplanned(u.why, u.key); err != nil {
			return err
		}
	}
	if v := r.Find("quantization_method"); v != nil && v.Text != "bnb" && v.Text != "bitsandbytes" {
		return r.Fault("quantization_method", fmt.Sprintf("is %s, which is not planned yet", v), "plimsoll plans bnb")
	}
	return nil
}
