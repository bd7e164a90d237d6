package simulate

import (
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
)

// TestPackedWeights compares weights of GPTQ and AWQ with the buffers that GPTQModel registers for a module of 512
// inputs and 1024 outputs, those of AQLM with aqlm.QuantizedLinear's, and those of compressed-tensors with its own 0.12
// (0.15 has the shape of a weight in twice the bytes, and zero points that 0.12 does not decompress). It compares
// temporaries with those of GPTQModel's dequantize_weight on the CPU, 6 bytes for a weight.
func TestPackedWeights(t *testing.T) {
	for _, test := range []struct {
		quantization recipe.Quantization
		want         int64
	}{
		{recipe.Quantization{Method: "gptq", Bits: 4, Group: 128}, 274432},
		{recipe.Quantization{Method: "gptq", Bits: 8, Group: 64}, 512*1024 + 8*1024*(1+2) + 4*512},
		{recipe.Quantization{Method: "gptq", Bits: 3, Group: 128}, 512*1024*3/8 + 4*1024*3/8 + 4*1024*2 + 4*512},
		{recipe.Quantization{Method: "gptq", Bits: 4}, 512*1024/2 + 1024/2 + 1024*2 + 4*512},
		{recipe.Quantization{Method: "awq", Bits: 4, Group: 128}, 272384},
		{recipe.Quantization{Method: recipe.CompressedTensors, Bits: 4, Group: 128}, 270344},
		{recipe.Quantization{Method: recipe.CompressedTensors, Bits: 4}, 264200},
		{recipe.Quantization{Method: recipe.CompressedTensors, Bits: 4, Group: 128, Ordered: true}, 272392},
		{recipe.Quantization{Method: recipe.CompressedTensors, Bits: 4, Group: 32, Asymmetric: true}, 303120 - 8},
		{recipe.Quantization{Method: "aqlm", Bits: 2, Group: 8, Codebooks: 1, CodeBits: 16}, 1181696},
		{recipe.Quantization{Method: "aqlm", Bits: 2, Group: 8, Codebooks: 2, CodeBits: 8}, 141312},
	} {
		p := &autograd.Parameter{Elements: 512 * 1024, Rows: 1024, DType: dtype.F16}
		if pack(p, &test.quantization); p.Bytes() != test.want {
			t.Errorf("%+v: %d bytes, want %d", test.quantization, p.Bytes(), test.want)
		}
	}
	file := filestest.InNewFolder(t)
	scratch := map[string]int64{}
	for _, name := range []string{"gptq", "awq", "aqlm"} {
		j, err := job.Request{Model: file("config.json", `{"model_type": "llama", "vocab_size": 320, "hidden_size": 512,
			"intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4, "torch_dtype": "float16",
			"quantization_config": {"quant_method": "`+name+`", "bits": 4, "group_size": 64, "desc_act": true}}`),
			Adapter: file("adapter.json", `{"peft_type": "LORA", "target_modules": ["up_proj"]}`),
			GPUs:    1, Sequence: 16}.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		classes, err := Run(j, Limit{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range classes[0].GPU.Phases {
			for _, c := range p.Components {
				if c.Component == ledger.OperationScratch && p.Iteration == ledger.Steady {
					scratch[name] = max(scratch[name], int64(c.Bytes))
				}
			}
		}
	}
	// Down is the last of the weights, and gate and up, whose copies wait for the backward pass, are as large.
	if want := int64(512 * 1024); scratch["gptq"] < 6*want || scratch["gptq"] > 12*want || scratch["awq"] != 4*want ||
		scratch["aqlm"] != 2*want+2*16*512 {
		t.Errorf("scratch %v", scratch)
	}
}

// TestAdaptedParameters compares the trained and all other parameters of an
// adapter with PEFT 0.21's, for models of transformers 5.23 on the meta device.
// VeRA's shared matrices and OFT's indices, which are buffers, are counted, too.
func TestAdaptedParameters(t *testing.T) {
	models := map[string]string{
		"llama": `{"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, ` +
			`"num_hidden_layers": 4,
			"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": true}`,
		"tied": `{"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, ` +
			`"num_hidden_layers": 4,
			"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true}`,
		"bert": `{"architectures": ["BertForMaskedLM"], "vocab_size": 1000, ` +
			`"hidden_size": 64, "intermediate_size": 128, ` +
			`"num_hidden_layers": 4,
			"num_attention_heads": 4, "max_position_embeddings": 256}`,
		"classifier": `{"architectures": ["BertForSequenceClassification"], "vocab_size": 1000, ` +
			`"hidden_size": 64, "intermediate_size": 128, ` +
			`"num_hidden_layers": 4,
			"num_attention_heads": 4, "max_position_embeddings": 256}`,
		"gpt2": `{"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 4, "n_head": 4, ` +
			`"n_positions": 256}`,
		"opt": `{"model_type": "opt", "vocab_size": 1000, "hidden_size": 64, "ffn_dim": 128, ` +
			`"num_hidden_layers": 4, "num_attention_heads": 4,
			"max_position_embeddings": 256, "word_embed_proj_dim": 32}`,
		"t5": `{"model_type": "t5", "vocab_size": 1000, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, ` +
			`"d_kv": 16}`,
	}
	file := filestest.InNewFolder(t)
	for _, c := range []struct {
		model, adapter   string
		trained, besides int64 // besides: all that the model does not have itself
	}{
		{"llama", `"target_modules": ["q_proj", "v_proj"]`, 3584, 3584},
		{"llama", `"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]`, 67584, 67584},
		{"tied", `"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]`, 67584, 67584},
		{"tied", `"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]`, 131584,
			131584},
		{"bert", `"target_modules": ["query", "value"], "modules_to_save": ["cls"]`, 73384, 73384},
		{"bert", `"target_modules": ["query", "value"], "modules_to_save": ["LayerNorm"]`, 5376, 5376},
		{"llama", `"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"`, 3968, 3584},
		{"gpt2", `"target_modules": ["c_attn", "c_proj"], "bias": "lora_only"`, 12544, 11264},
		{"gpt2", `"target_modules": ["c_attn", "c_proj"], "lora_bias": true`, 12544, 12544},
		{"gpt2", `"target_modules": ["c_attn", "c_proj"], "use_dora": true`, 12544, 12544},
		{"gpt2", `"peft_type": "IA3", "target_modules": ["c_attn", "c_proj"], "feedforward_modules": ["c_proj"]`, 2048,
			2048},
		{"opt", `"target_modules": "all-linear"`, 15104, 15104},
		{"bert", `"target_modules": "all-linear"`, 14848, 14848},
		{"classifier", `"target_modules": "all-linear"`, 15112, 15112},
		{"classifier", `"target_modules": "all-linear", "task_type": "SEQ_CLS"`, 14978, 14978},
		{"llama", `"target_modules": ["q_proj", "v_proj", "embed_tokens"]`, 7840, 7840},
		{"tied", `"target_modules": ["q_proj", "v_proj", "embed_tokens", "lm_head"]`, 12096, 12096},
		{"opt", `"target_modules": ["q_proj", "v_proj", "embed_tokens"]`, 8224, 8224},
		{"t5", `"target_modules": ["q", "relative_attention_bias"]`, 3360, 3360},
		{"llama",
			`"peft_type": "ADALORA", "init_r": 4, "target_r": 2, "total_step": 100, "target_modules": ["q_proj", ` +
				`"v_proj"]`,
			4 * (4*(64+64) + 4 + 4*(64+32) + 4), 4*(4*(64+64)+4+4*(64+32)+4) + 8},
		{"llama", `"peft_type": "VERA", "r": 8, "target_modules": ["q_proj", "v_proj"], "exclude_modules": ["q_proj"]`,
			4 * (8 + 64 + 8 + 32), 4*(8+64+8+32) + 8*(64+64)},
		{"llama", `"target_modules": ["q_proj", "v_proj"], "ensure_weight_tying": true`, 3584, 3584},
		{"llama", `"peft_type": "VERA", "r": 8, "target_modules": ["q_proj", "v_proj"], "bias": "vera_only"`, 832,
			448 + 8*(64+64)},
		{"llama", `"peft_type": "OFT", "target_modules": "all-linear"`, 31744, 59520},
		{"llama", `"peft_type": "OFT", "r": 4, "oft_block_size": 0, "target_modules": ["q_proj", "down_proj"], ` +
			`"bias": "oft_only"`, 10112, 14784},
		{"llama", `"peft_type": "OFT", "oft_block_size": 24, "target_modules": ["q_proj", "down_proj"]`, 5760, 7680},
		{"llama", `"peft_type": "OFT", "oft_block_size": 100, "block_share": true, "target_modules": ["q_proj", ` +
			`"down_proj"]`, 40576, 121728},
		{"bert", `"peft_type": "OFT", "oft_block_size": 12, "target_modules": "all-linear"`, 6496, 7896},
	} {
		text := `{` + c.adapter + `}`
		if !strings.Contains(text, "peft_type") {
			text = `{"peft_type": "LORA", "r": 4, ` + c.adapter + `}`
		}
		q := job.Request{Model: file("config.json", models[c.model]), Adapter: file("adapter.json", text)}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		_, list := makeParameters(j)
		var trained int64
		for _, p := range list {
			if p.Trainable {
				trained += p.Elements
			}
		}
		if besides := elementsOf(list) - j.Model.Elements(); trained != c.trained || besides != c.besides {
			t.Errorf("%s, %s: %d trained and %d besides, PEFT has %d and %d",
				c.model, c.adapter, trained, besides, c.trained, c.besides)
		}
	}
}
