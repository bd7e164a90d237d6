package lever

import (
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/job"
)

// inFullFiles are files of programs that train in fp32, with the edit that has the passes compute in bf16.
var inFullFiles = []struct{ name, text, edit string }{
	{"args.json", `{"output_dir": "out", "fp16": false}`, "bf16 true (new)"},
	{"off.json", `{"output_dir": "out", "bf16": false}`, "bf16 false -> true"},
	{"trl.yaml", "model_name_or_path: gpt2\ndtype: float32\nbf16: false\noutput_dir: out\nmax_length: 512\n",
		"bf16 false -> true"},
	{"factory.yaml", "model_name_or_path: gpt2\nstage: sft\nfinetuning_type: full\ndataset: alpaca\n" +
		"template: llama3\ncutoff_len: 512\ninfer_dtype: float32\n", "bf16 true (new)"},
	{"axolotl.yaml", "base_model: gpt2\nsequence_len: 512\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\n" +
		"optimizer: adamw_torch\nlearning_rate: 1e-5\nbf16: false\n", "bf16 false -> true"},
	{"litgpt.yaml", "checkpoint_dir: checkpoints/openai-community/gpt2\nprecision: 32-true\ntrain:\n" +
		"  max_seq_length: 512\n", `precision 32-true -> bf16-mixed`},
	{"accelerate.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: 'no'\n" +
		"num_processes: 2\n", "mixed_precision 'no' -> bf16"},
	{"deepspeed.json", `{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}`,
		"bf16.enabled true (new)"},
	{"titan.toml", titanWith("local_batch_size = 1\nmixed_precision_param = \"float32\"", ""),
		`training.mixed_precision_param "float32" -> "bfloat16"`},
}

// TestEditsTo16Bits: each program's file says the precision by its own key, and the program then computes so. No file
// that says it is advised to say it again.
func TestEditsTo16Bits(t *testing.T) {
	for _, c := range inFullFiles {
		path := filestest.InNewFolder(t)(c.name, c.text)
		q := job.Request{Configs: []string{path}, GPUs: 2, GPU: "RTX-4090", Transformers: "4.57"}
		if !strings.Contains(c.text, "gpt2") && !strings.HasSuffix(c.name, ".toml") {
			q.Model = "gpt2"
		}
		p := planned(t, q)
		ways := halfPrecision(p.Job)
		if len(ways) != 1 {
			t.Errorf("%s: %d ways, weights in %v, autocast to %v", c.name, len(ways), p.Job.ParameterType,
				p.Job.AutocastType)
			continue
		}
		applied, err := Apply(q, p.Job.Files, ways[0])
		if err != nil || applied == nil || len(applied.Edits) != 1 || len(applied.Flags) > 0 ||
			!strings.HasSuffix(applied.Edits[0].String(), c.edit) {
			t.Errorf("%s: %+v, %v, expected %s", c.name, applied, err, c.edit)
			continue
		}
		after := resolved(t, q, applied.Texts)
		if inFull(after) || after.AutocastType == dtype.F16 || after.ParameterType == dtype.F16 {
			t.Errorf("%s: weights in %v, autocast to %v", c.name, after.ParameterType, after.AutocastType)
		}
		if len(halfPrecision(after)) > 0 {
			t.Errorf("%s: the edited file is advised to say it again", c.name)
		}
	}
}

// TestMegatronTo16Bits: Megatron-LM's own argument says it, in a script and behind arguments that are typed.
func TestMegatronTo16Bits(t *testing.T) {
	script := strings.Replace(largeScript, "--bf16 ", "", 1)
	_, typed, _ := strings.Cut(script, "ARGS=(")
	typed, _, _ = strings.Cut(typed, ")")
	for said, want := range map[string]string{
		filestest.InNewFolder(t)("train.sh", script): "--bf16 (new)",
		strings.Join(strings.Fields(typed), " "):     added + "--bf16",
	} {
		q := job.Request{GPU: "A100-40GB", GPUs: 8, MegatronArguments: job.MegatronArguments{Megatron: said}}
		p := planned(t, q)
		applied, err := Apply(q, p.Job.Files, halfPrecision(p.Job)[0])
		if err != nil || applied == nil {
			t.Fatalf("%s: %+v, %v", said, applied, err)
		}
		says := (&Change{Applied: *applied}).String()
		if after, err := applied.planned(); err != nil || inFull(after.Job) || !strings.HasSuffix(says, want) {
			t.Errorf("%s: %s, %v, expected %s", said, says, err, want)
		}
	}
}
