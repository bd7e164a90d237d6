package megatron

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
)

// ofScript decides a script on H100.
func ofScript(t *testing.T, command string) (*Job, error) {
	t.Helper()
	m, err := recipe.ReadMegatron("train.sh", files.Texts{"train.sh": []byte(command)})
	if err != nil {
		return nil, err
	}
	device, err := gpu.Find("H100")
	if err != nil {
		t.Fatal(err)
	}
	return Decide(m, Request{GPU: device})
}

// TestSwiftModels: the model that megatron sft makes of a config.json has the parameters that transformers has.
func TestSwiftModels(t *testing.T) {
	for _, name := range []string{"llama-3-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen2.5-0.5b", "qwen3-4b",
		"qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "moonlight-16b-a3b", "glm-4.5-air",
		"glm-4.5", "deepseek-v2", "deepseek-v2-lite", "mistral-7b", "mistral-nemo-12b",
		"mistral-small-24b-2501", "mixtral-8x7b", "mixtral-8x22b"} {
		want, err := model.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		j, err := ofScript(t, "NPROC_PER_NODE=1 megatron sft --model "+name+" --dataset x --max_length 1024\n")
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if is := j.Model().Elements(); is != want.Elements() {
			t.Errorf("%s has %d parameters in Megatron core, and %d in transformers", name, is, want.Elements())
		}
	}
}

// TestSwiftDefaults: what ms-swift has by default, and what a command says.
func TestSwiftDefaults(t *testing.T) {
	j, err := ofScript(t, "NPROC_PER_NODE=8 NNODES=2 megatron pt --model Qwen/Qwen3-4B --max_length 2048\n")
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintln(j.MicroBatch, j.GlobalBatch, j.Sequence, j.Ranks, j.Recompute, j.Megatron.Attention,
		j.Distributed, j.FusesLoss, j.BF16, j.NoMask, j.Reference, j.Sequences())
	if want := "1 16 2048 16 selective flash true true true true false 1"; got != want+"\n" {
		t.Errorf("%s, want %s", got, want)
	}
	j, err = ofScript(t, "NPROC_PER_NODE=8 megatron rlhf --rlhf_type dpo --model qwen3-30b-a3b --packing_length 4096 "+
		"--tensor_model_parallel_size 2 --sequence_parallel true --micro_batch_size 2 --global_batch_size 8 "+
		"--expert_model_parallel_size 4 --recompute_granularity none --cross_entropy_loss_fusion false "+
		"--use_distributed_optimizer false --padding_free false --attention_backend flash_3 --torch_dtype float16 "+
		"--virtual_pipeline_model_parallel_size 1\n")
	if err != nil {
		t.Fatal(err)
	}
	// Experts have no tensor parallelism by default, so 8 ranks hold TP 2 and EP 4.
	if d := j.Degrees; d.ExpertTensor != 1 || d.Data != 4 {
		t.Errorf("experts on %d ranks of tensor parallelism, data parallel %d", d.ExpertTensor, d.Data)
	}
	got = fmt.Sprintln(j.MicroBatch, j.Sequences(), j.Sequence, j.Recompute == "", j.Megatron.Attention, j.Distributed,
		j.FusesLoss, j.FP16, j.NoMask, j.Reference, j.SequenceSplit, j.Expert, j.Micros)
	if want := "2 4 4096 true flash false false true false true true 4 1"; got != want+"\n" {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestSwiftRefused: what changes memory in a way that is not planned is refused, at its place.
func TestSwiftRefused(t *testing.T) {
	const command = "megatron sft --model qwen3-4b --max_length 2048 "
	for arguments, want := range map[string]string{
		"--tuner_type lora_llm": "lora_llm\", which is not planned",
		"--task_type seq_cls":   "another head",
		"--tuner_type lora --target_modules all-linear all-router": "has all-router",
		"--tuner_type lora --target_modules output_layer":          "has output_layer",
		"--tuner_type lora --target_modules q_proj":                "on no linear layer",
		"--tuner_type lora --target_regex .*fc1":                   "target_regex is",
		"--tuner_type lora --lora_bias all":                        "lora_bias is",
		"--tuner_type lora --lora_rank 0":                          "lora_rank is 0",
		"--tuner_type lora --lora_dropout 2":                       "lora_dropout is 2",
		"--tuner_type lora --modules_to_save norm":                 "modules_to_save has norm",
		"--tuner_type lora --modules_to_save output_layer":         "share their weight",
		"--tuner_type lora --adapters x":                           "loads adapters",
		"--tuner_type lora --fp8_format e4m3":                      "beside adapters",
		"--tuner_type lora --mtp_num_layers 1":                     "beside adapters",
		"--tuner_type lora --recompute_modules layernorm":          "beside adapters",
		"--freeze_parameters_ratio 0.5":                            "a part of the parameters",
		"--use_megatron_fsdp true":                                 "",
		"--micro_batch_sise 2":                                     "did you mean micro_batch_size?",
		"--external_plugins x.py":                                  "plugins",
		"--model qwen2.5-vl-7b":                                    "layers are not planned in Megatron core",
		"--model nobody/none":                                      "unknown model",
		"--optimizer muon":                                         "which is not planned",
		"--mtp_shared_weights true":                                "changes layers",
	} {
		_, err := ofScript(t, command+arguments+"\n")
		var input *fault.Input
		if !errors.As(err, &input) || !strings.Contains(fmt.Sprint(err, input.Hint), want) {
			t.Errorf("%s: %v", arguments, err)
		}
	}
	for script, want := range map[string]string{
		"megatron rlhf --rlhf_type kto --model qwen3-4b --max_length 8\n": "not planned yet for Megatron core",
		"megatron sft --model qwen3-4b\n":                                 "max_length is not given",
		"megatron sft --max_length 8\n":                                   "model is not given",
		"megatron sft sft.yaml\n":                                         "takes its arguments from sft.yaml",
	} {
		if _, err := ofScript(t, script); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", script, err)
		}
	}
}

// TestSwiftAdapters: which modules are adapted, the shapes of their matrices on a rank, and what is trained.
func TestSwiftAdapters(t *testing.T) {
	const dense = "NPROC_PER_NODE=2 megatron sft --model qwen2.5-7b --max_length 2048 --tuner_type lora " +
		"--tensor_model_parallel_size 2 --sequence_parallel true "
	const mixed = "NPROC_PER_NODE=4 megatron rlhf --rlhf_type dpo --model qwen3-30b-a3b --max_length 2048 " +
		"--tuner_type lora --expert_model_parallel_size 4 "
	const hidden, width, queries, keys = 3584, 18944, 3584, 512
	const attention = 8 * (hidden + (queries+2*keys)/2 + queries/2 + hidden)
	const feedForward = 8 * (hidden + 2*width/2 + width/2 + hidden)
	const expert = 8 * (2048 + 2*768 + 768 + 2048)
	for command, want := range map[string]struct {
		rank, whole int64
		pairs       bool
	}{
		dense: {28 * (attention + feedForward), 28 * 8 * (hidden + queries + 2*keys + queries + hidden + hidden +
			2*width + width + hidden), false},
		dense + "--target_modules linear_qkv linear_proj --lora_rank 16": {2 * 28 * attention, 0, false},
		dense + "--target_modules linear_fc1 linear_fc2":                 {28 * feedForward, 0, false},
		dense + "--target_modules linear_fc1 linear_fc2 --modules_to_save word_embeddings output_layer": {
			28*feedForward + 2*152064/2*hidden, 0, false},
		mixed + "--target_modules linear_fc1 linear_fc2": {48 * 128 / 4 * expert, 48 * 128 * expert, true},
		mixed + "--target_modules linear_proj":           {48 * 8 * (4096 + 2048), 0, true},
	} {
		j, err := ofScript(t, command+"\n")
		if err != nil {
			t.Errorf("%s: %v", command, err)
			continue
		}
		var trained, frozen int64
		for _, p := range j.Parameters(j.Table[0][0]) {
			if p.Frozen {
				frozen += p.Elements
			} else {
				trained += p.Elements
			}
		}
		if trained != want.rank || want.whole > 0 && j.Trained() != want.whole {
			t.Errorf("%s: %d of %d are trained on a rank, want %d; %d in all, want %d", command, trained, frozen,
				want.rank, j.Trained(), want.whole)
		}
		assumed := strings.Join(j.Assumptions, " ")
		if j.Reference || j.Pairs != want.pairs || j.Adapter.Dropout != 0 ||
			!strings.Contains(assumed, "lora_dropout is 0.05") {
			t.Errorf("%s: %+v, %v", command, j.Adapter, j.Assumptions)
		}
	}
	_, err := ofScript(t, mixed+"--tensor_model_parallel_size 2 --sequence_parallel true "+
		"--expert_model_parallel_size 2 --expert_tensor_parallel_size 2\n")
	if err == nil || !strings.Contains(err.Error(), "expert tensor parallel is 2") {
		t.Errorf("experts with tensor parallelism: %v", err)
	}
}
