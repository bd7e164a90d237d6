package trl

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/rollout"
)

// Keys that only trainers on generated answers have: GRPOConfig and RLOOConfig of TRL 1.16.
const generates = "trl_grpo trl_rloo use_vllm vllm_mode num_generations"

// generationKeys are the keys of GRPOConfig and RLOOConfig that change memory, with TRL's defaults.
var generationKeys = strict.Merge(
	rule.Anything.For("trl_grpo trl_rloo reward_model_name_or_path reward_weights"),
	rule.NameOrNames.For("reward_funcs"), rule.Measured.For("beta"),
	rule.Switched.For("use_vllm vllm_enable_sleep_mode use_transformers_continuous_batching use_transformers_paged"),
	rule.Counted.For("max_prompt_length vllm_max_model_length steps_per_generation"),
	strict.Keys{
		"vllm_mode":                   strict.Text("colocate", "server").OrNull().Default("colocate"),
		"vllm_gpu_memory_utilization": rule.Measured.Default(.3),
		"vllm_tensor_parallel_size":   rule.Counted.Default(1),
		"num_generations":             rule.Counted.Default(8),
		"max_completion_length":       rule.Counted.Default(512),
	})

// settings are those of the Trainer, and of the engine that generates answers.
var settings = func() recipe.SettingKeys {
	keys := recipe.SettingKeys{recipe.RolloutFraction: {Path: "vllm_gpu_memory_utilization",
		Says: recipe.AssignedFraction, Unset: .3},
		recipe.RolloutSleep:  {Path: "vllm_enable_sleep_mode", Says: recipe.Constant(true), Unset: false},
		recipe.RolloutServer: {Path: "vllm_mode", Says: recipe.Constant("server"), Unset: "colocate"}}
	maps.Copy(keys, recipe.TrainerKeys)
	return keys
}()

// usualPrompt is the tokens of a prompt where the file does not say: the default of max_prompt_length in the releases
// that had it.
const usualPrompt = 512

// generates reports whether the model generates the answers that it is trained on.
func (r *reader) generates() bool { return r.firstGiven(generates) != "" }

// generation reads a training on answers that vLLM generates: GRPOTrainer and RLOOTrainer, and VLLMGeneration in
// trl/generation/vllm_generation.py.
func (r *reader) generation() error {
	if !r.Truth("use_vllm") {
		return r.Fault(r.firstGiven(generates), "generates answers by the model's own generate(), whose KV cache is "+
			"not planned", "set use_vllm to true to plan the job with vLLM")
	}
	if err := r.Unplanned("the trainer's own cache of keys and values is not planned",
		"use_transformers_continuous_batching use_transformers_paged"); err != nil {
		return err
	}
	r.lengths()
	e := rollout.New(rollout.VLLM)
	e.Fraction, e.Tensor = r.Number("vllm_gpu_memory_utilization"), r.Integer("vllm_tensor_parallel_size")
	e.SharesProcess, e.BatchTokens, e.Longest = true, 4096, r.Integer("vllm_max_model_length")
	e.Server = r.Word("vllm_mode") == "server"
	if r.Truth("vllm_enable_sleep_mode") {
		e.Sleep = 2
	}
	e.ChunkedLogProbs = r.Since(1, 15)
	if r.Truth("use_peft") {
		e.Sync = rollout.WholeModel // merged adapters
	}
	r.To.Generation = &recipe.Generation{Engine: &e, Reference: r.Number("beta") != 0}
	if r.To.Generation.Reference {
		r.Note("beta", "is not 0: a frozen copy of the model judges the answers")
	}
	return r.rewards()
}

// lengths sets the tokens of a prompt with its answer.
func (r *reader) lengths() {
	prompt, answer := r.Integer("max_prompt_length"), r.Integer("max_completion_length")
	if prompt == 0 {
		prompt = usualPrompt
		r.Note("max_completion_length", fmt.Sprintf("is %d, and no key says the tokens of a prompt: %d are assumed, "+
			"and --seq-len says both", answer, prompt))
	}
	r.To.Sequence = int(prompt + answer)
	if most := r.Integer("vllm_max_model_length"); most > 0 {
		r.To.Sequence = min(r.To.Sequence, int(most))
	}
}

// rewards notes models that reward answers. Functions take no memory of a GPU.
func (r *reader) rewards() error {
	names := r.List("reward_funcs")
	if slices.ContainsFunc(names, func(name string) bool { return strings.Contains(name, "/") }) ||
		r.Gives("reward_model_name_or_path") {
		key := "reward_funcs"
		if r.Gives("reward_model_name_or_path") {
			key = "reward_model_name_or_path"
		}
		r.Note(key, "names a model that rewards answers: the plan leaves it out")
	}
	return nil
}
