package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
)

// decideAxolotl decides a job of a file of axolotl with this model.
func decideAxolotl(t *testing.T, base, text string) (*Job, error) {
	t.Helper()
	t.Setenv("HF_HOME", t.TempDir())
	path := filestest.InNewFolder(t)("train.yaml", "base_model: "+base+"\nlearning_rate: 1e-4\nmicro_batch_size: 1\n"+
		"bf16: true\nsequence_len: 512\ndatasets:\n  - path: x\n    type: alpaca\n"+text)
	return Request{Configs: []string{path}}.Resolve()
}

// TestAxolotlModels reads models by names and keys of axolotl.
func TestAxolotlModels(t *testing.T) {
	j, err := decideAxolotl(t, "TheBloke/Llama-2-7B-GPTQ", "gptq: true\nadapter: lora\nlora_r: 8\n"+
		"lora_target_modules: [q_proj]\n")
	if err != nil || j.Model.Name != "llama-2-7b" || j.Quantization == nil || j.Quantization.Method != "gptq" {
		t.Errorf("a name of GPTQ: %v", err)
	}
	j, err = decideAxolotl(t, "qwen2.5-0.5b", "process_reward_model: true\n")
	if err != nil || j.Model.Architecture != "Qwen2ForTokenClassification" || j.Model.Network.Head.Outputs != 2 ||
		j.Model.Network.Head.Dropout != 0 || j.Pairs {
		t.Errorf("a process reward model: %v", err)
	}
	const linearized = "axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16"
	const adapter = "load_in_4bit: true\nadapter: qlora\nlora_r: 8\nlora_target_modules: [q_proj]\n"
	j, err = decideAxolotl(t, linearized, "llama4_linearized_experts: true\n"+adapter)
	if err != nil || len(j.FusedExperts()) > 0 {
		t.Errorf("linear experts: %v", err)
	}
	if _, err = decideAxolotl(t, linearized, adapter); err == nil || !strings.Contains(err.Error(), "linear modules") {
		t.Errorf("linear experts that nothing asks for: %v", err)
	}
}

// TestAxolotlLinearModules lists the linear modules of a mixture as axolotl does: its router and its experts are none.
func TestAxolotlLinearModules(t *testing.T) {
	j, err := decideAxolotl(t, "mixtral-8x7b",
		"adapter: lora\nlora_r: 8\nlora_dropout: 0.05\nlora_target_linear: true\n")
	if err != nil {
		t.Fatal(err)
	}
	if names := j.AdaptedParameters(); len(names) > 0 || !j.Adapter.Targets("model.layers.0.self_attn.q_proj") {
		t.Errorf("adapts %v", names)
	}
}

// TestOpaqueExperts adapts experts in one parameter where the operations are unknown. transformers 5 fuses those of
// others, which bitsandbytes leaves as they are.
func TestOpaqueExperts(t *testing.T) {
	const lora = "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_dropout: 0\n"
	j, err := decideAxolotl(t, "gemma-4-26b-a4b", lora+"lora_target_modules: [q_proj]\n"+
		"lora_target_parameters: [experts.gate_up_proj, experts.down_proj]\n")
	if err != nil || len(j.AdaptedParameters()) != 60 {
		t.Errorf("Gemma 4: %v", err)
	}
	j, err = decideAxolotl(t, "trinity-nano", lora+"lora_target_modules: [q_proj]\n")
	if err != nil || len(j.FusedExperts()) != 2*54 {
		t.Errorf("Trinity: %v", err)
	}
}
