package recipe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// nemoRecipes are sources of a project with recipes of NeMo 2, by their paths.
var nemoRecipes = map[string]string{
	"own/__init__.py":        ``,
	"own/models/__init__.py": `from own.models import other`,
	"own/models/gpt.py": `from dataclasses import dataclass, field
from typing import Callable
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from own.specs import default_layer_spec, own_layer_spec

@dataclass
class GPTConfig(TransformerConfig):
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    seq_length: int = 1024
    transformer_layer_spec: Callable = default_layer_spec

@dataclass
class LlamaConfig(GPTConfig):
    normalization: str = "RMSNorm"
    activation_func: Callable = F.silu
    gated_linear_unit: bool = True
    position_embedding_type: str = "rope"
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    num_layers: int = 4
    hidden_size: int = 512
    num_attention_heads: int = 8
    num_query_groups: int = 2
    ffn_hidden_size: int = 1024

@dataclass
class OwnLayersConfig(LlamaConfig):
    transformer_layer_spec: Callable = field(default_factory=lambda: own_layer_spec)

@dataclass
class OwnLayers8BConfig(OwnLayersConfig):
    num_layers: int = 8

class LlamaModel:
    pass

@dataclass
class LoRA:
    target_modules: list = field(default_factory=lambda: ["linear_qkv", "linear_proj"])
    dim: int = 32
`,
	"own/specs.py": `def default_layer_spec(config):
    return config

def own_layer_spec(config):
    return config
`,
	"own/small.py": `import nemo_run as run
import torch
from nemo import lightning as nl
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from own.data import MockDataModule
from own.models import gpt
from own.models.gpt import LlamaConfig, LlamaModel, LoRA, OwnLayers8BConfig
from own.overlap import MegatronCommOverlapCallback

def bf16():
    return run.Config(MegatronMixedPrecision, precision="bf16-mixed", grad_reduce_in_fp32=True)

def trainer(tensor=2, nodes=2, callbacks=None):
    strategy = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=tensor, sequence_parallel=True,
                          pipeline_dtype=torch.bfloat16, ddp=run.Config(DistributedDataParallelConfig,
                          overlap_grad_reduce=True))
    return run.Config(nl.Trainer, devices=8, num_nodes=nodes, plugins=bf16(), strategy=strategy, callbacks=callbacks)

@run.cli.factory(target=pretrain)
def pretrain_recipe(config=LlamaConfig, tensor=2, nodes=2, callbacks=None):
    optimizer = run.Config(OptimizerConfig, optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=True)
    return run.Partial(
        pretrain, model=run.Config(LlamaModel, config=run.Config(config)), trainer=trainer(tensor, nodes, callbacks),
        data=run.Config(MockDataModule, seq_length=2048, global_batch_size=64, micro_batch_size=2),
        optim=run.Config(MegatronOptimizerModule, config=optimizer))

def finetune_recipe():
    recipe = pretrain_recipe(nodes=1)
    recipe.peft = run.Config(LoRA)
    recipe.peft.dim = 16
    recipe.resume = run.Config(nl.AutoResume, restore_config=run.Config(nl.RestoreConfig, path="nemo://Qwen/Qwen3-8B"))
    recipe.data = run.Config(SquadDataModule, seq_length=2048, global_batch_size=64, micro_batch_size=2)
    return recipe

def overlapped_recipe():
    return pretrain_recipe(callbacks=[run.Config(MegatronCommOverlapCallback, tp_comm_overlap=False)])

def by_module_recipe():
    recipe = pretrain_recipe()
    recipe.model = run.Config(gpt.LlamaModel, config=run.Config(gpt.LlamaConfig, num_layers=6, vocab_size=1000))
    return recipe

def own_layers_recipe():
    return pretrain_recipe(OwnLayers8BConfig)

def dora_recipe():
    recipe = finetune_recipe()
    recipe.peft = run.Config(DoRA, dim=8)
    return recipe

def hybrid_recipe():
    recipe = pretrain_recipe()
    recipe.model = run.Config(MambaModel, config=run.Config(LlamaConfig))
    return recipe

def unknown_recipe():
    recipe = pretrain_recipe()
    recipe.data.micro_batch_size = int(os.environ["MBS"])
    return recipe

def sharded_recipe():
    recipe = pretrain_recipe()
    recipe.trainer.strategy = run.Config(nl.FSDP2Strategy)
    return recipe

def strange_recipe():
    recipe = pretrain_recipe()
    recipe.trainer.strategy.encoder_tensor_model_parallel_size = 2
    return recipe
`}

// TestNeMoSource reads recipes of NeMo 2: the sizes from the dataclasses of the project, the ranks from the trainer.
func TestNeMoSource(t *testing.T) {
	folder := t.TempDir()
	for name, text := range nemoRecipes {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(folder, "own/small.py")
	read := func(function string) *Megatron {
		t.Helper()
		m, err := ReadMegatron(file+":"+function, nil)
		if err != nil {
			t.Fatalf("%s: %v", function, err)
		}
		return m
	}
	m := read("pretrain_recipe")
	if m.Layers != 4 || m.Hidden != 512 || m.QueryGroups != 2 || m.FeedForward != 1024 || !m.SwiGLU || !m.NoBias ||
		m.Untied || m.Normalization != "RMSNorm" || m.HiddenDrop != 0 || m.VocabularyUnits != 128 ||
		m.TokenizerType != "GPT2BPETokenizer" || m.Positions != 1024 || m.Sequence != 2048 || m.MicroBatch != 2 ||
		m.GlobalBatch != 64 || m.Tensor != 2 || !m.SequenceSplit || m.Ranks != 16 || m.RanksPerNode != 8 || !m.BF16 ||
		m.Reduce16 || !m.Distributed || !m.OverlapGradients || m.OverlapParams || m.BucketSize != 0 {
		t.Errorf("pretrain_recipe: %+v", m)
	}
	tuned := read("finetune_recipe")
	if a := tuned.Adapter; a == nil || a.Rank != 16 || !a.Targets("decoder.layers.0.self_attention.linear_qkv") ||
		a.Targets("decoder.layers.0.mlp.linear_fc1") || tuned.VocabularySize != 151936 || tuned.Padded != 0 ||
		tuned.Ranks != 8 {
		t.Errorf("finetune_recipe: %+v, adapter %+v", tuned, a)
	}
	if o := read("overlapped_recipe"); !o.OverlapParams || o.BucketSize != overlapBucket {
		t.Errorf("overlapped_recipe: %+v", o)
	}
	if b := read("by_module_recipe"); b.Layers != 6 || b.Hidden != 512 || b.Padded != 1000 {
		t.Errorf("by_module_recipe: %+v", b)
	}
	for function, says := range map[string]string{"own_layers_recipe": "specifies layers of its own",
		"dora_recipe": "peft is DoRA", "hybrid_recipe": "MambaModel makes the model",
		"unknown_recipe": "only a run can tell", "sharded_recipe": "not MegatronStrategy",
		"strange_recipe": "encoder_tensor_model_parallel_size"} {
		if _, err := ReadMegatron(file+":"+function, nil); err == nil || !strings.Contains(err.Error(), says) ||
			strings.Contains(err.Error(), "Megatron-Bridge") {
			t.Errorf("%s: %v, want %q, and no word of Megatron-Bridge", function, err, says)
		}
	}
	if flag, err := Detect(file+":pretrain_recipe", nil); flag != MegatronFlag {
		t.Errorf("flag %q, %v", flag, err)
	}
}
