package llamafactory

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

// V1 is the kind of configurations of the trainer v1.
var V1 = &recipe.Kind{Name: "configuration of LLaMA-Factory's trainer v1", Flag: recipe.ConfigFlag,
	Program: &llamaFactoryV1, Marks: "peft_config dist_config init_config quant_config kernel_config"}

// llamaFactoryV1 is the configuration of LLaMA-Factory's trainer v1 of August 2026 (commit ff6d4d12):
// src/llamafactory/v1/config, with the plugins that its sections name.
var llamaFactoryV1 = recipe.Program{Name: "LLaMA-Factory's trainer v1", Package: "llamafactory",
	Release: version.Version{Minor: 9, Patch: 5},
	Read:    func(r *recipe.Reader) error { return (&readerV1{r}).read() },
	Keys: strict.Merge(strict.Keys{
		"model":                           rule.Worded.Default("Qwen/Qwen3-4B-Instruct-2507"),
		"model_class":                     strict.Text("llm", "cls", "other").OrNull().Default("llm"),
		"flash_attn":                      strict.Text("eager", "sdpa", "flash_attention_2").OrNull().Default("sdpa"),
		"micro_batch_size":                rule.Counted.Default(1),
		"cutoff_len":                      rule.Counted.Default(2048),
		"max_grad_norm":                   rule.Measured.Default(1.),
		"bf16":                            rule.Switched.Default(true),
		"enable_activation_checkpointing": rule.Switched.Default(true),
		"cp_size":                         rule.Counted.Default(1),
		"mp_replicate_size":               rule.Counted.Default(1),
		"dist_config": strict.Object(strict.Keys{"name": rule.Worded.Default("fsdp2"), "config_file": rule.Worded},
			rule.Anything.For("reshard_after_forward offload_params")).AndOthers().OrNull(),
		"peft_config": strict.Object(strict.Keys{"name": rule.Worded.Default("lora"), "r": rule.Counted.Default(8),
			"lora_alpha": rule.Measured.Default(16.), "lora_dropout": rule.Measured.Default(.05),
			"target_modules":                rule.NameOrNames,
			"modules_to_save":               rule.NameOrNames,
			"freeze_trainable_layers":       rule.Integer.Lax().OrNull().Default(2),
			"cast_trainable_params_to_fp32": rule.Switched.Default(true)},
			rule.Anything.For(`adapter_name_or_path use_rslora use_dora freeze_trainable_modules
				freeze_extra_modules`)).AndOthers().OrNull(),
		"kernel_config": strict.Object(rule.Worded.Default("auto").For("name")).AndOthers().OrNull(),
		"init_config":   strict.Object(rule.Worded.Default("init_on_default").For("name")).AndOthers().OrNull(),
		"optim_config":  strict.Object(rule.Worded.Default("adamw").For("name")).AndOthers().OrNull(),
		"quant_config": strict.Object(strict.Keys{"name": rule.Worded.Default("bnb"),
			"quantization_bit": rule.Counted.Default(4),
			"compute_dtype":    rule.Worded.Default("float16"), "double_quantization": rule.Switched.Default(true),
			"quantization_type": strict.Text("fp4", "nf4").OrNull().Default("nf4")}).AndOthers().OrNull(),
		"global_batch_size": rule.Counted.OrNull(),
	}, rule.Ignored(ignoredV1))}

//go:embed ignored_v1.txt
var ignoredV1 string

// readerV1 reads a configuration.
type readerV1 struct{ *recipe.Reader }

// read reads a file.
func (r *readerV1) read() error {
	r.Model("model")
	if !r.Gives("train_dataset") {
		return r.Fault("model", "is given without train_dataset: this file exports or generates, and trains nothing",
			"give the file of a training")
	}
	if err := r.refuse(); err != nil {
		return err
	}
	r.Longest("cutoff_len")
	r.Note("model", "is trained as by 'llamafactory-cli sft': 'dpo' and 'rm' take the same files, and other memory")
	recipe.Give(r.Arguments, "per_device_train_batch_size", r.At("micro_batch_size"), r.Value("micro_batch_size"))
	const all = "global_batch_size"
	switch v := r.Find("batching_strategy"); {
	case r.Integer(all) == 0:
	case v == nil || v.Text == "normal":
		r.To.GlobalBatch = &recipe.GlobalBatch{Place: r.Place(all), Sequences: int(r.Integer(all))}
	default:
		r.Note(all, "makes several micro batches of a step, and one is planned: give --grad-accum")
	}
	r.Set("max_grad_norm", "max_grad_norm", r.Number("max_grad_norm"))
	r.Set("optim", "optim_config", "adamw_torch")
	if r.Word("optim_config.name") == "muon" {
		r.To.Optimizer = "muon-moonlight"
	}
	const checkpointing = "enable_activation_checkpointing"
	r.Set("gradient_checkpointing", checkpointing, r.Truth(checkpointing))
	kwargs := &strict.Value{Kind: '{'}
	recipe.Give(kwargs, "use_reentrant", -1, strict.Of(false))
	recipe.Give(r.Arguments, "gradient_checkpointing_kwargs", r.At(checkpointing), kwargs)
	r.To.Attention = recipe.Attentions[r.Word("flash_attn")]
	if r.To.Attention == "" {
		r.To.Attention = r.Word("flash_attn")
	}
	r.To.LossTwice = true
	if r.Word("kernel_config.name") == "liger_kernel" {
		r.To.LigerModules = true
	}
	r.shard()
	return cmp.Or(r.quantize(), r.adapt())
}

// refuse refuses what changes memory and is not planned.
func (r *readerV1) refuse() error {
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
		if word := r.Word(c.key); recipe.On(r.Find(c.section)) && !slices.Contains(strings.Fields(c.want), word) {
			return r.Fault(c.key, fmt.Sprintf("is %q%s", word, only), c.hint)
		}
	}
	const context = "cp_size"
	switch sharded := recipe.On(r.Find("dist_config")) && r.Word("dist_config.name") == "fsdp2"; {
	case r.Integer(context) > 1 && !sharded: // base_trainer.py
		return r.Fault(context, "is above 1: context parallelism requires dist_config.name: fsdp2", "add dist_config")
	case r.Integer("mp_replicate_size") > 1 && !sharded:
		return r.Fault("mp_replicate_size", "is above 1 without dist_config.name: fsdp2"+only, "add dist_config")
	case r.Integer(context) > 1 && recipe.On(r.Find("peft_config")):
		r.Note(context, "is above 1: adapters see a part of the sequence, as the rest of a block does")
	}
	return r.Unplanned("training goes on with an adapter whose adapter_config.json says its rank",
		"peft_config.adapter_name_or_path")
}

// shard reads the types of weights and how they are divided: _init_model in core/model_engine.py, and
// plugins/trainer_plugins/distributed.
func (r *readerV1) shard() {
	if !recipe.On(r.Find("peft_config")) {
		r.To.Weights = "fp32" // model.to(torch.float32)
	}
	switch {
	case !recipe.On(r.Find("dist_config")):
	case r.Word("dist_config.name") == "deepspeed":
		r.Pass("dist_config.config_file", "deepspeed")
		r.Set("bf16", "bf16", r.Truth("bf16"))
	default:
		reshards, offloads := r.Find("dist_config.reshard_after_forward"), r.Find("dist_config.offload_params")
		r.ShardFSDP2("dist_config", reshards == nil || recipe.On(reshards), recipe.On(offloads), "FULL_STATE_DICT")
		r.To.SeveralOnly = false
		r.Set("bf16", "bf16", r.Truth("bf16"))
		r.To.ReducesIn32 = true
		r.To.Parallelism = &recipe.Parallelism{Replicate: int(r.Integer("mp_replicate_size")), Tensor: 1, Sequence: 1,
			Context: int(r.Integer("cp_size")), Ulysses: true}
		r.To.LoadsOnGPU = r.Word("init_config.name") == "init_on_default"
		r.To.UnitsAtEnds = &recipe.UnitsAtEnds{Embedding: true}
	}
}

// quantize reads the quantization: plugins/model_plugins/quantization.py.
func (r *readerV1) quantize() error {
	const key = "quant_config.quantization_bit"
	switch {
	case !recipe.On(r.Find("quant_config")):
		return nil
	case r.Integer(key) == 8:
		return r.Quantize(key, map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	case r.Integer(key) != 4:
		return r.Fault(key, "is neither 4 nor 8", "set it to 4 or 8")
	}
	computed := r.Value("quant_config.compute_dtype")
	return r.Quantize(key, map[string]*strict.Value{"load_in_4bit": strict.Of(true),
		"bnb_4bit_quant_type":       r.Value("quant_config.quantization_type"),
		"bnb_4bit_use_double_quant": strict.Of(r.Truth("quant_config.double_quantization")),
		"bnb_4bit_compute_dtype":    computed, "bnb_4bit_quant_storage": computed})
}

// adapt reads the adapter: plugins/model_plugins/peft.py.
func (r *readerV1) adapt() error {
	const section = "peft_config."
	if !recipe.On(r.Find("peft_config")) {
		return nil
	}
	if r.Word(section+"name") == "freeze" {
		freezePart(r.Reader, section)
		r.To.Freeze.Widens, r.To.Freeze.BeforeSharding = r.Truth(section+"cast_trainable_params_to_fp32"), true
		return nil
	}
	targets := r.Find(section + "target_modules")
	if targets == nil || targets.Text == "all" {
		targets = strict.Of("all-linear")
	}
	r.To.AddsInFull = true // peft 0.18
	return r.Adapt("peft_config", map[string]*strict.Value{"r": r.Value(section + "r"),
		"lora_alpha": r.Value(section + "lora_alpha"), "target_modules": recipe.OneName(recipe.AsList(targets)),
		"lora_dropout": r.Value(section + "lora_dropout"), "use_rslora": r.Find(section + "use_rslora"),
		"use_dora":        r.Find(section + "use_dora"),
		"modules_to_save": recipe.AsList(r.Find(section + "modules_to_save"))})
}
