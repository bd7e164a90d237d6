package job

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
)

// TestUnplannedDeepSpeed tests that unplanned settings are refused if they change
// the memory of the job.
func TestUnplannedDeepSpeed(t *testing.T) {
	for text, refused := range map[ledger.Component]string{
		`"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}`: "zero_hpz_partition_size",
		`"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}`: "",
		`"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4, "offload_param": {"device": "nvme",
			"nvme_path": "/nvme"}, "offload_optimizer": {"device": "cpu"}}`: "zero_hpz_partition_size",
		`"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}`: "",
		`"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}`: "",
		`"zero_optimization": {"stage": 3, "mics_shard_size": 4}`:         "",
		`"zero_optimization": {"stage": 3, "mics_shard_size": 3}`:         "mics_shard_size",
		`"zero_optimization": {"stage": 3, "mics_shard_size": 4, "offload_optimizer": {"device": "cpu"}}`: "no support " +
			"for CPU offloading",
		`"expert_parallel": {"enabled": true, "autoep_size": 2}`:                 "expert_parallel",
		`"fp16": {"enabled": true}, "optimizer": {"type": "OneBitAdam"}`:         "",
		`"bf16": {"enabled": true}, "optimizer": {"type": "ZeroOneAdam"}`:        "",
		`"zero_optimization": {"stage": 1}, "optimizer": {"type": "OneBitLamb"}`: "OneBitLamb does not work with ZeRO",
		`"bf16": {"enabled": true}, "communication_data_type": "fp32"`:           "",
		`"zero_optimization": {"stage": 3, "mics_shard_size": -1}`:               "",
		`"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": true}`: "zero_quantized_" +
			"nontrainable_weights",
		`"zero_optimization": {"stage": 3, "zero_quantized_weights": true}`:        "",
		`"torch_autocast": {"enabled": true, "dtype": "bfloat16"}`:                 "",
		`"torch_autocast": {"enabled": true}`:                                      "torch_autocast",
		`"sequence_parallel_size": 8`:                                              "",
		`"sequence_parallel_size": 3`:                                              "that share a sequence",
		`"torch_autocast": {"enabled": false}`:                                     "",
		`"amp": {"enabled": true}`:                                                 "amp",
		`"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}`: "autotp",
	} {
		file := filepath.Join(t.TempDir(), "zero.json")
		if err := os.WriteFile(file, []byte(`{"train_micro_batch_size_per_gpu": 1, `+text+`}`), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Request{Model: "llama-3-8b", DeepSpeed: file, GPUs: 8}.Resolve()
		if (err != nil) != (refused != "") || err != nil && !strings.Contains(err.Error(), refused) {
			t.Errorf("%s: refused for %v, expected %q", text, err, refused)
		}
	}
}

// TestReleaseOfDeepSpeed refuses or notes a key as the release that is named does, wherever the configuration is.
func TestReleaseOfDeepSpeed(t *testing.T) {
	write := filestest.InNewFolder(t)
	const text = `{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
		"fp16": {"enabled": true, "opt_level": "O2"}, "zero_optimization": {"stage": 2}}`
	file := write("zero.json", text)
	for name, q := range map[string]Request{
		"--deepspeed": {DeepSpeed: file},
		"--config":    {Configs: []string{file}},
		"--training-args": {TrainingArgs: write("args.json", `{"output_dir": "x", "per_device_train_batch_size": 1, `+
			`"fp16": true, "deepspeed": "zero.json"}`)},
		"--accelerate": {Accelerate: write("launch.yaml", "distributed_type: DEEPSPEED\nnum_processes: 2\n"+
			"deepspeed_config:\n  deepspeed_config_file: "+file+"\n")},
		"axolotl": {Configs: []string{write("train.yaml", "base_model: gpt2\nsequence_len: 128\nfp16: true\n"+
			"bf16: false\ndatasets: []\ndeepspeed: zero.json\n")}},
	} {
		q.Model, q.GPUs, q.Sequence = "gpt2", 2, 128
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), `zero.json:2:29: DeepSpeed 0.19.6`) {
			t.Errorf("%s: %v, want a refusal of opt_level", name, err)
		}
		q.DeepSpeedVersion = "0.16.9"
		j, err := q.Resolve()
		if err != nil || !strings.Contains(fmt.Sprint(j.Assumptions), `DeepSpeed 0.16.9 knows no key "opt_level"`) {
			t.Errorf("%s with DeepSpeed 0.16.9: %v", name, err)
		}
	}
	q := Request{Model: "gpt2", GPUs: 2, DeepSpeed: file, DeepSpeedVersion: "new"}
	if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), "--deepspeed-version") {
		t.Errorf("a version that is none: %v", err)
	}
}

// TestTensorParallelOfDeepSpeed takes the degree from the file unless a flag sets
// it.
func TestTensorParallelOfDeepSpeed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "zero.json")
	if err := os.WriteFile(file,
		[]byte(`{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "tensor_parallel": `+
			`{"autotp_size": 4}}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	for flag, expected := range map[int]int64{0: 4, 2: 2} {
		j, err := Request{Model: "llama-3-8b", DeepSpeed: file, GPUs: 8, TensorParallel: flag}.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if j.Parallel.Tensor != expected || j.Parallel.Shard != 8/expected {
			t.Errorf("--tensor-parallel %d: split among %d and sharded among %d", flag, j.Parallel.Tensor,
				j.Parallel.Shard)
		}
	}
}

// TestTrainerOfDeepSpeed takes bf16 from the Trainer if the DeepSpeed file that
// the Trainer names does not set it.
func TestTrainerOfDeepSpeed(t *testing.T) {
	file := filestest.InNewFolder(t)
	file("zero.json", `{"zero_optimization": {"stage": 2}}`)
	j, err := Request{Model: "gpt2",
		TrainingArgs: file("args.json", `{"output_dir": "x", "bf16": true, "deepspeed": "zero.json"}`),
		GPUs:         2}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	if j.ParameterType != dtype.BF16 {
		t.Errorf("weights in %v under DeepSpeed and a Trainer with bf16", j.ParameterType)
	}
}

// TestTrainerBesideDeepSpeed refuses mismatches that the Trainer refuses, for a
// file that the Trainer does not name (propagate_args_to_deepspeed, fill_match).
func TestTrainerBesideDeepSpeed(t *testing.T) {
	file := filestest.InNewFolder(t)
	arguments := `{"output_dir": "x", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": ` +
		`true, "max_grad_norm": 0.5}`
	for _, c := range []struct{ name, deepSpeed, accelerate, refused string }{
		{"auto",
			`"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": ` +
				`"auto", "bf16": {"enabled": "auto"}`,
			"", ""},
		{"the same",
			`"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, ` +
				`"bf16": {"enabled": true}`,
			"", ""},
		{"less", `"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}`, "", ""},
		{"micro batch", `"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}`, "",
			`zero.json:1:37: DeepSpeed's train_micro_batch_size_per_gpu is 2, but per_device_train_batch_size is 4`},
		{"accumulation",
			`"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "bf16": {"enabled": true}`, "",
			`gradient_accumulation_steps is 1, but gradient_accumulation_steps is 2`},
		{"clipping", `"gradient_clipping": 1, "bf16": {"enabled": true}`, "",
			`gradient_clipping is 1, but max_grad_norm is 0.5`},
		{"accelerate", "", "zero_stage: 2\nmixed_precision: bf16", ""},
		{"accelerate's accumulation", "", "gradient_accumulation_steps: 4\nmixed_precision: bf16",
			`launch.yaml:4:3: DeepSpeed's gradient_accumulation_steps is 4`},
	} {
		q := Request{Model: "qwen2.5-0.5b", TrainingArgs: file("args.json", arguments), GPUs: 2}
		if c.accelerate == "" {
			q.DeepSpeed = file("zero.json", `{"zero_optimization": {"stage": 2}, `+c.deepSpeed+`}`)
		} else {
			q.Accelerate = file("launch.yaml",
				"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  "+c.accelerate+"\n")
		}
		j, err := q.Resolve()
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: refused for %v, expected %q", c.name, err, c.refused)
		}
		if err == nil && (j.MicroBatch != 4 || j.Accumulation != 2 || j.Clip != 0.5) {
			t.Errorf("%s: %d sequences x %d, clipped at %v", c.name, j.MicroBatch, j.Accumulation, j.Clip)
		}
	}
}
