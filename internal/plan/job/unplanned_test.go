package job

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
)

// TestUnplannedIsSaid tests the notes on settings that the plan ignores though
// they change the memory of the job.
func TestUnplannedIsSaid(t *testing.T) {
	write, count := filestest.InNewFolder(t), 0
	file := func(name, text string) string { // every file needs a name of its own
		count++
		return write(fmt.Sprintf("%d%s", count, name), text)
	}
	args := func(text string) Request {
		return Request{TrainingArgs: file("args.json", `{"per_device_train_batch_size": 1, `+text+`}`)}
	}
	launch := func(text string) Request { return Request{Accelerate: file("launch.yaml", text)} }
	bnb := func(text string) Request {
		return Request{Adapter: file("lora.json", `{"peft_type": "LORA", "target_modules": ["q_proj"]}`),
			Quantization: file("bnb.json", `{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"`+text+`}`)}
	}
	const wraps = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_auto_wrap_policy: "
	for _, c := range []struct {
		q    Request
		want string // a part of the note; with "!" first, a part of no note
	}{
		{args(`"auto_find_batch_size": true`), "auto_find_batch_size"},
		{args(`"eval_strategy": "steps"`), "without eval_accumulation_steps"},
		{args(`"eval_strategy": "steps", "prediction_loss_only": true, "per_device_eval_batch_size": 1`),
			"!not planned"},
		{args(`"eval_strategy": "steps", "prediction_loss_only": true`), "evaluation in batches of 8"},
		{args(`"dataloader_num_workers": 4`), "4 data loader processes"},
		{args(`"torch_empty_cache_steps": 4`), "torch_empty_cache_steps"},
		{args(`"bf16": true`), "!not planned"},
		{launch("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n"),
			"fp8 (te)"},
		{launch("distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_backend: EAGER\n"), "dynamo_backend eager"},
		{launch("distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_backend: INDUCTOR\n"), "!not planned"},
		{launch(wraps + "TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"),
			"units of LlamaDecoderLayer"},
		{launch(wraps + "TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer\n"),
			"!not planned"},
		{bnb(""), "bnb_4bit_compute_dtype fp32"},
		{bnb(`, "bnb_4bit_compute_dtype": "bfloat16"`), "!not planned"},
	} {
		c.q.Model, c.q.Sequence = "qwen2.5-0.5b", 64
		j, err := c.q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		said := strings.Join(j.Assumptions, "\n")
		if part, not := strings.CutPrefix(c.want, "!"); strings.Contains(said, part) == not {
			t.Errorf("%+v: want %q in\n%s", c.q, c.want, said)
		}
	}
	for want, q := range map[string]Request{
		"SIZE_BASED_WRAP": launch(wraps + "SIZE_BASED_WRAP\n  fsdp_min_num_params: 1000000\n"),
		"parallelism_config is given, which": {TrainingArgs: file("parallel.json",
			`{"per_device_train_batch_size": 1, "parallelism_config": {"tp_size": 2}}`)},
	} {
		q.Model = "qwen2.5-0.5b"
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	compiled, err := launchedCompiled(file)
	if err != nil || !compiled.Compile || compiled.RanksPerNode != 2 {
		t.Errorf("accelerate's dynamo_backend INDUCTOR on gpu_ids 0,1: compiled %v, %d ranks, %v", compiled.Compile,
			compiled.RanksPerNode, err)
	}
}

func launchedCompiled(file func(name, text string) string) (*Job, error) {
	text := "distributed_type: MULTI_GPU\ngpu_ids: 0,1\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"
	return Request{Model: "qwen2.5-0.5b", Accelerate: file("compiled.yaml", text)}.Resolve()
}

// TestUnitsOfEncoders reads right lists of units: those that transformers itself has for the model, encoders included.
func TestUnitsOfEncoders(t *testing.T) {
	file := filestest.InNewFolder(t)
	for name, c := range map[string]struct {
		units string
		noted bool
	}{
		"qwen2.5-vl-3b":         {"Qwen2_5_VLDecoderLayer,Qwen2_5_VLVisionBlock", false},
		"qwen2.5-vl-7b":         {"Qwen2_5_VLDecoderLayer", false},
		"glm-4-9b-0414":         {"GlmDecoderLayer", true},
		"qwen3-4b":              {"Qwen2DecoderLayer,Qwen3DecoderLayer", true},
		"gpt-oss-20b":           {"GptOssDecoderLayer", false},
		"whisper-small":         {"WhisperEncoderLayer,WhisperDecoderLayer", false},
		"whisper-base":          {"WhisperEncoderLayer", true},
		"clip-vit-base-patch32": {"CLIPEncoderLayer", false},
		"../../input/model/testdata/remote/baichuan2-7b.json": {"DecoderLayer", false},
	} {
		q := Request{Model: name, MicroBatch: 1, Accelerate: file(filepath.Base(name)+".yaml",
			"distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"+
				"  fsdp_transformer_layer_cls_to_wrap: "+c.units+"\n")}
		j, err := q.Resolve()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if said := strings.Join(j.Assumptions, "\n"); strings.Contains(said, "FSDP units of") != c.noted {
			t.Errorf("%s with units of %s:\n%s", name, c.units, said)
		}
	}
}
