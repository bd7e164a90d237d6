package recipe

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// component is the name of a class or a function in a section of torchtune.
const component = "_component_"

// Kind is the kind of torchtune's configurations.
var TorchtuneKind = &Kind{Name: "torchtune configuration", Flag: ConfigFlag, Program: &torchtune,
	Marks: "checkpointer metric_logger",
	Settings: SettingKeys{MicroBatch: {Path: "batch_size"},
		Accumulation:          {Path: "gradient_accumulation_steps"},
		GradientCheckpointing: {Path: "enable_activation_checkpointing"}, FSDPOffload: {Path: "fsdp_cpu_offload"}}}

// torchtune is torchtune's recipes for supervised training of April 2026 (commit bd2a0fc7): recipes/*.py.
var torchtune = Program{Name: "torchtune", Loose: true, Read: readTorchtune,
	Keys: strict.Merge(
		Worded.For("dtype device"),
		Switched.For(`compile enable_activation_checkpointing enable_activation_offloading optimizer_in_bwd
			fsdp_cpu_offload fsdp_reshard_after_forward activation_offloading_use_streams`),
		Counted.For("gradient_accumulation_steps"),
		Counted.Or(integer.Lax()).For(`tensor_parallel_dim context_parallel_dim data_parallel_shard_dim
			data_parallel_replicate_dim`),
		keys{
			"model": object(Worded.For(component), Counted.Default(8).For("lora_rank"),
				Measured.Default(16.).For("lora_alpha"),
				Switched.For("apply_lora_to_mlp apply_lora_to_output use_dora quantize_base"),
				Measured.For("lora_dropout"), NameOrNames.For("lora_attn_modules")).AndOthers(),
			"tokenizer": object(Worded.For(component), Counted.For("max_seq_len")).AndOthers(),
			"dataset":   free.Or(list(free)).OrNull(),
			"optimizer": object(Worded.For(component), Switched.For("fused foreach"),
				Measured.For("lr weight_decay")).AndOthers().OrNull(),
			"loss":           object(Worded.For(component)).AndOthers().OrNull(),
			"quantizer":      object(Worded.For(component), Counted.Default(256).For("groupsize")).AndOthers().OrNull(),
			"batch_size":     Counted.Default(2),
			"clip_grad_norm": Measured,
		},
		Anything.For(unplannedTorchtune+" "+`ac_mode ac_option enable_fp8_training`),
		Anything.For(`output_dir checkpointer resume_from_checkpoint save_adapter_weights_only seed shuffle dataset_val
			batch_size_val run_val_every_n_steps lr_scheduler epochs max_steps_per_epoch metric_logger log_every_n_steps
			log_peak_memory_stats log_level profiler low_cpu_ram custom_sharded_layers enable_async_checkpointing
			collate_fn keep_last_n_checkpoints save_every_n_epochs save_every_n_steps
			use_distributed_state_dict dataloader datasets memory_efficient_fsdp_wrap packed tensor_parallel_plan
			context_parallel_rotate_method fsdp fake_quant_after_n_steps fp8_recipe_name cudnn_deterministic_mode`),
	)}

// Keys of torchtune's other recipes: preferences, distillation, rewards, quantization, evaluation and generation.
const unplannedTorchtune = `ref_checkpointer ref_policy_checkpointer value_checkpointer reward_checkpointer
	teacher_model teacher_checkpointer kd_loss reward_and_value_model policy_model ppo_epochs grpo_samples tasks
	prompt orchestration num_steps`

func readTorchtune(r *Reader) error {
	if !r.Gives("optimizer") && !r.Gives("policy_model") {
		return r.Fault("model", "is given without an optimizer: this file trains nothing",
			"give the file of a training")
	}
	if err := cmp.Or(r.Unplanned("it is of another recipe than supervised training", unplannedTorchtune),
		r.Unplanned("it changes what the passes hold", "ac_mode enable_fp8_training"),
		r.passesTorchtune(), r.quantizerOfTorchtune()); err != nil {
		return err
	}
	builder := r.modelOfTorchtune()
	r.Note("model", "has torchtune's own modules, which the plan takes for those of transformers: activations may "+
		"differ")
	if r.Gives("tokenizer.max_seq_len") {
		r.Longest("tokenizer.max_seq_len")
	} else {
		r.Note("tokenizer", "has no max_seq_len: samples are as long as they are, so give --seq-len")
	}
	if err := r.optimizerOfTorchtune(); err != nil {
		return err
	}
	Give(r.Arguments, "per_device_train_batch_size", r.At("batch_size"), r.Value("batch_size"))
	r.Pass("gradient_accumulation_steps", "gradient_accumulation_steps")
	r.Set("max_grad_norm", "clip_grad_norm", r.Number("clip_grad_norm"))
	r.Set("gradient_checkpointing", "enable_activation_checkpointing", r.Truth("enable_activation_checkpointing"))
	r.Set("torch_compile", "compile", r.Truth("compile"))
	kwargs := &strict.Value{Kind: '{'}
	Give(kwargs, "use_reentrant", -1, strict.Of(false))
	Give(r.Arguments, "gradient_checkpointing_kwargs", r.At("enable_activation_checkpointing"), kwargs)
	if r.To.Weights = PrecisionNames[r.Word("dtype")]; r.To.Weights == "" {
		return r.Fault("dtype", "is not bf16, fp16 or fp32", "set it to bf16")
	}
	r.shardTorchtune()
	return r.adaptTorchtune(builder)
}

// passesTorchtune reads what waits on the host, and whether the optimizer steps in the backward pass.
func (r *Reader) passesTorchtune() error {
	const offloading, inBackward = "enable_activation_offloading", "optimizer_in_bwd"
	if r.Truth(offloading) {
		if !r.Truth("enable_activation_checkpointing") {
			return r.Fault(offloading, "is true, but torchtune needs enable_activation_checkpointing with it",
				"add enable_activation_checkpointing: True")
		}
		if r.Truth("compile") {
			return r.Fault(offloading, "is true beside compile, which is not planned yet", "set compile to False")
		}
		r.To.Offloading = &Offloading{Streams: !r.Gives(streamsOfTorchtune) || r.Truth(streamsOfTorchtune), Stash: 5,
			BeforeLoss: true}
	}
	if r.To.StepsInBackward = r.Truth(inBackward); r.To.StepsInBackward && r.Number("clip_grad_norm") > 0 {
		return r.Fault(inBackward, "is true, but torchtune does not clip gradients then", "remove clip_grad_norm")
	}
	return nil
}

// quantizerOfTorchtune reads quantization-aware training.
func (r *Reader) quantizerOfTorchtune() error {
	const key = "quantizer." + component
	if !r.Gives("quantizer") {
		return nil
	}
	name := r.Word(key)
	switch name[strings.LastIndexByte(name, '.')+1:] {
	case "Int8DynActInt4WeightQATQuantizer", "Int8DynActInt4WeightQATQuantizerModuleSwap":
		r.To.QAT = &QAT{Group: int(r.Integer("quantizer.groupsize")), Activations: true}
	default:
		return r.Fault(key, fmt.Sprintf("is %s, which is not planned yet", r.Find(key)),
			"plimsoll plans Int8DynActInt4WeightQATQuantizer")
	}
	return nil
}

const streamsOfTorchtune = "activation_offloading_use_streams"

// torchtuneFamilies are the begins of catalogued names by torchtune's modules.
var torchtuneFamilies = map[string]string{"llama2": "llama-2-", "llama3": "llama-3-", "llama3_1": "llama-3.1-",
	"llama3_2": "llama-3.2-", "llama3_3": "llama-3.3-", "gemma": "gemma-", "gemma2": "gemma-2-", "mistral": "mistral-",
	"phi3": "phi-3-", "phi4": "phi-4-", "qwen2": "qwen2-", "qwen2_5": "qwen2.5-", "qwen3": "qwen3-"}

var sizeDigits = lazyregexp.New(`(\d)_(\d)`)

// modelOfTorchtune sets the model's name, which is that of the function that makes it, and returns the function.
func (r *Reader) modelOfTorchtune() string {
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
	if begin := torchtuneFamilies[module]; found && begin != "" {
		size = sizeDigits.ReplaceAllString(size, "$1.$2")
		r.To.Model = begin + strings.ReplaceAll(size, "_", "-")
	}
	if r.To.Model == "phi-4-14b" {
		r.To.Model = "phi-4"
	}
	return builder
}

// optimizerOfTorchtune reads the class of the optimizer.
func (r *Reader) optimizerOfTorchtune() error {
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

// shardTorchtune sets FSDP2 for the recipes of several GPUs. Those of one GPU have the same keys.
func (r *Reader) shardTorchtune() {
	const reshard, offload = "fsdp_reshard_after_forward", "fsdp_cpu_offload"
	r.ShardFSDP2(offload, !r.Gives(reshard) || r.Truth(reshard), r.Truth(offload), "FULL_STATE_DICT")
	r.Dimensions("data_parallel_replicate_dim", "data_parallel_shard_dim", "tensor_parallel_dim",
		"context_parallel_dim")
}

// adaptTorchtune reads LoRA, which is a part of the model there, and the quantization of its weights.
func (r *Reader) adaptTorchtune(builder string) error {
	quantized := strings.HasPrefix(builder, "qlora_") || r.Truth("model.quantize_base")
	if !strings.Contains(builder, "lora_") {
		return nil
	}
	if quantized {
		computed := strict.Of(ElementNames[r.To.Weights])
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
