package simulate

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/job"
)

// TestReasons simulates a model of every architecture with every engine, or in short mode with a quarter of them, which
// is another one for the next architecture. Every allocation gives a reason, and all allocations of a component on a
// device give the same one.
func TestReasons(t *testing.T) {
	file := filestest.InNewFolder(t)
	engines := map[string]job.Request{
		"one GPU": {Precision: "bf16", Attention: "eager"},
		"CPU":     {Precision: "fp32", CPU: true},
		"DDP":     {Precision: "amp-bf16", GPUs: 4, Recompute: "full"},
		"FSDP1":   {Precision: "amp-fp16", GPUs: 4, FSDP: "1", Accumulation: 2},
		"FSDP2":   {Precision: "bf16", GPUs: 4, FSDP: "2", OffloadParameters: true},
		"states":  {Precision: "bf16", Optimizer: "muon", Offload: job.Offload{What: "states", Fraction: 0.5}},
		"whole":   {Precision: "bf16", Offload: job.Offload{What: "states", Mode: "whole", Master: "split"}},
	}
	for name, keys := range map[string]string{
		"ZeRO-0":              `"bf16": {"enabled": true}, "zero_optimization": {"stage": 0}`,
		"ZeRO-0 with fp16":    `"fp16": {"enabled": true}, "zero_optimization": {"stage": 0}`,
		"ZeRO-1":              `"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}`,
		"ZeRO-2":              `"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}`,
		"ZeRO-2 with offload": `"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}`,
		"ZeRO-3":              `"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}`,
		"ZeRO-3 with offload": `"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_optimizer": ` +
			`{"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu", "pin_memory": true}}`,
		"ZeRO-3 with NVMe": `"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_optimizer": ` +
			`{"device": "nvme", "nvme_path": "/nvme"}, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}`,
	} {
		text := `{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, ` + keys + `}`
		engines[name] = job.Request{DeepSpeed: file(name+".json", text), GPUs: 4}
	}
	for _, name := range []string{"one GPU", "FSDP2", "ZeRO-2", "ZeRO-3", "ZeRO-3 with offload"} {
		q := engines[name]
		q.Reference = "the same model"
		engines[name+" beside a reference"] = q
	}
	models := smallest(t)
	for number, name := range slices.Sorted(maps.Keys(engines)) {
		q := engines[name]
		t.Run(name, func(t *testing.T) {
			for i, architecture := range slices.Sorted(maps.Keys(models)) {
				if testing.Short() && q.Reference == "" && (number+i)%4 > 0 {
					continue
				}
				q.Model, q.Sequence = models[architecture], 64
				switch n := catalog(t, q.Model).Network; {
				case n != nil && n.OnlyImages():
					q.Sequence = 0
				case n != nil && n.Generates():
					q.Sequence = 640 // LLaVA 1.5 reads an image as 576 tokens
				}
				if q.Reference != "" {
					q.Model = models["LlamaForCausalLM"]
					q.Reference = q.Model
				}
				j, err := q.Resolve()
				if err != nil && strings.Contains(err.Error(), "uniform original parameter dtype") {
					continue // Hunyuan's routers stay in fp32, which FSDP2 refuses
				}
				if err != nil {
					t.Fatalf("%s: %v", q.Model, err)
				}
				checkReasons(t, simulated(j))
				if q.Reference != "" {
					break // one model stands for all
				}
			}
		})
	}
}

// smallest returns the smallest model of the catalog of every architecture. One stands for all whose operations are
// unknown.
func smallest(t *testing.T) map[string]string {
	names, elements := map[string]string{}, map[string]int64{}
	for _, name := range model.Catalog() {
		m := catalog(t, name)
		if m.Network == nil && m.Architecture != "MambaForCausalLM" {
			continue
		}
		if least := elements[m.Architecture]; least == 0 || m.Elements() < least {
			names[m.Architecture], elements[m.Architecture] = name, m.Elements()
		}
	}
	return names
}

// checkReasons wants one reason for each component of a simulation.
func checkReasons(t interface{ Fatalf(string, ...any) }, s *simulation) {
	for kind, tr := range map[ledger.Kind]*trace{ledger.GPU: s.gpu, ledger.Host: s.host} {
		if tr.failed != nil {
			t.Fatalf("%s, %s: %v", s.Model.Name, kind, tr.failed)
		}
		for i, name := range tr.names {
			if tr.reasons[i] == "" {
				t.Fatalf("%s, %s: no reason for %s", s.Model.Name, kind, name)
			}
		}
	}
}

// TestReasonsAgree breaks the rule: two allocations of a component with different
// reasons fail, and two with the same reason do not.
func TestReasonsAgree(t *testing.T) {
	tr := &trace{strict: true}
	for _, step := range []struct {
		why    string
		failed string
	}{
		{"it is large", "<nil>"},
		{"it is large", "<nil>"},
		{"it is small", `two reasons for batch: "it is large" and "it is small"`},
	} {
		tr.hold(8, ledger.Batch, because("%s", step.why))
		if got := fmt.Sprint(tr.failed); got != step.failed {
			t.Errorf("%s: %s, want %s", step.why, got, step.failed)
		}
	}
}
