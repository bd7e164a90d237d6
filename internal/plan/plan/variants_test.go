package plan

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/job"
)

// TestVariants plans variants of a job at the same time from files that are read
// once. Each must be the plan that freshly read files give.
func TestVariants(t *testing.T) {
	file := filestest.InNewFolder(t)
	q := job.Request{Model: file("config.json", `{"model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 64, `+
		`"intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, `+
		`"num_key_value_heads": 2, "num_experts": 4}`),
		DeepSpeed: file("zero.json", `{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, `+
			`"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}`),
		Adapter: file("lora.json", `{"peft_type": "LORA", "r": 4, "target_modules": ".*self_attn.*_proj"}`),
		GPUs:    4, GPU: "H100-80GB", Sequence: 128}
	in, err := job.Read(q)
	if err != nil {
		t.Fatal(err)
	}
	devices := func(in *job.Inputs, o job.Overrides) string {
		j, err := job.Decide(in, o)
		if err != nil {
			return "refused: " + err.Error()
		}
		p, err := New(j)
		if err != nil {
			return "failed: " + err.Error()
		}
		return fmt.Sprint(p.Devices, p.Verdict, p.Trained, j.Assumptions)
	}
	var wait sync.WaitGroup
	different := sync.Map{}
	for stage := range 4 {
		for _, offload := range []string{"none", "cpu"} {
			for _, recompute := range []string{"none", "full"} {
				o := job.Overrides{ZeROStage: &stage, OffloadOptimizer: offload, Recompute: recompute,
					MicroBatch: 1 + stage, GPUs: 8 >> stage}
				wait.Go(func() {
					again, err := job.Read(q)
					if err != nil {
						t.Error(err)
						return
					}
					want, got := devices(again, o), devices(in, o)
					if want != got || strings.HasPrefix(got, "refused") != (stage == 0 && offload == "cpu") {
						t.Errorf("stage %d, %s, %s: %s", stage, offload, recompute, cmp.Diff(want, got))
					}
					different.Store(got, true)
				})
			}
		}
	}
	wait.Wait()
	count := 0
	different.Range(func(any, any) bool { count++; return true })
	if count != 15 { // stage 0 refuses to offload
		t.Errorf("16 variants have %d different plans", count)
	}
}
