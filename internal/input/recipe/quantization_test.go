package recipe

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/recipe/recipetest"
)

func TestQuantizationBad(t *testing.T) { recipetest.Refused(t, "quantization", 25, LoadQuantization) }

func TestQuantization(t *testing.T) {
	for _, test := range []struct {
		text  string
		want  Quantization
		notes []string
	}{
		{`{}`, Quantization{
			Kind:         "fp4",
			ComputeDType: dtype.F32,
			StorageDType: dtype.U8,
			Threshold:    6,
		}, []string{"nothing is quantized"}},
		{`{"load_in_4bit": true}`, Quantization{
			Bits:         4,
			Kind:         "fp4",
			ComputeDType: dtype.F32,
			StorageDType: dtype.U8,
			Threshold:    6,
		}, []string{"bnb_4bit_quant_type is not given"}},
		{`{"model_type": "llama", "hidden_size": 4096, "quantization_config": {"_load_in_4bit": true, "_load_in_8bit": false, "load_in_4bit": true, "load_in_8bit": false,
			"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true,
			"llm_int8_enable_fp32_cpu_offload": false, "llm_int8_has_fp16_weight": false, "llm_int8_skip_modules": null, "llm_int8_threshold": 6.0,
			"quant_method": "bitsandbytes"}}`,
			Quantization{
				Bits:         4,
				Kind:         "nf4",
				DoubleQuant:  true,
				ComputeDType: dtype.BF16,
				StorageDType: dtype.BF16,
				Threshold:    6,
			}, nil},
		{`{"load_in_8bit": true, "llm_int8_threshold": 0.0, "llm_int8_has_fp16_weight": true, "llm_int8_skip_modules": ["lm_head", "gate"],
			"llm_int8_enable_fp32_cpu_offload": true, "later": 1}`,
			Quantization{
				Bits:         8,
				Kind:         "fp4",
				ComputeDType: dtype.F32,
				StorageDType: dtype.U8,
				FP16Weights:  true,
				SkipModules:  []string{"lm_head", "gate"},
				OffloadCPU:   true,
			},
			[]string{`BitsAndBytesConfig knows no key "later"`}},
	} {
		got, err := ParseQuantization("config.json", []byte(test.text))
		if err != nil {
			t.Fatal(err)
		}
		test.want.File = "config.json"
		if diff := cmp.Diff(&test.want, got, cmpopts.IgnoreFields(Quantization{}, "Notes")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.text, diff)
		}
		recipetest.RequireNotes(t, got.Notes, test.notes)
	}
}

func FuzzParseQuantization(f *testing.F) {
	recipetest.Archived(f, "testdata/bad/quantization.txtar", func(_ string, text []byte) { f.Add(text) })
	f.Add([]byte(`{"model_type": "llama", "quantization_config": {"load_in_8bit": true, "llm_int8_threshold": 1e999}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := ParseQuantization("fuzz.json", text)
		if (got == nil) == (err == nil) {
			t.Fatalf("got %v and %v", got, err)
		}
		if err != nil {
			recipetest.RequireInput(t, err)
		}
	})
}
