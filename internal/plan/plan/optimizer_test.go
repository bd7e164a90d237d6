package plan

import (
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestMomentsOfCPUAdam tests moments in the type of the master weights, for files
// that ask for it.
func TestMomentsOfCPUAdam(t *testing.T) {
	file := filestest.InNewFolder(t)
	states := func(name, params, bf16 string) int64 {
		text := `{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true` + bf16 + `}, "optimizer": ` +
			`{"type": "AdamW", "params": {` + params + `}},
			"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}`
		for _, c := range phaseOf(t,
			hostOf(planned(t, job.Request{Model: "qwen2.5-0.5b", Sequence: 64, DeepSpeed: file(name, text)})),
			ledger.Checkpoint).End {
			if c.Component == ledger.OptimizerStates {
				return int64(c.Bytes)
			}
		}
		return 0
	}
	const low, half = `"fp32_optimizer_states": false`, `, "bf16_master_weights_and_grads": true`
	wide := states("wide.json", `"lr": 1e-4`, half)
	if got := states("low.json", low, half); got != wide/2 {
		t.Errorf("moments of bf16 master weights take %d B without fp32_optimizer_states, and %d B with them", got,
			wide)
	}
	if got := states("master.json", low, ""); got != wide {
		t.Errorf("moments of fp32 master weights take %d B without fp32_optimizer_states, want %d", got, wide)
	}
}
