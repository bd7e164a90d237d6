package plan

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// hsdp is an accelerate configuration that shards a model among ranks and
// replicates it.
func hsdp(sizes string) string {
	return "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: " +
		"TRANSFORMER_BASED_WRAP\nparallelism_config:\n" + sizes
}

// TestReplicas shards parameters among the ranks of dp_shard_size and cp_size, and
// not among replicas: accelerate's mesh is (dp_replicate, dp_shard_cp).
func TestReplicas(t *testing.T) {
	file := filestest.InNewFolder(t)
	held := func(q job.Request) (ledger.Bytes, *job.Job) {
		p := planned(t, q)
		for _, c := range p.Devices[0].Phases[0].End {
			if c.Component == ledger.Parameters {
				return c.Bytes, p.Job
			}
		}
		t.Fatal("no parameters")
		return 0, nil
	}
	for _, c := range []struct {
		sizes           string
		ranks, replicas int
		divisor         int64
	}{
		{"  parallelism_config_dp_shard_size: 8\n", 8, 1, 8},
		{"  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n", 8, 2, 4},
		{"  parallelism_config_dp_replicate_size: 4\n  parallelism_config_dp_shard_size: 2\n", 8, 4, 2},
		{"  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n  " +
			"parallelism_config_cp_size: 2\n", 8, 2, 4},
		{"  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n  " +
			"parallelism_config_tp_size: 2\n", 8, 2, 2},
	} {
		q := job.Request{Model: "qwen2.5-0.5b", Sequence: 512, GPUs: c.ranks,
			Accelerate: file("launch.yaml", hsdp(c.sizes))}
		bytes, j := held(q)
		if j.Parallel.Shard != c.divisor || j.Replicas() != c.replicas {
			t.Errorf("%s: parameters among %d ranks, %d replicas, want %d and %d", c.sizes, j.Parallel.Shard,
				j.Replicas(), c.divisor, c.replicas)
		}
		if j.Parallel.Tensor > 1 {
			continue
		}
		alone, _ := held(job.Request{Model: "qwen2.5-0.5b", Sequence: 512, GPUs: int(c.divisor), FSDP: "2",
			Precision: "amp-bf16"})
		if bytes != alone {
			t.Errorf("%s: %v of parameters, on %d ranks without replicas %v", c.sizes, bytes, c.divisor, alone)
		}
	}
}

// TestParallelismRefused tests sizes that accelerate refuses, and sizes that are
// not planned.
func TestParallelismRefused(t *testing.T) {
	file := filestest.InNewFolder(t)
	for _, c := range []struct{ launch, want string }{
		{hsdp("  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n"),
			"parallelism_config makes 4 ranks, but the job has 8"},
		{hsdp("  parallelism_config_tp_size: 8\n"), "leaves FSDP no ranks"},
		{hsdp("  parallelism_config_sp_size: 2\n  parallelism_config_dp_shard_size: 4\n"),
			"sp_size is above 1, but only DeepSpeed divides sequences so"},
		{"distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_dp_shard_size: 8\n",
			"dp_shard_size is above 1, but distributed_type is MULTI_GPU"},
	} {
		_, err := job.Request{Model: "qwen2.5-0.5b", GPUs: 8, Accelerate: file("launch.yaml", c.launch)}.Resolve()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s\n%v, want %q", c.launch, err, c.want)
		}
	}
}

// TestReplicatedGradients tests that FSDP2 holds the inputs of the all-reduce
// among replicas until the backward pass ends, beside the gradients. They are in
// the type of the reduction.
func TestReplicatedGradients(t *testing.T) {
	file := filestest.InNewFolder(t)
	peak := func(sizes string) ledger.Bytes {
		q := job.Request{Model: "qwen2.5-0.5b", Sequence: 64, Recompute: "full",
			Accelerate: file("launch.yaml", hsdp(sizes))}
		q.GPUs = 4
		if strings.Contains(sizes, "replicate") {
			q.GPUs = 8
		}
		for _, phase := range planned(t, q).Devices[0].Phases {
			if phase.Name == ledger.Backward && phase.Iteration == ledger.Steady {
				return phase.PeakRequested
			}
		}
		return 0
	}
	alone := peak("  parallelism_config_dp_shard_size: 4\n")
	twice := peak("  parallelism_config_dp_shard_size: 4\n  parallelism_config_dp_replicate_size: 2\n")
	// A fourth of 24 blocks of 14.9 million parameters, in bf16.
	if more := twice - alone; more < 23*14_900_000/4*2 || more > 494_000_000/4*2+1<<20 {
		t.Errorf("with replicas the backward pass holds %v more, want about a fourth of the gradients in bf16", more)
	}
}
