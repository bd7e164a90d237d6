package plan

import (
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestExpertsAreSharedOnce holds what a rank keeps of the model to a part of the whole, whatever the degree of expert
// parallelism: a rank has fewer experts, and shares them with fewer ranks. Releases of transformers before 5 have
// experts as modules of their own, which PEFT adapts one by one.
func TestExpertsAreSharedOnce(t *testing.T) {
	lora := filestest.InNewFolder(t)("lora.json", `{"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}`)
	mixture := shallow(t, "qwen3-30b-a3b", 4)
	for name, q := range map[string]job.Request{
		"fused":          {Model: mixture},
		"apart":          {Model: mixture, Transformers: "4.57.0"},
		"apart, adapted": {Model: mixture, Transformers: "4.57.0", Adapter: lora},
	} {
		q.FSDP, q.GPUs, q.Precision, q.Sequence = "2", 8, "bf16", 512
		alone := keptOfModel(t, q)
		for _, degree := range []int{2, 4, 8} {
			q.ExpertParallel = degree
			for component, bytes := range keptOfModel(t, q) {
				if least := alone[component]; bytes < least*999/1000 || bytes > least*1001/1000 {
					t.Errorf("%s, experts in %d parts: a rank holds %v of %s, without expert parallelism %v", name,
						degree, bytes, component, least)
				}
			}
		}
	}
}

// keptOfModel returns what a rank holds of the model at the end of a backward pass.
func keptOfModel(t *testing.T, q job.Request) map[ledger.Component]ledger.Bytes {
	kept := map[ledger.Component]ledger.Bytes{}
	for _, p := range planned(t, q).Devices[0].Phases {
		if p.Name != ledger.Backward || p.Iteration != ledger.Steady {
			continue
		}
		for _, h := range p.End {
			switch h.Component {
			case ledger.Parameters, ledger.Gradients, ledger.OptimizerStates:
				kept[h.Component] += h.Bytes
			}
		}
	}
	if len(kept) != 3 {
		t.Fatalf("a rank keeps %v", kept)
	}
	return kept
}

// TestReasonOfExpertsAddsUp: the formula of the reason gives the bytes.
func TestReasonOfExpertsAddsUp(t *testing.T) {
	p := planned(t, job.Request{Model: "qwen3-30b-a3b", FSDP: "2", GPUs: 8, ExpertParallel: 4, Precision: "bf16",
		Sequence: 512})
	for _, h := range p.Devices[0].Peak().Components {
		if h.Component != ledger.Parameters {
			continue
		}
		var all, ranks, own, experts, width int64
		const formula = "one of %d shards of %d parameters and one of %d of %d in the rank's experts x %d B"
		if _, err := fmt.Sscanf(strings.ReplaceAll(h.Why, ",", ""), formula, &ranks, &all, &experts, &own,
			&width); err != nil {
			t.Fatalf("%s: %v", h.Why, err)
		}
		if sum := ledger.Bytes(all/ranks+own/experts) * ledger.Bytes(width); sum != h.Bytes {
			t.Errorf("%s: that is %d bytes, the component has %d", h.Why, sum, h.Bytes)
		}
	}
}

func TestExpertsNeedRanksOfTheirOwn(t *testing.T) {
	zero3 := filestest.InNewFolder(t)("zero3.json", `{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}`)
	for want, q := range map[string]job.Request{
		"flat tensor":   {FSDP: "1", GPUs: 8, ExpertParallel: 2},
		"deepspeed.moe": {DeepSpeed: zero3, GPUs: 8, ExpertParallel: 2},
		"groups of 16":  {FSDP: "2", GPUs: 16, TensorParallel: 2, ExpertParallel: 16},
	} {
		q.Model, q.Precision, q.Sequence = "qwen3-30b-a3b", "bf16", 512
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("expert parallelism of %d: %v, expected a refusal with %q", q.ExpertParallel, err, want)
		}
	}
}
