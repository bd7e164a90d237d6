package simulate

import (
	"fmt"
	"testing"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/files/filestest"
	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/optim/optimtest"
	"plimsoll/recipe"
)

// TestPaddingAgainstPyTorch compares the shard and the gathered buffer of a
// parameter with FSDP2's.
func TestPaddingAgainstPyTorch(t *testing.T) {
	for _, c := range []struct{ rows, ranks, experts int64 }{{256, 2048, 0}, {256, 256, 0}, {10, 4, 0}, {7, 8, 0},
		{64, 16, 4}} {
		t.Run(fmt.Sprintf("%d rows among %d ranks", c.rows, c.ranks), func(t *testing.T) {
			measured := optimtest.Answer[struct{ Shard, Gathered int64 }](t,
				optimtest.Forked("torch.distributed.fsdp"), "../scripts/measure/shard.py",
				"--rows", fmt.Sprint(c.rows), "--ranks", fmt.Sprint(c.ranks), "--experts", fmt.Sprint(c.experts))
			e := &fsdp{simulation: &simulation{Job: &job.Job{Parallel: job.Parallel{Shard: c.ranks},
				ParameterType: dtype.F32,
				FSDP:          &recipe.FSDP{Version: 2}}}}
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
