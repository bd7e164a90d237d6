package recipe

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/torchtest"
)

// TestTransformers reads the output of the real classes, without notes about
// unknown keys, and every optimizer that they know.
func TestTransformers(t *testing.T) {
	const script = `
import json, sys, torch
from transformers import BitsAndBytesConfig, TrainingArguments
from transformers.training_args import OptimizerNames
TrainingArguments.device = torch.device("cpu") # else it wants accelerate
plain = TrainingArguments(output_dir="out", use_cpu=True)
full = TrainingArguments(output_dir="out", use_cpu=True, per_device_train_batch_size=3, gradient_accumulation_steps=5, optim="paged_adamw_8bit",
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, dataloader_num_workers=2, bf16=True,
    learning_rate=1e-4, adam_beta2=0.95, max_grad_norm=0.3, eval_strategy="steps", logging_steps=10)
json.dump({"plain": plain.to_json_string(), "full": full.to_json_string(), "optimizers": [o.value for o in OptimizerNames],
    "quantized": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bfloat16").to_json_string()}, sys.stdout)
`
	real := torchtest.Answer[struct {
		Plain, Full, Quantized string
		Optimizers             []string
	}](t, torchtest.Forked("torch", "transformers"), "-c", script)
	for _, name := range real.Optimizers {
		if !slices.Contains(TrainerOptimizers, name) {
			t.Errorf("the optimizer %q is unknown", name)
		}
	}
	plain, full := trainingDefaults(), trainingDefaults()
	plain.OnCPU, plain.DataLoader.PinMemory, plain.Optimizer.Assumed = true, false, false
	full.OnCPU, full.MicroBatch, full.GradientAccumulation, full.Precision, full.MaxGradNorm = true, 3, 5, MixedBF16,
		0.3
	full.Optimizer = TrainerOptimizer{
		Name:    "paged_adamw_8bit",
		LR:      1e-4,
		Beta1:   0.9,
		Beta2:   0.95,
		Epsilon: 1e-8,
	}
	full.Checkpointing = Checkpointing{Enabled: true, EveryN: 1}
	full.DataLoader = DataLoader{Workers: 2, PrefetchFactor: 2}
	full.Evaluation.Enabled = true
	for _, test := range []struct {
		text string
		want Training
	}{{real.Plain, plain}, {real.Full, full}} {
		got, err := ParseTraining("args.json", []byte(test.text), Source{})
		if err != nil {
			t.Fatal(err)
		}
		test.want.File = "args.json"
		if diff := cmp.Diff(&test.want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	quantized, err := ParseQuantization("bnb.json", []byte(real.Quantized))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&Quantization{
		File:         "bnb.json",
		Bits:         4,
		Kind:         "nf4",
		DoubleQuant:  true,
		ComputeDType: dtype.BF16,
		StorageDType: dtype.U8,
		Threshold:    6,
	}, quantized); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
