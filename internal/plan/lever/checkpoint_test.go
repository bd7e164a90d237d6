package lever

import (
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/steptime"
)

// TestCheckpointLevers: where a checkpoint is what the host has no room for, changes of it are advised, with what they
// free.
func TestCheckpointLevers(t *testing.T) {
	file := filestest.InNewFolder(t)
	launch := file("launch.yaml", "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n"+
		"  fsdp_version: 1\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"+
		"  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_cpu_ram_efficient_loading: true\n")
	arguments := file("arguments.json", `{"bf16": true, "per_device_train_batch_size": 1}`)
	const megatron = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 " +
		"--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 " +
		"--use-distributed-optimizer"
	const n = ledger.Bytes(6_738_415_616)
	for _, c := range []struct {
		q     job.Request
		says  string
		frees ledger.Bytes // at least
	}{
		{job.Request{Model: "llama-2-7b", Accelerate: launch, Transformers: "4.57.0"}, "SHARDED_STATE_DICT", 20 * n},
		{job.Request{Model: "llama-2-7b", GPUs: 8, TrainingArgs: arguments, Accelerate: launch}, "save_only_model",
			4 * n},
		{job.Request{Model: "llama-3-8b", GPUs: 8, Precision: "bf16", Shorthand: job.Shorthand{ZeRO: "2"}}, "--zero 3",
			2 * n},
		{job.Request{GPUs: 8, MegatronArguments: job.MegatronArguments{Megatron: megatron}}, "--no-save-optim", 8 * n},
	} {
		c.q.GPU, c.q.HostMemory = "H200", 32*ledger.GiB
		if c.q.Model != "" {
			c.q.Sequence = 128
		}
		j, err := c.q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		p, err := plan.New(j)
		if err != nil {
			t.Fatal(err)
		}
		list, err := For(Question{Need: HostMemory, Request: c.q, Plan: p, Machine: steptime.Machine{}})
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(list, func(x Change) bool { return strings.Contains(x.String(), c.says) })
		if at < 0 || list[at].Frees() < c.frees {
			t.Errorf("%s is not advised, or frees less than %v: %+v", c.says, c.frees, list)
		}
	}
}
