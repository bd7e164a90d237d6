package lever

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// TestRolloutLevers holds the changes of an engine that generates answers: each frees what it says.
func TestRolloutLevers(t *testing.T) {
	of := func(rollout string) job.Request {
		return job.Request{Model: "qwen2.5-0.5b", Reference: "qwen2.5-0.5b", GPUs: 2, GPU: "H100-80GB",
			Precision: "bf16", Sequence: 2048, MicroBatch: 8, HostMemory: 64 * ledger.GiB,
			Shorthand: job.Shorthand{Rollout: rollout}}
	}
	for _, tt := range []struct {
		need    Need
		rollout string
		phase   ledger.PhaseName
		says    string
		frees   ledger.Bytes // at least
	}{
		{GPUMemory, "vllm:0.5", ledger.Backward, "--rollout sleep=2", 30 * ledger.GiB},
		{GPUMemory, "vllm:0.5", ledger.Rollout, "--rollout fraction=0.2", 22 * ledger.GiB},
		{GPUMemory, "vllm:0.5,sleep=2", ledger.LogProbs, "--rollout log-probs=chunked", 10 * ledger.GiB},
		{GPUMemory, "vllm:0.5,sleep=2,log-probs-batch=8", ledger.LogProbs, "--rollout log-probs-batch=4",
			4 * ledger.GiB},
		{GPUMemory, "vllm:0.5,sleep=2", ledger.Backward, "--rollout reference=host", 900 * ledger.MiB},
		{GPUMemory, "vllm:0.5,sleep=2", ledger.Rollout, "--rollout backups=all", 2 * ledger.GiB},
		{GPUMemory, "vllm:0.5,sleep=2", ledger.Rollout, "--rollout server", 38 * ledger.GiB},
		{HostMemory, "vllm:0.5,sleep=1", ledger.Backward, "--rollout sleep=2", 1900 * ledger.MiB},
		{HostMemory, "sglang:0.5,sleep=2,backups", ledger.Rollout, "--rollout backups=none", 4 * ledger.GiB},
	} {
		p := planned(t, of(tt.rollout))
		list, err := For(Question{Need: tt.need, Request: of(tt.rollout), Plan: p, Phase: &tt.phase})
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(list, func(c Change) bool { return c.String() == tt.says })
		if at < 0 {
			t.Errorf("%s, %s: %s is not advised", tt.rollout, tt.phase, tt.says)
		} else if got := list[at].Frees(); got < tt.frees {
			t.Errorf("%s, %s: %s frees %v, want %v", tt.rollout, tt.phase, tt.says, got, tt.frees)
		}
	}
}

// TestRolloutLeversEditFiles holds the edits of a file of TRL and of a script of verl.
func TestRolloutLeversEditFiles(t *testing.T) {
	for name, tt := range map[string]struct{ text, says, edited string }{
		"grpo.yaml": {"model_name_or_path: Qwen/Qwen2.5-0.5B\nuse_vllm: true\nvllm_gpu_memory_utilization: 0.9\n" +
			"vllm_enable_sleep_mode: true\nper_device_train_batch_size: 1\n",
			"vllm_gpu_memory_utilization 0.9 -> 0.8", "vllm_gpu_memory_utilization: 0.8\n"},
		"verl.sh": {"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n" +
			"  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.rollout.name=vllm \\\n" +
			"  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=2 \\\n" +
			"  actor_rollout_ref.rollout.gpu_memory_utilization=0.9\n",
			"gpu_memory_utilization 0.9 -> 0.8", "actor_rollout_ref.rollout.gpu_memory_utilization=0.8\n"},
		"openrlhf.sh": {"python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-0.5B \\\n" +
			"  --actor_num_gpus_per_node 2 \\\n" +
			"  --vllm_num_engines 1 --advantage_estimator group_norm --init_kl_coef 0 --prompt_max_len 1024 \\\n" +
			"  --generate_max_len 7168 --micro_rollout_batch_size 16\n",
			"--micro_rollout_batch_size 16 -> 8", "--micro_rollout_batch_size 8\n"},
	} {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, []byte(tt.text), 0o644); err != nil {
			t.Fatal(err)
		}
		q := job.Request{Configs: []string{file}, GPU: "H100-80GB"}
		phase := ledger.Rollout
		if strings.Contains(tt.says, "micro_rollout") {
			phase = ledger.LogProbs
		}
		list, err := For(Question{Need: GPUMemory, Request: q, Plan: planned(t, q), Phase: &phase})
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(list, func(c Change) bool { return strings.HasSuffix(c.String(), tt.says) })
		if at < 0 {
			t.Errorf("%s: %q is not advised", name, tt.says)
		} else if text := string(list[at].Texts[file]); !strings.Contains(text, tt.edited) {
			t.Errorf("%s: edited to %q", name, text)
		}
	}
}

// TestSlimeLevers holds the edits of a script of slime: its own arguments, and those of Megatron-LM.
func TestSlimeLevers(t *testing.T) {
	const text = "ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate \\\n" +
		"  --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 128000 --rollout-batch-size 16 \\\n" +
		"  --position-embedding-type rope --global-batch-size 16 --rollout-max-context-len 2048 \\\n" +
		"  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --use-kl-loss \\\n" +
		"  --sglang-mem-fraction-static 0.6\n"
	file := filepath.Join(t.TempDir(), "slime.sh")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	q := job.Request{MegatronArguments: job.MegatronArguments{Megatron: file}, GPU: "H100-80GB",
		HostMemory: 512 * ledger.GiB}
	for _, tt := range []struct {
		phase      ledger.PhaseName
		from, want string
	}{
		{ledger.Backward, "--max-tokens-per-gpu 8192", "--max-tokens-per-gpu 4096"},
		{ledger.Rollout, "--sglang-mem-fraction-static 0.6", "--sglang-mem-fraction-static 0.5"},
		{ledger.Backward, "--global-batch-size 16",
			"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --global-batch-size 16"},
	} {
		list, err := For(Question{Need: GPUMemory, Request: q, Plan: planned(t, q), Phase: &tt.phase})
		if err != nil {
			t.Fatal(err)
		}
		want := strings.Replace(text, tt.from, tt.want, 1)
		made := func(c Change) bool { return string(c.Texts[file]) == want && len(c.Flags) == 0 }
		if !slices.ContainsFunc(list, made) {
			t.Errorf("no advice has %s and changes nothing else", tt.want)
		}
		for _, c := range list {
			if strings.Contains(c.String(), "global-batch-size ") {
				t.Errorf("%s: the batch counts samples, and micro batches have tokens", c.String())
			}
		}
	}
}

// TestVerlMegatronLevers holds the edits of a script of verl with Megatron core: assignments, and no arguments.
func TestVerlMegatronLevers(t *testing.T) {
	const text = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.n_gpus_per_node=4 \\\n" +
		"  actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.model.path=qwen2.5-0.5b trainer.nnodes=1 \\\n" +
		"  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.name=vllm\n"
	file := filepath.Join(t.TempDir(), "verl.sh")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	q := job.Request{MegatronArguments: job.MegatronArguments{Megatron: file}, GPU: "H100-80GB"}
	phase := ledger.Backward
	list, err := For(Question{Need: GPUMemory, Request: q, Plan: planned(t, q), Phase: &phase})
	if err != nil {
		t.Fatal(err)
	}
	var edited []string
	for _, c := range list {
		if len(c.Flags) == 0 {
			edited = append(edited, string(c.Texts[file]))
		}
		if strings.Contains(strings.Join(c.Flags, " "), "add --") {
			t.Errorf("%s is no assignment", c.String())
		}
	}
	for _, want := range []string{"ppo_micro_batch_size_per_gpu=2 ",
		"actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 ",
		"actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full "} {
		if !slices.ContainsFunc(edited, func(text string) bool { return strings.Contains(text, want) }) {
			t.Errorf("no edit has %s", want)
		}
	}
}

// TestServerComesLast holds GPUs that the job does not have behind changes of the job itself.
func TestServerComesLast(t *testing.T) {
	q := job.Request{Model: "qwen2.5-7b", GPUs: 8, GPU: "H100-80GB", FSDP: "2", Precision: "bf16", Sequence: 4096,
		MicroBatch: 8, Shorthand: job.Shorthand{Rollout: "vllm:0.6"}}
	p := planned(t, q)
	if p.Verdict.Result == plan.Fits {
		t.Fatal("the job fits, and needs no advice")
	}
	list, err := For(Question{Need: GPUMemory, Request: q, Plan: p})
	if err != nil {
		t.Fatal(err)
	}
	server := slices.IndexFunc(list, func(c Change) bool { return c.String() == "--rollout server" })
	sleep := slices.IndexFunc(list, func(c Change) bool { return c.String() == "--rollout sleep=2" })
	if server < 0 || sleep < 0 || server < sleep {
		t.Errorf("a server is number %d of the advice, and sleep number %d", server, sleep)
	}
}

// TestMicroBatchOfVerl holds that a smaller micro batch leaves verl's batch alone, which counts prompts.
func TestMicroBatchOfVerl(t *testing.T) {
	const text = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \\\n" +
		"  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.rollout.name=vllm \\\n" +
		"  actor_rollout_ref.actor.ppo_mini_batch_size=16 trainer.n_gpus_per_node=2 \\\n" +
		"  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8\n"
	file := filepath.Join(t.TempDir(), "verl.sh")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	q := job.Request{Configs: []string{file}, GPU: "H100-80GB"}
	phase := ledger.Backward
	list, err := For(Question{Need: GPUMemory, Request: q, Plan: planned(t, q), Phase: &phase})
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Replace(text, "gpu=8", "gpu=1", 1)
	if !slices.ContainsFunc(list, func(c Change) bool { return string(c.Texts[file]) == want && len(c.Flags) == 0 }) {
		t.Errorf("no advice makes the micro batch smaller and changes nothing else: %v", list)
	}
}
