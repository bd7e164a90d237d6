package simulate

import (
	"fmt"
	"math"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
)

// TestPaddingAgainstPyTorch compares the shard and the gathered buffer of a
// parameter with FSDP2's.
func TestPaddingAgainstPyTorch(t *testing.T) {
	for _, c := range []struct{ rows, ranks, experts int64 }{{256, 2048, 0}, {256, 256, 0}, {10, 4, 0}, {7, 8, 0},
		{64, 16, 4}} {
		t.Run(fmt.Sprintf("%d rows among %d ranks", c.rows, c.ranks), func(t *testing.T) {
			measured := torchtest.Answer[struct{ Shard, Gathered int64 }](t,
				torchtest.Forked("torch.distributed.fsdp"), "../../../scripts/measure/shard.py",
				"--rows", fmt.Sprint(c.rows), "--ranks", fmt.Sprint(c.ranks), "--experts", fmt.Sprint(c.experts))
			e := &fsdp{simulation: &simulation{Job: &job.Job{
				Precision: job.Precision{ParameterType: dtype.F32},
				Sharding: job.Sharding{Parallel: job.Parallel{Shard: c.ranks},
					FSDP: &recipe.FSDP{Version: 2}}}}}
			p := &autograd.Parameter{Elements: c.rows * 32, Rows: c.rows}
			if c.experts > 0 { // of one of two expert parallel ranks: 32 ranks share 8 experts
				p.Elements, p.Matrices, p.Expert = c.experts*p.Elements, c.experts, true
				e.Modules, e.Parallel.Expert, e.Parallel.Shard = "torchtitan", 2, 2*c.ranks
			}
			if all := e.padded(p); all != measured.Gathered || e.shardOf(p, all) != measured.Shard {
				t.Errorf("a shard of %d of %d elements, FSDP2 has %d of %d", e.shardOf(p, all), all, measured.Shard,
					measured.Gathered)
			}
		})
	}
}

// TestFrozenGradients accumulates gradients of an adapter under FSDP1. PEFT's fsdp_auto_wrap_policy keeps frozen
// parameters out of the units of trained ones, so that micro batches before the last add no gradients of those.
func TestFrozenGradients(t *testing.T) {
	file, peaks := filestest.InNewFolder(t), map[int]ledger.Bytes{}
	var frozen ledger.Bytes
	for _, accumulation := range []int{1, 4} {
		j, err := (&job.Request{Model: file("config.json", wideLlama), GPU: "H100-80GB", GPUs: 2, Configs: []string{
			file("train.yaml", fmt.Sprintf("base_model: x\nadapter: lora\nlora_r: 4\nlora_target_linear: true\n"+
				"sequence_len: 64\nmicro_batch_size: 1\ngradient_accumulation_steps: %d\nbf16: true\n"+
				"optimizer: adamw_torch\nattn_implementation: sdpa\nfsdp: [full_shard, auto_wrap]\nfsdp_config:\n"+
				"  fsdp_use_orig_params: false\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"+
				"  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_sharding_strategy: FULL_SHARD\n", accumulation))}}).
			Resolve()
		if err != nil {
			t.Fatal(err)
		}
		got, _ := steady(t, j)
		peaks[accumulation], frozen = got[2], ledger.Bytes(2*j.Model.Elements())
	}
	if more := peaks[4] - peaks[1]; more < 0 || more > frozen/20 {
		t.Errorf("accumulation adds %v to the backward pass of an adapter of a model of %v", more, frozen)
	}
}

// TestUnitsAtEnds holds the peaks of Llama 3 8B on 8 ranks to those of the program: the Trainer of transformers 5.24
// with torch 2.15 and accelerate 1.15, which has units for the embedding, and for the last norm with the head. Releases
// before 1.14 leave both to the root.
func TestUnitsAtEnds(t *testing.T) {
	for _, c := range []struct {
		recompute         string
		forward, backward float64 // steady, in GiB without the workspaces of cuBLAS
	}{{"false", 27.95, 27.46}, {"true", 16.19, 17.09}} {
		got := unitsAtEnds(t, "1.15.0", c.recompute)
		if math.Abs(got[0]/c.forward-1) > 0.003 || math.Abs(got[1]/c.backward-1) > 0.003 {
			t.Errorf("with fsdp_activation_checkpointing %s: %.2f GiB, the program has %.2f and %.2f GiB",
				c.recompute, got, c.forward, c.backward)
		}
	}
	older, newer := unitsAtEnds(t, "1.13.0", "true"), unitsAtEnds(t, "1.14.0", "true")
	if embedding := float64(128256*4096*2) / (1 << 30); older[1]-newer[1] < embedding {
		t.Errorf("units of their own save %.2f GiB, the embedding has %.2f GiB", older[1]-newer[1], embedding)
	}
}

// unitsAtEnds returns the peaks of the steady forward and backward passes with a release of accelerate, in GiB.
func unitsAtEnds(t *testing.T, release, recompute string) (peaks []float64) {
	file := filestest.InNewFolder(t)
	j, err := (&job.Request{Model: "llama-3-8b", GPU: "H200", GPUs: 8, Sequence: 2048, AccelerateVersion: release,
		Precision: "amp-bf16", TrainingArgs: file("arguments.json", `{"per_device_train_batch_size": 1, "bf16": true}`),
		Accelerate: file("accelerate.yaml", "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n"+
			"  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: true\n"+
			"  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_activation_checkpointing: "+recompute+"\n")}).Resolve()
	if err != nil {
		t.Fatal(err)
	}
	figures, _ := steady(t, j)
	for _, peak := range []ledger.Bytes{figures[0], figures[2]} {
		peaks = append(peaks, float64(peak)/(1<<30))
	}
	return peaks
}
