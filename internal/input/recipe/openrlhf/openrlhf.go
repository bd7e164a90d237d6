// Package openrlhf reads commands of OpenRLHF's train_ppo_ray.
package openrlhf

import (
	"cmp"
	_ "embed"
	"fmt"
	"strings"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/rollout"
)

// mark is the member of a document that stands for a command.
const mark = "openrlhf_ppo"

// Kind is the kind of the commands that train a policy on answers that vLLM generates.
var Kind = &recipe.Kind{Name: "training of OpenRLHF", Flag: recipe.ConfigFlag, Program: &program, Marks: mark,
	Commands: map[string]string{"openrlhf/cli/train_ppo_ray.py": mark, "examples/train_ppo_ray.py": mark},
	Settings: recipe.SettingKeys{
		recipe.MicroBatch:      {Path: "--micro_train_batch_size"},
		recipe.Accumulation:    {Follows: recipe.TrainBatch},
		recipe.TrainBatch:      {Path: "--train_batch_size"},
		recipe.RolloutJudged:   {Path: "--micro_rollout_batch_size", Says: recipe.AssignedCount},
		recipe.RolloutFraction: {Path: "--vllm_gpu_memory_utilization", Says: recipe.AssignedFraction},
	}}

//go:embed ignored.txt
var ignored string

//go:embed names.txt
var renamed string

// program is openrlhf/cli/train_ppo_ray.py.
var program = recipe.Program{Name: "OpenRLHF", Package: "openrlhf", Release: version.Version{Minor: 11, Patch: 2},
	Oldest: version.Version{Minor: 6}, Unread: rule.Uncommented(ignored),
	Read: func(r *recipe.Reader) error { return (&reader{r}).read() },
	Keys: aliased(rule.Ignored(ignored), rule.Anything.For(mark),
		rule.Worded.For(`pretrain reward_pretrain critic_pretrain agent_func_path attn_implementation
			grad_accum_dtype actor_optim`), rule.Anything.For("temperature torch_compile pretrain_data"),
		rule.Switched.For(`colocate_actor_ref colocate_all_models vllm_enable_sleep
			enforce_eager async_train gradient_checkpointing gradient_checkpointing_use_reentrant adam_offload
			overlap_comm use_liger_kernel deepspeed_enable_sleep packing_samples use_dynamic_batch
			ref_reward_offload enable_ema load_in_4bit deepcompile freeze_visual_encoder`),
		rule.Counted.For("max_len prompt_max_len generate_max_len rollout_max_tokens_per_gpu"),
		rule.Counted.Default(1).For(`actor_num_nodes vllm_tensor_parallel_size micro_train_batch_size
			micro_rollout_batch_size zpg ring_attn_size ds_tensor_parallel_size`),
		rule.Count.Lax().OrNull().For("vllm_num_engines lora_rank"),
		rule.NameOrNames.For("target_modules"),
		rule.Measured.For("entropy_loss_coef"),
		strict.Keys{
			"actor_num_gpus_per_node":     rule.Counted.Default(8),
			"train_batch_size":            rule.Counted.Default(128),
			"train_max_tokens_per_gpu":    rule.Counted.Default(16192),
			"zero_stage":                  rule.Count.Lax().Default(2),
			"vllm_gpu_memory_utilization": rule.Measured.Default(.95),
			"init_kl_coef":                rule.Measured.Default(.01),
			"max_norm":                    rule.Measured.Default(1.),
			"lora_alpha":                  rule.Measured.Default(16.),
			"advantage_estimator":         rule.Worded.Default("gae"),
			"param_dtype":                 rule.Worded.Default("bf16"),
		})}

// aliased returns keys with the names that flags have had since 0.10.3, of which names.txt has those that are read.
func aliased(lists ...strict.Keys) strict.Keys {
	keys := strict.Merge(lists...)
	for line := range strings.Lines(rule.Uncommented(renamed)) {
		if other, key, both := strings.Cut(strings.TrimSpace(line), " "); both {
			keys[key] = keys[key].Alias(other)
		}
	}
	return keys
}

// reader reads a command.
type reader struct{ *recipe.Reader }

func (r *reader) read() error {
	r.Model("pretrain")
	r.To.Nodes, r.To.PerNode = int(r.Integer("actor_num_nodes")), int(r.Integer("actor_num_gpus_per_node"))
	if err := cmp.Or(r.refuse(), r.types()); err != nil {
		return err
	}
	r.batch()
	r.shard()
	r.generation()
	r.remarks()
	if r.Integer("lora_rank") > 0 {
		return r.adapt()
	}
	return nil
}

// refuse refuses what is not planned.
func (r *reader) refuse() error {
	several := strings.Contains(r.Word("reward_pretrain"), ",")
	if several && r.Truth("colocate_all_models") && r.hasReward() {
		return r.Fault("reward_pretrain", "names several models that reward answers on the GPUs of the actor, which "+
			"is not planned yet", "give --remote_rm_url to plan the job without them")
	}
	if o := r.Word("actor_optim"); o != "" && o != "adam" {
		return r.Fault("actor_optim", fmt.Sprintf("is %s, which is not planned for OpenRLHF yet", o), "set it to adam")
	}
	for _, key := range []string{"ring_attn_size", "ds_tensor_parallel_size"} {
		if r.Integer(key) > 1 {
			return r.Fault(key, "divides sequences or layers among ranks, which is not planned for OpenRLHF yet",
				"set it to 1")
		}
	}
	if r.Integer("vllm_num_engines") == 0 {
		return r.Fault("vllm_num_engines", "is 0 or not given: the model generates answers itself, which is not "+
			"planned", "give the number of vLLM's engines")
	}
	return cmp.Or(r.Unplanned("an average of the weights is trained beside them", "enable_ema"),
		r.Unplanned("DeepSpeed or torch compiles the passes", "deepcompile torch_compile"),
		r.Unplanned("a loss of other data has passes of its own", "pretrain_data"),
		r.Unplanned("the weights are quantized", "load_in_4bit"))
}

// hasCritic reports whether a critic is trained: its model is the reward model, where nothing else says it
// (train_ppo_ray.py).
func (r *reader) hasCritic() bool { return r.Word("advantage_estimator") == "gae" }

// hasReward reports whether a model rewards answers. A function or a service does so else.
func (r *reader) hasReward() bool {
	return r.Gives("reward_pretrain") && !r.Gives("remote_rm_url") && !r.Gives("agent_func_path")
}

// types reads the types of the weights and of the passes.
func (r *reader) types() error {
	name := r.Word("param_dtype")
	if name != "bf16" && name != "fp16" {
		return r.Fault("param_dtype", fmt.Sprintf("is %s, expected bf16 or fp16", name), "")
	}
	r.To.Weights = name
	r.Set("bf16", "param_dtype", name == "bf16")
	r.Set("fp16", "param_dtype", name == "fp16")
	r.To.Attention = "flash"
	if name := r.Word("attn_implementation"); name == "sdpa" || name == "eager" {
		r.To.Attention = name
	}
	r.To.Chunks = recipe.WideKernel // log_probs_from_logits in openrlhf/models/utils.py
	r.To.LigerModules = r.Truth("use_liger_kernel")
	r.To.RouterLoss = true // output_router_logits in openrlhf/models/actor.py
	r.To.Freezes = &recipe.Freezes{Vision: r.Truth("freeze_visual_encoder")}
	return nil
}

// longest returns the tokens of the longest sample, and the key that says it.
func (r *reader) longest() (string, int64) {
	if r.Gives("max_len") {
		return "max_len", r.Integer("max_len")
	}
	prompt, answer := r.Integer("prompt_max_len"), r.Integer("generate_max_len")
	if prompt+answer == 0 {
		return "max_len", 2048
	}
	return "generate_max_len", cmp.Or(prompt, 1024) + cmp.Or(answer, 1024)
}

// batch reads the sequences of a micro batch, or the tokens of a packed one.
func (r *reader) batch() {
	at, longest := r.longest()
	key, micro := "micro_train_batch_size", r.Integer("micro_train_batch_size")
	world := int64(max(1, r.To.Nodes*r.To.PerNode))
	steps := int64(r.accumulation())
	if r.Truth("use_dynamic_batch") {
		key = "train_max_tokens_per_gpu"
		tokens := max(longest, r.Integer(key))
		steps = max(1, r.Integer("train_batch_size")*longest/(tokens*world))
		longest, micro = tokens, 1
		r.Note(key, fmt.Sprintf("has passes of packed samples: %d tokens in all", tokens))
	} else {
		r.Note(at, fmt.Sprintf("says the longest sample: every one is planned with %d tokens", longest))
	}
	r.To.Sequence = int(longest)
	r.Set("per_device_train_batch_size", key, int(micro))
	r.Set("gradient_accumulation_steps", "train_batch_size", int(steps))
}

// accumulation returns the micro batches of a step that are not packed.
func (r *reader) accumulation() int {
	each := r.Integer("micro_train_batch_size") * int64(max(1, r.To.Nodes*r.To.PerNode))
	return int(max(1, r.Integer("train_batch_size")/each))
}

// shard gives DeepSpeed's configuration: get_train_ds_config in openrlhf/utils/deepspeed/deepspeed_utils.py.
func (r *reader) shard() {
	object := func(members ...any) *strict.Value {
		v := &strict.Value{Kind: '{', At: r.At("zero_stage")}
		for i := 0; i < len(members); i += 2 {
			value, is := members[i+1].(*strict.Value)
			if !is {
				value = strict.Of(members[i+1])
			}
			recipe.Give(v, members[i].(string), v.At, value)
		}
		return v
	}
	device := "none"
	if r.Truth("adam_offload") {
		device = "cpu"
	}
	zero := object("stage", int(r.Integer("zero_stage")), "offload_param", object("device", "none"),
		"offload_optimizer", object("device", device, "pin_memory", true))
	if n := r.Integer("zpg"); n > 1 {
		recipe.Give(zero, "zero_hpz_partition_size", zero.At, strict.Of(int(n)))
	}
	if r.Truth("overlap_comm") {
		recipe.Give(zero, "overlap_comm", zero.At, strict.Of(true))
	}
	half := r.Word("param_dtype")
	config := object("zero_optimization", zero, half, object("enabled", true),
		"gradient_clipping", r.Number("max_norm"), "train_micro_batch_size_per_gpu", "auto",
		"gradient_accumulation_steps", "auto",
		"optimizer", object("type", "AdamW", "params", object("lr", "auto")))
	if half == "fp16" {
		recipe.Give(config, "bf16", zero.At, object("enabled", false))
	}
	if name := r.Word("grad_accum_dtype"); name != "" {
		recipe.Give(config, "data_types", zero.At, object("grad_accum_dtype", name))
	}
	recipe.Give(r.Arguments, "deepspeed", r.At("zero_stage"), config)
	r.Set("max_grad_norm", "max_norm", r.Number("max_norm"))
	r.Set("gradient_checkpointing", "gradient_checkpointing", r.Truth("gradient_checkpointing"))
	kwargs := object("use_reentrant", r.Truth("gradient_checkpointing_use_reentrant"))
	recipe.Give(r.Arguments, "gradient_checkpointing_kwargs", r.At("gradient_checkpointing"), kwargs)
}

// generation reads vLLM and the frozen model. Each model has processes of its own, on GPUs of its own but for what is
// colocated (openrlhf/cli/train_ppo_ray.py).
func (r *reader) generation() {
	all := r.Truth("colocate_all_models")
	e := rollout.New(rollout.VLLM)
	e.Server = !all || r.Truth("async_train")
	e.Fraction, e.Tensor = r.Number("vllm_gpu_memory_utilization"), r.Integer("vllm_tensor_parallel_size")
	_, e.Longest = r.longest()
	e.Graphs = !r.Truth("enforce_eager")
	if r.Truth("vllm_enable_sleep") {
		e.Sleep = 1 // sleep() in openrlhf/trainer/ray/vllm_engine.py
	}
	if r.Truth("deepspeed_enable_sleep") && !r.Truth("adam_offload") { // offload_deepspeed_states
		e.Backups = rollout.Backups{Gradients: true, Optimizer: true}
	}
	e.LogProbsBatch, e.RayThreshold = r.Integer("micro_rollout_batch_size"), rollout.RayUsualThreshold
	if r.Truth("use_dynamic_batch") {
		e.LogProbsBatch = 1
	}
	beside := all || r.Truth("colocate_actor_ref")
	judges := r.Number("init_kl_coef") > 0
	if judges && beside {
		e.Apart = 1
		e.HostReference = r.Truth("ref_reward_offload") && r.Integer("zero_stage") == 3
		r.Note("init_kl_coef", "is above 0: a frozen copy of the model judges answers, in a process of its own on the "+
			"GPUs of the actor")
	} else if judges {
		r.Note("init_kl_coef", "is above 0: a frozen copy of the model judges answers on GPUs of its own, which the "+
			"plan leaves out")
	}
	r.To.Generation = &recipe.Generation{Engine: &e, Reference: judges && beside, LeftOut: r.others(judges && !beside)}
	if all {
		r.companions()
	}
}

// companions adds the critic and the model that rewards answers, where they are on the GPUs of the actor. Each has a
// process of its own (openrlhf/models/model.py, openrlhf/trainer/ray/ppo_critic.py).
func (r *reader) companions() {
	g := r.To.Generation
	_, longest := r.longest()
	c := recipe.Companion{Weights: r.Word("param_dtype"), Recomputes: r.Truth("gradient_checkpointing"), Context: 1,
		Apart: true, MicroBatch: r.Integer("micro_train_batch_size"), Judged: r.Integer("micro_rollout_batch_size"),
		Accumulation: r.accumulation(), Sequence: longest}
	if r.Truth("use_dynamic_batch") {
		c.MicroBatch, c.Judged, c.Sequence = 1, 1, int64(r.To.Sequence)
	}
	if r.hasCritic() {
		trained := c
		trained.Role, trained.Model, trained.At = recipe.Critic, r.Word("pretrain"), r.Place("advantage_estimator")
		for _, key := range []string{"critic_pretrain", "reward_pretrain"} {
			if r.Gives(key) && (key == "critic_pretrain" || r.hasReward()) {
				trained.Model, trained.At = r.Word(key), r.Place(key)
				break
			}
		}
		if r.Truth("deepspeed_enable_sleep") && !r.Truth("adam_offload") {
			trained.Backups = rollout.Backups{Gradients: true, Optimizer: true}
		}
		g.Companions = append(g.Companions, trained)
	}
	if r.hasReward() {
		frozen := c
		frozen.Role, frozen.Model, frozen.At = recipe.Reward, r.Word("reward_pretrain"), r.Place("reward_pretrain")
		frozen.Backups.Parameters = r.Truth("ref_reward_offload") && r.Integer("zero_stage") == 3
		g.Companions = append(g.Companions, frozen)
	}
	g.Engine.Apart += int64(len(g.Companions))
}

// others names the models that have GPUs of their own.
func (r *reader) others(frozen bool) (list []string) {
	if frozen {
		list = append(list, "the GPUs of the frozen model")
	}
	all := r.Truth("colocate_all_models")
	if r.hasCritic() && !all {
		list = append(list, "the GPUs of the critic")
	}
	if r.hasReward() && !all {
		list = append(list, "the GPUs of the reward model")
	}
	if r.Gives("agent_func_path") {
		list = append(list, "samples that turns of an agent make longer")
	}
	return list
}

// remarks notes keys that change memory in a way that the plan leaves out.
func (r *reader) remarks() {
	all := r.Truth("colocate_all_models")
	if r.hasCritic() && !all {
		r.Note("advantage_estimator", "is "+r.Word("advantage_estimator")+": a critic is trained on GPUs of its own, "+
			"which the plan leaves out")
	}
	if r.Gives("entropy_loss_coef") {
		r.Note("entropy_loss_coef", "is given: entropies of the logits take more than the plan says")
	}
	if r.hasReward() && !all {
		r.Note("reward_pretrain", "names a model that rewards answers on GPUs of its own, which the plan leaves out")
	}
	if n := r.Integer("rollout_max_tokens_per_gpu"); n > 0 && n != r.Integer("train_max_tokens_per_gpu") {
		r.Note("rollout_max_tokens_per_gpu", fmt.Sprintf("is %d: the passes that judge answers are planned with those "+
			"of the update", n))
	}
	if v := r.Find("temperature"); v != nil && v.Text != "1.0" && v.Text != "1" {
		r.Note("temperature", "is not 1: the logits are divided by it, and the backward pass takes a copy more of them")
	}
	if r.Gives("agent_func_path") {
		r.Note("agent_func_path", "generates answers in a way of the user's own, whose turns may make samples longer")
	}
	if r.Truth("packing_samples") && !r.Truth("use_dynamic_batch") {
		r.Note("packing_samples", "is true: a pass has no padding, and is as large as planned where all samples are "+
			"as long as the longest")
	}
}

// adapt reads the adapter.
func (r *reader) adapt() error {
	targets := r.Find("target_modules")
	if targets == nil {
		targets = strict.Of("all-linear")
	}
	return r.Adapt("lora_rank", map[string]*strict.Value{"r": r.Find("lora_rank"),
		"lora_alpha": r.Value("lora_alpha"), "target_modules": recipe.OneName(targets)})
}
