package recipe

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe/strict"
)

// llamaFactoryV1 is the configuration of LLaMA-Factory's trainer v1 of August 2026 (commit ff6d4d12):
// src/llamafactory/v1/config, with the plugins that its sections name.
var llamaFactoryV1 = family{kind: llamaFactoryV1Kind, program: "LLaMA-Factory's trainer v1", read: readFactoryV1,
	own: strict.Merge(keys{
		"model":                           worded.Default("Qwen/Qwen3-4B-Instruct-2507"),
		"model_class":                     oneOf("llm", "cls", "other").OrNull().Default("llm"),
		"flash_attn":                      oneOf("eager", "sdpa", "flash_attention_2").OrNull().Default("sdpa"),
		"micro_batch_size":                counted.Default(1),
		"cutoff_len":                      counted.Default(2048),
		"max_grad_norm":                   measured.Default(1.),
		"bf16":                            switched.Default(true),
		"enable_activation_checkpointing": switched.Default(true),
		"cp_size":                         counted.Default(1),
		"mp_replicate_size":               counted.Default(1),
		"dist_config": object(keys{"name": worded.Default("fsdp2"), "config_file": worded},
			anything.For("reshard_after_forward offload_params")).AndOthers().OrNull(),
		"peft_config": object(keys{"name": worded.Default("lora"), "r": counted.Default(8),
			"lora_alpha": measured.Default(16.), "lora_dropout": measured.Default(.05), "target_modules": nameOrNames,
			"modules_to_save":               nameOrNames,
			"freeze_trainable_layers":       integer.Lax().OrNull().Default(2),
			"cast_trainable_params_to_fp32": switched.Default(true)},
			anything.For("adapter_name_or_path use_rslora use_dora freeze_trainable_modules freeze_extra_modules")).
			AndOthers().OrNull(),
		"kernel_config": object(keys{"name": worded.Default("auto")}).AndOthers().OrNull(),
		"init_config":   object(keys{"name": worded.Default("init_on_default")}).AndOthers().OrNull(),
		"optim_config":  object(keys{"name": worded.Default("adamw")}).AndOthers().OrNull(),
		"quant_config": object(keys{"name": worded.Default("bnb"), "quantization_bit": counted.Default(4),
			"compute_dtype": worded.Default("float16"), "double_quantization": switched.Default(true),
			"quantization_type": oneOf("fp4", "nf4").OrNull().Default("nf4")}).AndOthers().OrNull(),
		"global_batch_size": counted.OrNull(),
	}, anything.For(`learning_rate num_train_epochs max_steps batching_strategy batching_workers
		dp_size cp_mode mp_shard_size dist_timeout lr_scheduler_config seed full_determinism resume_from_checkpoint
		save_steps save_epochs save_ckpt_as_hf save_total_limit logging_steps pref_loss pref_beta pref_ftx simpo_gamma
		dpo_label_smoothing ld_alpha output_dir custom_chat_template trust_remote_code train_dataset eval_dataset
		sample_backend max_new_tokens`))}

func readFactoryV1(r *frameworkReader) error {
	r.model("model")
	if !r.Gives("train_dataset") {
		return r.Fault("model", "is given without train_dataset: this file exports or generates, and trains nothing",
			"give the file of a training")
	}
	if err := r.refuseFactoryV1(); err != nil {
		return err
	}
	r.longest("cutoff_len")
	r.Note("model", "is trained as by 'llamafactory-cli sft': 'dpo' and 'rm' take the same files, and other memory")
	give(r.arguments, "per_device_train_batch_size", r.At("micro_batch_size"), r.Value("micro_batch_size"))
	const all = "global_batch_size"
	switch v := r.Find("batching_strategy"); {
	case r.Integer(all) == 0:
	case v == nil || v.Text == "normal":
		r.to.GlobalBatch = &GlobalBatch{Place: r.Place(all), Sequences: int(r.Integer(all))}
	default:
		r.Note(all, "makes several micro batches of a step, and one is planned: give --grad-accum")
	}
	r.set("max_grad_norm", "max_grad_norm", r.Number("max_grad_norm"))
	r.set("optim", "optim_config", "adamw_torch")
	if r.Word("optim_config.name") == "muon" {
		r.to.Optimizer = "muon-moonlight"
	}
	const checkpointing = "enable_activation_checkpointing"
	r.set("gradient_checkpointing", checkpointing, r.Truth(checkpointing))
	kwargs := &strict.Value{Kind: '{'}
	give(kwargs, "use_reentrant", -1, strict.Of(false))
	give(r.arguments, "gradient_checkpointing_kwargs", r.At(checkpointing), kwargs)
	r.to.Attention = attentions[r.Word("flash_attn")]
	if r.to.Attention == "" {
		r.to.Attention = r.Word("flash_attn")
	}
	r.to.LossTwice = true
	if r.Word("kernel_config.name") == "liger_kernel" {
		r.to.LigerModules = true
	}
	r.shardFactoryV1()
	return cmp.Or(r.quantizeFactoryV1(), r.adaptFactoryV1())
}

// refuseFactoryV1 refuses what changes memory and is not planned.
func (r *frameworkReader) refuseFactoryV1() error {
	const only = ", which is not planned yet"
	for _, c := range []struct{ key, section, want, hint string }{
		{"model_class", "model_class", "llm", "plimsoll plans llm"},
		{"dist_config.name", "dist_config", "fsdp2 deepspeed", "plimsoll plans fsdp2 and deepspeed: what FSDPTurbo's " +
			"exchange of tokens holds is not known here"},
		{"peft_config.name", "peft_config", "lora freeze", "plimsoll plans lora and freeze"},
		{"optim_config.name", "optim_config", "adamw muon", "plimsoll plans muon, and AdamW without the section"},
		{"quant_config.name", "quant_config", "bnb auto", "plimsoll plans bnb"},
		{"kernel_config.name", "kernel_config", "auto liger_kernel", "plimsoll plans auto and liger_kernel"},
		{"init_config.name", "init_config", "init_on_default init_on_rank0 init_on_meta", ""},
	} {
		if word := r.Word(c.key); on(r.Find(c.section)) && !slices.Contains(strings.Fields(c.want), word) {
			return r.Fault(c.key, fmt.Sprintf("is %q%s", word, only), c.hint)
		}
	}
	const context = "cp_size"
	switch sharded := on(r.Find("dist_config")) && r.Word("dist_config.name") == "fsdp2"; {
	case r.Integer(context) > 1 && !sharded: // base_trainer.py
		return r.Fault(context, "is above 1: context parallelism requires dist_config.name: fsdp2", "add dist_config")
	case r.Integer("mp_replicate_size") > 1 && !sharded:
		return r.Fault("mp_replicate_size", "is above 1 without dist_config.name: fsdp2"+only, "add dist_config")
	case r.Integer(context) > 1 && on(r.Find("peft_config")):
		r.Note(context, "is above 1: adapters see a part of the sequence, as the rest of a block does")
	}
	return r.unplanned("training goes on with an adapter whose adapter_config.json says its rank",
		"peft_config.adapter_name_or_path")
}

// shardFactoryV1 reads the types of weights and how they are divided: _init_model in core/model_engine.py, and
// plugins/trainer_plugins/distributed.
func (r *frameworkReader) shardFactoryV1() {
	if !on(r.Find("peft_config")) {
		r.to.Weights = "fp32" // model.to(torch.float32)
	}
	switch {
	case !on(r.Find("dist_config")):
	case r.Word("dist_config.name") == "deepspeed":
		r.pass("dist_config.config_file", "deepspeed")
		r.set("bf16", "bf16", r.Truth("bf16"))
	default:
		reshards, offloads := r.Find("dist_config.reshard_after_forward"), r.Find("dist_config.offload_params")
		r.shardFSDP2("dist_config", reshards == nil || on(reshards), on(offloads), "FULL_STATE_DICT")
		r.to.SeveralOnly = false
		r.set("bf16", "bf16", r.Truth("bf16"))
		r.to.ReducesIn32 = true
		r.to.Parallelism = &Parallelism{Replicate: int(r.Integer("mp_replicate_size")), Tensor: 1, Sequence: 1,
			Context: int(r.Integer("cp_size")), Ulysses: true}
		r.to.LoadsOnGPU = r.Word("init_config.name") == "init_on_default"
		r.to.UnitsAtEnds = &UnitsAtEnds{Embedding: true}
	}
}

// quantizeFactoryV1 reads the quantization: plugins/model_plugins/quantization.py.
func (r *frameworkReader) quantizeFactoryV1() error {
	const key = "quant_config.quantization_bit"
	switch {
	case !on(r.Find("quant_config")):
		return nil
	case r.Integer(key) == 8:
		return r.quantize(key, map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	case r.Integer(key) != 4:
		return r.Fault(key, "is neither 4 nor 8", "set it to 4 or 8")
	}
	computed := r.Value("quant_config.compute_dtype")
	return r.quantize(key, map[string]*strict.Value{"load_in_4bit": strict.Of(true),
		"bnb_4bit_quant_type":       r.Value("quant_config.quantization_type"),
		"bnb_4bit_use_double_quant": strict.Of(r.Truth("quant_config.double_quantization")),
		"bnb_4bit_compute_dtype":    computed, "bnb_4bit_quant_storage": computed})
}

// adaptFactoryV1 reads the adapter: plugins/model_plugins/peft.py.
func (r *frameworkReader) adaptFactoryV1() error {
	const section = "peft_config."
	if !on(r.Find("peft_config")) {
		return nil
	}
	if r.Word(section+"name") == "freeze" {
		r.freezePart(section)
		r.to.Freeze.Widens, r.to.Freeze.BeforeSharding = r.Truth(section+"cast_trainable_params_to_fp32"), true
		return nil
	}
	targets := r.Find(section + "target_modules")
	if targets == nil || targets.Text == "all" {
		targets = strict.Of("all-linear")
	}
	r.to.AddsInFull = true // peft 0.18
	return r.adapt("peft_config", map[string]*strict.Value{"r": r.Value(section + "r"),
		"lora_alpha": r.Value(section + "lora_alpha"), "target_modules": oneName(asList(targets)),
		"lora_dropout": r.Value(section + "lora_dropout"), "use_rslora": r.Find(section + "use_rslora"),
		"use_dora": r.Find(section + "use_dora"), "modules_to_save": asList(r.Find(section + "modules_to_save"))})
}
