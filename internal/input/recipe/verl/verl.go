// Package verl reads configurations and commands of verl's PPO trainer.
package verl

import (
	"cmp"
	"fmt"
	"maps"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/rollout"
)

// Kind is the kind of verl's configurations, and of the commands that start its trainer with assignments of Hydra.
var Kind = &recipe.Kind{Name: "verl configuration", Flag: recipe.ConfigFlag, Program: &verl, Assigns: true,
	Marks:    "verl_ppo actor_rollout_ref algorithm.adv_estimator data.train_files+trainer.n_gpus_per_node",
	Commands: map[string]string{"verl/trainer/main_ppo.py": "verl_ppo", "recipe/dapo/main_dapo.py": "verl_ppo"},
	Settings: settings, SettingsOf: settingsOf}

// Sections of the configuration.
const (
	actor  = "actor_rollout_ref.actor."
	fsdp   = actor + "fsdp_config."
	engine = "actor_rollout_ref.rollout."
	model  = "actor_rollout_ref.model."
)

var settings = recipe.SettingKeys{
	recipe.MicroBatch:            {Path: actor + "ppo_micro_batch_size_per_gpu"},
	recipe.Accumulation:          {Follows: recipe.TrainBatch},
	recipe.TrainBatch:            {Path: actor + "ppo_mini_batch_size"},
	recipe.GradientCheckpointing: {Path: model + "enable_gradient_checkpointing"},
	recipe.RolloutFraction:       {Path: engine + "gpu_memory_utilization", Says: recipe.AssignedFraction},
	recipe.RolloutJudged:         {Path: engine + "log_prob_micro_batch_size_per_gpu", Says: recipe.AssignedCount},
	recipe.RolloutSleep:          {Path: engine + "free_cache_engine", Says: recipe.Constant(true)},
}

// settingsOf returns the keys of a file. Its batch counts prompts, each of which has several answers.
func settingsOf(root *strict.Value) recipe.SettingKeys {
	answers := 1
	if v := root.Find(engine + "n"); v != nil {
		if n, err := strconv.Atoi(v.Text); err == nil && n > 0 {
			answers = n
		}
	}
	of := maps.Clone(settings)
	of[recipe.TrainBatch] = recipe.SettingKey{Path: settings[recipe.TrainBatch].Path, Says: func(x any) any {
		sequences, _ := x.(int)
		return sequences / answers
	}}
	return of
}

// verl is the configuration of verl/trainer/main_ppo.py.
var verl = recipe.Program{Name: "verl", Keys: keys, Package: "verl",
	Release: version.Version{Minor: 9, Patch: 1}, Oldest: version.Version{Minor: 5},
	Read: func(r *recipe.Reader) error { return (&reader{r}).read() }}

// reader reads a configuration.
type reader struct{ *recipe.Reader }

// read reads a file.
func (r *reader) read() error {
	if err := r.refuse(); err != nil {
		return err
	}
	r.Model(model + "path")
	r.To.PerNode, r.To.Nodes = int(r.Integer("trainer.n_gpus_per_node")), int(r.Integer("trainer.nnodes"))
	if err := cmp.Or(r.batch(), r.precision(), r.rollout()); err != nil {
		return err
	}
	const checkpoints = model + "enable_gradient_checkpointing"
	r.Set("gradient_checkpointing", checkpoints, r.recomputes(checkpoints))
	kwargs := &strict.Value{Kind: '{'}
	recipe.Give(kwargs, "use_reentrant", -1, strict.Of(false))
	recipe.Give(r.Arguments, "gradient_checkpointing_kwargs", r.At(model+"path"), kwargs)
	r.Set("max_grad_norm", actor+"grad_clip", r.Number(actor+"grad_clip"))
	r.Set("optim", actor+"optim.optimizer", "adamw_torch")
	r.shard()
	remarks(r.Reader.Reader)
	r.To.Freezes = &recipe.Freezes{Vision: r.Truth(actor + "freeze_vision_tower")}
	if rank := r.Integer(model + "lora_rank"); rank > 0 {
		return r.adapt()
	}
	return nil
}

// engines refuses configurations with the defaults of another engine than FSDP: trainer/config/model_engine, and the
// configurations beside ppo_trainer.yaml.
func (r *reader) engines() error {
	const hint = "with Megatron core give the command that starts verl; or plan it as it runs: " +
		"plimsoll plan -- python -m verl.trainer.main_ppo"
	if e := r.Word("model_engine"); e != "" && e != "dp" {
		return r.Fault("model_engine", fmt.Sprintf("is %s: of verl FSDP and Megatron core are planned", e), hint)
	}
	for _, section := range strings.Fields("engine megatron veomni torchtitan") {
		if recipe.On(r.Find(actor + section)) {
			return r.Fault(actor+section, "is of another engine than FSDP, which is not planned yet", hint)
		}
	}
	if r.Gives("hydra.searchpath") {
		return r.Fault("hydra.searchpath", "adds configurations that plimsoll does not have", hint)
	}
	return r.applyNamed(hint)
}

// refuse refuses what is not planned: other models beside the actor, and engines that are not FSDP.
func (r *reader) refuse() error {
	if err := r.engines(); err != nil {
		return err
	}
	if s := cmp.Or(r.Word(actor+"strategy"), "fsdp"); s != "fsdp" && s != "fsdp2" {
		return r.Fault(actor+"strategy", fmt.Sprintf("is %s: of verl FSDP and Megatron core are planned", s),
			"with Megatron core give the command that starts verl")
	}
	if o := r.Word(actor + "optim.optimizer"); o != "AdamW" || r.Word(actor+"optim.optimizer_impl") != "torch.optim" {
		return r.Fault(actor+"optim.optimizer", fmt.Sprintf("is %s, which is not planned yet", o),
			"plimsoll plans AdamW of torch.optim")
	}
	if n := r.sequenceRanks(); n > 1 && max(1, r.Integer("trainer.n_gpus_per_node")*
		r.Integer("trainer.nnodes"))%n != 0 {
		return r.Fault(actor+"ulysses_sequence_parallel_size", fmt.Sprintf("is %d, which does not divide the GPUs", n),
			"give a divisor of their number")
	}
	return cmp.Or(
		r.Unplanned("a teacher lies on GPUs, too", "distillation.enabled"),
		r.Unplanned("units are cut by their size", fsdp+"wrap_policy.min_num_params"),
		r.Unplanned("it divides the engine in another way", engine+"disaggregation.enabled"),
		r.Unplanned("the engine has GPUs of its own", engine+"nnodes"), colocated(r.Reader.Reader),
		r.Unplanned("it changes what the passes hold", model+"enable_activation_offload "+actor+"qat.enable "+
			fsdp+"qat.enable "+model+"mtp.enable "+model+"tiled_mlp.enabled"))
}

// sequenceRanks returns the ranks that share a sequence. The key is in fsdp_config since 0.9.
func (r *reader) sequenceRanks() int64 {
	const name = "ulysses_sequence_parallel_size"
	return max(r.Integer(fsdp+name), r.Integer(actor+name))
}

// colocated refuses trainings whose engine is not on the GPUs of the trained model.
func colocated(r *strict.Reader) error {
	if v := r.Find("actor_rollout_ref.hybrid_engine"); v != nil && !recipe.On(v) {
		return r.Fault("actor_rollout_ref.hybrid_engine", "is false: the engine has GPUs of its own, which is not "+
			"planned yet", "set it to true")
	}
	const mode = "trainer.v1.trainer_mode"
	if strings.HasPrefix(r.Word(mode), "separate") {
		return r.Fault(mode, "is "+r.Word(mode)+": the engine has GPUs of its own, which is not planned yet",
			"set it to colocate_sync")
	}
	return nil
}

// remarks notes keys that change memory in a way that the plan leaves out.
func remarks(r *strict.Reader) {
	for _, n := range [][2]string{
		{actor + "use_prefix_grouper", "has passes share the prompt: they take less than the plan says"},
		{engine + "layered_summon", "sends weights layer by layer: the exchange takes less than the plan says"},
		{"transfer_queue.enable", "has samples in the memory of hosts, which is not planned"},
	} {
		if recipe.On(r.Find(n[0])) {
			r.Note(n[0], n[1])
		}
	}
	if name := r.Word(engine + "dtype"); name != "" && !strings.HasSuffix(name, "16") && name != "auto" {
		r.Note(engine+"dtype", "is "+name+": the engine's weights are planned in 16 bits")
	}
}

// batch reads the sequences of a pass: those of a micro batch, or packed ones of so many tokens.
func (r *reader) batch() error {
	longest := r.Integer("data.max_prompt_length") + r.Integer("data.max_response_length")
	key, micro := actor+"ppo_micro_batch_size_per_gpu", r.Integer(actor+"ppo_micro_batch_size_per_gpu")
	shared := r.sequenceRanks()
	all := max(1, r.To.PerNode*r.To.Nodes) / int(shared)
	if micro == 0 {
		key, micro = actor+"ppo_micro_batch_size", r.Integer(actor+"ppo_micro_batch_size")/int64(all)
	}
	sequences := r.Integer(actor+"ppo_mini_batch_size") * r.Integer(engine+"n")
	switch {
	case r.Truth(actor + "use_dynamic_bsz"):
		key = actor + "ppo_max_token_len_per_gpu"
		tokens := r.Integer(key) * shared
		r.To.Sequence, micro = int(tokens), 1
		r.Note(key, fmt.Sprintf("is %d: passes have packed sequences of so many tokens in all", tokens))
		sequences = max(int64(all), sequences*longest/tokens)
	case micro > 0:
		r.To.Sequence = int(longest)
		r.Note(key, fmt.Sprintf("has sequences of %d tokens at most: data.max_prompt_length and "+
			"data.max_response_length", longest))
	default:
		return r.Fault(actor+"ppo_micro_batch_size_per_gpu", "is not given, and use_dynamic_bsz is off: verl does not "+
			"start without one of the two", "give the sequences of a pass of each GPU")
	}
	r.Set("per_device_train_batch_size", key, int(micro))
	r.Set("gradient_accumulation_steps", key, int(max(1, sequences/int64(all)/micro)))
	return nil
}

// precision reads the types of the parameters and of the passes.
func (r *reader) precision() error {
	r.To.Weights = recipe.PrecisionNames[r.Word(fsdp+"model_dtype")]
	if r.To.Weights == "" {
		r.To.Weights = r.Word(fsdp + "model_dtype")
	}
	if w := r.To.Weights; w != "fp32" && w != "bf16" && w != "fp16" {
		return r.Fault(fsdp+"model_dtype", fmt.Sprintf("is %s, expected fp32, bf16 or fp16", w), "")
	}
	r.Set("bf16", fsdp+"dtype", strings.HasPrefix(r.Word(fsdp+"dtype"), "bf"))
	r.Set("fp16", fsdp+"dtype", strings.HasSuffix(r.Word(fsdp+"dtype"), "16") &&
		!strings.HasPrefix(r.Word(fsdp+"dtype"), "bf"))
	r.To.ReducesIn32 = true
	r.To.FusedLoss = r.Truth(model + "use_fused_kernels")
	r.To.Chunks = recipe.Kernel                      // logprobs_from_logits in verl/utils/torch_functional.py
	r.To.LigerModules = r.Truth(model + "use_liger") // without its loss: workers/engine/fsdp/transformer_impl.py
	if r.Number(actor+"entropy_coeff") != 0 && !r.To.FusedLoss {
		r.Note(actor+"entropy_coeff", "is not 0: the backward pass of the entropy keeps more of the logits than the "+
			"plan says")
	}
	return nil
}

// attentionOf returns the implementation of attention: that of flash-attn, unless override_config has another
// (attn_implementation in verl/workers/engine/fsdp/transformer_impl.py).
func attentionOf(overrides *strict.Value) string {
	if overrides != nil {
		m := overrides.Member("attn_implementation")
		if m != nil && (m.Value.Text == "sdpa" || m.Value.Text == "eager") {
			return m.Value.Text
		}
	}
	return "flash"
}

// accumulatesWhole reports whether ranks keep full gradients of all micro batches but the last: verl 0.9.0 does, and
// later releases if a key of FSDP's section asks for it (_gradient_sync_context in
// verl/workers/engine/fsdp/transformer_impl.py).
func (r *reader) accumulatesWhole(section string) bool {
	if v := r.To.Release; v.Major == 0 && v.Minor == 9 && v.Patch == 0 {
		return true
	}
	return r.Truth(section + "use_no_sync_for_gradient_accumulation")
}

// shard sets FSDP for every block. Only FSDP2 may have the host hold its shards for good.
func (r *reader) shard() {
	config := &strict.Value{Kind: '{'}
	reshards := r.Truth(fsdp + "reshard_after_forward")
	version, policy := 1, any("full_shard")
	if !reshards {
		policy = "shard_grad_op"
	}
	if r.Word(actor+"strategy") == "fsdp2" {
		version, policy = 2, reshards
	}
	recipe.Give(config, "version", -1, strict.Of(version))
	recipe.Give(config, "auto_wrap_policy", -1, strict.Of("TRANSFORMER_BASED_WRAP"))
	recipe.Give(config, "reshard_after_forward", -1, strict.Of(policy))
	recipe.Give(config, "cpu_offload", -1, strict.Of(r.Truth(fsdp+"offload_policy")))
	recipe.Give(config, "state_dict_type", -1, strict.Of("SHARDED_STATE_DICT"))
	r.To.Attention = attentionOf(r.Find(model + "override_config"))
	r.To.LoadsOnFirst = true // get_init_weight_context_manager in verl/utils/fsdp_utils.py
	r.To.SeveralOnly = true
	r.Set("fsdp", actor+"strategy", "full_shard auto_wrap")
	kwargs, sync := &strict.Value{Kind: '{'}, &strict.Value{Kind: '{'}
	recipe.Give(sync, "sync_each_batch", -1, strict.Of(!r.accumulatesWhole(fsdp)))
	recipe.Give(kwargs, "gradient_accumulation_kwargs", -1, sync)
	recipe.Give(r.Arguments, "accelerator_config", r.At(actor+"strategy"), kwargs)
	recipe.Give(r.Arguments, "fsdp_config", r.At(actor+"strategy"), config)
	if n := r.sequenceRanks(); n > 1 { // Ulysses, with flash attention: verl/models/transformers/monkey_patch.py
		r.To.Attention = "flash"
		r.To.Parallelism = &recipe.Parallelism{Replicate: 1, Shard: max(1, r.To.PerNode*r.To.Nodes/int(n)), Tensor: 1,
			Context: int(n), Sequence: 1, Ulysses: true}
	} else if n := r.Integer(fsdp + "fsdp_size"); n > 0 {
		r.To.Parallelism = &recipe.Parallelism{Replicate: max(1, r.To.PerNode*r.To.Nodes/int(n)), Shard: int(n),
			Tensor: 1, Context: 1, Sequence: 1}
	}
}

// rollout reads the engine, and what moves for it: update_weights in verl/workers/engine_workers.py.
func (r *reader) rollout() error {
	e, err := engineOf(r.Reader.Reader)
	if err != nil {
		return err
	}
	e.Backups.Parameters = r.Truth(fsdp + "param_offload")
	e.Backups.Gradients = e.Backups.Parameters
	e.Backups.Optimizer = r.Truth(fsdp + "optimizer_offload")
	e.HostReference, e.ChunkedLogProbs = true, r.To.FusedLoss
	judged := r.Integer(engine + "log_prob_micro_batch_size_per_gpu")
	if judged == 0 { // its name up to verl 0.1, for all GPUs together
		judged = r.Integer(engine+"log_prob_micro_batch_size") / int64(max(1, r.To.PerNode*r.To.Nodes))
	}
	if judged > 0 && !r.Truth(actor+"use_dynamic_bsz") {
		e.LogProbsBatch = judged
	}
	e.SyncsFromGPU = true // load_fsdp_model_to_gpu in get_per_tensor_param
	r.To.Generation = &recipe.Generation{Engine: e, Reference: r.judges()}
	return r.companions()
}

// engineOf reads the engine.
func engineOf(r *strict.Reader) (*rollout.Engine, error) {
	name := engineName(r)
	if name != rollout.VLLM && name != rollout.SGLang {
		return nil, r.Fault(engine+"name", fmt.Sprintf("is %q, expected vllm or sglang", name), "")
	}
	for _, key := range []string{"data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"} {
		if r.Integer(engine+key) > 1 {
			return nil, r.Fault(engine+key, "divides the engine in a way that is not planned yet", "set it to 1")
		}
	}
	e := rollout.New(name)
	e.Fraction, e.Tensor = r.Number(engine+"gpu_memory_utilization"), r.Integer(engine+"tensor_model_parallel_size")
	e.BatchTokens, e.Sequences = r.Integer(engine+"max_num_batched_tokens"), r.Integer(engine+"max_num_seqs")
	e.Longest, e.Graphs = r.Integer(engine+"max_model_len"), !r.Truth(engine+"enforce_eager")
	if r.Truth(engine + "free_cache_engine") {
		e.Sleep = 2
		if r.Integer(model+"lora_rank") > 0 { // adapters need the weights that they were made for
			e.Sleep = 1
		}
	}
	bucket := engine + "checkpoint_engine.update_weights_bucket_megabytes"
	if r.Gives(engine + "update_weights_bucket_megabytes") { // its name before 0.7
		bucket = engine + "update_weights_bucket_megabytes"
	}
	e.Sync = ledger.Bytes(r.Integer(bucket)) << 20
	e.RayThreshold = rollout.RayUsualThreshold
	return &e, nil
}

// judges reports whether a frozen model judges the answers.
func (r *reader) judges() bool {
	for _, key := range []string{actor + "use_kl_loss", "algorithm.use_kl_in_reward"} {
		if r.Truth(key) {
			r.Note(key, "is true: a frozen copy of the model judges the answers, and FSDP has it on the host")
			return true
		}
	}
	return false
}

// adapt reads the adapter.
func (r *reader) adapt() error {
	targets := r.Find(model + "target_modules")
	if targets == nil {
		targets = strict.Of("all-linear")
	}
	return r.Adapt(model+"lora_rank", map[string]*strict.Value{"r": r.Find(model + "lora_rank"),
		"lora_alpha": r.Value(model + "lora_alpha"), "target_modules": recipe.OneName(targets),
		"exclude_modules": recipe.OneName(recipe.AsList(r.Find(model + "exclude_modules")))})
}
