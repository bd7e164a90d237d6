package plan

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/job"
)

// TestShorthand plans jobs by flags, and by the files that the flags stand for.
func TestShorthand(t *testing.T) {
	file := filestest.InNewFolder(t)
	for i, c := range []struct {
		short     job.Shorthand
		precision string
		deepSpeed string
		adapter   string
	}{
		{job.Shorthand{ZeRO: "0"}, "fp32", `{"zero_optimization": {"stage": 0}}`, ""},
		{job.Shorthand{ZeRO: "1"}, "BFloat16", `{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}`, ""},
		{job.Shorthand{ZeRO: "1"}, "fp16", `{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}`, ""},
		{job.Shorthand{ZeRO: "2", ZeROOffload: []string{"optimizer"}}, "bf16", `{"bf16": {"enabled": true}, "zero_optimization":
			{"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}`, ""},
		{job.Shorthand{ZeRO: "3", ZeROOffload: []string{"optimizer", "parameters"}}, "bf16", `{"bf16": {"enabled": true},
			"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
			"offload_param": {"device": "cpu", "pin_memory": true}}}`, ""},
		{job.Shorthand{LoRA: 8}, "bf16", "", `{"peft_type": "LORA", "r": 8}`},
		{job.Shorthand{LoRA: 16, LoRATargets: []string{"all-linear"}}, "bf16", "",
			`{"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}`},
		{job.Shorthand{LoRA: 4, LoRATargets: []string{"q_proj", "up_proj"}}, "bf16", "",
			`{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "up_proj"]}`},
	} {
		q := job.Request{Model: "llama-3.2-1b", GPUs: 2, Sequence: 128, Precision: c.precision}
		long := q
		q.Shorthand = c.short
		if c.deepSpeed != "" {
			long.DeepSpeed = file(fmt.Sprintf("deepspeed%d.json", i), c.deepSpeed)
		}
		if c.adapter != "" {
			long.Adapter = file(fmt.Sprintf("adapter%d.json", i), c.adapter)
		}
		if diff := cmp.Diff(planned(t, long).Devices, planned(t, q).Devices); diff != "" {
			t.Errorf("%+v: %s", c.short, diff)
		}
	}
}
