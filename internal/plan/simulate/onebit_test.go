package simulate

import (
	"fmt"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestOneBit holds the optimizers that exchange one bit for each number against what DeepSpeed 0.19.6's own classes
// allocate in their step: runtime/fp16/onebit, with compressed_allreduce of runtime/comm, run on the CPU for 8 ranks.
// Figures are bytes for each element of a flat tensor in fp32, beside the weights and their gradient.
func TestOneBit(t *testing.T) {
	for _, test := range []struct {
		name         string
		ranks        int
		more         int64   // elements beyond a tensor that needs no padding
		after, above float64 // a step after freeze_step
	}{
		{job.OneBitAdam, 8, 0, 12.5, 8},
		{job.OneBitAdam, 8, 8, 12.5, 12},
		{job.OneBitAdam, 1, 0, 16, 8},
		{job.ZeroOneAdam, 8, 0, 16.5, 12},
		{job.ZeroOneAdam, 8, 8, 16.5, 16},
		{job.OneBitLamb, 8, 0, 16.5, 18},
	} {
		t.Run(fmt.Sprintf("%s, %d ranks, %d more", test.name, test.ranks, test.more), func(t *testing.T) {
			n := int64(1<<20) + test.more
			shapes := [][]int64{{n}}
			if test.name == job.OneBitLamb {
				shapes = [][]int64{{n / 2}, {n / 2}}
			}
			j := onRanks(test.ranks, deepSpeedJob(t, linears(shapes...),
				`{"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true}}`, "0.19.6"))
			j.Optimizer = job.NewOptimizer(test.name, "")
			s := stepped(j)
			s.phase(ledger.Step, ledger.Steady, s.engine.step)
			held := ends(t, s.gpu, ledger.Step, ledger.Steady)
			var states, peak int64
			states = held[ledger.OptimizerStates] + held[ledger.CompressionErrors]
			for _, p := range s.gpu.phases() {
				for _, c := range p.Components {
					if p.Iteration == ledger.Steady && c.Component == ledger.OptimizerTemporaries {
						peak = int64(c.Bytes)
					}
				}
			}
			each := func(bytes int64) float64 { return float64(bytes*1000/n) / 1000 }
			if got := each(states); got-test.after > 0.01 || test.after-got > 0.01 {
				t.Errorf("states of %v bytes an element, want %v", got, test.after)
			}
			if got := each(peak); got-test.above > 0.01 || test.above-got > 0.01 {
				t.Errorf("temporaries of %v bytes an element, want %v", got, test.above)
			}
		})
	}
}
