package swift

import (
	"cmp"
	"fmt"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/rollout"
)

// generationKeys are the keys of GRPO that change memory, with ms-swift's defaults: RolloutTrainerArgumentsMixin and
// GRPOArgumentsMixin in swift/rlhf_trainers/args_mixin.py.
var generationKeys = strict.Merge(
	rule.Anything.For(notGenerated+" "+ofTeachers+" vllm_engine_kwargs"),
	rule.Measured.For("beta"),
	rule.Switched.For(`use_vllm offload_model offload_optimizer vllm_enforce_eager vllm_enable_lora async_generate
		vllm_enable_expert_parallel dynamic_sample log_entropy kl_in_reward sync_ref_model`),
	rule.Switched.Default(true).For("enable_flattened_weight_sync vllm_disable_custom_all_reduce"),
	rule.Measured.Default(1.).For("top_entropy_quantile"),
	rule.Measured.For("vllm_mm_processor_cache_gb"),
	rule.Counted.Default(1).For("vllm_pipeline_parallel_size"),
	rule.Counted.For(`vllm_max_model_len max_model_len vllm_max_num_seqs steps_per_generation generation_batch_size
		move_model_batches`),
	rule.Worded.For("multi_turn_scheduler vllm_quantization"),
	strict.Keys{
		"vllm_mode":                   strict.Text("colocate", "server").OrNull(),
		"vllm_gpu_memory_utilization": rule.Measured.Default(.9),
		"vllm_tensor_parallel_size":   rule.Counted.Default(1),
		"sleep_level":                 rule.Count.Lax(),
		"max_completion_length":       rule.Counted.Default(512),
	})

// Keys of models beside the trained one, and of losses with passes of their own.
const (
	notGenerated = "reward_model reward_model_plugin chord_sft_dataset vllm_speculative_config"
	ofTeachers   = "teacher_model teacher_adapters teacher_model_server sdar_loss_coef advantage_reweight"
)

// usualPrompt is the tokens of a prompt where the file does not say.
const usualPrompt = 512

// generation reads a training on answers that vLLM generates: swift/rlhf_trainers/grpo_trainer.py, and _prepare_vllm in
// rollout_mixin.py.
func (r *reader) generation() error {
	const kind = "rlhf_type"
	if err := cmp.Or(r.Unplanned("a model beside the trained one, or passes of another kind, are not planned",
		notGenerated), r.Unplanned("a teacher gives logits", ofTeachers),
		r.Unplanned("the reference model has an adapter", "ref_adapters"),
		r.Unplanned("the engine divides experts", "vllm_enable_expert_parallel")); err != nil {
		return err
	}
	switch stages := "vllm_pipeline_parallel_size"; {
	case r.Integer(stages) > 1:
		return r.Fault(stages, "cuts the engine into stages, which is not planned yet", "use "+
			"vllm_tensor_parallel_size")
	case !r.Truth("use_vllm"):
		return r.Fault(kind, "is grpo: it generates answers by the model's own generate(), whose KV cache is not "+
			"planned", "set use_vllm to true and vllm_mode to colocate or server to plan the job with vLLM")
	case r.Word("vllm_mode") == "":
		return r.Fault("use_vllm", "is true without vllm_mode, which ms-swift asks for", "set vllm_mode to colocate "+
			"or server")
	}
	r.lengths()
	e := r.engine()
	judges := !r.Gives("beta") || r.Number("beta") != 0 // 0.04 by default
	r.To.Generation = &recipe.Generation{Engine: &e, Reference: judges}
	r.To.Chunks = recipe.BySequence
	if r.To.Generation.Reference {
		r.Note("beta", "is not 0: the model as it was loaded judges the answers")
	}
	if m := r.Arguments.Member("use_liger_kernel"); m != nil && recipe.On(m.Value) {
		r.Set("use_liger_kernel", "use_liger_kernel", false)
		r.To.LigerModules = true
		r.Note("use_liger_kernel", "is true: the loss of answers is planned with all logits, and takes less")
	}
	return r.remarks()
}

// engine reads the engine. Ranks start it in their own process, and it takes weights out of the trainer's tensors.
func (r *reader) engine() rollout.Engine {
	e := rollout.New(rollout.VLLM)
	e.SharesProcess, e.Server = true, r.Word("vllm_mode") == "server"
	e.Fraction, e.Tensor = r.Number("vllm_gpu_memory_utilization"), r.Integer("vllm_tensor_parallel_size")
	e.Sleep, e.Longest = int(r.Integer("sleep_level")), cmp.Or(r.Integer("vllm_max_model_len"),
		r.Integer("max_model_len"))
	e.Graphs = !r.Truth("vllm_enforce_eager")
	e.Backups = rollout.Backups{Parameters: r.Truth("offload_model"), Optimizer: r.Truth("offload_optimizer")}
	e.Sync, e.SyncParts = rollout.GatheredModel, r.syncParts()
	each, steps := r.Integer("per_device_train_batch_size"), r.Integer("steps_per_generation")
	if steps == 0 {
		steps = r.accumulation()
	}
	e.Sequences = cmp.Or(r.Integer("vllm_max_num_seqs"), each*e.Tensor*steps)
	return e
}

// syncParts returns the parts that a model which ZeRO-3 shards is gathered in. Releases 3.12.1 to 3.12.5 gather all of
// it before the first part (_move_full_model_to_vllm in rollout_mixin.py).
func (r *reader) syncParts() int64 {
	const key = "move_model_batches"
	parts := r.Integer(key)
	of := r.To.Release
	switch {
	case parts <= 1:
	case of.AtLeast(3, 12, 1) && !of.AtLeast(3, 12, 6):
		r.Note(key, fmt.Sprintf("is without effect in ms-swift %v, which gathers all of the model at once: 3.12.6 "+
			"and later have the parts", of))
		return 1
	case r.To.Assumed:
		r.Note(key, "divides what is gathered for vLLM; ms-swift 3.12.1 to 3.12.5 gather all of the model at once "+
			"under ZeRO-3, and --release ms-swift=VERSION plans that")
	}
	return parts
}

// accumulation returns the micro batches of an optimizer step, as batch has set them.
func (r *reader) accumulation() int64 {
	if m := r.Arguments.Member("gradient_accumulation_steps"); m != nil {
		return max(1, m.Value.Integer)
	}
	return 1
}

// lengths sets the tokens of a prompt with its answer. In a training on generated answers max_length is of prompts.
func (r *reader) lengths() {
	prompt, answer := r.Integer("max_length"), r.Integer("max_completion_length")
	if prompt == 0 {
		prompt = usualPrompt
		r.Note("max_completion_length", fmt.Sprintf("is %d, and no key says the tokens of a prompt: %d are assumed, "+
			"and --seq-len says both", answer, prompt))
	}
	r.To.Sequence = int(prompt + answer)
	if most := r.Integer("vllm_max_model_len"); most > 0 && r.Word("vllm_mode") == "colocate" {
		r.To.Sequence = min(r.To.Sequence, int(most))
	}
}

// entropies says what entropy_from_logits in swift/rlhf_trainers/utils.py takes, which no plan has.
const entropies = "has entropies of all tokens: the loss then makes log-probabilities and probabilities of all " +
	"logits, which are not planned: two more of them for a moment"

// remarks notes what the plan leaves out.
func (r *reader) remarks() error {
	for _, n := range [][2]string{
		{"multi_turn_scheduler", "has answers of several turns: each is planned with max_completion_length tokens"},
		{"vllm_enable_lora", "is true: buffers of the engine for adapters are not planned"},
		{"vllm_quantization", "is given: the engine is planned with weights in 16 bits"},
		{"vllm_engine_kwargs", "is not read: it may change what the engine holds"},
		{"async_generate", "is true: answers come while the trainer works, which changes no memory of its GPUs"},
		{"dynamic_sample", "is true: answers are generated again, and each pass is as large as planned"},
		{"generation_batch_size", "is of all ranks: the engine is planned for those of gradient_accumulation_steps"},
		{"log_entropy", entropies},
		{"kl_in_reward", "is true: the divergence from the frozen model is planned in the loss, and takes less"},
		{"sync_ref_model", "is true: weights are copied into the frozen model, which is planned"},
		{"vllm_mm_processor_cache_gb", "is memory of the host, which is not planned"},
	} {
		if recipe.On(r.Find(n[0])) {
			r.Note(n[0], n[1])
		}
	}
	for _, key := range []string{"enable_flattened_weight_sync", "vllm_disable_custom_all_reduce"} {
		if !r.Truth(key) {
			r.Note(key, "is false: the buffers that the engine then has are not planned")
		}
	}
	if r.Number("top_entropy_quantile") < 1 {
		r.Note("top_entropy_quantile", entropies)
	}
	if r.Truth("offload_model") && r.To.Generation.Reference {
		r.Note("offload_model", "is true: the frozen model waits on the host, too, while answers are generated, and "+
			"is planned on the GPU")
	}
	return nil
}
