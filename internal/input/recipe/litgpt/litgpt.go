// Package litgpt reads configurations of LitGPT's finetuning.
package litgpt

import (
	"cmp"
	_ "embed"
	"path"
	"strings"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of LitGPT's configurations.
var Kind = &recipe.Kind{Name: "LitGPT configuration", Flag: recipe.ConfigFlag, Program: &litgpt,
	Marks: "checkpoint_dir+train checkpoint_dir+logger_name checkpoint_dir+lora_r",
	Settings: recipe.SettingKeys{recipe.MicroBatch: {Path: "train.micro_batch_size"},
		recipe.TrainBatch:   {Path: "train.global_batch_size"},
		recipe.BF16:         {Path: "precision", Says: recipe.Constant("bf16-mixed")},
		recipe.FP16:         {Path: "precision", Says: recipe.Constant("16-mixed")},
		recipe.Accumulation: {Follows: recipe.TrainBatch}}}

// litgpt is LitGPT 0.5.13: litgpt/finetune/lora.py and litgpt/args.py.
var litgpt = recipe.Program{Name: "LitGPT",
	Package: "litgpt", Release: version.Version{Minor: 5, Patch: 13}, Oldest: version.Version{Minor: 5},
	Read: func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: strict.Merge(
		rule.Worded.For("checkpoint_dir precision"),
		rule.Worded.OrNull().For("quantize"),
		rule.Switched.Default(true).For("lora_query lora_value"),
		rule.Switched.For("lora_key lora_projection lora_mlp lora_head"),
		rule.Counted.For("num_nodes"),
		strict.Keys{
			"devices":      rule.Counted.Default(1),
			"lora_r":       rule.Counted.Default(8),
			"lora_alpha":   rule.Measured.Default(16.),
			"lora_dropout": rule.Measured.Default(.05),
			"optimizer":    rule.Text.Or(strict.Object(rule.Worded.For("class_path")).AndOthers()).OrNull(),
			"galore":       strict.Object(rule.Switched.For("use_galore")).AndOthers().OrNull(),
			"train": strict.Object(strict.Keys{
				"global_batch_size": rule.Counted.Default(16),
				"micro_batch_size":  rule.Counted.Default(1),
				"max_seq_length":    rule.Size.Lax().OrNull(),
				"max_norm":          rule.Measured.OrNull(),
				"tie_embeddings":    rule.Switched.OrNull(),
			}).AndOthers(),
		},
		rule.Anything.For("adapter_start_layer"),
		rule.Ignored(ignored), rule.Anything.For("data eval log"),
	)}

//go:embed ignored.txt
var ignored string

// reader reads a configuration.
type reader struct{ *recipe.Reader }

// read reads a file.
func (r *reader) read() error {
	folder := path.Clean(r.Word("checkpoint_dir")) // checkpoints/OWNER/NAME, or OWNER/NAME
	r.NameModel("checkpoint_dir", strings.TrimPrefix(folder, "checkpoints/"))
	r.To.Modules = "litgpt"
	if err := cmp.Or(r.oneGPU(), r.Unplanned("GaLore of LitGPT projects other modules", "galore.use_galore"),
		r.Unplanned("it trains parts of a model that are LitGPT's own", "adapter_start_layer train.tie_embeddings"),
		r.optimizer(), r.precision()); err != nil {
		return err
	}
	recipe.Give(r.Arguments, "per_device_train_batch_size", r.At("train.micro_batch_size"),
		r.Value("train.micro_batch_size"))
	micro, all := r.Integer("train.micro_batch_size"), r.Integer("train.global_batch_size")
	r.Set("gradient_accumulation_steps", "train.global_batch_size", int(max(1, all/max(1, micro))))
	r.Set("max_grad_norm", "train.max_norm", r.Number("train.max_norm"))
	r.Set("gradient_checkpointing", "checkpoint_dir", false)
	if r.Gives("train.max_seq_length") {
		r.Longest("train.max_seq_length")
	} else {
		r.Note("checkpoint_dir", "there is no train.max_seq_length: samples are as long as they are, so give --seq-len")
	}
	return r.adapt()
}

// oneGPU refuses several GPUs, whose units of FSDP2 are LitGPT's own.
func (r *reader) oneGPU() error {
	for _, key := range []string{"devices", "num_nodes"} {
		if r.Integer(key) > 1 {
			return r.Fault(key, "is more than 1: LitGPT's parallelize_fn makes units of its own, which are not "+
				"planned yet", "set it to 1 to plan the job on one GPU")
		}
	}
	return nil
}

// optimizer reads the optimizer. That of a quantized model is paged (instantiate_bnb_optimizer).
func (r *reader) optimizer() error {
	name := cmp.Or(r.Word("optimizer.class_path"), "AdamW")
	if v := r.Find("optimizer"); v != nil && v.Kind == '"' {
		name = v.Text
	}
	known := map[string]string{"AdamW": "adamw_torch", "torch.optim.AdamW": "adamw_torch", "SGD": "sgd",
		"torch.optim.SGD": "sgd"}[name]
	if known == "" {
		return r.Fault("optimizer", "is "+name+", which is not planned yet", "plimsoll plans torch.optim.AdamW")
	}
	if r.Word("quantize") != "" && known == "adamw_torch" {
		known = "paged_adamw_32bit"
	}
	r.Set("optim", "optimizer", known)
	return nil
}

// precision reads the types of weights and products. The default on a GPU with bf16 is bf16-mixed.
func (r *reader) precision() error {
	name := cmp.Or(r.Word("precision"), "bf16-mixed")
	weights, mixed := map[string]string{"bf16-true": "bf16", "16-true": "fp16", "32-true": "fp32", "32": "fp32",
		"bf16-mixed": "fp32", "16-mixed": "fp32"}[name], strings.HasSuffix(name, "-mixed")
	if weights == "" {
		return r.Fault("precision", "is not bf16-true, bf16-mixed, 16-true, 16-mixed or 32-true", "set it to bf16-true")
	}
	if mixed && r.Word("quantize") != "" {
		return r.Fault("precision", "is "+name+" beside quantize, which LitGPT refuses", "set it to bf16-true")
	}
	r.To.Weights, r.To.AdapterPrecision = weights, weights
	if mixed {
		r.Set(map[string]string{"bf16-mixed": "bf16", "16-mixed": "fp16"}[name], "precision", true)
	}
	return nil
}

// targets are the names of the modules that a switch adapts, in the architectures that LitGPT has.
var targets = []struct{ key, modules string }{
	{"lora_query", "q_proj query"}, {"lora_key", "k_proj key"}, {"lora_value", "v_proj value"},
	{"lora_projection", "o_proj dense"}, {"lora_head", "lm_head embed_out"},
	{"lora_mlp", "gate_proj up_proj down_proj fc1 fc2 dense_h_to_4h dense_4h_to_h"},
}

// adapt reads LoRA and the quantization below it. A file without lora_r is of full finetuning.
func (r *reader) adapt() error {
	if quantize := strings.TrimPrefix(r.Word("quantize"), "bnb."); quantize != "" {
		if quantize == "int8-training" {
			return r.Fault("quantize", "is bnb.int8-training, which is not planned yet", "set it to bnb.nf4")
		}
		kind, double := strings.CutSuffix(quantize, "-dq")
		if err := r.Quantize("quantize", map[string]*strict.Value{"load_in_4bit": strict.Of(true),
			"bnb_4bit_quant_type": strict.Of(kind), "bnb_4bit_use_double_quant": strict.Of(double),
			"bnb_4bit_compute_dtype": strict.Of(recipe.ElementNames[r.To.Weights]),
			"llm_int8_skip_modules":  {Kind: '['}}); err != nil {
			return err
		}
	}
	if !r.Gives("lora_r") {
		return nil
	}
	names := &strict.Value{Kind: '['}
	for _, t := range targets {
		for name := range strings.FieldsSeq(t.modules) {
			if r.Truth(t.key) {
				names.Elements = append(names.Elements, strict.Of(name))
			}
		}
	}
	return r.Adapt("lora_r", map[string]*strict.Value{"r": r.Value("lora_r"), "lora_alpha": r.Value("lora_alpha"),
		"lora_dropout": r.Value("lora_dropout"), "target_modules": names})
}
