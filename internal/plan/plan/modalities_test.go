//go:build linux

package plan_test

import (
	"strings"
	"testing"

	"plimsoll/internal/plan/job"
)

// TestModalities compares plans of models that read images or sound with what PyTorch and transformers hold.
func TestModalities(t *testing.T) {
	const lora = `{"peft_type": "LORA", "r": 8, "target_modules": ".*\\.(q_proj|v_proj|query|value)"}`
	var list []training
	for _, name := range []string{"whisper", "whisper-dropped", "vit", "vit-dropped", "deit", "dinov2", "dinov2-swiglu",
		"clip", "siglip"} {
		for _, kind := range []string{"bf16 sdpa", "bf16 eager", "bf16 sdpa recomputed", "fp32 sdpa", "amp-bf16 sdpa",
			"amp-bf16 sdpa recomputed", "amp-fp16 sdpa", "amp-bf16 sdpa adapted"} {
			words, length := strings.Fields(kind), 0
			if strings.HasPrefix(name, "whisper") || strings.Contains(name, "lip") { // it reads text, too
				length = 256
			}
			c := training{name: name + " " + kind, model: configOf(t, variants+name+".json"), batch: 2, length: length,
				options: map[string]any{"image_size": []int{224, 224}},
				request: job.Request{Precision: words[0], Attention: words[1]}}
			if len(words) > 2 {
				c.request.Recompute = "full"
			}
			if words[len(words)-1] == "adapted" {
				c.adapter = lora
			}
			list = append(list, c)
		}
	}
	compare(t, list, nil)
}
