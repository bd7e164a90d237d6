package recipe

import (
	"reflect"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/rollout"
)

const grpoText = trlText + `use_vllm: true
num_generations: 8
max_completion_length: 1536
per_device_train_batch_size: 4
`

// TestGRPO reads how TRL's trainers on generated answers run vLLM.
func TestGRPO(t *testing.T) {
	usual := func(change func(*rollout.Engine)) rollout.Engine {
		e := rollout.New(rollout.VLLM)
		e.Fraction, e.SharesProcess, e.BatchTokens, e.ChunkedLogProbs = .3, true, 4096, true
		change(&e)
		return e
	}
	for text, want := range map[string]struct {
		engine    rollout.Engine
		reference bool
		sequence  int
	}{
		grpoText: {usual(func(*rollout.Engine) {}), false, 2048},
		grpoText + "beta: 0.04\nvllm_enable_sleep_mode: true\n": {usual(func(e *rollout.Engine) { e.Sleep = 2 }), true,
			2048},
		grpoText + "vllm_gpu_memory_utilization: 0.55\nvllm_tensor_parallel_size: 4\n": {usual(func(e *rollout.Engine) {
			e.Fraction, e.Tensor = .55, 4
		}), false, 2048},
		grpoText + "max_prompt_length: 256\nvllm_max_model_length: 1700\n": {usual(func(e *rollout.Engine) {
			e.Longest = 1700
		}), false, 1700},
		grpoText + "vllm_mode: server\n": {usual(func(e *rollout.Engine) { e.Server = true }), false, 2048},
		grpoText + "use_peft: true\n":    {usual(func(e *rollout.Engine) { e.Sync = rollout.WholeModel }), false, 2048},
		"trl grpo --model_name_or_path x --use_vllm --vllm_enable_sleep_mode --max_completion_length 100 " +
			"--beta 0.1\n": {
			usual(func(e *rollout.Engine) { e.Sleep = 2 }), true, 612},
	} {
		f, err := read(t, text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if g := f.Generation; g == nil || *g.Engine != want.engine || g.Reference != want.reference ||
			f.Sequence != want.sequence || f.Answers != nil {
			t.Errorf("%s: %+v of %+v, reference %t, %d tokens; want %+v", text, g.Engine, want.engine, g.Reference,
				f.Sequence, want)
		}
	}
}

// TestSwiftGRPO reads how ms-swift's GRPO runs vLLM: the engine takes weights where the trainer has them.
func TestSwiftGRPO(t *testing.T) {
	const text = "rlhf_type: grpo\nmodel: x\ntuner_type: full\nuse_vllm: true\nvllm_mode: colocate\nmax_length: " +
		"1000\ngradient_accumulation_steps: 4\n"
	usual := func(change func(*rollout.Engine)) rollout.Engine {
		e := rollout.New(rollout.VLLM)
		e.Fraction, e.SharesProcess, e.Sync, e.Sequences = .9, true, rollout.GatheredModel, 4
		change(&e)
		return e
	}
	for more, want := range map[string]struct {
		engine    rollout.Engine
		reference bool
		sequence  int
	}{
		"":            {usual(func(*rollout.Engine) {}), true, 1512},
		"beta: 0.0\n": {usual(func(*rollout.Engine) {}), false, 1512},
		"sleep_level: 1\noffload_model: true\noffload_optimizer: true\nmove_model_batches: 16\n": {usual(
			func(e *rollout.Engine) {
				e.Sleep, e.SyncParts = 1, 16
				e.Backups = rollout.Backups{Parameters: true, Optimizer: true}
			}), true, 1512},
		"vllm_gpu_memory_utilization: 0.4\nvllm_tensor_parallel_size: 2\nvllm_max_model_len: 1200\n" +
			"vllm_enforce_eager: true\nper_device_train_batch_size: 3\n": {usual(func(e *rollout.Engine) {
			e.Fraction, e.Tensor, e.Longest, e.Sequences, e.Graphs = .4, 2, 1200, 24, false
		}), true, 1200},
	} {
		f, err := read(t, text+more)
		if err != nil {
			t.Errorf("%s: %v", more, err)
			continue
		}
		if g := f.Generation; g == nil || *g.Engine != want.engine || g.Reference != want.reference ||
			f.Sequence != want.sequence || f.Chunks != BySequence {
			t.Errorf("%s: %+v, reference %t, %d tokens; want %+v", more, g.Engine, g.Reference, f.Sequence, want)
		}
	}
	const alone = "rlhf_type: grpo\nmodel: x\ntuner_type: full\n"
	for more, says := range map[string]string{"": "generate(), whose KV cache is not planned",
		"use_vllm: true\n": "is true without vllm_mode"} {
		if _, err := read(t, alone+more); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", more, err, says)
		}
	}
	for more, says := range map[string]string{
		"reward_model: [y]\n":                    "a model beside the trained one",
		"teacher_model: y\n":                     "a teacher gives logits",
		"vllm_enable_expert_parallel: true\n":    "the engine divides experts",
		"external_plugins: a.py\noptimizer: x\n": "plugins may change",
	} {
		if _, err := read(t, text+more); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", more, err, says)
		}
	}
}

// TestPartsOfSwift holds the parts of a weight sync by the release of ms-swift: some gather all parts at once.
func TestPartsOfSwift(t *testing.T) {
	const text = "rlhf_type: grpo\nmodel: x\ntuner_type: full\nuse_vllm: true\nvllm_mode: colocate\n" +
		"move_model_batches: 16\n"
	for of, want := range map[version.Version]int64{
		{Major: 3, Minor: 10, Patch: 3}: 16, {Major: 3, Minor: 12}: 16, {Major: 3, Minor: 12, Patch: 1}: 1,
		{Major: 3, Minor: 12, Patch: 5}: 1, {Major: 3, Minor: 12, Patch: 6}: 16, {Major: 4}: 16,
	} {
		f, err := ParseFramework("train.yaml", []byte(text),
			Source{Releases: func(string) version.Version { return of }})
		if err != nil {
			t.Fatal(err)
		}
		if got := f.Generation.Engine.SyncParts; got != want {
			t.Errorf("ms-swift %v gathers the model in %d parts, want %d", of, got, want)
		}
	}
}

// TestOpenRLHF reads commands of train_ppo_ray, with the names of flags before and since 0.10.3.
func TestOpenRLHF(t *testing.T) {
	const before = "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-7B --actor_num_gpus_per_node 4 " +
		"--micro_train_batch_size 2 --train_batch_size 64 --prompt_max_len 1000 --generate_max_len 3000 " +
		"--zero_stage 3 --adam_offload --vllm_num_engines 4 " +
		"--vllm_gpu_memory_utilization 0.5 --micro_rollout_batch_size 8 " +
		"--vllm_enable_sleep --advantage_estimator group_norm --colocate_all_models --save_path $OUT\n"
	const since = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-7B " +
		"--actor.num_gpus_per_node 4 --train.micro_batch_size 2 --train.batch_size 64 --data.max_len 4000 " +
		"--ds.zero_stage 3 --ds.adam_offload --vllm.num_engines 4 --vllm.gpu_memory_utilization 0.5 " +
		"--rollout.micro_batch_size 8 --vllm.enable_sleep --algo.advantage.estimator group_norm --train.colocate_all " +
		"--ckpt.output_dir $OUT\n"
	want := rollout.New(rollout.VLLM)
	want.Fraction, want.Longest, want.Sleep, want.LogProbsBatch = .5, 4000, 1, 8
	want.RayThreshold, want.Apart = .95, 1
	for name, text := range map[string]string{"before": before, "since": since} {
		f, err := read(t, text)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if g := f.Generation; *g.Engine != want || !g.Reference || f.Sequence != 4000 || f.Chunks != WideKernel ||
			f.PerNode != 4 || f.Training.GradientAccumulation != 8 || f.Training.MicroBatch != 2 {
			t.Errorf("%s: %+v, reference %t, %d tokens in %d of %d; want %+v", name, g.Engine, g.Reference, f.Sequence,
				f.Training.MicroBatch, f.Training.GradientAccumulation, want)
		}
	}
	for more, says := range map[string]string{
		"--ring_attn_size 2":           "divides sequences or layers",
		"--enable_ema":                 "an average of the weights",
		"--reward_pretrain y,z":        "names several models that reward answers on the GPUs of the actor",
		"--vllm_num_engines 0":         "the model generates answers itself",
		"--actor_optim muon":           "is muon",
		"--param_dtype fp8":            "expected bf16 or fp16",
		"--pretrain_data x":            "a loss of other data",
		"--load_in_4bit --lora_rank 8": "the weights are quantized",
	} {
		if _, err := read(t, strings.TrimSuffix(before, "\n")+" "+more+"\n"); err == nil ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", more, err, says)
		}
	}
}

// verlText is a command of verl. Its last argument ends without a line.
const verlText = `python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_prompt_length=512 \
	data.max_response_length=1536 actor_rollout_ref.model.path=Qwen/Qwen3-8B \
	actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.name=vllm \
	actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=4 trainer.nnodes=2`

// TestVerl reads verl's assignments of Hydra.
func TestVerl(t *testing.T) {
	usual := func(change func(*rollout.Engine)) rollout.Engine {
		e := rollout.New(rollout.VLLM)
		e.Fraction, e.Tensor, e.Sequences, e.Sleep = .5, 2, 1024, 2
		e.HostReference, e.RayThreshold, e.Sync, e.SyncsFromGPU = true, .95, 2<<30, true
		change(&e)
		return e
	}
	const micro = " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
	for arguments, want := range map[string]struct {
		engine            rollout.Engine
		reference         bool
		sequence, batches int
	}{
		micro: {usual(func(*rollout.Engine) {}), false, 2048, 16},
		micro + " actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.gpu_memory_utilization=0.6": {
			usual(func(e *rollout.Engine) { e.Fraction = .6 }), true, 2048, 16},
		micro + " actor_rollout_ref.actor.fsdp_config.param_offload=True" +
			" +actor_rollout_ref.actor.fsdp_config.optimizer_offload=True": {usual(func(e *rollout.Engine) {
			e.Backups = rollout.Backups{Parameters: true, Gradients: true, Optimizer: true}
		}), false, 2048, 16},
		micro + " actor_rollout_ref.rollout.free_cache_engine=False actor_rollout_ref.rollout.enforce_eager=True" +
			" actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16": {usual(func(e *rollout.Engine) {
			e.Sleep, e.Graphs, e.LogProbsBatch = 0, false, 16
		}), false, 2048, 16},
		" actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192": {
			usual(func(*rollout.Engine) {}), false, 8192, 16},
		micro + " actor_rollout_ref.actor.ulysses_sequence_parallel_size=2": {
			usual(func(*rollout.Engine) {}), false, 2048, 32},
		" actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192" +
			" actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4": {
			usual(func(*rollout.Engine) {}), false, 32768, 16},
	} {
		f, err := read(t, verlText+arguments+"\n")
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		if f.PerNode != 4 || f.Nodes != 2 {
			t.Errorf("%s: %d nodes of %d ranks", arguments, f.Nodes, f.PerNode)
		}
		if g := f.Generation; g == nil || *g.Engine != want.engine || g.Reference != want.reference ||
			f.Sequence != want.sequence || f.Training.GradientAccumulation != want.batches {
			t.Errorf("%s: %+v, reference %t, %d tokens, %d micro batches; want %+v", arguments, g.Engine,
				g.Reference, f.Sequence, f.Training.GradientAccumulation, want)
		}
	}
}

// critical asks verl for a critic.
const critical = " algorithm.adv_estimator=gae critic.model.path=x critic.ppo_micro_batch_size_per_gpu=2"

// TestVerlTrainsCritics reads the models beside the policy, with the keys of verl up to 0.8 and since.
func TestVerlTrainsCritics(t *testing.T) {
	const micro = " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
	sharded := func(version int, reshards bool) *CompanionSharding { return &CompanionSharding{version, reshards} }
	critic := func(change func(*Companion)) Companion {
		c := Companion{Role: Critic, Model: "x", Weights: "fp32", Recomputes: true, MicroBatch: 2, Judged: 2,
			Accumulation: 32, Sequence: 2048, Attention: "flash", Context: 1, Strategy: sharded(1, true)}
		change(&c)
		return c
	}
	moved := rollout.Backups{Parameters: true, Gradients: true, Optimizer: true}
	for arguments, want := range map[string][]Companion{
		micro: nil,
		micro + " algorithm.adv_estimator=gae critic.enable=False": nil,
		micro + critical: {critic(func(*Companion) {})},
		micro + critical + " critic.model.fsdp_config.param_offload=True " +
			"critic.model.fsdp_config.optimizer_offload=True": {critic(func(c *Companion) { c.Backups = moved })},
		micro + critical + " critic.fsdp.param_offload=True critic.fsdp.optimizer_offload=True critic.strategy=fsdp2 " +
			"critic.fsdp.reshard_after_forward=False critic.fsdp.model_dtype=bfloat16": {critic(func(c *Companion) {
			c.Backups, c.Strategy, c.Weights = moved, sharded(2, false), "bfloat16"
		})},
		micro + critical + " actor_rollout_ref.actor.strategy=fsdp2": {critic(func(c *Companion) {
			c.Strategy = sharded(2, true)
		})},
		micro + critical + " critic.forward_micro_batch_size_per_gpu=8 " +
			"critic.model.enable_gradient_checkpointing=False": {
			critic(func(c *Companion) { c.Judged, c.Recomputes = 8, false })},
		micro + critical + " critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=8192 " +
			"critic.forward_max_token_len_per_gpu=16384": {critic(func(c *Companion) {
			c.MicroBatch, c.Judged, c.Sequence, c.JudgedSequence, c.Accumulation = 1, 1, 8192, 16384, 16
		})},
		micro + critical + " critic.fsdp.use_no_sync_for_gradient_accumulation=True": {
			critic(func(c *Companion) { c.AccumulatesWhole = true })},
		micro + " reward_model.enable=True reward_model.enable_resource_pool=True": nil,
		micro + " reward_model.enable=True reward_model.model.path=y reward_model.micro_batch_size_per_gpu=16 " +
			"reward_model.model.fsdp_config.param_offload=True": {{Role: Reward, Model: "y", Weights: "bf16",
			MicroBatch: 1, Judged: 16, Sequence: 2048, Context: 1, Strategy: sharded(1, true),
			Backups: rollout.Backups{Parameters: true}}},
	} {
		f, err := read(t, verlText+arguments+"\n")
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		got := withoutPlaces(f.Generation.Companions)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", arguments, got, want)
		}
	}
}

// TestVerlReleases reads what releases and the examples of verl have of their own: a default of verl 0.1 where a key is
// of that release, the engine that is taken where none is given, and configurations of examples.
func TestVerlReleases(t *testing.T) {
	const text = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae actor_rollout_ref.model.path=x " +
		"trainer.n_gpus_per_node=2"
	for arguments, want := range map[string]struct {
		recomputes [2]bool // the policy, the critic
		engine     string
		sequence   int
		judged     int64
	}{
		" actor_rollout_ref.actor.ppo_micro_batch_size=4 critic.ppo_micro_batch_size=4 " +
			"actor_rollout_ref.rollout.log_prob_micro_batch_size=16": {[2]bool{}, rollout.VLLM, 1024, 8},
		" actor_rollout_ref.actor.ppo_micro_batch_size=4 critic.ppo_micro_batch_size=4 " +
			"critic.model.enable_gradient_checkpointing=True": {[2]bool{false, true}, rollout.VLLM, 1024, 0},
		" actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 critic.ppo_micro_batch_size_per_gpu=4": {
			[2]bool{true, true}, rollout.VLLM, 1024, 0},
		" actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 critic.ppo_micro_batch_size_per_gpu=4 " +
			"--config-name=geo3k_multiturn_grpo": {[2]bool{true, true}, rollout.SGLang, 4096, 0},
		" actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 critic.ppo_micro_batch_size_per_gpu=4 " +
			"--config-name='gsm8k_multiturn_grpo' data.max_response_length=512": {[2]bool{true, true}, rollout.SGLang,
			1536, 0},
	} {
		f, err := read(t, text+arguments+"\n")
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		got := [2]bool{f.Training.Checkpointing.Enabled, f.Generation.Companions[0].Recomputes}
		if e := f.Generation.Engine; got != want.recomputes || e.Name != want.engine || f.Sequence != want.sequence ||
			e.LogProbsBatch != want.judged {
			t.Errorf("%s: recomputes %v, %s, %d tokens, %d judged; want %+v", arguments, got, e.Name, f.Sequence,
				e.LogProbsBatch, want)
		}
	}
}

// TestVerlReducesGradients holds the releases in which ranks keep full gradients while they accumulate.
func TestVerlReducesGradients(t *testing.T) {
	const micro = " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
	for arguments, want := range map[string]bool{micro: true,
		micro + " actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=True": false} {
		f, err := read(t, verlText+arguments+"\n")
		if err != nil || f.Training.SyncEachBatch != want {
			t.Errorf("%s: %v, reduced with each micro batch: %t", arguments, err, !want)
		}
	}
}

// TestOpenRLHFTrainsCritics reads the models that are on the GPUs of the actor, each in a process of its own.
func TestOpenRLHFTrainsCritics(t *testing.T) {
	const text = "python3 -m openrlhf.cli.train_ppo_ray --pretrain x --actor_num_gpus_per_node 4 --zero_stage 3 " +
		"--micro_train_batch_size 2 --train_batch_size 64 --max_len 4000 --vllm_num_engines 4 " +
		"--micro_rollout_batch_size 8 --gradient_checkpointing --init_kl_coef 0"
	common := Companion{Weights: "bf16", Recomputes: true, MicroBatch: 2, Judged: 8, Accumulation: 8, Sequence: 4000,
		Context: 1, Apart: true}
	var none rollout.Backups
	critic, reward := common, common
	critic.Role, critic.Model, reward.Role, reward.Model = Critic, "x", Reward, "y"
	of := func(model string, c Companion, b rollout.Backups) Companion {
		c.Model, c.Backups = model, b
		return c
	}
	for arguments, want := range map[string][]Companion{
		"": nil,
		" --colocate_all_models --advantage_estimator group_norm":             nil,
		" --colocate_all_models":                                              {critic},
		" --colocate_all_models --reward_pretrain y":                          {of("y", critic, none), reward},
		" --colocate_all_models --reward_pretrain y --critic_pretrain z":      {of("z", critic, none), reward},
		" --colocate_all_models --reward_pretrain y --remote_rm_url http://a": {critic},
		" --colocate_all_models --deepspeed_enable_sleep": {of("x", critic,
			rollout.Backups{Gradients: true, Optimizer: true})},
		" --colocate_all_models --advantage_estimator rloo --reward_pretrain y --ref_reward_offload": {of("y", reward,
			rollout.Backups{Parameters: true})},
	} {
		f, err := read(t, text+arguments+"\n")
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		got := withoutPlaces(f.Generation.Companions)
		if !reflect.DeepEqual(got, want) || f.Generation.Engine.Apart != int64(len(want)) {
			t.Errorf("%s: %+v in %d processes, want %+v", arguments, got, f.Generation.Engine.Apart, want)
		}
	}
}

// TestVerlSharesSequences holds the ranks that share a sequence: Ulysses, which exchanges heads around attention.
func TestVerlSharesSequences(t *testing.T) {
	f, err := read(t, verlText+" actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"+
		" actor_rollout_ref.actor.ulysses_sequence_parallel_size=2\n")
	if err != nil {
		t.Fatal(err)
	}
	want := Parallelism{Replicate: 1, Shard: 4, Tensor: 1, Context: 2, Sequence: 1, Ulysses: true}
	if p := f.Parallelism; p == nil || *p != want || f.Attention != "flash" {
		t.Errorf("%+v with %s attention, want %+v", p, f.Attention, want)
	}
}

// TestVerlRefuses holds that what verl trains beside the actor, and what is not planned, is refused at its key.
func TestVerlRefuses(t *testing.T) {
	const micro = " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
	for arguments, says := range map[string]string{
		"":                            "does not start without one of the two",
		micro + " critic.enable=True": "a critic is trained: verl does not start",
		micro + critical + " critic.strategy=veomni":                        "of verl's critics those of FSDP",
		micro + critical + " critic.model.lora_rank=8":                      "it trains adapters of the critic",
		micro + critical + " critic.fsdp.offload_policy=True":               "the host holds the critic's shards",
		micro + " reward_model.enable=True":                                 "the model that rewards answers",
		micro + " reward.reward_model.enable=True":                          "an engine with the model that rewards",
		micro + " model_engine=veomni":                                      "model_engine is veomni",
		micro + " --config-name=ppo_other":                                  "config_name is ppo_other",
		micro + " actor_rollout_ref.actor.strategy=veomni":                  "FSDP and Megatron core are planned",
		micro + " actor_rollout_ref.actor.torchtitan.x=1":                   "is of another engine than FSDP",
		micro + " hydra.searchpath=[pkg://other.config]":                    "configurations that plimsoll does not have",
		micro + " distillation.enabled=True":                                "a teacher lies on GPUs",
		micro + " actor_rollout_ref.hybrid_engine=False":                    "the engine has GPUs of its own",
		micro + " actor_rollout_ref.rollout.name=hf":                        `is "hf", expected vllm or sglang`,
		micro + " actor_rollout_ref.actor.ulysses_sequence_parallel_size=3": "does not divide the GPUs",
	} {
		if _, err := read(t, verlText+arguments+"\n"); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", arguments, err, says)
		}
	}
	f, err := read(t, verlText+micro+" +actor_rollout_ref.rollout.gpu_memory_utilisation=0.7\n")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range f.Notes {
		if strings.Contains(n.What, "gpu_memory_utilisation") {
			return
		}
	}
	t.Errorf("nobody names the key that verl does not know: %v", f.Notes)
}

// withoutPlaces forgets where the names of companions stand.
func withoutPlaces(companions []Companion) []Companion {
	for i := range companions {
		companions[i].At = fault.Position{}
	}
	return companions
}
