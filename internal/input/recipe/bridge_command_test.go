package recipe

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// bridgeProject has recipes where Megatron-Bridge has them, with the modules that they import.
var bridgeProject = map[string]string{
	"src/megatron/bridge/__init__.py": "from megatron.bridge.models.auto import AutoBridge\n",
	"src/megatron/bridge/models/auto.py": `class AutoBridge:
    @classmethod
    def from_hf_pretrained(cls, path, **kwargs):
        return cls(SafeConfig.load(path))
    def to_megatron_provider(self, load_weights=True):
        return self.find().provide()
`,
	"src/megatron/bridge/training/config.py": `class GPTDatasetConfig:
    def __init__(self, seq_length=None, **kwargs):
        kwargs["sequence_length"] = seq_length
        self.seq_length = self.sequence_length
class ConfigContainer:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)
`,
	"src/megatron/bridge/recipes/own.py": `from megatron.core.optimizer import OptimizerConfig
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, DDPConfig, GPTDatasetConfig, TrainingConfig

def qwen3_4b_pretrain_2gpu_h100_bf16_config():
    cfg = ConfigContainer(train=TrainingConfig(global_batch_size=32, micro_batch_size=2), mixed_precision="bf16_mixed",
        optimizer=OptimizerConfig(optimizer="adam", use_distributed_optimizer=True), ddp=DDPConfig(),
        dataset=GPTDatasetConfig(seq_length=4096))
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-4B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 2
    return cfg

def staged_pretrain_4gpu_h100_bf16_config():
    cfg = qwen3_4b_pretrain_2gpu_h100_bf16_config()
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.num_layers_in_first_pipeline_stage = 16
    return cfg
`,
	"src/megatron/bridge/recipes/names.py": "from megatron.bridge.recipes.own import (\n" +
		"    qwen3_4b_pretrain_2gpu_h100_bf16_config as qwen3_4b_pretrain_config,\n)\n",
	"src/megatron/bridge/perf_recipes/own.py": "from megatron.bridge.recipes.own import " +
		"qwen3_4b_pretrain_2gpu_h100_bf16_config\n\ndef fast_pretrain_2gpu_h100_bf16_config():\n" +
		"    return qwen3_4b_pretrain_2gpu_h100_bf16_config()\n",
}

// bridgeScripts returns a function that reads a script in the project.
func bridgeScripts(t *testing.T) func(line string) (*Megatron, error) {
	folder := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, text := range bridgeProject {
		write(name, text)
	}
	return func(line string) (*Megatron, error) { return ReadMegatron(write("train.sh", line+"\n"), nil) }
}

// TestBridgeCommand reads commands of Megatron-Bridge that name a recipe, with what they set over it.
func TestBridgeCommand(t *testing.T) {
	read := bridgeScripts(t)
	const start = "torchrun --nproc_per_node=2 scripts/training/run_recipe.py --recipe "
	usual := Megatron{Ranks: 2, MicroBatch: 2, Sequence: 4096, Tensor: 2}
	fast, set, slurm := usual, usual, usual
	fast.PrecisionAware, slurm.Ranks = true, 8
	set.MicroBatch, set.Sequence, set.SequenceSplit = 1, 2048, true
	for line, want := range map[string]Megatron{
		start + "qwen3_4b_pretrain_2gpu_h100_bf16_config":                                           usual,
		start + "qwen3_4b_pretrain_config":                                                          usual,
		strings.Replace(start, "--recipe ", "--model qwen3_4b ", 1) + "--mode pretrain":             usual,
		start + "fast_pretrain_2gpu_h100_bf16_config":                                               fast,
		"./scripts/training/train.sh --nodes 2 --gpus-per-node 4 --recipe qwen3_4b_pretrain_config": slurm,
		start + "qwen3_4b_pretrain_config -mb 1 -sl 2048 model.sequence_parallel=true -tp 1 " +
			"model.tensor_model_parallel_size=2": set,
	} {
		m, err := read(line)
		if err != nil {
			t.Errorf("%s: %v", line, err)
			continue
		}
		if m.Ranks != want.Ranks || m.MicroBatch != want.MicroBatch || m.Sequence != want.Sequence ||
			m.Tensor != want.Tensor || m.SequenceSplit != want.SequenceSplit ||
			m.PrecisionAware != want.PrecisionAware || m.Layers != 36 || len(m.Files) != 2 {
			t.Errorf("%s: got %+v", line, m)
		}
	}
	for arguments, says := range map[string]string{
		"absent_pretrain_config":                            "no file of megatron/bridge/recipes here",
		"qwen3_4b_pretrain_config --mode dora":              "mode is dora",
		"$RECIPE":                                           "which the script does not set",
		"staged_pretrain_4gpu_h100_bf16_config -pp 4":       "makes a layout of pipeline stages by code",
		"qwen3_4b_pretrain_config train=null":               "train is set over the recipe",
		"qwen3_4b_pretrain_config dist.use_megatron_fsdp=1": "use_megatron_fsdp",
	} {
		if _, err := read(start + arguments); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", arguments, err, says)
		}
	}
	const unnamed = "torchrun --nproc_per_node=2 scripts/training/run_recipe.py --model qwen3_4b"
	if _, err := read(unnamed); err == nil || !strings.Contains(err.Error(), "names no recipe without --mode") {
		t.Errorf("%s: %v", unnamed, err)
	}
}

// TestBridgeAssignments: what advice says of a setting is what Megatron-Bridge reads, for all settings that it has.
func TestBridgeAssignments(t *testing.T) {
	read := bridgeScripts(t)
	const start = "torchrun --nproc_per_node=2 scripts/training/run_recipe.py --recipe qwen3_4b_pretrain_config "
	values := map[Setting]any{MicroBatch: 4, TrainBatch: 64, TensorDegree: 1, ContextDegree: 2, PipelineDegree: 2,
		RecomputeGranularity: "full", RecomputeMethod: "block", RecomputeLayers: 3, OffloadFraction: 0.5,
		FusedLossBy: "te"}
	for _, setting := range MegatronSettings() {
		to, is := values[setting]
		if !is {
			to = true
		}
		assignment := BridgeAssignment(setting, to)
		switch setting {
		// Megatron-Bridge does not have the first two. Its mixed_precision says the others, which all recipes have.
		case StatesOffload, ChunkedStatesOffload, BF16, FP16:
			if assignment != "" {
				t.Errorf("%s: %s", setting, assignment)
			}
			continue
		case SavesModelOnly: // of checkpoints, which no argument of the recipe's says
			continue
		}
		m, err := read(start + assignment)
		if err != nil {
			t.Errorf("%s: %v", assignment, err)
			continue
		}
		if v := m.given.Find(ArgumentOf(setting, to).Key); v == nil || strings.Trim(v.String(), `"`) != fmt.Sprint(to) {
			t.Errorf("%s: got %v", assignment, v)
		}
	}
}
