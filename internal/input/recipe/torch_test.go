package recipe

import (
	"strings"
	"testing"
)

const (
	tuneText = `model:
  _component_: torchtune.models.qwen2_5.lora_qwen2_5_1_5b_instruct
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: True
  lora_rank: 16
tokenizer:
  max_seq_len: 4096
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 2e-5
batch_size: 4
batch_size_val: ${batch_size}
gradient_accumulation_steps: 8
enable_activation_checkpointing: True
dtype: bf16
`
	titanText = `[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
`
)

func TestTorchtune(t *testing.T) {
	f, err := read(t, tuneText)
	if err != nil {
		t.Fatal(err)
	}
	tr := f.Training
	if f.Model != "qwen2.5-1.5b-instruct" || f.Adapter.Rank != 16 || f.AdapterPrecision != "bf16" ||
		!f.Adapter.Targets("model.layers.0.self_attn.o_proj") || !f.Adapter.Targets("model.layers.0.mlp.up_proj") ||
		f.Adapter.Targets("model.layers.0.self_attn.k_proj") || f.Sequence != 4096 || f.Weights != "bf16" {
		t.Errorf("got %+v, %+v", f, f.Adapter)
	}
	if tr.MicroBatch != 4 || tr.GradientAccumulation != 8 || tr.Precision != Unmixed || tr.MaxGradNorm != 0 ||
		tr.Optimizer.Name != "adamw_torch_fused" || !tr.Checkpointing.Enabled || tr.Checkpointing.Reentrant ||
		tr.FSDP.Version != 2 || !f.SeveralOnly {
		t.Errorf("got %+v", tr)
	}
	f, err = read(t, strings.ReplaceAll(tuneText, "lora_qwen2_5_1_5b_instruct", "qlora_qwen2_5_1_5b_instruct"))
	if err != nil || f.Quantization == nil || !f.Quantization.DoubleQuant {
		t.Errorf("quantized: %+v, %v", f, err)
	}
	for module, want := range map[string]string{"llama3_1.llama3_1_8b": "llama-3.1-8b", "phi4.lora_phi4_14b": "phi-4",
		"gemma2.qlora_gemma2_2b": "gemma-2-2b", "llama2.llama2": "llama2"} {
		f, err := read(t, strings.ReplaceAll(tuneText, "qwen2_5.lora_qwen2_5_1_5b_instruct", module))
		if err != nil || f.Model != want {
			t.Errorf("%s is %+v, %v, want %s", module, f, err, want)
		}
	}
}

func TestTorchtitan(t *testing.T) {
	f, err := ParseFramework("train.toml", []byte(titanText), Source{})
	if err != nil {
		t.Fatal(err)
	}
	tr := f.Training
	if f.Model != "llama-3-8b" || f.Modules != "torchtitan" || f.Recompute != "selective" || f.Sequence != 8192 ||
		f.Weights != "fp32" || tr.Precision != MixedBF16 || tr.MicroBatch != 2 || tr.FSDP.Version != 2 ||
		tr.Optimizer.Name != "adamw_torch_fused" ||
		*f.Parallelism != (Parallelism{Replicate: 1, Tensor: 2, Context: 1, Sequence: 1}) {
		t.Errorf("got %+v, %+v, %+v", f, tr, f.Parallelism)
	}
	kept := strings.Replace(titanText, "[parallelism]\n", "[parallelism]\nfsdp_reshard_after_forward = \"never\"\n", 1)
	if f, err := ParseFramework("train.toml", []byte(kept), Source{}); err != nil ||
		f.Training.FSDP.Strategy != "shard_grad_op" || tr.FSDP.Strategy != "full_shard" {
		t.Errorf("never resharded: %+v, %v", f, err)
	}
	older := titanText + "[optimizer]\nfused = false\n"
	if f, err := ParseFramework("train.toml", []byte(older), Source{}); err != nil ||
		f.Training.Optimizer.Name != "adamw_torch" {
		t.Errorf("not fused: %+v, %v", f, err)
	}
	for text, key := range map[string]string{
		"[model]\nconverters = [\"mx\"]\n[parallelism]\n":                       "model.converters",
		"[optimizer]\nname = \"Muon\"\n[parallelism]\n":                         "optimizer.name",
		"[activation_checkpoint]\nmode = \"memory_budget\"\n[parallelism]\n":    "activation_checkpoint.mode",
		"[training]\ndtype = \"float16\"\n[parallelism]\n":                      "training.dtype",
		"[optimizer]\nearly_step_in_backward = true\n[activation_checkpoint]\n": "optimizer.early_step_in_backward",
		"[training]\ntensor_parallel_degree = 8\n[parallelism]\n":               "training.tensor_parallel_degree",
		"[experimental]\ncontext_parallel_degree = 2\n[parallelism]\n":          "experimental.context_parallel_degree",
	} {
		_, err := ParseFramework("train.toml", []byte(text), Source{})
		if err == nil || !strings.Contains(err.Error(), key+" is") {
			t.Errorf("%s: %v, want %s", text, err, key)
		}
	}
}

// TestTorchtitanPresets reads what torchtitan's own files say: lists of components and converters, mixtures of experts,
// and the batch of all ranks.
func TestTorchtitanPresets(t *testing.T) {
	read := func(text string) *Framework {
		t.Helper()
		f, err := ParseFramework("train.toml", []byte(text), Source{})
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	const sparse = `[model]
name = "deepseek_v3"
flavor = "16B"
converters = ["float8"]
[training]
local_batch_size = 4
global_batch_size = 64
dtype = "bfloat16"
[parallelism]
expert_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["loss"]
`
	f := read(sparse)
	if f.Model != "deepseek-v2-lite" || f.Experts != 8 || f.GlobalBatch.Sequences != 64 || f.Weights != "bf16" ||
		f.Training.TorchCompile || len(f.Notes) < 2 {
		t.Errorf("got %+v, %+v", f, f.Training)
	}
	whole := read(strings.Replace(sparse, `["loss"]`, `["model", "loss"]`, 1))
	if !whole.Training.TorchCompile {
		t.Errorf("not compiled: %+v", whole.Training)
	}
	for flavor, want := range map[string]string{"8B_flex": "llama-3-8b", "70B_varlen_attn": "llama-3-70b",
		"405B": "llama-3.1-405b", "debugmodel_flex_attn": "llama3 debugmodel_flex_attn"} {
		text := strings.NewReplacer("deepseek_v3", "llama3", "16B", flavor).Replace(sparse)
		if f := read(text); f.Model != want {
			t.Errorf("%s is %q, want %q", flavor, f.Model, want)
		}
	}
}

// TestUnplannedTorchtune gives recipes that no plan knows.
func TestUnplannedTorchtune(t *testing.T) {
	for _, line := range []string{"quantizer: {_component_: x.Int4WeightOnlyQATQuantizer}", "teacher_model: {a: b}",
		"ref_checkpointer: {a: b}", "optimizer_in_bwd: True\nclip_grad_norm: 1.0",
		"enable_activation_offloading: True\ncompile: True", "tasks: [x]"} {
		_, err := read(t, tuneText+line+"\n")
		if key, _, _ := strings.Cut(line, ":"); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", line, err)
		}
	}
	generation := tuneText[:strings.Index(tuneText, "optimizer:")] + tuneText[strings.Index(tuneText, "batch_size:"):]
	if _, err := read(t, generation); err == nil || !strings.Contains(err.Error(), "trains nothing") {
		t.Errorf("without an optimizer: %v", err)
	}
}
