package plan

import (
	"plimsoll/ledger"
	"testing"
)

// TestOptimizerOfDeepSpeed tests the chosen optimizer. If the DeepSpeed file has a
// section for Adam, it is DeepSpeed's own kernel, not the Trainer's.
func TestOptimizerOfDeepSpeed(t *testing.T) {
	file := inNewFolder(t)
	section := func(optimizer string) string {
		return `{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}` +
			optimizer + `}`
	}
	adam := section(`, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}`)
	for _, c := range []struct {
		deepSpeed, training, flag, want string
	}{
		{adam, "", "", "adamw/fused"},
		{section(`, "optimizer": {"type": "Adam"}`), "", "", "adam/fused"},
		{section(`, "optimizer": {"type": "Adam", "params": {"torch_adam": true}}`), "", "", "adam/foreach"},
		{section(""), "", "", "adamw/foreach"},
		{adam, "", "adamw", "adamw/fused"},
		{adam, "", "adamw/foreach", "adamw/foreach"},
		{adam, "", "sgd", "sgd/foreach"},
		{adam, `{"optim": "adafactor", "per_device_train_batch_size": 1, "bf16": true}`, "", "adamw/fused"},
		{section(""), `{"optim": "adafactor", "per_device_train_batch_size": 1, "bf16": true}`, "",
			"adafactor/foreach"},
	} {
		q := Request{Model: "qwen2.5-0.5b", Sequence: 64, GPUs: 2, DeepSpeed: file("ds.json", c.deepSpeed),
			Optimizer: c.flag}
		if c.training != "" {
			q.TrainingArgs = file("args.json", c.training)
		}
		p := planned(t, q)
		if got := p.Job.OptimizerName(); got != c.want {
			t.Errorf("%s and %s, --optimizer %q: %s, want %s", c.deepSpeed, c.training, c.flag, got, c.want)
		}
	}
}

// TestMomentsOfCPUAdam tests moments in the type of the master weights, for files
// that ask for it.
func TestMomentsOfCPUAdam(t *testing.T) {
	file := inNewFolder(t)
	states := func(name, params, bf16 string) int64 {
		text := `{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true` + bf16 + `}, "optimizer": ` +
			`{"type": "AdamW", "params": {` + params + `}},
			"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}`
		for _, c := range phaseOf(t,
			hostOf(planned(t, Request{Model: "qwen2.5-0.5b", Sequence: 64, DeepSpeed: file(name, text)})),
			ledger.Checkpoint).End {
			if c.Component == ledger.OptimizerStates {
				return int64(c.Bytes)
			}
		}
		return 0
	}
	const low, half = `"fp32_optimizer_states": false`, `, "bf16_master_weights_and_grads": true`
	wide := states("wide.json", `"lr": 1e-4`, half)
	if got := states("low.json", low, half); got != wide/2 {
		t.Errorf("moments of bf16 master weights take %d B without fp32_optimizer_states, and %d B with them", got,
			wide)
	}
	if got := states("master.json", low, ""); got != wide {
		t.Errorf("moments of fp32 master weights take %d B without fp32_optimizer_states, want %d", got, wide)
	}
}
