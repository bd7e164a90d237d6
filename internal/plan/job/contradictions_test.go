package job

import (
	"strings"
	"testing"
)

// TestRefusedByPrograms tests jobs that transformers or FSDP refuse.
func TestRefusedByPrograms(t *testing.T) {
	variant := func(name string) string { return "../../input/model/testdata/variants/" + name + ".json" }
	const mixed, fused = "uniform", "does not support an attention implementation"
	for _, c := range []struct {
		q    Request
		want string // a part of the fault; "" is none
	}{
		{Request{Model: variant("gpt-oss"), Attention: "sdpa"}, fused},
		{Request{Model: variant("gpt-oss"), Attention: "sdpa", Transformers: "4.57"}, fused},
		{Request{Model: variant("gpt-oss"), Attention: "eager"}, ""},
		{Request{Model: variant("gpt-oss")}, ""},
		{Request{Model: variant("gemma2-biased"), Attention: "sdpa"}, fused},
		{Request{Model: variant("gemma3"), Attention: "sdpa"}, ""},
		{Request{Model: variant("ernie-moe"), Precision: "bf16", FSDP: "2"}, mixed},
		{Request{Model: variant("hunyuan-moe"), Precision: "bf16", FSDP: "1"}, mixed},
		{Request{Model: variant("hunyuan-moe"), Precision: "amp-bf16", FSDP: "2"}, ""},
		{Request{Model: variant("qwen3-moe"), Precision: "bf16", FSDP: "2"}, ""},
		{Request{Model: variant("ernie-moe"), Precision: "bf16"}, ""},
		{Request{Model: "t5-small", Precision: "fp16"}, "_keep_in_fp32_modules"},
		{Request{Model: "t5-small", Precision: "bf16"}, ""},
		{Request{Model: "pythia-70m", Modules: "litgpt", Quantization: "nf4", Shorthand: Shorthand{LoRA: 8},
			TensorParallel: 2}, "LitGPT quantizes on one GPU only"},
		{Request{Model: "pythia-70m", Quantization: "nf4", Shorthand: Shorthand{LoRA: 8}, TensorParallel: 2}, ""},
	} {
		c.q.Sequence, c.q.GPUs = 64, 2
		_, err := c.q.Resolve()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v, want %q", c.q, err, c.want)
		}
	}
}
