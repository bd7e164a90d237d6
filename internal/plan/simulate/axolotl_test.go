package simulate

import (
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/job"
)

const flash = "attn_implementation: flash_attention_2\n"

const smallLlama4 = `{"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "vocab_size": 256,
	"hidden_size": 256, "intermediate_size": 512, "intermediate_size_mlp": 1024, "num_hidden_layers": 2,
	"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4,
	"interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "tie_word_embeddings": false,
	"attn_temperature_tuning": false}`

// TestLinearizedExperts compares trainings of Llama 4 with real torch 2.15 and transformers 5.23 on tensors without
// memory, with axolotl's module of linearized experts.
func TestLinearizedExperts(t *testing.T) {
	file := filestest.InNewFolder(t)
	for name, test := range map[string]struct {
		text string
		want [4]float64
	}{
		"stacked": {"", [4]float64{62052148, 60999480, 64004408, 35678468}},
		"linearized": {"llama4_linearized_experts: true\n",
			[4]float64{62052148, 60999480, 62693688, 35678468}},
		"adapter": {"llama4_linearized_experts: true\nadapter: lora\nlora_r: 8\nlora_target_modules: [q_proj]\n",
			[4]float64{36735812, 33585992, 35668808, 9050900}},
	} {
		j, err := (&job.Request{Model: file("config.json", smallLlama4), Sequence: 256, MicroBatch: 2,
			Precision: "bf16", Torch: "2.15", Attention: "sdpa", GPU: "H100-80GB", Optimizer: "adamw",
			Configs: []string{file("train.yaml", "base_model: x\n"+flash+test.text)}}).Resolve()
		if err != nil {
			t.Fatal(err)
		}
		j.HoldsOutputs, j.HoldsCache = false, false
		if _, list := makeParameters(j); slices.ContainsFunc(list, func(p *autograd.Parameter) bool {
			return strings.HasSuffix(p.Name, "experts.down_projs.3.weight") && p.Rows == 256
		}) != (test.text != "") {
			t.Errorf("%s: an expert has modules, or has not", name)
		}
		got, _ := steady(t, j)
		within(t, name, got, test.want, 0.035)
	}
}

const wideLlama = `{"model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 4096,
	"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": false}`

// TestTiles compares trainings with axolotl's TiledMLP on tiles of a sequence with real torch 2.15 and transformers
// 5.23 on tensors without memory.
func TestTiles(t *testing.T) {
	file := filestest.InNewFolder(t)
	for name, test := range map[string]struct {
		text string
		want [4]float64
	}{
		"whole": {"", [4]float64{211189572, 208043840, 238543160, 55585028}},
		"tiles": {"tiled_mlp: true\ntiled_mlp_num_shards: 4\n", [4]float64{84041524, 73826112, 105636152, 55585028}},
		"tiles of checkpoints": {"tiled_mlp: true\ntiled_mlp_num_shards: 4\ngradient_checkpointing: true\n" +
			"gradient_checkpointing_kwargs: {use_reentrant: false}\n",
			[4]float64{59825924, 50675472, 100885792, 55585028}},
	} {
		j, err := (&job.Request{Model: file("config.json", wideLlama), Sequence: 2048, MicroBatch: 1, Precision: "bf16",
			Torch: "2.15", Attention: "sdpa", GPU: "H100-80GB", Optimizer: "adamw",
			Configs: []string{file("train.yaml", "base_model: x\n"+flash+test.text)}}).Resolve()
		if err != nil {
			t.Fatal(err)
		}
		j.HoldsOutputs, j.HoldsCache = false, false
		got, _ := steady(t, j)
		within(t, name, got, test.want, 0.03)
	}
}

// TestScatteredExperts plans axolotl's kernels of ScatterMoE: they make no weights with what an adapter adds, and no
// token more than once.
func TestScatteredExperts(t *testing.T) {
	file, peaks := filestest.InNewFolder(t), map[string]ledger.Bytes{}
	for _, text := range []string{"experts_implementation: grouped_mm\n", "use_scattermoe: true\n"} {
		j, err := (&job.Request{Model: file("config.json", smallMixtral), Sequence: 64, MicroBatch: 1, GPU: "H100-80GB",
			Configs: []string{file("train.yaml", "base_model: x\nadapter: lora\nlora_r: 4\nsequence_len: 64\n"+
				"attn_implementation: flash_attention_2\nlora_target_modules: [q_proj]\nlora_target_parameters: "+
				"[experts.gate_up_proj, experts.down_proj]\nplugins: [axolotl.integrations.kernels.KernelsPlugin]\n"+
				text)}}).Resolve()
		if err != nil {
			t.Fatal(err)
		}
		got, _ := steady(t, j)
		peaks[text] = got[1] // the end of the forward pass: what is saved
	}
	const layers, sums, taken = 2, 2 * 4 * 3 * 96 * 64, 2 * 64 * 2 * 64 // bytes of a layer in bf16
	less := peaks["experts_implementation: grouped_mm\n"] - peaks["use_scattermoe: true\n"]
	if less < layers*(sums+taken)*8/10 || less > layers*(sums+taken)*11/10 {
		t.Errorf("ScatterMoE saves %d less, want about %d", less, layers*(sums+taken))
	}
}

// TestProductsInFull compares adapters of experts' parameters with PEFT 0.19, which makes their products in full, on
// tensors without memory.
func TestProductsInFull(t *testing.T) {
	file := filestest.InNewFolder(t)
	for precision, want := range map[string][4]float64{"bf16": {89788804, 68011472, 89512328, 35515668},
		"amp-bf16": {152283652, 127324624, 140457416, 62511380}} {
		j, err := (&job.Request{Model: file("config.json", `{"model_type": "qwen3_moe", "vocab_size": 1000,
			"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 16,
			"num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
			"head_dim": 64, "tie_word_embeddings": false}`), Sequence: 256, MicroBatch: 1, Precision: precision,
			Torch: "2.15", Attention: "sdpa", GPU: "H100-80GB", Adapter: file("adapter.json", `{"peft_type": "LORA", "r": 8,
			"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}`)}).Resolve()
		if err != nil {
			t.Fatal(err)
		}
		j.HoldsOutputs, j.AddsInFull = false, true
		got, _ := steady(t, j)
		within(t, precision, got, want, 0.005)
	}
}
