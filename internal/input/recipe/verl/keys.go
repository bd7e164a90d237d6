package verl

import (
	_ "embed"
	"strings"

	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

//go:embed ignored.txt
var ignored string

//go:embed fsdp_ignored.txt
var fsdpIgnored string

// keys are the keys of verl's configuration, with the defaults of verl 0.9.1. A section of unread keys is free.
var keys = nested(strict.Merge(rule.Ignored(fsdpIgnored), flat))

var flat = strict.Merge(
	companionKeys,
	rule.Ignored(ignored),
	rule.Anything.For("verl_ppo"), rule.Worded.For("model_engine config_name"),
	rule.Measured.For("actor_rollout_ref.actor.entropy_coeff"),
	rule.Anything.For(`actor_rollout_ref.hybrid_engine actor_rollout_ref.actor.use_prefix_grouper
		actor_rollout_ref.rollout.layered_summon`),
	rule.Count.Lax().OrNull().For("actor_rollout_ref.rollout.nnodes"),
	rule.Worded.For("actor_rollout_ref.rollout.dtype"),
	rule.Switched.For(`actor_rollout_ref.actor.freeze_vision_tower
		actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation`),
	// Sections with one key that asks for all of it.
	open(rule.Anything.For("enabled")).For(`distillation actor_rollout_ref.model.tiled_mlp
		actor_rollout_ref.rollout.disaggregation`),
	open(rule.Anything.For("enable")).For(`transfer_queue actor_rollout_ref.model.mtp
		actor_rollout_ref.actor.fsdp_config.qat`),
	open(rule.Anything.For("min_num_params")).For("actor_rollout_ref.actor.fsdp_config.wrap_policy"),
	open(rule.Worded.For("trainer_mode")).For("trainer.v1"),
	open(rule.Anything.For("searchpath")).For("hydra"),
	rule.Free.OrNull().For(`actor_rollout_ref.actor.engine actor_rollout_ref.actor.megatron
		actor_rollout_ref.actor.veomni actor_rollout_ref.actor.torchtitan`),
	rule.Free.For(`actor_rollout_ref.actor.policy_loss actor_rollout_ref.actor.checkpoint
		actor_rollout_ref.actor.profiler actor_rollout_ref.actor.optim.override_optimizer_config
		actor_rollout_ref.rollout.val_kwargs actor_rollout_ref.rollout.multi_turn actor_rollout_ref.rollout.agent
		actor_rollout_ref.rollout.trace actor_rollout_ref.rollout.engine_kwargs actor_rollout_ref.rollout.profiler
		actor_rollout_ref.model.override_config actor_rollout_ref.model.fused_kernel_options
		algorithm.filter_groups algorithm.kl_ctrl algorithm.pf_ppo algorithm.rollout_correction
		data.custom_cls data.sampler data.datagen data.apply_chat_template_kwargs
		skip sandbox_fusion global_profiler ray_kwargs custom_reward_function`),
	rule.Worded.For("actor_rollout_ref.model.path actor_rollout_ref.rollout.name actor_rollout_ref.actor.strategy"),
	rule.Anything.For("actor_rollout_ref.actor.optim.lr actor_rollout_ref.actor.optim.weight_decay "+
		"actor_rollout_ref.actor.optim.betas "+
		"actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio "+
		"actor_rollout_ref.actor.optim.total_training_steps actor_rollout_ref.actor.optim.lr_scheduler_type "+
		"actor_rollout_ref.actor.optim.warmup_style actor_rollout_ref.actor.optim.min_lr_ratio "+
		"actor_rollout_ref.actor.optim.num_cycles actor_rollout_ref.actor.optim.clip_grad "+
		"actor_rollout_ref.ref.strategy actor_rollout_ref.ref.log_prob_use_dynamic_bsz "+
		"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu actor_rollout_ref.ref.log_prob_micro_batch_size "+
		"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu actor_rollout_ref.ref.ulysses_sequence_parallel_size "+
		"actor_rollout_ref.rollout.log_prob_use_dynamic_bsz actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"),
	rule.Switched.For(offloads+` actor_rollout_ref.model.use_liger actor_rollout_ref.model.enable_activation_offload
		actor_rollout_ref.model.use_fused_kernels actor_rollout_ref.actor.use_dynamic_bsz
		actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.rollout.enforce_eager actor_rollout_ref.actor.qat.enable
		actor_rollout_ref.ref.fsdp_config.param_offload algorithm.use_kl_in_reward critic.enable reward_model.enable
		reward.reward_model.enable`),
	rule.Switched.Default(true).For(`actor_rollout_ref.model.enable_gradient_checkpointing
		actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.actor.fsdp_config.reshard_after_forward`),
	rule.Counted.For(`actor_rollout_ref.actor.ppo_micro_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
		actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.log_prob_micro_batch_size
		actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu`),
	rule.Counted.Default(1).For(`actor_rollout_ref.actor.ulysses_sequence_parallel_size actor_rollout_ref.rollout.n
		actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
		actor_rollout_ref.rollout.data_parallel_size actor_rollout_ref.rollout.expert_parallel_size
		actor_rollout_ref.rollout.pipeline_model_parallel_size trainer.nnodes`),
	rule.Counted.Default(512).For("data.max_prompt_length data.max_response_length"),
	rule.NameOrNames.For("actor_rollout_ref.model.target_modules actor_rollout_ref.model.exclude_modules"),
	strict.Keys{
		actor + "ppo_mini_batch_size":                                rule.Counted.Default(256),
		actor + "ppo_max_token_len_per_gpu":                          rule.Counted.Default(16384),
		actor + "grad_clip":                                          rule.Measured.Default(1.),
		actor + "optim.optimizer":                                    rule.Worded.Default("AdamW"),
		actor + "optim.optimizer_impl":                               rule.Worded.Default("torch.optim"),
		fsdp + "fsdp_size":                                           rule.Integer.Lax().OrNull().Default(-1),
		fsdp + "model_dtype":                                         rule.Worded.Default("fp32"),
		fsdp + "dtype":                                               rule.Worded.Default("bfloat16"),
		model + "lora_rank":                                          rule.Count.Lax().OrNull(),
		model + "lora_alpha":                                         rule.Measured.Default(16.),
		engine + "gpu_memory_utilization":                            rule.Measured.Default(.5),
		engine + "tensor_model_parallel_size":                        rule.Counted.Default(2),
		engine + "max_num_batched_tokens":                            rule.Counted.Default(8192),
		engine + "max_num_seqs":                                      rule.Counted.Default(1024),
		engine + "update_weights_bucket_megabytes":                   rule.Counted.Default(512),
		engine + "checkpoint_engine.update_weights_bucket_megabytes": rule.Counted.Default(2048),
		"algorithm.adv_estimator":                                    rule.Worded.Default("gae"),
		"trainer.n_gpus_per_node":                                    rule.Counted.Default(8),
		"data.train_batch_size":                                      rule.Counted.Default(1024),
	})

// offloads are what FSDP of the trained model moves to the host.
const offloads = `actor_rollout_ref.actor.fsdp_config.param_offload
	actor_rollout_ref.actor.fsdp_config.optimizer_offload
	actor_rollout_ref.actor.fsdp_config.offload_policy`

// open returns the rule of a section whose other keys are not read.
func open(keys strict.Keys) strict.Rule { return strict.Object(keys).AndOthers().OrNull() }

// nested returns sections for keys whose names have dots. A section notes keys that it does not know.
func nested(flat strict.Keys) strict.Keys {
	keys, sections := strict.Keys{}, map[string]strict.Keys{}
	for name, r := range flat {
		section, rest, dotted := strings.Cut(name, ".")
		if !dotted {
			keys[name] = r
			continue
		}
		if sections[section] == nil {
			sections[section] = strict.Keys{}
		}
		sections[section][rest] = r
	}
	for name, inside := range sections {
		keys[name] = strict.Object(nested(inside)).NotingAll().OrNull()
	}
	return keys
}
