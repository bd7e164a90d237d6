package job

import (
	"testing"

	"plimsoll/files/filestest"
)

// TestOptimizerOfDeepSpeed tests the chosen optimizer. If the DeepSpeed file has a
// section for Adam, it is DeepSpeed's own kernel, not the Trainer's.
func TestOptimizerOfDeepSpeed(t *testing.T) {
	file := filestest.InNewFolder(t)
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
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if got := j.OptimizerName(); got != c.want {
			t.Errorf("%s and %s, --optimizer %q: %s, want %s", c.deepSpeed, c.training, c.flag, got, c.want)
		}
	}
}
