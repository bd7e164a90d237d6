package deepspeed

import (
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/version"
)

// TestDeepSpeedReleases tests what releases do with keys that they do not know, by the tags of DeepSpeed's repository.
func TestDeepSpeedReleases(t *testing.T) {
	for _, c := range []struct{ release, text, refused, noted string }{
		{"0.19.6", `"zero_optimization": {"stage": 2, "overlap_com": true}`,
			`ds.json:1:59: DeepSpeed 0.19.6 knows no key "overlap_com" in zero_optimization`, ""},
		{"0.7.0", `"zero_optimization": {"stage": 2, "overlap_com": true}`, `DeepSpeed 0.7 knows no key`, ""},
		{"0.6.7", `"zero_optimization": {"stage": 2, "overlap_com": true}`, "",
			`DeepSpeed 0.6.7 knows no key "overlap_com" in zero_optimization: plimsoll ignores it; did you mean ` +
				`"overlap_comm"?`},
		{"0.6.7", `"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}`, "", "offload_optimizer"},
		{"0.19.6", `"zero_optimization": {"stage": 2, "overlap_com": "auto"}`, "", "overlap_com"},
		{"0.19.6", `"fp16": {"enabled": true, "opt_level": "O2"}`, `no key "opt_level" in fp16`, ""},
		{"0.17.1", `"fp16": {"enabled": true, "opt_level": "O2"}`, `no key "opt_level" in fp16`, ""},
		{"0.17.0", `"fp16": {"enabled": true, "opt_level": "O2"}`, "", `DeepSpeed 0.17 knows no key "opt_level"`},
		{"0.17.0", `"bf16": {"enabled": true, "loss_scale": 0}`, "", `no key "loss_scale" in bf16`},
		{"0.18.0", `"bf16": {"enabled": true, "loss_scale": 0}`, `no key "loss_scale" in bf16`, ""},
		{"0.17.4", `"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}`,
			"hint: it came with DeepSpeed 0.17.5", ""},
		{"0.17.0", `"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}`, "",
			"plimsoll ignores it; it came with DeepSpeed 0.18.3"},
		{"0.19.7", `"compression_training": {}`, "was removed in DeepSpeed 0.19.7, which ends with an error", ""},
		{"0.19.7", `"elasticity": {"enabled": false}`, "", ""},
		{"0.19.8", `"elasticity": {"enabled": false}`, "was removed in DeepSpeed 0.19.8", ""},
		{"0.16.3", `"tensor_parallel": {"autotp_size": 2}`, "", "it came with DeepSpeed 0.16.4"},
		{"0.16.4", `"tensor_parallel": {"autotp_sise": 2}`, `did you mean "autotp_size"?`, ""},
		{"0.19.6", `"activation_checkpointing": {"partitioned_activations": true}`, "",
			`no key "partitioned_activations" in activation_checkpointing: plimsoll ignores it`},
		{"0.19.6", `"flops_profiler": {"enabled": false, "anything": true}`, "", `no key "anything" in flops_profiler`},
	} {
		release, err := version.Parse(c.release)
		if err != nil {
			t.Fatal(err)
		}
		d, err := Parse("ds.json", []byte(`{"train_batch_size": 8, `+c.text+`}`), release)
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s %s: refused for %v, want %q", c.release, c.text, err, c.refused)
			continue
		}
		if err == nil && !strings.Contains(fmt.Sprint(d.Notes), c.noted) {
			t.Errorf("%s %s: notes %v, want %q", c.release, c.text, d.Notes, c.noted)
		}
		if err == nil && (d.LowPrecisionMaster || d.TensorParallel > 0) {
			t.Errorf("%s %s: a key that this release does not know has an effect", c.release, c.text)
		}
	}
}

// TestFractionOfLossScale reads a smallest loss scale that is no whole number, as DeepSpeed did before 0.17.1.
func TestFractionOfLossScale(t *testing.T) {
	text := []byte(`{"train_batch_size": 8, "fp16": {"enabled": true, "min_loss_scale": 1e-10}}`)
	_, err := Parse("ds.json", text, version.Version{})
	if err == nil || !strings.Contains(err.Error(), "only before 0.17.1") {
		t.Errorf("got %v", err)
	}
	d, err := Parse("ds.json", text, version.Version{Minor: 16, Patch: 9})
	if err != nil || d.LossScale.Minimum != 1e-10 {
		t.Errorf("%+v, %v", d, err)
	}
}
