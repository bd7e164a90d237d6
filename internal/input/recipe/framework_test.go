package recipe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/recipetest"
)

// read parses a configuration of a framework.
func read(t *testing.T, text string) (*Framework, error) {
	t.Helper()
	f, err := ParseFramework("train.yaml", []byte(text), Source{})
	if f == nil && err == nil {
		t.Fatalf("no framework recognizes %s", text)
	}
	return f, err
}

const (
	factoryText = "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: lora\n"
	axolotlText = "base_model: mistralai/Mistral-7B-v0.1\nattn_implementation: flash_attention_2\n"
	swiftText   = "model: Qwen/Qwen2.5-7B-Instruct\ntuner_type: lora\n"
	swiftScript = "#!/bin/bash\nnproc=2  # GPUs\nNPROC_PER_NODE=$nproc \\\n  swift sft --model Qwen/Qwen3-8B \\\n" +
		"  --gradient_accumulation_steps $(expr 16 / $nproc) --target_modules q_proj v_proj " +
		"--per-device-train-batch-size=2 \\\n" +
		"  --system 'You; are \"kind\"' --deepspeed zero3_offload --output_dir $OUT\nswift infer --model x\n"
	trlText = "model_name_or_path: mistralai/Mistral-7B-v0.1\n"
)

func TestLLaMAFactory(t *testing.T) {
	f, err := read(t, factoryText+`lora_rank: 16
lora_target: q_proj, v_proj
quantization_bit: 4
bf16: true
learning_rate: 1e-4
flash_attn: fa2
per_device_train_batch_size: 2
`)
	if err != nil {
		t.Fatal(err)
	}
	if a := f.Adapter; a.Rank != 16 || a.Alpha != 32 || !a.Targets("model.layers.0.self_attn.v_proj") ||
		a.Targets("model.layers.0.self_attn.k_proj") {
		t.Errorf("the adapter is %+v", a)
	}
	if q := f.Quantization; q.Bits != 4 || q.Kind != "nf4" || !q.DoubleQuant {
		t.Errorf("the quantization is %+v", q)
	}
	c := f.Training.Checkpointing
	if f.Sequence != 2048 || f.Weights != "bf16" || f.TrainedIn32 != Never || f.Attention != "flash" ||
		f.Training.MicroBatch != 2 || f.Training.Optimizer.LR != 1e-4 || !c.Enabled || !c.Reentrant {
		t.Errorf("got %+v, %+v", f, f.Training)
	}
	f, err = read(t, "model_name_or_path: x\nfinetuning_type: full\nbf16: true\ndisable_gradient_checkpointing: true\n")
	if err != nil || f.Adapter != nil || f.TrainedIn32 != Always || f.Training.Checkpointing.Enabled {
		t.Errorf("full training: %+v, %v", f, err)
	}
}

func TestAxolotl(t *testing.T) {
	f, err := read(t, axolotlText+`load_in_4bit: true
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 4_096
plugins: [axolotl.integrations.swanlab.SwanLabPlugin]
micro_batch_size: 2
batch_size: 8
optimizer: paged_adamw_8bit
gradient_checkpointing: true
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
`)
	if err != nil {
		t.Fatal(err)
	}
	if f.Adapter.Rank != 32 || !f.Adapter.AllLinear() || f.Quantization.Bits != 4 || !f.Quantization.DoubleQuant {
		t.Errorf("the adapter is %+v, the quantization %+v", f.Adapter, f.Quantization)
	}
	tr := f.Training
	if f.Sequence != 4096 || tr.MicroBatch != 2 || tr.GradientAccumulation != 4 || f.Weights != "bf16" ||
		tr.Precision != MixedBF16 || tr.Optimizer.Name != "paged_adamw_8bit" || !tr.Checkpointing.Reentrant {
		t.Errorf("got %+v, %+v", f, tr)
	}
	if s := tr.FSDP; s == nil || s.Version != 1 || !s.OffloadParameters || s.Strategy != "full_shard" {
		t.Errorf("FSDP is %+v", s)
	}
	f, err = read(t, axolotlText+"tensor_parallel_size: 2\ndp_shard_size: 4\nfsdp_version: 2\nfsdp_config: {}\n")
	if err != nil || f.Parallelism.Ranks() != 8 || f.Training.FSDP.Version != 2 {
		t.Errorf("parallel: %+v, %v", f, err)
	}
	f, err = read(t, "base_model: x\ngradient_checkpointing: true\nactivation_offloading: legacy\n"+
		"unfrozen_parameters: [\"^lm_head.weight$\", \"model.layers.4[4-9]+.mlp[:32]\"]\n"+
		"qat: {weight_dtype: int4, activation_dtype: int8}\n")
	if err != nil || !f.WidensNorms || !f.Unfrozen.Has("model.layers.45.mlp.x") ||
		f.Unfrozen.Has("model.norm.weight") || !f.Unfrozen.Embeds || !f.Unfrozen.Ranges {
		t.Fatalf("frozen: %+v, %v", f, err)
	}
	if *f.QAT != (QAT{Group: 32, Activations: true, Learned: true}) ||
		*f.Offloading != (Offloading{Stash: 5, Tracks: true}) || !f.Training.Checkpointing.Enabled {
		t.Errorf("got %+v, %+v", f.QAT, f.Offloading)
	}
	f, err = read(t, axolotlText+"gradient_checkpointing: offload\nadapter: lora\nlora_target_linear: true\n")
	if err != nil || !f.Offloading.Weights || !f.Offloading.Streams || f.Training.Checkpointing.Enabled {
		t.Errorf("an adapter's activations: %+v, %v", f, err)
	}
	f, err = read(t, axolotlText+"accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n")
	if err != nil || !f.Training.SyncEachBatch {
		t.Errorf("gradients are not reduced in each micro batch: %+v, %v", f, err)
	}
}

// TestAxolotlExperts reads how experts run, and what adapts them.
func TestAxolotlExperts(t *testing.T) {
	const kernels = axolotlText + "plugins: [axolotl.integrations.kernels.KernelsPlugin]\n"
	f, err := read(t, kernels+"expert_backend: scattermoe\nadapter: lora\n"+
		"lora_target_parameters: [mlp.experts.gate_up_proj]\n")
	if err != nil || !f.ScattersExperts || !f.AddsInFull ||
		!f.Adapter.TargetsParameter("model.layers.0.mlp.experts.gate_up_proj") ||
		f.Adapter.TargetsParameter("model.layers.0.mlp.experts.down_proj") {
		t.Errorf("experts: %+v, %v", f, err)
	}
	f, err = read(t, kernels+"use_sonicmoe: true\nllama4_linearized_experts: true\ntiled_mlp: true\n")
	if err != nil || f.ScattersExperts || !f.LinearizesExperts || *f.TilesMLP != (Tiles{}) {
		t.Errorf("experts: %+v, %v", f, err)
	}
	f, err = read(t, axolotlText+"qat: {weight_dtype: mxfp4, activation_dtype: mxfp4}\n")
	if err != nil || *f.QAT != (QAT{Group: 32, Activations: true, Packed: true}) {
		t.Errorf("MXFP4: %+v, %v", f, err)
	}
	for _, refused := range []string{
		axolotlText + "qat: {weight_dtype: nvfp4, activation_dtype: nvfp4, group_size: 16}\n",
		axolotlText + "qat: {weight_dtype: mxfp4, group_size: 16}\n",
		kernels + "use_scattermoe: true\nuse_sonicmoe: true\n",
		kernels + "use_scattermoe: true\ntiled_mlp: true\n",
		kernels + "use_scattermoe: true\nmoe_bnb_fast: false\n",
		kernels + "experts_implementation: batched_mm\n",
		kernels + "use_sonicmoe: true\nnvfp4_merge_aware: true\n",
		axolotlText + "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]\n",
	} {
		if _, err := read(t, refused); err == nil {
			t.Errorf("%s is read", refused)
		}
	}
}

func TestTRL(t *testing.T) {
	f, err := read(t, trlText+`torch_dtype: bfloat16
use_peft: true
load_in_4bit: true
lora_target_modules: [all-linear]
max_seq_length: 512
gradient_checkpointing: false
`)
	if err != nil {
		t.Fatal(err)
	}
	if f.Adapter.Rank != 16 || !f.Adapter.AllLinear() || f.AdapterPrecision != "bf16" || f.Quantization.DoubleQuant ||
		f.Weights != "bf16" || f.Sequence != 512 || f.Training.Checkpointing.Enabled {
		t.Errorf("got %+v, %+v", f, f.Training)
	}
	f, err = read(t, trlText)
	if err != nil || f.Weights != "fp32" || f.Training.Precision != MixedBF16 || !f.Training.Checkpointing.Enabled ||
		f.Sequence != 1024 || f.Training.Optimizer.LR != 2e-5 {
		t.Errorf("with TRL's defaults: %+v, %v", f, err)
	}
}

func TestSwift(t *testing.T) {
	f, err := read(t, swiftText+"torch_dtype: bfloat16\nquant_method: bnb\nquant_bits: 4\nfsdp: fsdp2\n"+
		"max_length: 4096\n")
	if err != nil {
		t.Fatal(err)
	}
	tr := f.Training
	if f.Adapter.Rank != 8 || !f.Adapter.AllLinear() || f.Quantization.Bits != 4 || !f.Quantization.DoubleQuant ||
		f.Weights != "bf16" || f.Sequence != 4096 || tr.MicroBatch != 1 || tr.GradientAccumulation != 16 ||
		tr.Precision != MixedBF16 || tr.FSDP.Version != 2 || !tr.FSDP.ActivationCheckpointing ||
		tr.Checkpointing.Enabled {
		t.Errorf("got %+v, %+v", f, tr)
	}
	f, err = read(t, "model: x\ntuner_type: full\ntorch_dtype: float16\n")
	if err != nil || f.Adapter != nil || f.Training.Precision != MixedF16 || f.Training.Checkpointing.Reentrant {
		t.Errorf("full training: %+v, %v", f, err)
	}
}

// TestRouterLoss reads the keys for the auxiliary loss of routers.
func TestRouterLoss(t *testing.T) {
	for text, want := range map[string]bool{
		swiftText + "router_aux_loss_coef: 0.001\n":                    true,
		swiftText + "router_aux_loss_coef: 0\n":                        false,
		factoryText + "moe_aux_loss_coef: 0.02\n":                      true,
		axolotlText + "model_config:\n  output_router_logits: true\n":  true,
		axolotlText + "model_config:\n  output_router_logits: false\n": false,
	} {
		f, err := read(t, text)
		if err != nil {
			t.Fatal(err)
		}
		if f.RouterLoss != want || (f.RouterLossOf != nil) != strings.HasPrefix(text, factoryText) {
			t.Errorf("%s: %v of %v", text, f.RouterLoss, f.RouterLossOf)
		}
	}
}

// TestCommand reads a training from the command line in a script.
func TestCommand(t *testing.T) {
	f, err := read(t, swiftScript)
	if err != nil {
		t.Fatal(err)
	}
	d := f.Training.DeepSpeed
	if f.Model != "Qwen/Qwen3-8B" || f.Training.GradientAccumulation != 8 || f.Training.MicroBatch != 2 ||
		!f.Adapter.Targets("model.layers.0.self_attn.v_proj") || f.Adapter.Targets("model.layers.0.self_attn.k_proj") ||
		d.ZeROStage != 3 || d.OffloadOptimizer.Device != "cpu" || !f.Training.Checkpointing.Reentrant {
		t.Errorf("got %+v, %+v", f, f.Training)
	}
	if at := f.Place(); at.Line != 4 || at.Column != 13 {
		t.Errorf("the model's name is at %v", at)
	}
	if f, err = read(t, "trl sft --model_name_or_path x --use_peft --lora_r 4\n"); err != nil || f.Adapter.Rank != 4 {
		t.Errorf("TRL: %+v, %v", f, err)
	}
	if f, err = read(t, "llamafactory-cli train --model_name_or_path x --do_train true --bf16 true\n"); err != nil ||
		f.Weights != "bf16" {
		t.Errorf("LLaMA-Factory: %+v, %v", f, err)
	}
	for text, want := range map[string]string{
		"swift sft --model x\nswift sft --model y\n":      "more than one training",
		"megatron sft --model x\n":                        "",
		"megatron export --model x\n":                     "starts megatron, which plimsoll does not plan",
		"python train.py --per_device_train_batch_size 1": "starts train.py, which plimsoll does not plan",
		"swift sft --model $MODEL --tuner_type full\n":    "",
	} {
		path := filepath.Join(t.TempDir(), "train.sh")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Detect(path, nil)
		if (want != "") != (err != nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// TestUnplannedFrameworks gives keys that change memory in a way that no plan knows. Each is refused by its name.
func TestUnplannedFrameworks(t *testing.T) {
	for _, c := range []struct{ text, key string }{
		{factoryText + "stage: ppo\nreward_model: x\n", "stage"},
		{"model_name_or_path: x\nfinetuning_type: oft\noft_rank: 4\n", "oft_block_size"},
		{factoryText + "stage: dpo\nref_model: y\nref_model_quantization_bit: 4\n", "ref_model_quantization_bit"},
		{factoryText + "use_unsloth: true\n", "use_unsloth"},
		{factoryText + "shift_attn: true\n", "shift_attn"},
		{factoryText + "quantization_bit: 3\n", "quantization_bit"},
		{factoryText + "quantization_method: hqq\n", "quantization_method"},
		{factoryText + "adapter_name_or_path: saves/x\n", "adapter_name_or_path"},
		{"model_name_or_path: x\nfinetuning_type: full\nquantization_bit: 4\n", "quantization_bit"},
		{axolotlText + "rl: grpo\n", "rl"},
		{axolotlText + "rl: dpo\ndpo_use_weighting: true\n", "dpo_use_weighting"},
		{axolotlText + "num_labels: 2\n", "num_labels"},
		{axolotlText + "model_type: AutoModelForSequenceClassification\n", "model_type"},
		{axolotlText + "reward_model: true\nnum_labels: 2\n", "num_labels"},
		{axolotlText + "reward_model: true\nmodel_type: AutoModelForCausalLM\n", "model_type"},
		{axolotlText + "process_reward_model: true\nmodel_type: AutoModelForCausalLM\n", "model_type"},
		{axolotlText + "process_reward_model: true\nadapter: lora\nlora_r: 8\n", "adapter"},
		{axolotlText + "adapter: llama-adapter\n", "adapter"},
		{axolotlText + "adapter: qlora\n", "adapter"},
		{axolotlText + "load_in_4bit: true\n", "load_in_4bit"},
		{axolotlText + "optimizer: dion\n", "optimizer"},
		{axolotlText + "activation_offloading: true\n", "activation_offloading"},
		{axolotlText + "gradient_checkpointing: true\nactivation_offloading: hidden_states\n" +
			"gradient_checkpointing_kwargs: {use_reentrant: true}\n", "activation_offloading"},
		{axolotlText + "gradient_checkpointing: offload\ntorch_compile: true\n", "gradient_checkpointing"},
		{axolotlText + "qat: {weight_dtype: nvfp4, activation_dtype: nvfp4}\n", "qat.weight_dtype"},
		{axolotlText + "qat: {weight_dtype: int4, activation_dtype: int8}\nadapter: lora\n", "qat"},
		{axolotlText + "quantize_moe_experts: true\n", "quantize_moe_experts"},
		{axolotlText + "unfrozen_parameters: [\"(?<=x)y\"]\n", "unfrozen_parameters"},
		{axolotlText + "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]\n", "plugins"},
		{"base_model: x\nbf16: false\nfloat16: true\n", "base_model"},
		{axolotlText + "sequence_len: ${LENGTH}\n", "sequence_len"},
		{swiftText + "rlhf_type: grpo\n", "rlhf_type"},
		{"model: x\ntuner_type: reft\n", "tuner_type"},
		{swiftText + "task_type: seq_cls\n", "task_type"},
		{swiftText + "sequence_parallel_size: 2\n", "sequence_parallel_size"},
		{swiftText + "use_galore: true\n", "use_galore"},
		{swiftText + "trainable_parameters: [lm_head]\n", "trainable_parameters"},
		{swiftText + "quant_method: hqq\nquant_bits: 4\n", "quant_method"},
		{swiftText + "adapters: [out]\n", "adapters"},
		{"swift sft --model $MODEL --tuner_type full\n", "model"},
		{"model_name_or_path: x\ninfer_backend: vllm\n", "infer_backend"},
		{"model_name_or_path: x\nexport_dir: y\n", "export_dir"},
		{factoryText + "do_train: true\npipeline_model_parallel_size: 4\n", "pipeline_model_parallel_size"},
		{trlText + "beta: 0.1\nuse_weighting: true\n", "use_weighting"},
		{trlText + "num_generations: 8\n", "num_generations"}, // without vLLM
		{trlText + "response_length: 53\n", "response_length"},
		{trlText + "attn_implementation: paged\n", "attn_implementation"},
		{trlText + "dtype: int8\n", "dtype"},
	} {
		if f, err := read(t, c.text); err == nil {
			t.Errorf("accepted: %s: %+v", c.text, f)
		} else if recipetest.RequireInput(t, err); !strings.Contains(err.Error(), ": "+c.key+" ") {
			t.Errorf("%s\nis refused without its key: %v", c.text, err)
		}
	}
}

// TestUnknownKeys gives misspelled keys, which the programs ignore: a note says what was probably meant.
func TestUnknownKeys(t *testing.T) {
	f, err := read(t, factoryText+"cutof_len: 512\nwobble: 1\n")
	if err != nil {
		t.Fatal(err)
	}
	recipetest.RequireNotes(t, f.Notes, []string{`did you mean "cutoff_len"?`, `"wobble"`, "cutoff_len is not given"})
}

func FuzzParseFramework(f *testing.F) {
	for _, text := range []string{factoryText, axolotlText, trlText, swiftText, swiftScript, tuneText, titanText,
		factoryText + "stage: dpo\n",
		axolotlText + "adapter: qlora\nload_in_4bit: true\nfsdp_config: {version: 2}\n", `{"base_model": "x"}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, name := range []string{"train.yaml", "train.conf", "train.toml"} {
			if _, err := ParseFramework(name, text, Source{}); err != nil {
				recipetest.RequireInput(t, err)
			}
		}
		nature(text)
	})
}

// TestTRLPreparesQuantizedModels holds what TRL's trainers make of quantized models, by release.
func TestTRLPreparesQuantizedModels(t *testing.T) {
	for _, c := range []struct {
		release, bits string
		norms, alone  bool
		adapter       string
	}{
		{"0.5.0", "4", true, false, "fp32"},
		{"0.7.6", "4", true, true, "bf16"},
		{"0.13.0", "4", true, true, "bf16"},
		{"0.13.0", "8", true, false, "fp32"},
		{"0.25.1", "4", true, true, "bf16"},
		{"0.26.0", "4", false, false, "bf16"},
		{"0.26.0", "8", false, false, "bf16"},
	} {
		of, err := version.Parse(c.release)
		if err != nil {
			t.Fatal(err)
		}
		text := trlText + "use_peft: true\nbf16: true\nload_in_" + c.bits + "bit: true\n"
		f, err := ParseFramework("train.yaml", []byte(text),
			Source{Releases: func(string) version.Version { return of }})
		if err != nil {
			t.Fatal(err)
		}
		if f.WidensNorms != c.norms || f.UnlessSharded != c.norms || f.NormsAlone != c.alone ||
			f.AdapterPrecision != c.adapter {
			t.Errorf("TRL %s with %s bits: norms %v, alone %v, adapters in %s, want %+v", c.release, c.bits,
				f.WidensNorms, f.NormsAlone, f.AdapterPrecision, c)
		}
	}
}
