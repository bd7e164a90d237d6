package plan

import (
	"fmt"
	"math"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestIssue7693 plans the host memory that docs/plan.md shows beside DeepSpeed's
// issue 7693, in bytes a parameter of a node: qwen2.5-3b on 2 ranks.
func TestIssue7693(t *testing.T) {
	file := filestest.InNewFolder(t)
	for _, c := range []struct {
		release              string
		pin                  bool
		accumulation         int
		initialized, stepped float64
	}{
		{"0.18.2", false, 1, 11.97, 19.97}, {"0.18.3", false, 1, 10.40, 18.40},
		{"0.18.3", true, 1, 14.61, 22.61}, {"0.18.3", true, 2, 14.61, 25.59},
	} {
		config := file("zero.json", fmt.Sprintf(`{"train_micro_batch_size_per_gpu": 1, `+
			`"gradient_accumulation_steps": %d, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"}, `+
			`"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": %t}}}`,
			c.accumulation, c.pin))
		p := planned(t, job.Request{Model: "qwen2.5-3b", GPUs: 2, Sequence: 512, Recompute: "full", DeepSpeed: config,
			DeepSpeedVersion: c.release})
		host := hostOf(p)
		parameters := float64(p.Job.Model.Elements())
		for name, want := range map[ledger.PhaseName]float64{ledger.Initialize: c.initialized,
			ledger.Checkpoint: c.stepped} {
			if got := float64(phaseOf(t, host, name).EndRequested) / parameters; math.Abs(got-want) > 0.01 {
				t.Errorf("DeepSpeed %s, pin_memory %t, %d micro batches: %.2f bytes a parameter after %s, want %.2f",
					c.release, c.pin, c.accumulation, got, name, want)
			}
		}
		for _, held := range host.Outside {
			if got := float64(held.Bytes) / parameters; math.Abs(got-1.92) > 0.01 {
				t.Errorf("%s: %.2f bytes a parameter", held.Component, got)
			}
		}
	}
}
