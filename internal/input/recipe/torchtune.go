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

// torchtune is torchtune's recipes for supervised training of April 2026 (commit bd2a0fc7): recipes/*.py.
var torchtune = family{kind: torchtuneKind, program: "torchtune", read: readTorchtune,
	own: strict.Merge(
		worded.For("dtype device"),
		switched.For(`compile enable_activation_checkpointing enable_activation_offloading optimizer_in_bwd
			fsdp_cpu_offload fsdp_reshard_after_forward activation_offloading_use_streams`),
		counted.For("gradient_accumulation_steps"),
		counted.Or(integer.Lax()).For(`tensor_parallel_dim context_parallel_dim data_parallel_shard_dim
			data_parallel_replicate_dim`),
		keys{
			"model": object(worded.For(component), counted.Default(8).For("lora_rank"),
				measured.Default(16.).For("lora_alpha"),
				switched.For("apply_lora_to_mlp apply_lora_to_output use_dora quantize_base"),
				measured.For("lora_dropout"), nameOrNames.For("lora_attn_modules")).AndOthers(),
			"tokenizer": object(worded.For(component), counted.For("max_seq_len")).AndOthers(),
			"dataset":   free.Or(list(free)).OrNull(),
			"optimizer": object(worded.For(component), switched.For("fused foreach"),
				measured.For("lr weight_decay")).AndOthers().OrNull(),
			"loss":           object(worded.For(component)).AndOthers().OrNull(),
			"quantizer":      object(worded.For(component), counted.Default(256).For("groupsize")).AndOthers().OrNull(),
			"batch_size":     counted.Default(2),
			"clip_grad_norm": measured,
		},
		anything.For(unplannedTorchtune+" "+`ac_mode ac_option enable_fp8_training`),
		anything.For(`output_dir checkpointer resume_from_checkpoint save_adapter_weights_only seed shuffle dataset_val
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

func readTorchtune(r *frameworkReader) error {
	if !r.Gives("optimizer") && !r.Gives("policy_model") {
		return r.Fault("model", "is given without an optimizer: this file trains nothing",
			"give the file of a training")
	}
	if err := cmp.Or(r.unplanned("it is of another recipe than supervised training", unplannedTorchtune),
		r.unplanned("it changes what the passes hold", "ac_mode enable_fp8_training"),
		r.passesTorchtune(), r.quantizerOfTorchtune()); err != nil {
		return err
	}
	builder := r.modelOfTorchtune()
	r.Note("model", "has torchtune's own modules, which the plan takes for those of transformers: activations may "+
		"differ")
	if r.Gives("tokenizer.max_seq_len") {
		r.longest("tokenizer.max_seq_len")
	} else {
		r.Note("tokenizer", "has no max_seq_len: samples are as long as they are, so give --seq-len")
	}
	if err := r.optimizerOfTorchtune(); err != nil {
		return err
	}
	give(r.arguments, "per_device_train_batch_size", r.At("batch_size"), r.Value("batch_size"))
	r.pass("gradient_accumulation_steps", "gradient_accumulation_steps")
	r.set("max_grad_norm", "clip_grad_norm", r.Number("clip_grad_norm"))
	r.set("gradient_checkpointing", "enable_activation_checkpointing", r.Truth("enable_activation_checkpointing"))
	r.set("torch_compile", "compile", r.Truth("compile"))
	kwargs := &strict.Value{Kind: '{'}
	give(kwargs, "use_reentrant", -1, strict.Of(false))
	give(r.arguments, "gradient_checkpointing_kwargs", r.At("enable_activation_checkpointing"), kwargs)
	if r.to.Weights = precisionNames[r.Word("dtype")]; r.to.Weights == "" {
		return r.Fault("dtype", "is not bf16, fp16 or fp32", "set it to bf16")
	}
	r.shardTorchtune()
	return r.adaptTorchtune(builder)
}

// passesTorchtune reads what waits on the host, and whether the optimizer steps in the backward pass.
func (r *frameworkReader) passesTorchtune() error {
	const offloading, inBackward = "enable_activation_offloading", "optimizer_in_bwd"
	if r.Truth(offloading) {
		if !r.Truth("enable_activation_checkpointing") {
			return r.Fault(offloading, "is true, but torchtune needs enable_activation_checkpointing with it",
				"add enable_activation_checkpointing: True")
		}
		if r.Truth("compile") {
			return r.Fault(offloading, "is true beside compile, which is not planned yet", "set compile to False")
		}
		r.to.Offloading = &Offloading{Streams: !r.Gives(streamsOfTorchtune) || r.Truth(streamsOfTorchtune), Stash: 5,
			BeforeLoss: true}
	}
	if r.to.StepsInBackward = r.Truth(inBackward); r.to.StepsInBackward && r.Number("clip_grad_norm") > 0 {
		return r.Fault(inBackward, "is true, but torchtune does not clip gradients then", "remove clip_grad_norm")
	}
	return nil
}

// quantizerOfTorchtune reads quantization-aware training.
func (r *frameworkReader) quantizerOfTorchtune() error {
	const key = "quantizer." + component
	if !r.Gives("quantizer") {
		return nil
	}
	name := r.Word(key)
	switch name[strings.LastIndexByte(name, '.')+1:] {
	case "Int8DynActInt4WeightQATQuantizer", "Int8DynActInt4WeightQATQuantizerModuleSwap":
		r.to.QAT = &QAT{Group: int(r.Integer("quantizer.groupsize")), Activations: true}
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
func (r *frameworkReader) modelOfTorchtune() string {
	path := strings.Split(r.Word("model."+component), ".")
	builder := path[len(path)-1]
	r.to.place = r.Place("model." + component)
	if len(path) < 3 {
		return builder
	}
	module := path[len(path)-2]
	plain := strings.TrimPrefix(strings.TrimPrefix(builder, "qlora_"), "lora_")
	size, found := strings.CutPrefix(plain, module+"_")
	r.to.Model = builder
	if begin := torchtuneFamilies[module]; found && begin != "" {
		size = sizeDigits.ReplaceAllString(size, "$1.$2")
		r.to.Model = begin + strings.ReplaceAll(size, "_", "-")
	}
	if r.to.Model == "phi-4-14b" {
		r.to.Model = "phi-4"
	}
	return builder
}

// optimizerOfTorchtune reads the class of the optimizer.
func (r *frameworkReader) optimizerOfTorchtune() error {
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
	r.set("optim", key, name)
	return nil
}

// shardTorchtune sets FSDP2 for the recipes of several GPUs. Those of one GPU have the same keys.
func (r *frameworkReader) shardTorchtune() {
	const reshard, offload = "fsdp_reshard_after_forward", "fsdp_cpu_offload"
	r.shardFSDP2(offload, !r.Gives(reshard) || r.Truth(reshard), r.Truth(offload), "FULL_STATE_DICT")
	r.dimensions("data_parallel_replicate_dim", "data_parallel_shard_dim", "tensor_parallel_dim",
		"context_parallel_dim")
}

// dimensions reads how ranks divide the work. The ranks that are left shard the model where its key is -1.
func (r *frameworkReader) dimensions(replicate, shard, tensor, context string) {
	p := Parallelism{Replicate: max(1, int(r.Integer(replicate))), Shard: int(r.Integer(shard)),
		Tensor: max(1, int(r.Integer(tensor))), Context: max(1, int(r.Integer(context))), Sequence: 1}
	if p.Shard < 1 {
		p.Shard = 0
	}
	if p.Shard > 0 || p.Replicate*p.Tensor*p.Context > 1 {
		r.to.Parallelism = &p
	}
}

// adaptTorchtune reads LoRA, which is a part of the model there, and the quantization of its weights.
func (r *frameworkReader) adaptTorchtune(builder string) error {
	quantized := strings.HasPrefix(builder, "qlora_") || r.Truth("model.quantize_base")
	if !strings.Contains(builder, "lora_") {
		return nil
	}
	if quantized {
		computed := strict.Of(elementNames[r.to.Weights])
		if err := r.quantize("model."+component, map[string]*strict.Value{"load_in_4bit": strict.Of(true),
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
	r.to.AdapterPrecision = r.to.Weights
	return r.adapt("model."+component, map[string]*strict.Value{"r": r.Value("model.lora_rank"),
		"lora_alpha": r.Value("model.lora_alpha"), "lora_dropout": r.Find("model.lora_dropout"),
		"target_modules": targets, "use_dora": r.Find("model.use_dora")})
}
