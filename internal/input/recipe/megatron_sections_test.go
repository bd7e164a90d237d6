package recipe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const nemoText = `defaults:
  - _self_
trainer:
  num_nodes: 2
  devices: 8
  precision: bf16
model:
  mcore_gpt: true
  micro_batch_size: 2
  global_batch_size: ${multiply:${model.micro_batch_size}, 64}
  tensor_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: null
  sequence_parallel: true
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  num_query_groups: 8
  hidden_dropout: 0.0
  activation: fast-swiglu
  normalization: rmsnorm
  bias: false
  share_embeddings_and_output_weights: false
  position_embedding_type: rope
  transformer_engine: true
  megatron_amp_O2: true
  activations_checkpoint_granularity: selective
  activations_checkpoint_method: block
  unheard_of: 3
  tokenizer: {library: sentencepiece, model: "${data_dir}/tokenizer.model"}
  optim:
    name: distributed_fused_adam
    grad_sync_dtype: bf16
    overlap_grad_sync: true
`

const bridgeText = `train: {global_batch_size: 512, micro_batch_size: 1}
dataset: {sequence_length: 4096}
ddp: {overlap_grad_reduce: true, use_distributed_optimizer: true, bucket_size: 40000000}
mixed_precision: {_target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig, bf16: true, fp8: null}
optimizer:
  exp_avg_dtype: {_call_: false, _target_: torch.bfloat16}
  use_precision_aware_optimizer: true
  pin_cpu_grads: false
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  gated_linear_unit: true
  add_bias_linear: false
  attention_backend: {_args_: [5], _call_: true, _target_: megatron.core.transformer.enums.AttnBackend}
  attention_dropout: 0.0
  num_layers: 32
  hidden_size: 4096
  num_attention_heads: 32
  num_query_groups: 8
  num_moe_experts: 16
  seq_length: 131072
  share_embeddings_and_output_weights: false
  vocab_size: 128256
  tensor_model_parallel_size: 2
`

func readSections(t *testing.T, text string) (*Megatron, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "train.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if flag, err := Detect(path, nil); flag != MegatronFlag {
		t.Errorf("%q, %v: not recognized:\n%s", flag, err, text)
	}
	return ReadMegatron(path, nil)
}

func TestReadNeMo(t *testing.T) {
	m, err := readSections(t, nemoText)
	if err != nil {
		t.Fatal(err)
	}
	if m.Ranks != 16 || m.RanksPerNode != 8 || m.MicroBatch != 2 || m.GlobalBatch != 128 || m.Tensor != 4 ||
		m.Sequence != 4096 || m.Positions != 4096 || m.VirtualStages != 0 || !m.SequenceSplit {
		t.Errorf("sizes: %+v", m)
	}
	if !m.SwiGLU || m.Normalization != "RMSNorm" || !m.NoBias || !m.Untied || !m.GroupedQuery || m.QueryGroups != 8 ||
		m.HiddenDrop != 0 || m.AttentionDrop != 0.1 || m.Recompute != "selective" || m.RecomputeMethod != "" {
		t.Errorf("layers: %+v", m)
	}
	if !m.BF16 || !m.Distributed || !m.Reduce16 || m.Accumulate32 || !m.OverlapGradients {
		t.Errorf("optimizer: %+v", m)
	}
	if len(m.Notes) != 2 || !strings.Contains(m.Notes[0].What+m.Notes[1].What, "unheard_of") {
		t.Errorf("notes: %v", m.Notes)
	}
}

func TestReadMegatronBridge(t *testing.T) {
	m, err := readSections(t, bridgeText)
	if err != nil {
		t.Fatal(err)
	}
	if m.Sequence != 4096 || m.Positions != 131072 || m.Padded != 128256 || m.Experts != 16 ||
		m.BucketSize != 40000000 ||
		!m.SwiGLU || !m.NoBias || !m.Untied || m.AttentionDrop != 0 || m.HiddenDrop != 0.1 || m.Attention != "auto" {
		t.Errorf("model: %+v", m)
	}
	if !m.BF16 || !m.Distributed || !m.PrecisionAware || m.ExpAvg != "bf16" || m.ExpAvgSq != "fp32" ||
		!m.NoPinnedGradients || m.Reduce16 {
		t.Errorf("optimizer: %+v", m)
	}
	if len(m.Notes) > 0 {
		t.Errorf("notes: %v", m.Notes)
	}
}

// TestUnplannedSections changes one line of a file, which then is refused with the reason.
func TestUnplannedSections(t *testing.T) {
	for _, c := range []struct{ text, line, by, want string }{
		{nemoText, "mcore_gpt: true", "mcore_gpt: false", "NeMo's own layers"},
		{nemoText, "megatron_amp_O2: true", "megatron_amp_O2: false", "autocast"},
		{nemoText, "fast-swiglu", "geglu", "squared-relu"},
		{nemoText, "name: distributed_fused_adam", "name: adafactor", "model.optim.name"},
		{nemoText, "num_layers: 32", "restore_from_path: a.nemo", "says the model"},
		{nemoText, "unheard_of: 3", "name: megatron_falcon_gpt", "layers of its own"},
		{nemoText, "hidden_size: 4096", "hidden_size: ${other.size}", "does not fill in"},
		{bridgeText, "num_layers: 32", "softmax_type: vanilla", "does not say the model"},
		{bridgeText, "gated_linear_unit: true", "gated_linear_unit: false", "activation_func"},
		{bridgeText, "bf16: true", "bf16: sometimes", "bf16"},
		{bridgeText, "use_distributed_optimizer: true", "use_megatron_fsdp: true", "another way"},
		{bridgeText, "train:", "peft: {_target_: megatron.bridge.peft.dora.DoRA, dim: 8}\ntrain:", "peft is DoRA"},
		{bridgeText, "train:", "peft: {_target_: LoRA, dim: 0}\ntrain:", "dim is 0"},
		{bridgeText, "train:", "peft: {_target_: LoRA, dropout: 1}\ntrain:", "dropout is 1"},
		{bridgeText, "train:", "peft: {_target_: LoRA, target_modules: [output_layer]}\ntrain:", "output layer"},
		{bridgeText, "train:", "peft: {_target_: LoRA, target_modules: []}\ntrain:", "other modules"},
		{bridgeText, "train:", "peft: {_target_: LoRA, exclude_modules: [linear_fc1]}\ntrain:", "exclude_modules"},
		{bridgeText, "train:", "peft: {_target_: LoRA, share_expert_adapters: false}\ntrain:", "share_expert_adapters"},
		{bridgeText, "train:", "peft: {_target_: LoRA, sequence_parallel_input_regather: true}\ntrain:", "regather"},
		{bridgeText, "train:", "peft: {_target_: CanonicalLoRA, target_modules: [linear_q]}\ntrain:", "1 of the 3"},
		{bridgeText, "train:", "peft: {_target_: CanonicalLoRA, target_modules: [linear_qkv]}\ntrain:",
			"is not planned"},
	} {
		_, err := readSections(t, strings.Replace(c.text, c.line, c.by, 1))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, expected %q", c.by, err, c.want)
		}
	}
}

// TestBridgeAdapters reads which modules Megatron-Bridge adapts.
func TestBridgeAdapters(t *testing.T) {
	const qkv, fc1, fc2 = "decoder.layers.1.self_attention.linear_qkv", "decoder.layers.1.mlp.linear_fc1",
		"decoder.layers.0.mlp.experts.linear_fc2"
	for peft, want := range map[string]struct {
		adapter CoreAdapter
		targets string
	}{
		"{_target_: megatron.bridge.peft.lora.LoRA}": {CoreAdapter{Rank: 32}, qkv + " " + fc1 + " " + fc2},
		"{_target_: LoRA, dim: 8, dropout: 0.1, dropout_position: post, a2a_experimental: true, " +
			"target_modules: ['*.layers.1.*.linear_qkv', linear_fc2]}": {CoreAdapter{Rank: 8, Dropout: .1,
			DropsAfter: true, AllToAll: true}, qkv + " " + fc2},
		"{_target_: LoRA, target_modules: ['mlp.linear_fc1']}": {CoreAdapter{Rank: 32}, ""}, // no whole path
		"{_target_: CanonicalLoRA, target_modules: [linear_q, linear_k, linear_v]}": {CoreAdapter{Rank: 32,
			Canonical: true}, qkv},
		"null": {},
	} {
		m, err := readSections(t, strings.Replace(bridgeText, "train:", "peft: "+peft+"\ntrain:", 1))
		if err != nil {
			t.Errorf("%s: %v", peft, err)
			continue
		}
		if m.Adapter == nil {
			if want.adapter.Rank > 0 {
				t.Errorf("%s: no adapter", peft)
			}
			continue
		}
		var targets []string
		for _, path := range []string{qkv, fc1, fc2} {
			if m.Adapter.Targets(path) {
				targets = append(targets, path)
			}
		}
		is := *m.Adapter
		if is.Program != BridgeTuner || is.Rank != want.adapter.Rank || is.Dropout != want.adapter.Dropout ||
			is.DropsAfter != want.adapter.DropsAfter || is.AllToAll != want.adapter.AllToAll ||
			is.Canonical != want.adapter.Canonical || strings.Join(targets, " ") != want.targets {
			t.Errorf("%s: %+v on %v", peft, is, targets)
		}
	}
}
