package plan

import (
	"fmt"
	"path/filepath"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/job"
)

// TestWithoutOperations plans models as if only the headers of their weights were
// known. The states have to be those of the plan with operations, and the peak of
// that plan has to lie between the least and the estimate.
func TestWithoutOperations(t *testing.T) {
	file := filestest.InNewFolder(t)
	zero := func(stage int) string {
		return file("ds.json", fmt.Sprintf(`{"zero_optimization": {"stage": %d}, "bf16": {"enabled": true}}`, stage))
	}
	lora := file("lora.json", `{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "down_proj"]}`)
	for name, q := range map[string]job.Request{
		"one GPU":       {},
		"checkpointing": {Recompute: "full"},
		"ZeRO-2":        {GPUs: 2, DeepSpeed: zero(2)},
		"ZeRO-3":        {GPUs: 2, DeepSpeed: zero(3)},
		"FSDP2":         {GPUs: 2, FSDP: "2"},
		"LoRA":          {Adapter: lora},
	} {
		for _, variant := range []string{"smollm3", "olmo2", "starcoder2-plain", "qwen3-moe"} {
			q.Model = filepath.Join("../../input/model/testdata/variants", variant+".json")
			q.Precision, q.Attention, q.MicroBatch, q.Sequence = "bf16", "sdpa", 2, 256
			if q.Adapter != "" && variant == "qwen3-moe" {
				continue // the experts are no linear modules that PEFT adapts
			}
			t.Run(name+"/"+variant, func(t *testing.T) { compareWithout(t, q) })
		}
	}
}

func compareWithout(t *testing.T, q job.Request) {
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	known, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	bare := model.Model{Name: j.Model.Name, Parameters: j.Model.Parameters}
	without, ok := bare.WithoutOperations()
	if !ok {
		t.Fatal("no network")
	}
	other := *j
	other.Model = without
	unknown, err := New(&other)
	if err != nil {
		t.Fatal(err)
	}
	for i := range known.Devices {
		for k := range known.Devices[i].Phases {
			a, b := &known.Devices[i].Phases[k], &unknown.Devices[i].Phases[k]
			if a.Name != ledger.Step && a.Name != ledger.Initialize {
				continue
			}
			if x, y := states(a), states(b); x != y {
				t.Errorf("%v of %s: %v of states, with operations %v", a.Name, known.Devices[i].Kind, y, x)
			}
		}
	}
	peak, least := known.Devices[0].Peak().PeakUsed, unknown.Devices[0].Peak().PeakUsed
	const segments = 4 << 20 // the allocator takes whole ones
	if least > peak || peak > unknown.Estimate+segments {
		t.Errorf("a peak of %v is not between %v and %v", peak, least, unknown.Estimate)
	}
	if unknown.Verdict.Result == Fits || known.Estimate != 0 {
		t.Errorf("a verdict %v without activations, and an estimate of %v with them", unknown.Verdict, known.Estimate)
	}
}

// states returns the bytes of parameters and optimizer states at the end of a phase.
func states(p *ledger.Phase) (sum ledger.Bytes) {
	for _, c := range p.End {
		switch c.Component {
		case ledger.Parameters, ledger.OptimizerStates, ledger.MasterWeights:
			sum += c.Bytes
		}
	}
	return sum
}
