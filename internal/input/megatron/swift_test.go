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
		"qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "moonlight-16b-a3b"} {
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
		"--tuner_type lora": "adapters on layers of Megatron core", "--task_type seq_cls": "another head",
		"--freeze_parameters_ratio 0.5": "a part of the parameters", "--use_megatron_fsdp true": "",
		"--micro_batch_sise 2":    "did you mean micro_batch_size?",
		"--external_plugins x.py": "plugins", "--model qwen2.5-vl-7b": "layers are not planned in Megatron core",
		"--model nobody/none": "unknown model", "--optimizer muon": "which is not planned",
		"--mtp_shared_weights true": "changes layers",
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
