package verl

import (
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/rollout"
)

// named are the configurations that verl's examples add to ppo_trainer.yaml, with their values that change memory
// (examples/sglang_multiturn/config of verl 0.8).
var named = map[string]map[string]any{
	"ppo_trainer":                        {},
	"gsm8k_multiturn_grpo":               ofTurns(1024),
	"gsm8k_multiturn_grpo_server":        ofTurns(1024),
	"gsm8k_multiturn_grpo_w_interaction": ofTurns(1024),
	"retool_multiturn_grpo":              ofTurns(1024),
	"search_multiturn_grpo":              ofTurns(1024),
	"geo3k_multiturn_grpo":               ofTurns(2048),
}

// ofTurns returns the values of a training on answers of several turns.
func ofTurns(longest int) map[string]any {
	return map[string]any{"data.max_prompt_length": longest, "data.max_response_length": longest,
		engine + "name": rollout.SGLang}
}

// applyNamed adds the values of the configuration that the command names, where it does not say others.
func (r *reader) applyNamed(hint string) error {
	name := strings.TrimSuffix(strings.TrimSuffix(r.Word("config_name"), ".yaml"), ".yml")
	values, known := named[name]
	if !known && name != "" {
		return r.Fault("config_name", fmt.Sprintf("is %s, whose defaults plimsoll does not know", name), hint)
	}
	for key, value := range values {
		if !r.Gives(key) {
			r.Root.Set(key, r.At("config_name"), strict.Of(value))
		}
	}
	if len(values) > 0 {
		r.Note("config_name", fmt.Sprintf("is %s: it is planned with the values of verl's example of that name, where "+
			"the command says no others", name))
	}
	return nil
}

// isEarly reports whether keys are of verl 0.1, whose forks still train: later releases count sequences of a GPU.
func (r *reader) isEarly() bool {
	return r.Gives(actor+"ppo_micro_batch_size") && !r.Gives(actor+"ppo_micro_batch_size_per_gpu")
}

// recomputes reports whether a model recomputes activations. Those of verl 0.1 do so only where a key says it.
func (r *reader) recomputes(key string) bool {
	if !r.Gives(key) && r.isEarly() {
		r.Note(key, "is not given, and ppo_micro_batch_size is a key of verl 0.1, whose default is false: activations "+
			"are planned as kept")
		return false
	}
	return r.Truth(key)
}

// engineName returns the engine's name. Up to verl 0.5 vLLM is the default; later releases do not start without.
func engineName(r *strict.Reader) string {
	if v := r.Find(engine + "name"); v == nil {
		r.Note(engine+"name", "is not given: vLLM, as up to verl 0.5")
		return rollout.VLLM
	}
	return r.Word(engine + "name")
}
