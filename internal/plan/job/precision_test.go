package job

import (
	"os"
	"path/filepath"
	"testing"

	"plimsoll/internal/base/dtype"
)

// TestWeightsAsPublished leaves weights in the type of the model where transformers does, under autocast.
func TestWeightsAsPublished(t *testing.T) {
	arguments := filepath.Join(t.TempDir(), "args.json")
	text := `{"per_device_train_batch_size": 1, "bf16": true, "output_dir": "x"}`
	if err := os.WriteFile(arguments, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		transformers, accelerate, fsdp, precision string
		want                                      dtype.Type
	}{
		{"4.57.0", "", "", "", dtype.F32},
		{"5.0.0", "", "", "", dtype.BF16},
		{"5.24.0", "", "2", "", dtype.F32},
		{"5.24.0", "1.13.0", "2", "", dtype.BF16},
		{"5.24.0", "1.13.0", "1", "", dtype.F32},
		{"4.57.0", "1.13.0", "2", "", dtype.F32},
		{"5.24.0", "", "", "amp-bf16", dtype.F32},
	} {
		j, err := Request{Model: "qwen2.5-0.5b", Sequence: 64, GPUs: 2, TrainingArgs: arguments, FSDP: c.fsdp,
			Precision: c.precision, Transformers: c.transformers, AccelerateVersion: c.accelerate}.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if j.ParameterType != c.want || j.AutocastType != dtype.BF16 && c.fsdp == "" {
			t.Errorf("%+v: weights in %v under %v", c, j.ParameterType, j.AutocastType)
		}
	}
}

// TestPrecisionOfZeROWithoutAFile takes the type of --zero from --precision, a Trainer's file or the model.
func TestPrecisionOfZeROWithoutAFile(t *testing.T) {
	t.Parallel()
	halves := filepath.Join(t.TempDir(), "args.json")
	text := `{"per_device_train_batch_size": 1, "fp16": true, "output_dir": "x"}`
	if err := os.WriteFile(halves, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		model, precision, arguments string
		want                        dtype.Type
	}{
		{"qwen2.5-0.5b", "", "", dtype.BF16},
		{"gpt2", "", "", dtype.F32},
		{"qwen2.5-0.5b", "fp32", "", dtype.F32},
		{"gpt2", "bf16", "", dtype.BF16},
		{"qwen2.5-0.5b", "", halves, dtype.F16},
	} {
		j, err := Request{Model: c.model, Sequence: 64, GPUs: 2, TrainingArgs: c.arguments, Precision: c.precision,
			Shorthand: Shorthand{ZeRO: "2"}}.Resolve()
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		if j.ParameterType != c.want {
			t.Errorf("%+v: weights in %v, expected %v", c, j.ParameterType, c.want)
		}
	}
}
