package simulate

import (
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestJudgedAnswersLeaveTheTrace holds what ZeRO-3 gathers in the update, however many micro batches follow the pass
// that judges answers. That pass is not in the order of the update, and once it was taken for its beginning: then
// parameters of all blocks were gathered ahead and stayed.
func TestJudgedAnswersLeaveTheTrace(t *testing.T) {
	gathered := func(micros int) ledger.Bytes {
		file := filestest.InNewFolder(t)
		q := job.Request{Model: "qwen2.5-7b", GPUs: 8, GPU: "H100-80GB", Precision: "bf16", Sequence: 512,
			MicroBatch: 1, Accumulation: micros, Shorthand: job.Shorthand{Rollout: "vllm:0.3,sleep=2"},
			DeepSpeed: file("ds.json", `{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true},
				"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}`)}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		classes, err := Run(j, Limit{})
		if err != nil {
			t.Fatal(err)
		}
		var most ledger.Bytes
		for _, p := range classes[0].GPU.Phases {
			for _, h := range p.Components {
				if h.Component == ledger.GatheredParameters {
					most = max(most, h.Bytes)
				}
			}
		}
		return most
	}
	one := gathered(1)
	for _, micros := range []int{2, 3, 4} {
		if got := gathered(micros); got > one+one/4 {
			t.Errorf("with %d micro batches %v are gathered at once, and %v with one", micros, got, one)
		}
	}
}
