package verl

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/bridge"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/rollout"
)

// megatronMark is the member of a document that stands for a command with Megatron core.
const megatronMark = "verl_megatron"

// Megatron is the kind of the commands that start verl's PPO trainer with Megatron core: MegatronEngine in
// verl/workers/engine/megatron/transformer_impl.py of verl 0.9.1.
var Megatron = &recipe.Kind{Name: "training of verl by Megatron core", Flag: recipe.MegatronFlag, Marks: megatronMark,
	Assigns:  true,
	Commands: map[string]string{"verl/trainer/main_ppo.py": megatronMark, "recipe/dapo/main_dapo.py": megatronMark},
	Asks: "--config-name=ppo-megatron ppo-megatron-trainer actor-rollout-ref.actor.strategy=megatron " +
		"actor-rollout-ref.actor.megatron. model-engine=megatron --config-name='ppo-megatron",
	Known: &megatronRule, Arguments: readMegatron, SettingsOf: megatronSettingsOf, Settings: megatronSettings}

const (
	core    = actor + "megatron."
	layers  = core + "override_transformer_config."
	updates = actor + "optim."
	frozen  = "actor_rollout_ref.ref.megatron."
)

var megatronSettings = recipe.SettingKeys{
	recipe.MicroBatch:           settings[recipe.MicroBatch],
	recipe.Accumulation:         settings[recipe.Accumulation],
	recipe.TrainBatch:           settings[recipe.TrainBatch],
	recipe.RolloutFraction:      settings[recipe.RolloutFraction],
	recipe.RolloutSleep:         settings[recipe.RolloutSleep],
	recipe.PackedTokens:         {Path: actor + "ppo_max_token_len_per_gpu"},
	recipe.TensorDegree:         {Path: core + "tensor_model_parallel_size", Unset: 1},
	recipe.ContextDegree:        {Path: core + "context_parallel_size", Unset: 1},
	recipe.PipelineDegree:       {Path: core + "pipeline_model_parallel_size", Unset: 1},
	recipe.SequenceSplit:        {Path: core + "sequence_parallel", Unset: true},
	recipe.DistributedOptimizer: {Path: core + "use_distributed_optimizer", Unset: true},
	recipe.RecomputeGranularity: {Path: layers + "recompute_granularity"},
	recipe.RecomputeMethod:      {Path: layers + "recompute_method"},
	recipe.RecomputeLayers:      {Path: layers + "recompute_num_layers"},
	recipe.OptimizerOffload:     {Path: updates + "override_optimizer_config.optimizer_cpu_offload", Unset: false},
	recipe.PrecisionAware: {Path: updates + "override_optimizer_config.use_precision_aware_optimizer",
		Unset: false},
	recipe.OffloadFraction: {Path: updates + "override_optimizer_config.optimizer_offload_fraction", Unset: 1.},
}

// megatronSettingsOf returns the keys of a command, whose batch counts prompts.
func megatronSettingsOf(root *strict.Value) recipe.SettingKeys {
	of := maps.Clone(megatronSettings)
	of[recipe.TrainBatch] = settingsOf(root)[recipe.TrainBatch]
	return of
}

// megatronKeys are the keys of a command with Megatron core.
var megatronKeys = nested(strict.Merge(withoutFree(flat),
	rule.Anything.For(megatronMark),
	rule.Counted.Default(1).For(core+"tensor_model_parallel_size "+core+"pipeline_model_parallel_size "+
		core+"context_parallel_size "+core+"expert_model_parallel_size"),
	rule.Counted.For(core+"expert_tensor_parallel_size "+core+"virtual_pipeline_model_parallel_size"),
	rule.Switched.For(core+"param_offload "+core+"grad_offload "+core+"optimizer_offload "+frozen+"param_offload "+
		core+"use_megatron_fsdp "+core+"dynamic_context_parallel "+core+"qat.enable "+core+"pad_to_length "+
		actor+"calculate_entropy"),
	rule.Switched.Default(true).For(core+"sequence_parallel "+core+"use_distributed_optimizer "+
		core+"use_remove_padding"),
	rule.Worded.Default("bfloat16").For(core+"dtype"),
	rule.Anything.For(core+"_target_ "+core+"seed "+core+"use_mbridge "+core+"vanilla_mbridge "+
		core+"use_dist_checkpointing "+core+"dist_checkpointing_path "+core+"dist_checkpointing_prefix "+
		core+"dist_ckpt_optim_fully_reshardable "+core+"distrib_optim_fully_reshardable_mem_efficient "+
		core+"forward_only "+core+"max_seqlen_per_dp_cp_rank "+core+"pad_to_length_bucket "+
		core+"pad_bshd_to_minibatch_max "+core+"entropy_from_logits_chunk_size "+
		core+"entropy_from_logits_with_chunking"),
	rule.Free.OrNull().For(frozen+"router_replay "+frozen+"qat "+core+"override_transformer_config "+
		core+"override_ddp_config "+
		core+"override_mcore_model_config "+core+"router_replay"),
	rule.Worded.Default("adam").For(updates+"optimizer"),
	rule.Switched.For(updates+"use_precision_aware_optimizer"),
	rule.Worded.Default("fp32").For(updates+"main_grads_dtype "+updates+"exp_avg_dtype "+
		updates+"exp_avg_sq_dtype"),
	rule.Anything.For(updates+"use_layer_wise_distributed_optimizer"),
	rule.Anything.For("critic.megatron"), rule.Free.OrNull().For(model+"lora"),
))

var megatronRule = strict.Object(megatronKeys).NotingAll()

// withoutFree leaves out keys that keys of their sections replace.
func withoutFree(keys strict.Keys) strict.Keys {
	kept := maps.Clone(keys)
	delete(kept, actor+"megatron")
	return kept
}

// fusedSplit is vocab_per_split of efficient_entropy_backward in verl/utils/kernel/kernels.py.
const fusedSplit = 9504

// megatronReader makes arguments of Megatron-LM of a command.
type megatronReader struct {
	*strict.Reader
	made   *strict.Value
	policy *recipe.Policy
}

func readMegatron(d *strict.Document) (recipe.MadeArguments, error) {
	checked, err := strict.Schema{Program: "verl", Rule: megatronRule}.Read(d)
	if err != nil {
		return recipe.MadeArguments{}, err
	}
	r := &megatronReader{checked, &strict.Value{Kind: '{', At: d.Root.At}, &recipe.Policy{Program: "verl"}}
	for _, step := range []func() error{r.refuse, r.batch, r.model, r.layers, r.optimizer, r.engine} {
		if err := step(); err != nil {
			return recipe.MadeArguments{}, err
		}
	}
	return recipe.MadeArguments{Root: r.made, Notes: r.Notes, Policy: r.policy, Nodes: r.Integer("trainer.nnodes"),
		PerNode: r.Integer("trainer.n_gpus_per_node")}, nil
}

// give sets an argument of Megatron-LM at the place of a key.
func (r *megatronReader) give(argument, of string, is any) {
	recipe.Give(r.made, argument, max(r.At(of), 0), strict.Of(is))
}

// refuse refuses what is not planned.
func (r *megatronReader) refuse() error {
	if hasCritic(r.Reader) {
		return r.Fault("algorithm.adv_estimator", "is gae: a critic is trained beside the actor, which is not planned "+
			"for Megatron core yet", "plan the actor alone with another estimator, such as grpo, and expect the "+
			"critic on top")
	}
	if s := r.Word(actor + "strategy"); s != "" && s != "megatron" {
		return r.Fault(actor+"strategy", fmt.Sprintf("is %s beside keys of Megatron core", s),
			"leave one of the two out")
	}
	for _, of := range []struct{ keys, why string }{
		{"critic.enable", "a critic is trained beside the actor"},
		{"reward_model.enable reward.reward_model.enable", "a model that rewards answers lies on the GPUs, too"},
		{"distillation.enabled", "a teacher lies on GPUs, too"},
		{model + "lora_rank " + model + "lora.rank", "it trains adapters on layers of Megatron core"},
		{core + "use_megatron_fsdp " + core + "dynamic_context_parallel",
			"it shares the model or sequences in another way"},
		{core + "qat.enable " + actor + "qat.enable " + frozen + "qat.enable", "weights are quantized"},
		{core + "forward_only", "nothing is trained"},
		{core + "override_mcore_model_config.params_dtype", "it changes the model"},
		{model + "mtp.enable", "it trains layers that predict further tokens"},
		{engine + "disaggregation.enabled " + engine + "nnodes", "the engine has GPUs of its own"},
		{actor + "freeze_vision_tower", "a part of the model is not trained"},
	} {
		for key := range strings.FieldsSeq(of.keys) {
			if v := r.Root.Find(key); recipe.On(v) && v.Text != "0" {
				return r.Inputf(v.At, "%s is %s: %s, which is not planned yet for Megatron core", key, v, of.why).
					WithHint("leave it out, and expect the job's memory to differ from the plan")
			}
		}
	}
	if err := colocated(r.Reader); err != nil {
		return err
	}
	if o := r.Word(updates + "optimizer"); !strings.EqualFold(o, "adam") && !strings.EqualFold(o, "adamw") {
		return r.Fault(updates+"optimizer", fmt.Sprintf("is %s, which is not planned yet", o), "plimsoll plans adam")
	}
	return nil
}

// batch reads the micro batches: samples of the greatest length, or as many as have so many tokens.
func (r *megatronReader) batch() error {
	longest := r.Integer("data.max_prompt_length") + r.Integer("data.max_response_length")
	samples := r.Integer(actor+"ppo_mini_batch_size") * r.Integer(engine+"n")
	ranks := r.Integer("trainer.nnodes") * r.Integer("trainer.n_gpus_per_node")
	context := r.Integer(core + "context_parallel_size")
	share := r.Integer(core+"tensor_model_parallel_size") * r.Integer(core+"pipeline_model_parallel_size") * context
	data := max(1, ranks/share)
	key, micro := actor+"ppo_micro_batch_size_per_gpu", r.Integer(actor+"ppo_micro_batch_size_per_gpu")
	if micro == 0 {
		key, micro = actor+"ppo_micro_batch_size", r.Integer(actor+"ppo_micro_batch_size")/data
	}
	unit := 2 * r.Integer(core+"tensor_model_parallel_size") * context
	switch {
	case r.Truth(actor + "use_dynamic_bsz"):
		key = actor + "ppo_max_token_len_per_gpu"
		tokens := max(r.Integer(key)*context, longest)
		r.policy.Packs, r.policy.PackedTokens = true, r.Integer(key)
		r.Note(key, fmt.Sprintf("is %d: micro batches have as many samples as have so many tokens", r.Integer(key)))
		r.give("seq_length", key, int((tokens+unit-1)/unit*unit))
		r.give("micro_batch_size", key, 1)
		micros := max(1, (samples*longest+tokens*data-1)/(tokens*data))
		if r.Integer(core+"virtual_pipeline_model_parallel_size") > 1 {
			stages := r.Integer(core + "pipeline_model_parallel_size")
			micros = (micros + stages - 1) / stages * stages
		}
		r.give("global_batch_size", key, int(micros*data))
	case micro > 0:
		r.Note(key, fmt.Sprintf("has sequences of %d tokens at most: data.max_prompt_length and "+
			"data.max_response_length", longest))
		r.give("seq_length", key, int((longest+unit-1)/unit*unit))
		r.give("micro_batch_size", key, int(micro))
		r.give("global_batch_size", key, int(max(samples, micro*data)/(micro*data)*micro*data))
	default:
		return r.Fault(actor+"ppo_micro_batch_size_per_gpu", "is not given, and use_dynamic_bsz is off: verl does not "+
			"start without one of the two", "give the sequences of a pass of each GPU")
	}
	r.give("no_create_attention_mask_in_dataloader", key, true)
	return nil
}

// model gives the sizes of the model.
func (r *megatronReader) model() error {
	name := r.Find(model + "path")
	if name == nil {
		return r.Inputf(r.Root.At, "%spath is not given: its config.json says the sizes of the model", model).
			WithHint("add it with a name of the hub or the path of a config.json")
	}
	config, notes, err := bridge.Sizes(r.Document, r.made, name)
	if err != nil {
		return err
	}
	r.Notes = append(r.Notes, notes...)
	if config.Member("num_experts") != nil || config.Member("n_routed_experts") != nil {
		r.give("moe_grouped_gemm", model+"path", true)
		r.give("moe_token_dispatcher_type", model+"path", "alltoall")
	}
	switch t := r.Word(core + "dtype"); t {
	case "bfloat16", "bf16":
		r.give("bf16", core+"dtype", true)
	case "float16", "fp16":
		r.give("fp16", core+"dtype", true)
	default:
		return r.Fault(core+"dtype", fmt.Sprintf("is %s, expected bfloat16 or float16", t), "")
	}
	return nil
}

// renamed are keys of override_transformer_config that Megatron-LM's arguments call otherwise. Those of negated are
// switches that its arguments turn off.
var (
	renamed = map[string]string{"num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
		"num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers", "fp8": "fp8_format",
		"microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
		"num_moe_experts":                    "num_experts"}
	negated = map[string]string{"gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
		"bias_activation_fusion": "no_bias_swiglu_fusion", "masked_softmax_fusion": "no_masked_softmax_fusion",
		"bias_dropout_fusion": "no_bias_dropout_fusion", "apply_rope_fusion": "no_rope_fusion",
		"persist_layer_norm": "no_persist_layer_norm"}
	// silent are keys that change no memory.
	silent = strings.Fields("deallocate_pipeline_outputs use_flash_attn variable_seq_lengths batch_p2p_comm")
)

// layers gives the degrees, and what verl sets of the transformer's configuration.
func (r *megatronReader) layers() error {
	for key := range strings.FieldsSeq(`tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
		expert_model_parallel_size expert_tensor_parallel_size`) {
		if n := r.Integer(core + key); n > 0 {
			r.give(key, core+key, int(n))
		}
	}
	if n := r.Integer(core + "virtual_pipeline_model_parallel_size"); n > 1 {
		r.give("num_virtual_stages_per_pipeline_rank", core+"virtual_pipeline_model_parallel_size", int(n))
	}
	if r.Truth(core+"sequence_parallel") && r.Integer(core+"tensor_model_parallel_size") > 1 {
		r.give("sequence_parallel", core+"sequence_parallel", true)
	}
	r.give("attention_backend", core+"sequence_parallel", "flash")
	section := r.Find(strings.TrimSuffix(layers, "."))
	if section == nil {
		return nil
	}
	for _, m := range section.Members {
		r.override(m)
	}
	return nil
}

// override gives a key of override_transformer_config.
func (r *megatronReader) override(m strict.Member) {
	name := m.Name
	if other := renamed[name]; other != "" {
		name = other
	}
	isNone := m.Value.Kind == 'n' || strings.EqualFold(m.Value.Text, "none") || strings.EqualFold(m.Value.Text, "null")
	is, _ := recipe.IsArgument(name)
	switch {
	case isNone, slices.Contains(silent, name):
	case name == "recompute_modules" && !recipe.On(r.Root.Find(layers+"recompute_granularity")):
	case negated[name] != "":
		if !recipe.On(m.Value) {
			recipe.Give(r.made, negated[name], m.At, strict.Of(true))
		}
	case !is:
		r.noteAt(m.At, layers+m.Name, "is no argument of Megatron-LM: planned as without it, and it may change memory "+
			"a little")
	case m.Value.Kind == 'f': // as without it
	default:
		recipe.Give(r.made, name, m.At, m.Value)
	}
}

// optimizer gives the optimizer, and the types that gradients are reduced in.
func (r *megatronReader) optimizer() error {
	if r.Truth(core + "use_distributed_optimizer") {
		r.give("use_distributed_optimizer", core+"use_distributed_optimizer", true)
	}
	aware := r.Truth(updates + "use_precision_aware_optimizer")
	if aware {
		r.give("use_precision_aware_optimizer", updates+"use_precision_aware_optimizer", true)
		for key := range strings.FieldsSeq("main_grads_dtype exp_avg_dtype exp_avg_sq_dtype") {
			word := r.Word(updates + key)
			if short := recipe.PrecisionNames[word]; short != "" {
				word = short
			}
			r.give(key, updates+key, word)
		}
	}
	ddp := r.Find(core + "override_ddp_config")
	in32 := !aware || r.Word(updates+"main_grads_dtype") == "fp32"
	if ddp != nil && ddp.Member("grad_reduce_in_fp32") != nil {
		in32 = recipe.On(ddp.Member("grad_reduce_in_fp32").Value)
	}
	if in32 {
		r.give("accumulate_allreduce_grads_in_fp32", core+"override_ddp_config", true)
	} else {
		r.give("grad_reduce_in_bf16", core+"override_ddp_config", true)
	}
	for section, same := range map[string]string{
		core + "override_ddp_config": `overlap_grad_reduce overlap_param_gather bucket_size=ddp_bucket_size
			grad_reduce_in_fp32=`,
		updates + "override_optimizer_config": `optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
			use_precision_aware_optimizer optimizer_cpu_offload main_grads_dtype exp_avg_dtype exp_avg_sq_dtype`,
	} {
		r.section(section, same)
	}
	return nil
}

// noteAt notes a key, of a section whose keys are not read one by one, too.
func (r *megatronReader) noteAt(at int64, key, says string) {
	r.Notes = append(r.Notes, recipe.Note{Where: r.Position(at), What: key + " " + says})
}

// remarks notes keys that the plan leaves out, and those that only FSDP reads.
func (r *megatronReader) remarks() {
	remarks(r.Reader)
	for _, n := range [][2]string{
		{core + "pad_to_length", "pads samples: micro batches may have more tokens than the plan says"},
		{core + "router_replay.mode", "keeps choices of routers on the host, which is not in the plan"},
		{frozen + "router_replay.mode", "keeps choices of routers on the host, which is not in the plan"},
		{core + "entropy_from_logits_with_chunking", "makes entropies of some tokens at a time: they take less than " +
			"the plan says"},
		{core + "entropy_from_logits_chunk_size", "is of entropies that are made in parts: planned as made at once"},
		{model + "enable_activation_offload", "is read by FSDP alone"},
		{model + "use_liger", "is read by FSDP alone"},
	} {
		if v := r.Root.Find(n[0]); recipe.On(v) && v.Text != "disabled" {
			r.noteAt(v.At, n[0], n[1])
		}
	}
	if v := r.Find(model + "enable_gradient_checkpointing"); v != nil {
		r.Note(model+"enable_gradient_checkpointing", "is read by FSDP alone: Megatron core goes by "+
			layers+"recompute_granularity")
	}
	if !r.Truth(core + "use_remove_padding") {
		r.Note(core+"use_remove_padding", "is false: samples are padded, and planned as long as the longest")
	}
}

// section gives the keys of a section that Megatron-LM's arguments have, too, and notes others.
func (r *megatronReader) section(path, same string) {
	v := r.Find(path)
	if v == nil {
		return
	}
	for _, m := range v.Members {
		argument, is := "", false
		for pair := range strings.FieldsSeq(same) {
			if key, other, renames := strings.Cut(pair, "="); key == m.Name {
				if argument, is = key, true; renames {
					argument = other
				}
			}
		}
		switch {
		case !is:
			r.noteAt(m.At, path+"."+m.Name, "is planned as without it, and it may change memory a little")
		case argument != "" && recipe.On(m.Value):
			recipe.Give(r.made, argument, m.At, m.Value)
		}
	}
}

// engine reads the engine, what leaves the GPUs for it, and the loss: offload_megatron_model_to_cpu and
// offload_megatron_optimizer in verl/utils/megatron_utils.py, and _lm_head_logits_processor.
func (r *megatronReader) engine() error {
	e, err := engineOf(r.Reader)
	if err != nil {
		return err
	}
	offloads := r.Truth(core + "param_offload")
	e.Backups = rollout.Backups{Parameters: offloads, Gradients: offloads,
		Optimizer: r.Truth(core + "optimizer_offload")}
	e.SyncsFromGPU = true
	if offloads { // a pinned copy of each buffer stays, and gradients are dropped
		e.Dropped = rollout.Backups{Parameters: true, Gradients: true}
		r.policy.Copies, r.policy.InBuffers, e.Copies = []string{"actor"}, true, 1
	}
	for _, key := range []string{actor + "use_kl_loss", "algorithm.use_kl_in_reward"} {
		if r.Truth(key) && !r.policy.Reference {
			r.policy.Reference, r.policy.Apart = true, true
			e.HostReference = offloads
			if r.Gives(frozen + "param_offload") {
				e.HostReference = r.Truth(frozen + "param_offload")
			}
			r.Note(key, "is true: a frozen copy of the model judges the answers")
		}
	}
	r.policy.Judges = true
	r.policy.Loss = recipe.PolicyLoss{InPlace: true, JudgesEntropy: true,
		TrainsEntropy: r.Number(actor+"entropy_coeff") != 0 || r.Truth(actor+"calculate_entropy")}
	if r.Truth(model+"use_fused_kernels") && r.Truth(core+"use_remove_padding") {
		r.policy.Loss.Fused = fusedSplit
	}
	r.policy.Engine = e
	r.remarks()
	return nil
}
