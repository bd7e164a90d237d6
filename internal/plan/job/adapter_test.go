package job

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestUnplannedAdapters tests that adapters with unplanned settings are refused.
func TestUnplannedAdapters(t *testing.T) {
	for _, text := range []string{`"trainable_token_indices": [1, 2]`,
		`"trainable_token_indices": {"embed_tokens": [1]}`, `"target_parameters": ["k_proj.weight"]`,
		`"layer_replication": [[0, 4], [2, 5]]`,
		`"modules_to_save": ["embed_tokens"], "ensure_weight_tying": true`,
		`"target_modules": ["lm_head"], "ensure_weight_tying": true`,
		`"target_modules": ["embed_tokens"], "lora_bias": true`} {
		file, targets := filepath.Join(t.TempDir(), "adapter.json"), `"target_modules": ["q_proj"], `
		if strings.Contains(text, "target_modules") {
			targets = ""
		}
		if err := os.WriteFile(file, []byte(`{"peft_type": "LORA", `+targets+text+`}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := (Request{Model: "qwen2.5-0.5b", Adapter: file}).Resolve(); err == nil {
			t.Errorf("%s is planned as if it were not there", text)
		}
	}
}
