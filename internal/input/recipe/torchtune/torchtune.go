// Package torchtune reads configurations of torchtune's recipes.
package torchtune

import (
	"cmp"
	_ "embed"
	"fmt"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// component is the name of a class or a function in a section of torchtune.
const component = "_component_"

// Kind is the kind of torchtune's configurations.
var Kind = &recipe.Kind{Name: "torchtune configuration", Flag: recipe.ConfigFlag, Program: &torchtune,
	Marks: "tune_run checkpointer metric_logger", ConfigIn: "config", OnlyByFile: true,
	Bundled:  "recipes/configs/%s.yaml",
	Commands: map[string]string{"tune run": "tune_run"},
	Settings: recipe.SettingKeys{recipe.MicroBatch: {Path: "batch_size"},
		recipe.Accumulation:          {Path: "gradient_accumulation_steps"},
		recipe.GradientCheckpointing: {Path: "enable_activation_checkpointing"},
		recipe.FSDPOffload:           {Path: "fsdp_cpu_offload"},
		recipe.BF16:                  {Path: "dtype", Says: recipe.Constant("bf16")}}}

// torchtune is torchtune's recipes for supervised training, until April 2026 (commit bd2a0fc7): recipes/*.py.
var torchtune = recipe.Program{Name: "torchtune", Loose: true, Package: "torchtune",
	Release: version.Version{Minor: 6, Patch: 1}, Oldest: version.Version{Minor: 3, Patch: 1},
	Read: func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: strict.Merge(rule.Ignored(ignored),
		rule.Worded.For("dtype device"),
		rule.Switched.For(`compile enable_activation_checkpointing enable_activation_offloading optimizer_in_bwd
			fsdp_cpu_offload fsdp_reshard_after_forward activation_offloading_use_streams`),
		rule.Counted.For("gradient_accumulation_steps"),
		rule.Counted.Or(rule.Integer.Lax()).For(`tensor_parallel_dim context_parallel_dim data_parallel_shard_dim
			data_parallel_replicate_dim`),
		strict.Keys{
			"model": strict.Object(rule.Worded.For(component), rule.Counted.Default(8).For("lora_rank"),
				rule.Anything.For("decoder_trainable encoder_trainable fusion_trainable"),
				rule.Measured.Default(16.).For("lora_alpha"),
				rule.Switched.For("apply_lora_to_mlp apply_lora_to_output use_dora quantize_base"),
				rule.Measured.For("lora_dropout"), rule.NameOrNames.For("lora_attn_modules")).AndOthers(),
			"tokenizer": strict.Object(rule.Worded.For(component), rule.Counted.For("max_seq_len")).AndOthers(),
			"dataset":   rule.Free.Or(strict.List(rule.Free)).OrNull(),
			"optimizer": strict.Object(rule.Worded.For(component), rule.Switched.For("fused foreach"),
				rule.Measured.For("lr weight_decay")).AndOthers().OrNull(),
			"loss": strict.Object(rule.Worded.For(component), rule.Counted.For("num_output_chunks")).
				AndOthers().OrNull(),
			"fsdp": strict.Object(rule.Switched.For("cpu_offload")).AndOthers().OrNull(),
			"quantizer": strict.Object(rule.Worded.For(component),
				rule.Counted.Default(256).For("groupsize")).AndOthers().OrNull(),
			"batch_size":     rule.Counted.Default(2),
			"clip_grad_norm": rule.Measured,
		},
		rule.Anything.For(unplanned+" ac_mode ac_option enable_fp8_training"),
		rule.Anything.For("custom_sharded_layers memory_efficient_fsdp_wrap low_cpu_ram enable_async_checkpointing"),
	)}

//go:embed ignored.txt
var ignored string

// Keys of torchtune's other recipes: preferences, distillation, rewards, quantization, evaluation and generation.
const unplanned = `ref_checkpointer ref_policy_checkpointer value_checkpointer reward_checkpointer
	teacher_model teacher_checkpointer kd_loss reward_and_value_model policy_model ppo_epochs grpo_samples tasks
	prompt orchestration num_steps`

// reader reads a configuration.
type reader struct{ *recipe.Reader }

// read reads a file.
func (r *reader) read() error {
	if !r.Gives("optimizer") && !r.Gives("policy_model") {
		return r.Fault("model", "is given without an optimizer: this file trains nothing",
			"give the file of a training")
	}
	if err := cmp.Or(r.Unplanned("it is of another recipe than supervised training", unplanned),
		r.Unplanned("it changes what the passes hold", "ac_mode enable_fp8_training"),
		r.Unplanned("parts of a model that reads images are trained", `model.decoder_trainable model.encoder_trainable
			model.fusion_trainable`),
		r.passes(), r.quantizer(), r.loss()); err != nil {
		return err
	}
	builder := r.model()
	r.Note("model", "has torchtune's own modules, which the plan takes for those of transformers: activations may "+
		"differ")
	if r.Gives("tokenizer.max_seq_len") {
		r.Longest("tokenizer.max_seq_len")
	} else {
		r.Note("tokenizer", "has no max_seq_len: samples are as long as they are, so give --seq-len")
	}
	if err := r.optimizer(); err != nil {
		return err
	}
	recipe.Give(r.Arguments, "per_device_train_batch_size", r.At("batch_size"), r.Value("batch_size"))
	r.Pass("gradient_accumulation_steps", "gradient_accumulation_steps")
	r.Set("max_grad_norm", "clip_grad_norm", r.Number("clip_grad_norm"))
	r.Set("gradient_checkpointing", "enable_activation_checkpointing", r.Truth("enable_activation_checkpointing"))
	r.Set("torch_compile", "compile", r.Truth("compile"))
	kwargs := &strict.Value{Kind: '{'}
	recipe.Give(kwargs, "use_reentrant", -1, strict.Of(false))
	recipe.Give(r.Arguments, "gradient_checkpointing_kwargs", r.At("enable_activation_checkpointing"), kwargs)
	if r.To.Weights = recipe.PrecisionNames[r.Word("dtype")]; r.To.Weights == "" {
		return r.Fault("dtype", "is not bf16, fp16 or fp32", "set it to bf16")
	}
	r.shard()
	return r.adapt(builder)
}

// passes reads what waits on the host, and whether the optimizer steps in the backward pass.
func (r *reader) passes() error {
	const offloading, inBackward = "enable_activation_offloading", "optimizer_in_bwd"
	if r.Truth(offloading) {
		if !r.Truth("enable_activation_checkpointing") {
			return r.Fault(offloading, "is true, but torchtune needs enable_activation_checkpointing with it",
				"add enable_activation_checkpointing: True")
		}
		if r.Truth("compile") {
			return r.Fault(offloading, "is true beside compile, which is not planned yet", "set compile to False")
		}
		r.To.Offloading = &recipe.Offloading{Streams: !r.Gives(streams) || r.Truth(streams), Stash: 5,
			BeforeLoss: true}
	}
	if r.To.StepsInBackward = r.Truth(inBackward); r.To.StepsInBackward && r.Number("clip_grad_norm") > 0 {
		return r.Fault(inBackward, "is true, but torchtune does not clip gradients then", "remove clip_grad_norm")
	}
	return nil
}

// quantizer reads quantization-aware training.
func (r *reader) quantizer() error {
	const key = "quantizer." + component
	if !r.Gives("quantizer") {
		return nil
	}
	name := r.Word(key)
	switch name[strings.LastIndexByte(name, '.')+1:] {
	case "Int8DynActInt4WeightQATQuantizer", "Int8DynActInt4WeightQATQuantizerModuleSwap":
		r.To.QAT = &recipe.QAT{Group: int(r.Integer("quantizer.groupsize")), Activations: true}
	default:
		return r.Fault(key, fmt.Sprintf("is %s, which is not planned yet", r.Find(key)),
			"plimsoll plans Int8DynActInt4WeightQATQuantizer")
	}
	return nil
}

// losses are torchtune's losses of parts of the tokens.
var losses = map[string]recipe.Chunks{"CEWithChunkedOutputLoss": recipe.Outputs,
	"LinearCrossEntropyLoss": recipe.Linear}

// loss reads how the loss is computed, and notes what the plan leaves out.
func (r *reader) loss() error {
	const key, count = "loss." + component, "loss.num_output_chunks"
	name := r.Word(key)
	name = name[strings.LastIndexByte(name, '.')+1:]
	r.To.Chunks, r.To.ShiftsLabels = losses[name], true
	switch {
	case r.To.Chunks != "" && r.Gives(count) && r.Integer(count) != 8:
		return r.Fault(count, "is not 8, which is not planned yet", "remove it")
	case name != "" && name != "CrossEntropyLoss" && r.To.Chunks == "":
		r.Note(key, "is "+name+", which is planned as the cross entropy of all tokens at once")
	}
	for _, n := range [][2]string{
		{"custom_sharded_layers", "makes units of layers that the plan has in the last unit"},
		{"memory_efficient_fsdp_wrap", "makes units of layers that the plan has in the last unit"},
		{"low_cpu_ram", "has the host read the model in parts: it takes less than the plan says"},
		{"enable_async_checkpointing", "has a copy of what is saved on the host, which is not planned"},
	} {
		if recipe.On(r.Find(n[0])) {
			r.Note(n[0], n[1])
		}
	}
	return nil
}

const streams = "activation_offloading_use_streams"

// begins are the begins of catalogued names by torchtune's modules.
var begins = map[string]string{"llama2": "llama-2-", "llama3": "llama-3-", "llama3_1": "llama-3.1-",
	"llama3_2": "llama-3.2-", "llama3_3": "llama-3.3-", "gemma": "gemma-", "gemma2": "gemma-2-", "mistral": "mistral-",
	"phi3": "phi-3-", "phi4": "phi-4-", "qwen2": "qwen2-", "qwen2_5": "qwen2.5-", "qwen3": "qwen3-"}

var sizeDigits = lazyregexp.New(`(\d)_(\d)`)

// model sets the model's name, which is that of the function that makes it, and returns the function.
func (r *reader) model() string {
	path := strings.Split(r.Word("model."+component), ".")
	builder := path[len(path)-1]
	r.NameModel("model."+component, "")
	if len(path) < 3 {
		return builder
	}
	module := path[len(path)-2]
	plain := strings.TrimPrefix(strings.TrimPrefix(builder, "qlora_"), "lora_")
	size, found := strings.CutPrefix(plain, module+"_")
	r.To.Model = builder
	if begin := begins[module]; found && begin != "" {
		size = sizeDigits.ReplaceAllString(size, "$1.$2")
		r.To.Model = begin + strings.ReplaceAll(size, "_", "-")
	}
	if r.To.Model == "phi-4-14b" {
		r.To.Model = "phi-4"
	}
	return builder
}

// optimizer reads the class of the optimizer.
func (r *reader) optimizer() error {
	const key = "optimizer." + component
	name := map[string]string{"torch.optim.AdamW": "adamw_torch", "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
		"bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit", "bitsandbytes.optim.AdamW8bit": "adamw_bnb_8bit",
		"torchao.optim.AdamW8bit": "adamw_torch_8bit", "torchao.optim.AdamW4bit": "adamw_torch_4bit",
		"torch.optim.SGD": "sgd"}[r.Word(key)]
	if name == "" {
		return r.Fault(key, fmt.Sprintf("is %s, which is not planned yet", r.Find(key)),
			"plimsoll plans torch.optim.AdamW")
	}
	if name == "adamw_torch" && r.Truth("optimizer.fused") {
		name = "adamw_torch_fused"
	}
	r.Set("optim", key, name)
	return nil
}

// shard sets FSDP2 for the recipes of several GPUs. Those of one GPU have the same keys.
func (r *reader) shard() {
	const reshard, offload = "fsdp_reshard_after_forward", "fsdp_cpu_offload"
	r.ShardFSDP2(offload, !r.Gives(reshard) || r.Truth(reshard), r.Truth(offload) || r.Truth("fsdp.cpu_offload"),
		"FULL_STATE_DICT")
	r.Dimensions("data_parallel_replicate_dim", "data_parallel_shard_dim", "tensor_parallel_dim",
		"context_parallel_dim")
}

// adapt reads LoRA, which is a part of the model there, and the quantization of its weights.
func (r *reader) adapt(builder string) error {
	quantized := strings.HasPrefix(builder, "qlora_") || r.Truth("model.quantize_base")
	if !strings.Contains(builder, "lora_") {
		return nil
	}
	if quantized {
		computed := strict.Of(recipe.ElementNames[r.To.Weights])
		if err := r.Quantize("model."+component, map[string]*strict.Value{"load_in_4bit": strict.Of(true),
			"bnb_4bit_quant_type": strict.Of("nf4"), "bnb_4bit_use_double_quant": strict.Of(true),
			"bnb_4bit_compute_dtype": computed}); err != nil {
			return err
		}
	}
	modules := r.List("model.lora_attn_modules")
	if r.Truth("model.apply_lora_to_mlp") {
		modules = append(modules, "gate_proj", "up_proj", "down_proj")
	}
	if r.Truth("model.apply_lora_to_output") {
		modules = append(modules, "lm_head")
	}
	targets := &strict.Value{Kind: '['}
	for _, name := range modules {
		if name == "output_proj" {
			name = "o_proj"
		}
		targets.Elements = append(targets.Elements, strict.Of(name))
	}
	r.To.AdapterPrecision = r.To.Weights
	return r.Adapt("model."+component, map[string]*strict.Value{"r": r.Value("model.lora_rank"),
		"lora_alpha": r.Value("model.lora_alpha"), "lora_dropout": r.Find("model.lora_dropout"),
		"target_modules": targets, "use_dora": r.Find("model.use_dora")})
}
