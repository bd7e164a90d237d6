// Package swift reads configurations and commands of ms-swift.
package swift

import (
	"cmp"
	_ "embed"
	"fmt"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of ms-swift's configurations.
var Kind = &recipe.Kind{Name: "ms-swift configuration", Flag: recipe.ConfigFlag, Program: &swift,
	Settings: recipe.TrainerKeys,
	Marks: `train_type tuner_type tuner_backend sft_type rlhf_type split_dataset_ratio attn_impl swift_sft
		swift_rlhf`,
	LaunchVariables: []string{"NPROC_PER_NODE", "NNODES"},
	ConfigIn:        "config", Abbreviates: true, Spreads: true, // is_mp in swift/utils/env.py
	Commands: map[string]string{"swift sft": "swift_sft", "swift pt": "swift_sft", "swift/cli/sft.py": "swift_sft",
		"swift/cli/pt.py": "swift_sft", "swift rlhf": "swift_rlhf", "swift/cli/rlhf.py": "swift_rlhf"}}

// Preset is the kind of files that --fsdp names.
var Preset = &recipe.Kind{Name: "file that --fsdp of ms-swift names", Marks: "_param_docs _requires"}

// swift is ms-swift: swift/arguments and swift/trainers/arguments.py.
var swift = recipe.Program{Name: "ms-swift", Hosts: true, Package: "ms-swift", Release: newest, Oldest: oldest,
	Read: func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: strict.Merge(rule.Ignored(ignored),
		rule.Worded.For(`model torch_dtype attn_impl tuner_type train_type sft_type tuner_backend target_regex
			task_type quant_method lora_dtype optimizer bnb_4bit_quant_storage bnb_4bit_compute_dtype`),
		rule.Switched.For("use_rslora use_dora fp16 bf16"),
		rule.NameOrNames.For("target_modules target_parameters modules_to_save adapters"),
		rule.Counted.For("gradient_accumulation_steps max_length"),
		strict.Keys{
			"lora_rank":                   rule.Counted.Default(8),
			"lora_alpha":                  rule.Measured.Default(32.),
			"lora_dropout":                rule.Measured.Default(.05),
			"lora_bias":                   strict.Text("none", "all").OrNull().Default("none"),
			"quant_bits":                  rule.Size.Lax().Or(rule.Text).OrNull(),
			"bnb_4bit_quant_type":         strict.Text("fp4", "nf4").OrNull().Default("nf4"),
			"bnb_4bit_use_double_quant":   rule.Switched.Default(true),
			"per_device_train_batch_size": rule.Counted.Default(1),
			"gradient_checkpointing":      rule.Switched.Default(true),
			"weight_decay":                rule.Measured.Default(.1),
			"adam_beta2":                  rule.Measured.Default(.95),
			"fsdp":                        rule.Text.Or(rule.Names).OrNull(),
			"deepspeed":                   rule.Text.Or(rule.Free).OrNull(),
			"sequence_parallel_size":      rule.Count.Lax().OrNull(),
			"rlhf_type": strict.Text("dpo", "orpo", "simpo", "kto", "cpo", "rm", "ppo", "grpo",
				"gkd").OrNull().Default("dpo"),
			"cpo_alpha":                rule.Measured.Default(1.),
			"ref_model":                rule.Worded,
			"precompute_ref_log_probs": rule.Switched,
			"lisa_activated_layers":    rule.Count.Lax().OrNull(),
			"freeze_parameters_ratio":  rule.Measured,
		},
		generationKeys,
		rule.Anything.For(`ref_adapters use_galore freeze_parameters freeze_parameters_regex trainable_parameters
			trainable_parameters_regex zero_hpz_partition_size deepspeed_autotp_size external_plugins device_map
			max_memory new_special_tokens loss_type init_weights hqq_axis model_kwargs rpo_alpha
			router_aux_loss_coef`),
		rule.Switched.For("freeze_llm packing vit_gradient_checkpointing use_logits_to_keep"),
		rule.Switched.Default(true).For("freeze_vit freeze_aligner"),
		rule.Counted.For("packing_length max_pixels num_labels"),
		rule.Worded.For("experts_impl"),
	)}

// The releases whose keys and defaults are known.
var newest, oldest = version.Version{Major: 4, Minor: 6}, version.Version{Major: 3, Minor: 5, Patch: 3}

//go:embed ignored.txt
var ignored string

// reader reads a configuration.
type reader struct{ *recipe.Reader }

// read reads a file.
func (r *reader) read() error {
	r.Model("model")
	r.RouterLoss(r.Find("router_aux_loss_coef"))
	r.To.Attention = map[string]string{"flash_attn": "flash", "flash_attention_3": "flash3",
		"flash_attention_4": "flash4"}[r.Word("attn_impl")]
	tuner := cmp.Or(r.Word("tuner_type"), r.Word("train_type"), r.Word("sft_type"), "lora")
	if err := r.refuse(tuner); err != nil {
		return err
	}
	if r.To.Attention == "" {
		if err := r.ReadAttention("attn_impl"); err != nil {
			return err
		}
	}
	r.length()
	r.parts(tuner)
	if err := cmp.Or(r.types(), r.shard()); err != nil {
		return err
	}
	r.batch()
	if r.Word("rlhf_type") == "grpo" {
		if err := r.generation(); err != nil {
			return err
		}
	}
	if err := r.quantize(); err != nil || tuner == "full" {
		return err
	}
	return r.adapt()
}

// refuse refuses what changes memory and is not planned.
func (r *reader) refuse(tuner string) error {
	for _, key := range []string{"tuner_type", "train_type", "sft_type"} {
		if r.Gives(key) && tuner != "lora" && tuner != "full" {
			hint := "plimsoll plans lora and full"
			if tuner == "qlora" {
				hint = "set it to lora, and add quant_method: bnb and quant_bits: 4"
			}
			return r.Fault(key, fmt.Sprintf("is %s, which is not planned yet", r.Find(key)), hint)
		}
	}
	if err := r.task(); err != nil {
		return err
	}
	if v := r.Find("sequence_parallel_size"); v != nil && v.Integer > 1 {
		return r.Fault("sequence_parallel_size", "divides sequences over ranks, which is not planned yet",
			"plan without it for an upper bound: full sequences on every rank")
	}
	if v := r.Find("tuner_backend"); v != nil && v.Text != "peft" {
		return r.Fault("tuner_backend", fmt.Sprintf("is %s, which is not planned yet", v), "plimsoll plans peft")
	}
	if r.Number("freeze_parameters_ratio") > 0 || r.Integer("lisa_activated_layers") > 0 {
		return r.Fault(map[bool]string{true: "freeze_parameters_ratio", false: "lisa_activated_layers"}[r.Number(
			"freeze_parameters_ratio") > 0], "trains a part of the layers, which is not planned yet", "")
	}
	return cmp.Or(r.answers(),
		r.Unplanned("the optimizer has states of its own", "use_galore"),
		r.Unplanned("it trains a part of the parameters", `freeze_parameters freeze_parameters_regex
			trainable_parameters trainable_parameters_regex`),
		r.plugins(),
		r.Unplanned("it divides the model in another way", `zero_hpz_partition_size deepspeed_autotp_size device_map
			max_memory`),
		r.Unplanned("it makes the vocabulary longer", "new_special_tokens"),
		r.Unplanned("training goes on with an adapter whose adapter_config.json says its rank", "adapters"))
}

// task reads what the head is trained for: num_labels classes of a sequence, with a head in place of the language
// model's (swift/model/register.py).
func (r *reader) task() error {
	const key, labels = "task_type", "num_labels"
	v := r.Find(key)
	switch {
	case v == nil || v.Text == "causal_lm" || r.Word("rlhf_type") == "rm":
		return r.Unplanned("it trains another head", labels)
	case v.Text == "seq_cls" && r.Integer(labels) > 0:
		r.To.SequenceLabels = r.Integer(labels)
		r.Note(labels, fmt.Sprintf("is %d: the head has so many classes of a sequence", r.To.SequenceLabels))
		return nil
	case v.Text == "seq_cls":
		return r.Fault(key, "is seq_cls, which needs num_labels", "add num_labels with the number of classes")
	}
	why := "it trains another head"
	if sample := samplesOf[v.Text]; sample != "" {
		why = "a pass has as many sequences as its samples have " + sample + ", which no key says"
	}
	return r.Fault(key, fmt.Sprintf("is %s: %s, which is not planned yet", v, why), "")
}

// samplesOf says what samples of tasks have that are told apart by comparison.
var samplesOf = map[string]string{"embedding": "texts that are compared", "reranker": "documents",
	"generative_reranker": "documents"}

// plugins refuses code that may change the model or the loss. A training on generated answers has its rewards there.
func (r *reader) plugins() error {
	const own = "external_plugins"
	if r.Word("rlhf_type") == "grpo" && recipe.On(r.Find(own)) {
		r.Note(own, "is planned as rewards without a model, which take no memory of a GPU")
		return r.Unplanned("plugins may change the model or the loss", "optimizer")
	}
	return r.Unplanned("plugins may change the model or the loss", own+" optimizer")
}

// answers reads what 'swift rlhf' trains on answers: swift/rlhf_trainers, and swift/arguments/rlhf_args.py.
func (r *reader) answers() error {
	if !r.Gives("swift_rlhf") && !r.Gives("rlhf_type") {
		return r.Unplanned("plugins may change the model or the loss", "loss_type")
	}
	const key = "rlhf_type"
	kind := r.Word(key)
	why := map[string]string{"ppo": "it generates answers beside a model of values",
		"gkd": "it trains on the logits of a teacher", "kto": "its passes are those of TRL before 1.0"}[kind]
	switch {
	case why != "":
		return r.Fault(key, fmt.Sprintf("is %s: %s, which is not planned yet", kind, why), "")
	case kind == "grpo":
		return nil // generation reads it
	case kind == "rm":
		r.To.Rewards = true
		r.Note(key, "is rm: the head has one label, and passes have two sequences for each of a micro batch")
		return nil
	}
	a := &recipe.Answers{Pairs: true, Selected: true, DropsLogits: kind == "dpo",
		Reference: kind == "dpo" && !r.Truth("precompute_ref_log_probs"),
		Model:     r.Word("ref_model"),
		CrossEntropy: kind == "orpo" || kind == "dpo" && r.scoresAnswers() ||
			kind != "orpo" && kind != "dpo" && r.Number("cpo_alpha") > 0}
	r.To.Answers = a
	r.NoteAnswers(key)
	return r.Unplanned("the reference model has an adapter", "ref_adapters")
}

// types reads the type of weights, which decides that of autocast: _init_mixed_precision in model_args.py.
func (r *reader) types() error {
	const key = "torch_dtype"
	v := r.Find(key)
	switch {
	case v == nil || v.Text == "auto":
		r.Note(key, "is not given: ms-swift takes the type of config.json, and the plan is for autocast in bf16")
	case recipe.PrecisionNames[v.Text] == "":
		return r.Fault(key, fmt.Sprintf("is %s, expected bfloat16, float16 or float32", v), "")
	default:
		r.To.Weights = recipe.PrecisionNames[v.Text]
	}
	half := r.To.Weights == "fp16" || r.To.Weights == "fp32"
	for name, is := range map[string]bool{"fp16": half, "bf16": !half} {
		if r.Gives(name) {
			is = r.Truth(name)
		}
		r.Set(name, name, is)
	}
	return nil
}

// batch sets ms-swift's own defaults of TrainingArguments.
func (r *reader) batch() {
	for _, key := range []string{"per_device_train_batch_size", "weight_decay", "adam_beta2"} {
		recipe.Give(r.Arguments, key, r.At(key), r.Value(key))
	}
	const key = "gradient_accumulation_steps"
	if r.Gives(key) {
		r.Pass(key, key)
		return
	}
	steps := max(1, 16/int(r.Integer("per_device_train_batch_size")))
	r.Set(key, key, steps)
	r.Note(key, fmt.Sprintf("is not given: ms-swift makes batches of 16 on all ranks; planned are the %d steps of one "+
		"rank", steps))
}
