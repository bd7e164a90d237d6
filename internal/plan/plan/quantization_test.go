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
		{`"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}`,
			`format is not "pack-quantized", which is not planned yet`},
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

// TestCompressedTensors compares what packed weights take before and after the first forward pass with the parameters
// of torch.nn.Linear under compressed-tensors 0.12.2 and 0.15.0.1, of 512 inputs and 1024 outputs: 270,344 bytes become
// 1,318,920 with the one, which keeps the packed weight, and 270,352 become 1,056,784 with the other.
func TestCompressedTensors(t *testing.T) {
	file := filestest.InNewFolder(t)
	const sizes = `"model_type": "llama", "vocab_size": 320, "hidden_size": 512, "intermediate_size": 1024,
		"num_hidden_layers": 2, "num_attention_heads": 4, "torch_dtype": "bfloat16"`
	const packed = `"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
		"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}},
		"ignore": ["lm_head", "re:.*(self_attn|down_proj)", "model.layers.0.mlp.gate_proj"]`
	request := job.Request{Adapter: file("lora.json", `{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}`),
		Sequence: 64}
	held := func(model, transformers string, phase ledger.PhaseName) (sum ledger.Bytes) {
		q := request
		q.Model, q.Transformers = model, transformers
		for _, c := range phaseOf(t, &planned(t, q).Devices[0], phase).End {
			if c.Component == ledger.Parameters {
				sum += c.Bytes
			}
		}
		return sum
	}
	plain := file("plain.json", "{"+sizes+"}")
	model := file("config.json", "{"+sizes+`, "quantization_config": {`+packed+"}}")
	const linear, quantized = 512 * 1024 * 2, 3 // both of up_proj, and gate_proj of the second layer
	full := held(plain, "4.57", ledger.Load)
	for _, c := range []struct {
		transformers string
		phase        ledger.PhaseName
		want         ledger.Bytes // of a weight beyond what an ordinary one takes
	}{
		{"4.57", ledger.Load, 270344 - linear},
		{"4.57", ledger.Backward, 1318920 - linear},
		{"4.57", ledger.Checkpoint, 1318920 - linear},
		{"4.57", ledger.Resume, 270344 - linear},
		{"5.24", ledger.Load, 270344 - linear},
		{"5.24", ledger.Backward, 0},
	} {
		if got := held(model, c.transformers, c.phase) - full; got != quantized*c.want {
			t.Errorf("transformers %s, %s: %d bytes beyond ordinary weights, want %d", c.transformers, c.phase, got,
				quantized*c.want)
		}
	}
}

// TestPreparedModelsKeepWideStreams holds what TRL before 0.26 makes of a quantized model: its norms are in fp32, and
// bitsandbytes gives results in the type of the input. So blocks keep their inputs in fp32. FSDP and ZeRO-3, which
// shard what is on the host, prepare nothing.
func TestPreparedModelsKeepWideStreams(t *testing.T) {
	file := filestest.InNewFolder(t)
	model := file("config.json", "{"+smallLlama+"}")
	train := file("train.yaml", "model_name_or_path: x\nuse_peft: true\nload_in_4bit: true\nbf16: true\n"+
		"gradient_checkpointing: true\nlora_target_modules: [q_proj]\n")
	streams := func(release, sharded string) ledger.Bytes {
		q := job.Request{Model: model, Configs: []string{train}, Sequence: 64}
		q.Releases = []string{"trl=" + release}
		if sharded != "" {
			q.GPUs, q.FSDP = 2, sharded
		}
		d := &planned(t, q).Devices[0]
		for _, c := range phaseOf(t, d, ledger.Forward).Components {
			if c.Component == ledger.ResidualActivations {
				return c.Bytes
			}
		}
		return 0
	}
	now := streams("1.0.0", "")
	if wide := streams("0.13.0", ""); now == 0 || wide < now*7/4 {
		t.Errorf("blocks keep %v of a prepared model, and %v of one that is not", wide, now)
	}
	if got, want := streams("0.13.0", "1"), streams("1.0.0", "1"); got != want {
		t.Errorf("under FSDP blocks keep %v with TRL 0.13, and %v with 1.0", got, want)
	}
}
