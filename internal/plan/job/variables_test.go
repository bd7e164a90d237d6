package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files"
)

// TestVariables reads variables of the environment that scripts and sources set, and what a script starts.
func TestVariables(t *testing.T) {
	const (
		script = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\nCUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 " +
			"swift sft --model qwen2.5-0.5b --train_type lora --deepspeed zero2 --max_length 64 --dataset x\n"
		source = "import os, torch, argparse\n" +
			"os.environ[\"PYTORCH_CUDA_ALLOC_CONF\"] = \"expandable_segments:True\"\n" +
			"os.environ[\"CUDA_VISIBLE_DEVICES\"] = \"0\"\np = argparse.ArgumentParser()\n" +
			"p.add_argument('--bs', type=int, default=3)\n" +
			"from transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\n" +
			"model = AutoModelForCausalLM.from_pretrained('qwen2.5-0.5b', dtype=torch.bfloat16)\n" +
			"SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=p.parse_args().bs, max_length=64), " +
			"train_dataset=d).train()\n"
	)
	gpu := func(is string) string { return strings.Replace(source, `"0"`, is, 1) }
	typed := func(is string) string {
		return strings.Replace(source, "model =", "torch.set_default_dtype("+is+")\nmodel =", 1)
	}
	of := func(command, train string) map[string]string {
		return map[string]string{"run.sh": command + "\n", "train.py": train}
	}
	swift := func(text string) map[string]string { return map[string]string{"run.sh": text} }
	const expandable = "expandable_segments:True"
	for name, c := range map[string]struct {
		q         Request
		files     map[string]string
		fault     string // a part of it; "" is none
		allocator string
		ranks     int
		batch     int64
	}{
		"script": {files: swift(script), allocator: expandable, ranks: 2, batch: 1},
		"a flag goes before": {q: Request{Allocator: "max_split_size_mb:128"}, files: swift(script),
			allocator: "max_split_size_mb:128", ranks: 2, batch: 1},
		"no allocator's key": {files: swift(strings.Replace(script, "ts:True", ":True", 1)),
			fault: `run.sh:1:8: PYTORCH_CUDA_ALLOC_CONF is "expandable_segmen:True"`},
		"not exported": {files: swift(strings.TrimPrefix(script, "export ")), ranks: 2, batch: 1},
		"no GPU": {files: swift(strings.Replace(script, "0,1 NPROC_PER_NODE=2", "''", 1)),
			fault: `CUDA_VISIBLE_DEVICES is "": the program sees no GPU`},
		"started source": {files: of("torchrun --nproc_per_node 4 train.py --bs 5", source), allocator: expandable,
			ranks: 4, batch: 5},
		"by default": {files: of("python train.py", source), allocator: expandable, ranks: 1, batch: 3},
		"unknown word": {files: of("python train.py --bs $BS", source),
			fault: "per_device_train_batch_size is $BS, which only a run can tell"},
		"source without its line": {q: Request{Configs: []string{"train.py"}}, files: of("", source),
			fault: "which only a run can tell"},
		"source without GPUs": {files: of("python train.py", gpu(`""`)),
			fault: `train.py:3:1: CUDA_VISIBLE_DEVICES is "": the program sees no GPU`},
		"a negative GPU": {files: of("python train.py", gpu(`"-1"`)), fault: "sees no GPU"},
		"a computed GPU": {files: of("python train.py", gpu("f()")), allocator: expandable, ranks: 1, batch: 3},
		"default type": {files: of("python train.py", typed("torch.bfloat16")),
			fault: "torch.set_default_dtype is"},
		"the usual default type": {files: of("python train.py", typed("torch.float32")), allocator: expandable,
			ranks: 1, batch: 3},
	} {
		t.Run(name, func(t *testing.T) {
			c.q.Texts = files.Texts{}
			for file, text := range c.files {
				c.q.Texts[file] = []byte(text)
			}
			if c.q.Configs == nil {
				c.q.Configs = []string{"run.sh"}
			}
			j, err := c.q.Resolve()
			switch {
			case c.fault != "":
				if err == nil || !strings.Contains(err.Error(), c.fault) {
					t.Errorf("got %v, want %q", err, c.fault)
				}
			case err != nil:
				t.Error(err)
			case j.Allocator != c.allocator || j.World != c.ranks || int64(j.MicroBatch) != c.batch:
				t.Errorf("got allocator %q, %d ranks, batch %d", j.Allocator, j.World, j.MicroBatch)
			}
		})
	}
}

// TestTwoGPUsOfOneProcess: transformers' Trainer divides batches by DataParallel.
func TestTwoGPUsOfOneProcess(t *testing.T) {
	q := Request{Configs: []string{"t.py"}, Texts: files.Texts{"t.py": []byte("import os\n" +
		"os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\nfrom transformers import *\n" +
		"Trainer(AutoModelForCausalLM.from_pretrained('gpt2'), TrainingArguments('out'))\n")}}
	const several = "t.py:2:1: CUDA_VISIBLE_DEVICES shows 2 GPUs"
	if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), several) {
		t.Errorf("got %v", err)
	}
	q.GPUs = 2
	if j, err := q.Resolve(); err != nil || j.World != 2 {
		t.Errorf("with --gpus 2: %v", err)
	}
}

// TestDataclassesOfSources: a source reads its configuration by HfArgumentParser, and the script that starts it says
// it.
func TestDataclassesOfSources(t *testing.T) {
	texts := files.Texts{"run.sh": []byte("torchrun --nproc_per_node 2 t.py --model qwen2.5-0.5b --bf16 True " +
		"--per_device_train_batch_size 6 --longest 32\n"), "t.py": []byte("import transformers\n" +
		"from dataclasses import dataclass, field\n@dataclass\nclass A:\n    model: str = field(default='gpt2')\n" +
		"@dataclass\nclass B(transformers.TrainingArguments):\n    longest: int = field(default=8)\n" +
		"a, b = transformers.HfArgumentParser((A, B)).parse_args_into_dataclasses()\n" +
		"m = transformers.AutoModelForCausalLM.from_pretrained(a.model)\n" +
		"transformers.Trainer(model=m, args=b, train_dataset=d).train()\n")}
	j, err := Request{Configs: []string{"run.sh"}, Texts: texts}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	if j.Model.Name != "qwen2.5-0.5b" || j.World != 2 || j.MicroBatch != 6 {
		t.Errorf("%s on %d ranks, batches of %d", j.Model.Name, j.World, j.MicroBatch)
	}
}

// TestNamedAgain: a file that a script names may be given beside it.
func TestNamedAgain(t *testing.T) {
	texts := files.Texts{"run.sh": []byte("llamafactory-cli train train.yaml\n"), "train.yaml": []byte(
		"model_name_or_path: /models/Qwen/Qwen2___5-0___5B-Instruct\nstage: sft\ndo_train: true\n" +
			"finetuning_type: lora\ntemplate: qwen\ndataset: x\ncutoff_len: 64\noutput_dir: o\n")}
	for _, configs := range [][]string{{"run.sh", "train.yaml"}, {"train.yaml", "run.sh"}, {"run.sh", "./train.yaml"}} {
		j, err := Request{Configs: configs, Texts: texts, GPUs: 1}.Resolve()
		if err != nil {
			t.Errorf("%v: %v", configs, err)
		} else if j.Model.Name != "qwen2.5-0.5b" || j.Model.Namesake == nil {
			t.Errorf("%v: the model is %s", configs, j.Model.Name)
		}
	}
	if _, err := (Request{Model: "/models/Qwen2.5-0.5B", GPUs: 1}).Resolve(); err == nil ||
		!strings.Contains(err.Error(), "there is no such file") {
		t.Errorf("a path that a flag names: %v", err)
	}
}

// TestReleasesOfFlags: a flag says the release of transformers for a source, too.
func TestReleasesOfFlags(t *testing.T) {
	q := Request{Configs: []string{"t.py"}, Texts: files.Texts{"t.py": []byte("from transformers import *\n" +
		"Trainer(AutoModelForCausalLM.from_pretrained('qwen2.5-0.5b'), TrainingArguments('out'))\n")}, GPUs: 1}
	for release, want := range map[string]string{"4.57": "fp32", "5.20": "bf16", "": "bf16"} {
		q.Transformers = release
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if got := j.ParameterType.String(); got != want {
			t.Errorf("transformers %q loads %s, want %s", release, got, want)
		}
	}
}
