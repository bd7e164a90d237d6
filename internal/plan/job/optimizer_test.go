package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/autograd"
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
		{strings.Replace(adam, `"stage": 2`, `"stage": 2, "offload_optimizer": {"device": "cpu"}`, 1), "", "",
			"adamw on the host"},
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

// TestTrainersOptimizer holds the Trainer's default against training_args.py of these releases of transformers.
func TestTrainersOptimizer(t *testing.T) {
	file := filestest.InNewFolder(t)
	for _, c := range []struct{ training, transformers, torch, want string }{
		{`{"bf16": true}`, "5.24.0", "2.15.0", "adamw/fused"},
		{`{"bf16": true}`, "4.54.0", "2.8.0", "adamw/fused"},
		{`{"bf16": true}`, "4.54.0", "2.7.1", "adamw/foreach"},
		{`{"bf16": true}`, "4.53.3", "2.8.0", "adamw/foreach"},
		{`{"bf16": true}`, "4.32.0", "2.1.0", "adamw/foreach"},
		{`{"bf16": true}`, "4.31.0", "2.1.0", "adamw/for-loop"},
		{`{"bf16": true, "optim": "adamw_torch_fused"}`, "4.46.3", "2.5.1", "adamw/fused"},
		{`{"bf16": true, "adafactor": true}`, "4.46.3", "2.5.1", "adafactor/foreach"},
	} {
		j, err := Request{Model: "qwen2.5-0.5b", Sequence: 64, GPUs: 1, TrainingArgs: file("args.json", c.training),
			Transformers: c.transformers, Torch: c.torch}.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if got := j.OptimizerName(); got != c.want {
			t.Errorf("%s with transformers %s and torch %s: %s, want %s", c.training, c.transformers, c.torch, got,
				c.want)
		}
	}
}

// TestStates holds the bytes of the states of a large and a small parameter in bf16 against the sources of the
// optimizers: schedulefree, bitsandbytes and DeepSpeed's FusedLamb.
func TestStates(t *testing.T) {
	for _, c := range []struct {
		name         string
		large, small int64 // of 8,192 and 512 elements
		managed      bool
	}{
		{"schedule_free_adamw", 2 * 2 * 8192, 2 * 2 * 512, false},
		{"schedule_free_radam", 2 * 2 * 8192, 2 * 2 * 512, false},
		{"schedule_free_sgd", 2 * 8192, 2 * 512, false},
		{"ademamix", 3 * 4 * 8192, 3 * 4 * 512, false},
		{"ademamix_8bit", 3*8192 + 3*4*32, 3 * 4 * 512, false},
		{"paged_ademamix_8bit", 3*8192 + 3*4*32, 3 * 4 * 512, true},
		{"lamb", 2 * 2 * 8192, 2 * 2 * 512, false},
	} {
		o := optimizerNames[c.name]
		sum := func(elements int64) (sum int64) {
			for _, s := range o.States(&autograd.Parameter{Elements: elements, DType: dtype.BF16}) {
				sum += s.Bytes
			}
			return sum
		}
		if sum(8192) != c.large || sum(512) != c.small || o.Managed != c.managed {
			t.Errorf("%s: %d and %d bytes, managed %v, want %+v", c.name, sum(8192), sum(512), o.Managed, c)
		}
	}
}

// TestUnplannedOptimizer names optimizers with states that no plan has, and misspelled ones. The hint never names
// another optimizer than the one that was meant.
func TestUnplannedOptimizer(t *testing.T) {
	for _, c := range []struct{ name, want string }{
		{"qgalore_adamw", "Q-GaLore keeps moments"},
		{"OneBitAdam", `did you mean "onebitadam"?`},
		{"adamw-16bit", "hint: plimsoll plans"},
		{"adamw-8bits", `did you mean "adamw-8bit"?`},
		{"adafacter", `did you mean "adafactor"?`},
		{"admaw", `did you mean "adamw"?`},
		{"radam", "hint: plimsoll plans"},
		{"adan", "hint: plimsoll plans"},
		{"adamax", "hint: plimsoll plans"},
	} {
		_, err := Request{Model: "gpt2", Optimizer: c.name}.Resolve()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	for deepSpeed, want := range map[string]string{
		"": "lamb is an optimizer of DeepSpeed",
		`{"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": true, "zero_optimization":
			{"stage": 2, "offload_optimizer": {"device": "cpu"}}}`: "DeepSpeed's lamb runs on the GPU",
	} {
		q := Request{Model: "gpt2", Optimizer: "lamb", GPUs: 2}
		if deepSpeed != "" {
			q.DeepSpeed = filestest.InNewFolder(t)("ds.json", deepSpeed)
		}
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
