package verl

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/rollout"
)

// The sections of the models beside the policy. FSDP's settings of a critic were in criticBefore up to verl 0.8. The
// reward model of rewards is one of verl up to 0.6, which FSDP shards: an engine of its own has taken its place.
const (
	critic       = "critic."
	criticModel  = critic + "model."
	criticFSDP   = critic + "fsdp."
	criticBefore = criticModel + "fsdp_config."
	rewards      = "reward_model."
)

// companionKeys are the keys of models beside the policy, with the defaults of verl 0.9.1.
var companionKeys = strict.Merge(
	rule.Worded.For(criticModel+"path "+critic+"strategy "+rewards+"model.path "+rewards+"strategy"),
	rule.Switched.For(critic+"use_dynamic_bsz "+criticModel+"enable_activation_offload "+criticModel+"use_liger "+
		criticFSDP+"use_no_sync_for_gradient_accumulation "+
		rewards+"model.fsdp_config.param_offload "+rewards+"enable_resource_pool "+
		"reward.reward_model.enable_resource_pool"),
	rule.Switched.Default(true).For(criticModel+"enable_gradient_checkpointing"),
	rule.Counted.For(critic+"ppo_micro_batch_size "+critic+"ppo_micro_batch_size_per_gpu "+
		critic+"forward_micro_batch_size "+critic+"forward_micro_batch_size_per_gpu "+critic+"ppo_mini_batch_size "+
		critic+"forward_max_token_len_per_gpu "+rewards+"micro_batch_size "+rewards+"micro_batch_size_per_gpu"),
	rule.Counted.Default(32768).For(critic+"ppo_max_token_len_per_gpu"),
	rule.Counted.Default(1).For(critic+"ulysses_sequence_parallel_size"),
	rule.Count.Lax().OrNull().For(criticModel+"lora_rank"),
	of(criticFSDP, criticBefore), rule.Worded.Default("bfloat16").For(criticFSDP+"dtype"),
	open(rule.Worded.For("optimizer optimizer_impl")).For(critic+"optim"),
	open(rule.Anything.For("rank")).For(criticModel+"lora"),
	open(rule.Anything.For("enable")).For(criticModel+"mtp "+criticFSDP+"qat"),
	open(rule.Anything.For("enabled")).For(criticModel+"tiled_mlp"),
	rule.Free.OrNull().For(criticModel+"override_config "+critic+"checkpoint "+critic+"profiler "+critic+"megatron "+
		critic+"veomni "+critic+"torchtitan "+critic+"engine "+critic+"kl_ctrl "+criticModel+"fused_kernel_options "+
		criticFSDP+"turbo_config"),
)

// of returns the keys of sections of FSDP's settings.
func of(sections ...string) strict.Keys {
	keys := strict.Keys{}
	for _, s := range sections {
		keys = strict.Merge(keys,
			rule.Switched.For(s+"param_offload "+s+"optimizer_offload "+s+"offload_policy "+s+"reshard_after_forward"),
			rule.Worded.For(s+"model_dtype"), rule.Integer.Lax().OrNull().Default(-1).For(s+"fsdp_size"),
			open(rule.Anything.For("min_num_params")).For(s+"wrap_policy"))
	}
	return keys
}

// hasCritic reports whether a critic is trained: need_critic in verl/trainer/ppo/utils.py.
func hasCritic(r *strict.Reader) bool {
	if v := r.Find(critic + "enable"); v != nil && v.Kind != 'n' {
		return recipe.On(v)
	}
	return r.Word("algorithm.adv_estimator") == "gae"
}

// either returns the key of FSDP's settings of the critic that the file gives: that of now, or that of before.
func (r *reader) either(name string) string {
	if r.Gives(criticBefore + name) {
		return criticBefore + name
	}
	return criticFSDP + name
}

// companions reads the models beside the policy.
func (r *reader) companions() error {
	g := r.To.Generation
	if hasCritic(r.Reader.Reader) {
		c, err := r.critic()
		if err != nil {
			return err
		}
		g.Companions = append(g.Companions, *c)
	}
	for _, section := range []string{rewards, "reward.reward_model."} {
		if !r.Truth(section + "enable") {
			continue
		}
		c, err := r.reward(section)
		if err != nil {
			return err
		}
		if c != nil {
			g.Companions = append(g.Companions, *c)
		}
	}
	return nil
}

// critic reads the critic, which FSDP shards in the processes of the policy (verl/trainer/ppo/ray_trainer.py).
func (r *reader) critic() (*recipe.Companion, error) {
	path := criticModel + "path"
	if !r.Gives(path) {
		path = model + "path"
		r.Note("algorithm.adv_estimator", "has a critic, and "+criticModel+"path is not given: it is planned with the "+
			"policy's model, where verl takes a model of 7 B of its own")
	}
	offloads := r.Truth(r.either("param_offload"))
	c := recipe.Companion{Role: recipe.Critic, Model: r.Word(path), At: r.Place(path),
		Weights: r.Word(r.either("model_dtype")), Context: r.Integer(critic + "ulysses_sequence_parallel_size"),
		Recomputes: r.recomputes(criticModel + "enable_gradient_checkpointing"),
		Backups: rollout.Backups{Parameters: offloads, Gradients: offloads,
			Optimizer: r.Truth(r.either("optimizer_offload"))}}
	c.AccumulatesWhole = r.accumulatesWhole(criticFSDP)
	if c.Weights == "" {
		c.Weights = "fp32"
	}
	strategy := r.Word(critic + "strategy")
	if strategy == "" {
		strategy = r.Word(actor + "strategy")
	}
	if strategy != "" && strategy != "fsdp" && strategy != "fsdp2" {
		return nil, r.Fault(critic+"strategy", fmt.Sprintf("is %s: of verl's critics those of FSDP are planned",
			strategy), "give the strategy of the policy")
	}
	c.Strategy = &recipe.CompanionSharding{Version: 1, Reshards: true}
	if key := r.either("reshard_after_forward"); r.Gives(key) {
		c.Strategy.Reshards = r.Truth(key)
	}
	if strategy == "fsdp2" {
		c.Strategy.Version = 2
	}
	c.Liger = r.Truth(criticModel + "use_liger")
	c.Attention = attentionOf(r.Root.Find(criticModel + "override_config"))
	return &c, cmp.Or(r.refuseCritic(), r.criticBatch(&c))
}

// refuseCritic refuses what is not planned of a critic.
func (r *reader) refuseCritic() error {
	for _, planned := range [][2]string{{critic + "optim.optimizer", "AdamW"},
		{critic + "optim.optimizer_impl", "torch.optim"}} {
		key, is := planned[0], planned[1]
		if o := r.Root.Find(key); o != nil && o.Kind != 'n' && o.Text != is {
			return r.Inputf(o.At, "%s is %s, which is not planned yet", key, o.Text).
				WithHint("plimsoll plans AdamW of torch.optim")
		}
	}
	if d := r.Word(criticFSDP + "dtype"); d != r.Word(fsdp+"dtype") {
		return r.Fault(criticFSDP+"dtype", fmt.Sprintf("is %s: the critic computes in another type than the policy, "+
			"which is not planned yet", d), "give the type of the policy")
	}
	size := r.either("fsdp_size")
	if n := r.Integer(size); n > 0 && n != r.Integer(fsdp+"fsdp_size") && int(n) != r.To.PerNode*r.To.Nodes {
		return r.Fault(size, fmt.Sprintf("is %d: the critic is shared among other ranks than the policy, which is not "+
			"planned yet", n), "give "+fsdp+"fsdp_size the same value")
	}
	for _, no := range [][2]string{
		{criticModel + "lora_rank " + criticModel + "lora.rank", "it trains adapters of the critic"},
		{criticModel + "enable_activation_offload " + criticModel + "tiled_mlp.enabled " + criticModel + "mtp.enable " +
			criticFSDP + "qat.enable", "it changes what the critic's passes hold"},
		{criticFSDP + "offload_policy " + criticBefore + "offload_policy",
			"the host holds the critic's shards for good"},
		{criticFSDP + "wrap_policy.min_num_params " + criticBefore + "wrap_policy.min_num_params",
			"units of the critic are cut by their size"},
	} {
		for key := range strings.FieldsSeq(no[0]) {
			if v := r.Root.Find(key); recipe.On(v) && v.Text != "0" {
				return r.Inputf(v.At, "%s is %s: %s, which is not planned yet", key, v, no[1]).
					WithHint("remove the key to plan the job without it, and expect its memory to differ")
			}
		}
	}
	return nil
}

// criticBatch reads the sequences of a pass of the critic, or the tokens of a packed one.
func (r *reader) criticBatch(c *recipe.Companion) error {
	longest := r.Integer("data.max_prompt_length") + r.Integer("data.max_response_length")
	all := max(1, int64(max(1, r.To.PerNode*r.To.Nodes))/c.Context)
	mini := r.Integer(critic + "ppo_mini_batch_size")
	if mini == 0 {
		mini = r.Integer(actor + "ppo_mini_batch_size")
	}
	mini *= r.Integer(engine + "n")
	packs := r.Truth(actor + "use_dynamic_bsz")
	if r.Gives(critic + "use_dynamic_bsz") {
		packs = r.Truth(critic + "use_dynamic_bsz")
	}
	if packs {
		tokens := r.Integer(critic+"ppo_max_token_len_per_gpu") * c.Context
		c.MicroBatch, c.Sequence, c.Judged = 1, tokens, 1
		if n := r.Integer(critic + "forward_max_token_len_per_gpu"); n > 0 {
			c.JudgedSequence = n * c.Context
		}
		// Its passes are never longer than what a step has.
		own := max(longest, (mini*longest+all-1)/all)
		c.Sequence, c.JudgedSequence = min(c.Sequence, own), min(c.JudgedSequence, own)
		c.Accumulation = int(max(1, mini*longest/(c.Sequence*all)))
		r.Note(critic+"ppo_max_token_len_per_gpu", fmt.Sprintf("has passes of the critic of %d tokens in all",
			c.Sequence))
		return nil
	}
	c.Sequence = longest
	perGPU := func(name string) int64 {
		if n := r.Integer(critic + name + "_per_gpu"); n > 0 {
			return n
		}
		return r.Integer(critic+name) / all
	}
	c.MicroBatch, c.Judged = perGPU("ppo_micro_batch_size"), perGPU("forward_micro_batch_size")
	if c.MicroBatch == 0 {
		return r.Fault(critic+"ppo_micro_batch_size_per_gpu", "is not given, and a critic is trained: verl does not "+
			"start without it", "give the sequences of a pass of the critic on each GPU; or set "+
			"algorithm.adv_estimator to an estimator without a critic, such as grpo")
	}
	if c.Judged == 0 {
		c.Judged = c.MicroBatch
	}
	c.Accumulation = int(max(1, mini/all/c.MicroBatch))
	return nil
}

// reward reads the model that rewards answers. That of now is an engine beside that of the policy.
func (r *reader) reward(section string) (*recipe.Companion, error) {
	if r.Truth(section + "enable_resource_pool") {
		r.To.Generation.LeftOut = append(r.To.Generation.LeftOut, "the GPUs of the reward model")
		return nil, nil
	}
	if section != rewards || !r.Gives(rewards+"micro_batch_size_per_gpu") && !r.Gives(rewards+"micro_batch_size") {
		return nil, r.Fault(section+"enable", "is true: an engine with the model that rewards answers lies on the "+
			"GPUs, too, which is not planned yet", "give it GPUs of its own by enable_resource_pool; or remove the "+
			"key to plan the job without it, and expect its engine on top")
	}
	c := recipe.Companion{Role: recipe.Reward, Model: r.Word(rewards + "model.path"),
		At: r.Place(rewards + "model.path"), Weights: "bf16", MicroBatch: 1, Context: 1,
		Sequence: r.Integer("data.max_prompt_length") + r.Integer("data.max_response_length"),
		Judged:   r.Integer(rewards + "micro_batch_size_per_gpu"), Strategy: &recipe.CompanionSharding{Version: 1,
			Reshards: true},
		Backups: rollout.Backups{Parameters: r.Truth(rewards + "model.fsdp_config.param_offload")}}
	if c.Judged == 0 {
		c.Judged = r.Integer(rewards+"micro_batch_size") / int64(max(1, r.To.PerNode*r.To.Nodes))
	}
	return &c, nil
}
