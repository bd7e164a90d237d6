package plan

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

const smallLlama = `"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, ` +
	`"num_hidden_layers": 4,
	"num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16"`

// TestQuantizationOfModel plans weights with the quantization_config of
// config.json, and refuses unplanned ones.
func TestQuantizationOfModel(t *testing.T) {
	file := filestest.InNewFolder(t)
	lora := file("lora.json", `{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}`)
	held := func(q job.Request) string {
		q.Adapter, q.Sequence = lora, 64
		for _, c := range phaseOf(t, &planned(t, q).Devices[0], ledger.Load).End {
			if c.Component == ledger.Parameters {
				return c.Bytes.Exact()
			}
		}
		return ""
	}
	plain := file("plain.json", "{"+smallLlama+"}")
	quantized := func(section string) job.Request {
		return job.Request{Model: file("config.json", "{"+smallLlama+`, "quantization_config": {`+section+"}}")}
	}
	four := held(quantized(`"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"`))
	if want := held(job.Request{Model: plain, Quantization: "nf4"}); four != want {
		t.Errorf("4 bits of config.json take %v, of --quantization %v", four, want)
	}
	eight := held(quantized(`"quant_method": "bitsandbytes", "load_in_8bit": true`))
	if want := held(job.Request{Model: plain, Quantization: "int8"}); eight != want || eight == four {
		t.Errorf("8 bits of config.json take %v, of --quantization %v", eight, want)
	}
	for _, method := range []string{"gptq", "awq", "aqlm"} {
		got := held(quantized(`"quant_method": "` + method + `", "bits": 4, "group_size": 128, "sym": true`))
		if want := held(job.Request{Model: plain, Quantization: method}); got != want || got == four {
			t.Errorf("%s of config.json takes %v, of --quantization %v", method, got, want)
		}
		sharded := job.Request{Model: plain, Quantization: method, Adapter: lora, GPUs: 2, FSDP: "2"}
		if _, err := sharded.Resolve(); err == nil || !strings.Contains(err.Error(), "integers are not sharded") {
			t.Errorf("%s under FSDP: %v", method, err)
		}
	}
	both := quantized(`"quant_method": "bitsandbytes", "load_in_4bit": true`)
	both.Quantization = "int8"
	if got := held(both); got != four {
		t.Errorf("with --quantization int8 beside 4 bits of config.json: %v, want %v", got, four)
	}
	bf16 := held(job.Request{Model: plain})
	for _, dequantized := range []string{`"quant_method": "mxfp4", "dequantize": true`,
		`"quant_method": "fp8", "activation_scheme": "dynamic", "dequantize": true`,
		`"quant_method": "compressed-tensors", "config_groups": {}, "run_compressed": false`} {
		if got := held(quantized(dequantized)); got != bf16 {
			t.Errorf("%s takes %v, want %v", dequantized, got, bf16)
		}
	}
	for _, c := range []struct{ section, want string }{
		{`"quant_method": "hqq", "nbits": 4`, `quant_method is "hqq", which is not planned yet`},
		{`"quant_method": "gptq", "bits": 6`, `GPTQ in 6 bits`},
		{`"quant_method": "aqlm", "out_group_size": 8`, `AQLM with 1 codebooks of 16 bits for 8 x 8 weights`},
		{`"quant_method": "fp8", "weight_block_size": [128, 128]`, `quant_method is "fp8", which is not planned yet`},
		{`"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]`,
			`quant_method is "mxfp4", which is not planned yet`},
		{`"quant_method": "compressed-tensors", "config_groups": {}`,
			`quant_method is "compressed-tensors", which is not planned yet`},
		{`"quant_method": "gtpq"`, "which transformers does not know"},
		{`"load_in_8bit": true, "llm_int8_has_fp16_weight": true`, "keeps 16-bit weights"},
	} {
		q := quantized(c.section)
		q.Adapter = lora
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), "config.json:") {
			t.Errorf("%s: %v, want %q", c.section, err, c.want)
		}
	}
	q := quantized(`"quant_method": "bitsandbytes", "load_in_4bit": true`)
	if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), "without an adapter") {
		t.Errorf("without an adapter: %v", err)
	}
}
