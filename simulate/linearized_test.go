package simulate

import (
	"slices"
	"strings"
	"testing"

	"plimsoll/autograd"
	"plimsoll/files/filestest"
	"plimsoll/job"
)

const smallLlama4 = `{"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "vocab_size": 256,
	"hidden_size": 256, "intermediate_size": 512, "intermediate_size_mlp": 1024, "num_hidden_layers": 2,
	"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4,
	"interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "tie_word_embeddings": false,
	"attn_temperature_tuning": false}`

// TestLinearizedExperts compares trainings of Llama 4 with real torch 2.15 and transformers 5.23 on tensors without
// memory (scripts/measure/train.py), with axolotl's module of linearized experts.
func TestLinearizedExperts(t *testing.T) {
	file := filestest.InNewFolder(t)
	for name, test := range map[string]struct {
		text string
		want [4]float64
	}{
		"stacked":    {"", [4]float64{62052148, 60999480, 64004408, 35678468}},
		"linearized": {"llama4_linearized_experts: true\n", [4]float64{62052148, 60999480, 62693688, 35678468}},
		"adapter": {"llama4_linearized_experts: true\nadapter: lora\nlora_r: 8\nlora_target_modules: [q_proj]\n",
			[4]float64{36735812, 33585992, 35668808, 9050900}},
	} {
		j, err := (&job.Request{Model: file("config.json", smallLlama4), Sequence: 256, MicroBatch: 2, Precision: "bf16",
			Torch: "2.15", Attention: "sdpa", GPU: "H100-80GB", Optimizer: "adamw",
			Configs: []string{file("train.yaml", "base_model: x\nattn_implementation: flash_attention_2\n"+test.text)}}).Resolve()
		if err != nil {
			t.Fatal(err)
		}
		j.HoldsOutputs = false
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

// TestTiles compares trainings with axolotl's TiledMLP on tiles of a sequence with real torch 2.15 and transformers 5.23
// on tensors without memory (scripts/measure/train.py).
func TestTiles(t *testing.T) {
	file := filestest.InNewFolder(t)
	for name, test := range map[string]struct {
		text string
		want [4]float64
	}{
		"whole": {"", [4]float64{211189572, 208043840, 238543160, 55585028}},
		"tiles": {"tiled_mlp: true\ntiled_mlp_num_shards: 4\n", [4]float64{84041524, 73826112, 105636152, 55585028}},
		"tiles of checkpoints": {"tiled_mlp: true\ntiled_mlp_num_shards: 4\ngradient_checkpointing: true\n" +
			"gradient_checkpointing_kwargs: {use_reentrant: false}\n", [4]float64{59825924, 50675472, 100885792, 55585028}},
	} {
		j, err := (&job.Request{Model: file("config.json", wideLlama), Sequence: 2048, MicroBatch: 1, Precision: "bf16",
			Torch: "2.15", Attention: "sdpa", GPU: "H100-80GB", Optimizer: "adamw",
			Configs: []string{file("train.yaml", "base_model: x\nattn_implementation: flash_attention_2\n"+test.text)}}).Resolve()
		if err != nil {
			t.Fatal(err)
		}
		j.HoldsOutputs = false
		got, _ := steady(t, j)
		within(t, name, got, test.want, 0.03)
	}
}
