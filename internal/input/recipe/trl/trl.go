// Package trl reads configurations and commands of TRL's scripts.
package trl

import (
	"cmp"
	_ "embed"
	"fmt"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Kind is the kind of configurations of TRL's scripts, and of those that are made like them.
var Kind = &recipe.Kind{Name: "configuration of a training script, such as TRL's", Flag: recipe.ConfigFlag,
	Program: &trl, Settings: settings,
	Marks: `trl_sft trl_dpo trl_kto trl_reward trl_grpo trl_rloo cpo_alpha model_name_or_path dataset_name
		dataset_mixture dataset_mixer use_peft lora_r+learning_rate lora_r+per_device_train_batch_size
		lora_r+num_train_epochs lora_r+output_dir`,
	Python:   fromPython,
	ConfigIn: "config", EveryDevice: true, ByAccelerate: true, Abbreviates: true,
	Commands: map[string]string{"trl sft": "trl_sft", "trl dpo": "trl_dpo", "trl kto": "trl_kto",
		"trl reward": "trl_reward", "sft.py": "trl_sft", "dpo.py": "trl_dpo", "kto.py": "trl_kto",
		"run_sft.py": "trl_sft", "run_dpo.py": "trl_dpo", "trl grpo": "trl_grpo", "trl rloo": "trl_rloo",
		"grpo.py": "trl_grpo", "rloo.py": "trl_rloo"}}

// trl is the configuration of TRL's SFT script and of those that are made like it, such as the alignment-handbook's:
// SFTConfig, ModelConfig and ScriptArguments.
var trl = recipe.Program{Name: "TRL", Hosts: true, Package: "trl", Release: version.Version{Major: 1, Minor: 16},
	Oldest: version.Version{Minor: 9, Patch: 6},
	Read:   func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: strict.Merge(rule.Ignored(ignored),
		rule.Anything.For(pairKeys+" "+unpairedKeys+" "+cpoKeys+" "+rewardKeys+" "+unplannedGeneration),
		rule.Worded.For("lora_task_type model_name_or_path dtype torch_dtype attn_implementation ref_model"),
		rule.NameOrNames.For("loss_type"),
		rule.Measured.For("cpo_alpha rpo_alpha"),
		rule.Switched.For("reference_free precompute_ref_log_probs force_use_ref_model"),
		rule.Anything.For(unplannedParts+" generate_during_eval precompute_ref_batch_size"),
		rule.Switched.For(`activation_offloading use_peft load_in_8bit load_in_4bit use_bnb_nested_quant use_rslora
			use_dora`),
		rule.NameOrNames.For("lora_target_modules lora_target_parameters lora_modules_to_save"),
		// This script's own defaults of two keys of TrainingArguments.
		rule.Switched.For("gradient_checkpointing bf16 fp16"),
		strict.Keys{
			"max_length":             rule.Counted.Default(1024),
			"max_seq_length":         rule.Counted,
			"pad_to_multiple_of":     rule.Counted.Or(rule.Text).OrNull(),
			"router_aux_loss_coef":   rule.Measured,
			"model_init_kwargs":      rule.Free.Or(rule.Text).OrNull(),
			"lora_r":                 rule.Counted.Default(16),
			"lora_alpha":             rule.Measured.Default(32.),
			"lora_dropout":           rule.Measured.Default(.05),
			"bnb_4bit_quant_type":    strict.Text("fp4", "nf4").OrNull().Default("nf4"),
			"bnb_4bit_quant_storage": rule.Worded,
		},
		rule.Anything.For(unplannedPasses),
		generationKeys, recipe.SourceKeys,
		rule.Anything.For("model optimizers optimizer_cls_and_kwargs compute_loss_func"),
	)}

//go:embed ignored.txt
var ignored string

// Keys of TRL's other configurations, which say what a script trains: DPOConfig, KTOConfig, CPOConfig, RewardConfig,
// and those of GRPO, RLOO and PPO.
const (
	pairKeys = `trl_dpo beta max_prompt_length max_completion_length rpo_alpha ref_model precompute_ref_log_probs
		reference_free label_smoothing f_divergence_type`
	unpairedKeys        = "trl_kto desirable_weight undesirable_weight"
	cpoKeys             = "cpo_alpha simpo_gamma"
	rewardKeys          = "trl_reward center_rewards_coefficient"
	unplannedGeneration = "reward_model_path num_ppo_epochs sft_model_path response_length"
	unplannedPasses     = `use_unsloth use_weighting use_liger_loss cast_lm_head_to_fp32 entropy_coef
		use_adaptive_entropy`
	unplannedParts = "ref_model_init_kwargs is_encoder_decoder"
)

// reader reads a configuration.
type reader struct{ *recipe.Reader }

// read reads a file.
func (r *reader) read() error {
	r.Model("model_name_or_path")
	if isUnsloth(r.LoaderClass()) && r.generates() {
		return r.Fault(recipe.Loaded, "is Unsloth's, which generates answers with the trainer's own weights: this is "+
			"not planned yet", "plan TRL's GRPOTrainer with vLLM for an upper bound")
	}
	if err := cmp.Or(
		r.Unplanned("code of the source decides", "optimizers optimizer_cls_and_kwargs compute_loss_func"),
		r.Unplanned("answers are generated and rewarded, beside a model of values", unplannedGeneration),
		r.Unplanned("it changes what the passes hold", unplannedPasses),
		r.Unplanned("it changes the models", unplannedParts), r.modelArguments()); err != nil {
		return err
	}
	if r.generates() {
		if err := r.generation(); err != nil {
			return err
		}
	} else {
		r.answers()
		length := "max_length"
		if r.Gives("max_seq_length") { // its name before 0.16
			length = "max_seq_length"
		}
		if r.Has(length) && !r.Gives(length) {
			r.Note(length, "is null: no sequence is cut, and --seq-len says how long the longest one is")
		} else {
			r.Longest(length)
		}
		if r.Gives("pad_to_multiple_of") {
			r.PadTo("pad_to_multiple_of")
		}
	}
	r.arguments()
	r.loss()
	if r.Truth("activation_offloading") {
		r.To.Offloading = recipe.NewOffloading()
	}
	if r.Find(recipe.Loaded) != nil || r.Find(recipe.Adapted) != nil {
		return r.source()
	}
	quantized := r.Truth("load_in_4bit") || r.Truth("load_in_8bit")
	if err := cmp.Or(r.weights(quantized), r.ReadAttention("attn_implementation"), r.quantize()); err != nil {
		return err
	}
	if !r.Truth("use_peft") {
		return nil
	}
	if quantized {
		r.prepare()
	}
	return r.Adapt("use_peft", map[string]*strict.Value{"r": r.Value("lora_r"), "lora_alpha": r.Value("lora_alpha"),
		"lora_dropout": r.Value("lora_dropout"), "target_modules": recipe.OneName(r.Find("lora_target_modules")),
		"target_parameters": recipe.AsList(r.Find("lora_target_parameters")), "use_rslora": r.Find("use_rslora"),
		"use_dora": r.Find("use_dora"), "modules_to_save": recipe.AsList(r.Find("lora_modules_to_save"))})
}

// source reads the model and the adapter of a source of Python, which loads and adapts the model itself.
func (r *reader) source() error {
	adapted := r.Find(recipe.Adapted)
	byUnsloth := isUnsloth(r.LoaderClass())
	if v := r.Find(recipe.Loaded); v == nil {
		if err := cmp.Or(r.weights(false), r.ReadAttention("attn_implementation")); err != nil {
			return err
		}
	} else {
		r.To.TrainedIn32 = recipe.UnderFSDP
		if err := r.ReadLoaded(byUnsloth); err != nil {
			return err
		}
		if byUnsloth {
			if err := r.unsloth(); err != nil {
				return err
			}
		}
	}
	if byUnsloth && adapted != nil && classOf(adapted) == "get_peft_model" {
		return r.unslothAdapts(adapted)
	}
	if r.To.Quantization != nil {
		r.prepare()
	}
	return r.ReadAdapted()
}

// prepare says what TRL's trainers make of a quantized model that they adapt. Before 0.26 they call PEFT's
// prepare_model_for_kbit_training, which makes the parameters that are not quantized fp32. Since 0.7.6 they convert
// the adapters, the embeddings and the head of models in 4 bits to bf16 thereafter. Since 0.26 they convert the
// adapters alone (SFTTrainer.__init__, prepare_peft_model in trl/models/utils.py).
func (r *reader) prepare() {
	const cast = "bf16"
	if r.Since(0, 26) {
		r.To.AdapterPrecision = cast
		return
	}
	r.To.WidensNorms, r.To.UnlessSharded = true, true
	if r.To.Quantization != nil && r.To.Quantization.Bits == 4 && r.Truth(cast) && r.To.Release.AtLeast(0, 7, 6) {
		r.To.NormsAlone, r.To.AdapterPrecision = true, cast
		return
	}
	r.To.AdapterPrecision = "fp32"
}

// arguments sets TRL's own defaults of TrainingArguments, which depend on its release.
func (r *reader) arguments() {
	half := r.Truth("fp16")
	r.Pass("fp16", "fp16")
	const checkpointing, brain = "gradient_checkpointing", "bf16"
	r.Set(brain, brain, r.usually(brain, r.Since(0, 19) && !half))
	r.Set(checkpointing, checkpointing, r.usually(checkpointing, r.Since(0, 22)))
	const kwargs = "gradient_checkpointing_kwargs"
	if r.Since(0, 28) && r.Arguments.Member(kwargs) == nil {
		reentrant := &strict.Value{Kind: '{'}
		recipe.Give(reentrant, "use_reentrant", r.At(checkpointing), strict.Of(false))
		recipe.Give(r.Arguments, kwargs, r.At(checkpointing), reentrant)
	}
	if r.Arguments.Member("learning_rate") == nil {
		r.Set("learning_rate", "max_length", 2e-5)
	}
}

// usually returns the value of a switch, or its default in the release. It says so where nothing says the release.
func (r *reader) usually(key string, is bool) bool {
	if r.Gives(key) {
		return r.Truth(key)
	}
	if r.To.Assumed && is {
		r.Note(key, fmt.Sprintf("is not given: it is true by default in TRL %v, and was false in 2024", r.To.Release))
	}
	return is
}

// modelArguments refuses arguments of from_pretrained that say what other keys say. TRL's scripts before 1.15 replace
// them by those.
func (r *reader) modelArguments() error {
	const key = "model_init_kwargs"
	v := r.Find(key)
	if v == nil || v.Kind != '{' {
		return nil
	}
	for _, m := range v.Members {
		if instead := inModel[m.Name]; instead != "" {
			return r.Fault(key, fmt.Sprintf("has %s, which TRL's scripts read in no release before 1.15", m.Name),
				"give "+instead+" beside it, which plimsoll and all releases read")
		}
	}
	return nil
}

// inModel are arguments of from_pretrained that change memory, and the keys of TRL that say the same.
var inModel = map[string]string{"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attn_implementation",
	"quantization_config": "load_in_4bit or load_in_8bit", "device_map": "nothing", "use_kernels": "nothing"}

// weights reads the type that the model is loaded in.
func (r *reader) weights(quantized bool) error {
	r.To.TrainedIn32 = recipe.UnderFSDP
	key := "dtype"
	if r.Has("torch_dtype") { // its name before 0.24
		key = "torch_dtype"
	}
	v := r.Find(key)
	switch {
	case v == nil && !r.Has(key) && !quantized:
		r.To.Weights = "fp32"
		r.Note(key, fmt.Sprintf("is not given: TRL %v loads the weights in fp32 by default", r.To.Release))
	case v == nil || v.IsAuto():
	case recipe.PrecisionNames[v.Text] == "":
		return r.Fault(key, fmt.Sprintf("is %s, expected bfloat16, float16, float32 or auto", v), "")
	default:
		r.To.Weights = recipe.PrecisionNames[v.Text]
	}
	return nil
}

// quantize reads the quantization: get_quantization_config in trl/trainer/utils.py.
func (r *reader) quantize() error {
	switch {
	case r.Truth("load_in_4bit"):
		computed := strict.Of(recipe.ElementNames[r.To.Weights])
		if r.To.Weights == "" {
			computed = nil
		}
		return r.Quantize("load_in_4bit", map[string]*strict.Value{"load_in_4bit": strict.Of(true),
			"load_in_8bit": r.Find("load_in_8bit"), "bnb_4bit_quant_type": r.Value("bnb_4bit_quant_type"),
			"bnb_4bit_use_double_quant": strict.Of(r.Truth("use_bnb_nested_quant")),
			"bnb_4bit_compute_dtype":    computed, "bnb_4bit_quant_storage": r.Find("bnb_4bit_quant_storage")})
	case r.Truth("load_in_8bit"):
		return r.Quantize("load_in_8bit", map[string]*strict.Value{"load_in_8bit": strict.Of(true)})
	}
	return nil
}
