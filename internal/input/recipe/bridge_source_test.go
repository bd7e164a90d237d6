package recipe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// bridgeRecipes are sources of a project with recipes of Megatron-Bridge, by their paths.
var bridgeRecipes = map[string]string{
	"own/common.py": `from megatron.core.optimizer import OptimizerConfig
from megatron.bridge.training.config import ConfigContainer, DDPConfig, TrainingConfig

def base(seq_length=4096):
    optimizer = OptimizerConfig(optimizer="adam", lr=3e-4, use_distributed_optimizer=True)
    cfg = ConfigContainer(model=None, train=TrainingConfig(train_iters=10, global_batch_size=32, micro_batch_size=2),
                          optimizer=optimizer, ddp=DDPConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
                          dataset=data(seq_length), mixed_precision="bf16_mixed")
    return cfg

def data(seq_length):
    from megatron.bridge.data import GPTDatasetConfig
    return GPTDatasetConfig(seq_length=seq_length)
`,
	"own/recipes.py": `import torch
from megatron.bridge import AutoBridge
from own.common import base

def qwen3_8b_pretrain_16gpu_config():
    cfg = base()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_dtype = torch.bfloat16
    cfg.train.micro_batch_size = 1
    return cfg

def qwen3_8b_sft_config(peft=None):
    cfg = qwen3_8b_pretrain_16gpu_config()
    cfg.peft = LoRA(dim=8, dropout=0.1, target_modules=["linear_qkv", "*.mlp.linear_fc2"])
    return cfg

def qwen3_8b_dora_config():
    cfg = qwen3_8b_pretrain_16gpu_config()
    cfg.peft = DoRA(dim=8)
    return cfg

LAYOUTS = {(1, 1): None, (4, 1): [["embedding"] + ["decoder"] * 9] + [["decoder"] * 9] * 2 + [["decoder"] * 9 + ["loss"]]}

def qwen3_8b_stages_config():
    cfg = qwen3_8b_pretrain_16gpu_config()
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.expert_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = [list(stage) for stage in LAYOUTS[(4, 1)]]
    return cfg

def glm_config():
    cfg = base()
    cfg.model = AutoBridge.from_hf_pretrained("glm-4.5-air").to_megatron_provider()
    return cfg

def glm_without_mtp_config():
    cfg = glm_config()
    cfg.model.mtp_num_layers = None
    return cfg

def qwen3_vl_config():
    cfg = base()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-VL-8B-Instruct").to_megatron_provider()
    return cfg

def unknown_config():
    cfg = qwen3_8b_pretrain_16gpu_config()
    cfg.train.micro_batch_size = int(os.environ["MBS"])
    return cfg

def benchmark(cfg):
    if hasattr(cfg.model, "use_transformer_engine_op_fuser") and cfg.model.use_transformer_engine_op_fuser:
        cfg.model.use_transformer_engine_op_fuser = False
    if getattr(cfg.model, "cuda_graph_impl", None) == "none":
        cfg.model.context_parallel_size = 2

def benchmark_config():
    cfg = qwen3_8b_pretrain_16gpu_config()
    benchmark(cfg)
    return cfg

def known_benchmark_config():
    cfg = qwen3_8b_pretrain_16gpu_config()
    cfg.model.use_transformer_engine_op_fuser = True
    cfg.model.cuda_graph_impl = "local"
    benchmark(cfg)
    return cfg

def guessing_config():
    cfg = qwen3_8b_pretrain_16gpu_config()
    if hasattr(cfg.model, "of_nobody"):
        cfg.model.num_layers = 3
    return cfg

def hybrid_config():
    cfg = base()
    cfg.model = HybridProvider(num_layers=2, hidden_size=64)
    return cfg
`}

// TestBridgeSource reads a recipe of Megatron-Bridge as its function makes it, with what it imports from its project.
func TestBridgeSource(t *testing.T) {
	folder := t.TempDir()
	for name, text := range bridgeRecipes {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(folder, "own/recipes.py")
	m, err := ReadMegatron(file+":qwen3_8b_pretrain_16gpu_config", nil)
	if err != nil {
		t.Fatal(err)
	}
	if m.Layers != 36 || m.Hidden != 4096 || m.QueryGroups != 8 || !m.QKNorm || !m.SwiGLU || m.Tensor != 4 ||
		m.MicroBatch != 1 || m.GlobalBatch != 32 || m.Sequence != 4096 || m.Ranks != 16 || !m.BF16 ||
		!m.Distributed || m.HiddenDrop != 0 || m.AttentionDrop != 0 || len(m.Files) != 1 || m.Files[0] != file {
		t.Errorf("got %+v", m)
	}
	tuned, err := ReadMegatron(file+":qwen3_8b_sft_config", nil)
	if err != nil {
		t.Fatal(err)
	}
	a := tuned.Adapter
	if a == nil || a.Program != BridgeTuner || a.Rank != 8 || a.Dropout != .1 || a.DropsAfter || a.Canonical ||
		!a.Targets("decoder.layers.3.self_attention.linear_qkv") || !a.Targets("decoder.layers.0.mlp.linear_fc2") ||
		a.Targets("decoder.layers.0.mlp.linear_fc1") || m.Adapter != nil {
		t.Errorf("adapter %+v", a)
	}
	if staged, err := ReadMegatron(file+":qwen3_8b_stages_config", nil); err != nil ||
		staged.ExpertTensor != 1 || m.ExpertTensor != 0 ||
		staged.Layout != "Ettttttttt|ttttttttt|ttttttttt|tttttttttL" {
		t.Errorf("layers of stages: %+v, %v", staged, err)
	}
	// What recipes ask of a model has the defaults of megatron-core, and what they have set before.
	for function, context := range map[string]int64{"benchmark_config": 2, "known_benchmark_config": 1} {
		got, err := ReadMegatron(file+":"+function, nil)
		if err != nil || got.Context != context || (got.CUDAGraph == "local") != (context == 1) {
			t.Errorf("%s: %+v, %v", function, got, err)
		}
	}
	// The provider predicts further tokens as config.json says, unless the recipe does not.
	for function, want := range map[string]int64{"glm_config": 1, "glm_without_mtp_config": 0} {
		if glm, err := ReadMegatron(file+":"+function, nil); err != nil || glm.Predictions != want || !glm.QKVBias {
			t.Errorf("%s: %+v, %v", function, glm, err)
		}
	}
	for function, says := range map[string]string{
		"guessing_config":      "model.num_layers of the recipe is",
		"qwen3_8b_dora_config": "peft is DoRA", "qwen3_vl_config": "layers are not planned in Megatron core",
		"unknown_config": "only a run can tell", "hybrid_config": "HybridProvider makes the model",
	} {
		if _, err := ReadMegatron(file+":"+function, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", function, err, says)
		}
	}
	if flag, err := Detect(file+":qwen3_8b_pretrain_16gpu_config", nil); flag != MegatronFlag {
		t.Errorf("flag %q, %v", flag, err)
	}
	if _, err := Detect(file, nil); err == nil {
		t.Error("a source of several recipes is taken for one")
	}
}
