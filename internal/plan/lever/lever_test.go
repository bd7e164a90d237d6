package lever

import (
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/origin/origintest"
	"plimsoll/internal/plan/plan"
)

var everyGPU = flag.Bool("all", false, "plan all public configurations, on GPUs of three sizes")

var configNamed = regexp.MustCompile(`[:\s"']([\w./-]+\.json)\b`)

// inFolder copies a file to a folder, with the files that it names, which lie flat beside it.
func inFolder(t *testing.T, c filestest.PublicConfig) string {
	t.Helper()
	text, err := os.ReadFile(c.Path)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	write := func(name string, text []byte) string {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, named := range configNamed.FindAllStringSubmatch(string(text), -1) {
		flat := strings.Split(c.Name, "__")[0] + "__" + strings.ReplaceAll(named[1], "/", "_")
		if other, err := os.ReadFile(filepath.Join(filepath.Dir(c.Path), flat)); err == nil {
			write(named[1], other)
		}
	}
	return write(c.Name, text)
}

// requested returns the request for a public configuration, with a Llama where the file names no model, and its plan.
// It returns no plan for a file that is refused.
func requested(path, gpu string) (job.Request, *plan.Plan) {
	q := job.Request{Configs: []string{path}, GPUs: 8, GPU: gpu, HostMemory: 512 * ledger.GiB}
	if f, err := recipe.LoadFramework(path, recipe.Source{}); err != nil || f == nil || f.Model == "" {
		q.Model = "llama-3.1-8b"
	}
	for ; q.GPUs > 0; q.GPUs /= 2 {
		if j, err := q.Resolve(); err == nil {
			p, err := plan.New(j)
			if err != nil {
				return q, nil
			}
			return q, p
		}
	}
	return q, nil
}

// TestPublicConfigs applies every advised edit to the files of public configurations that do not fit, and plans them
// once more: the plan changes by the number that was promised. Without -all it takes some of the files. Every component
// of all plans has a formula and a source.
func TestPublicConfigs(t *testing.T) {
	if testing.Short() {
		t.Skip("plans hundreds of jobs")
	}
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	list := filestest.PublicConfigs(t, "../../../../shared/data/configs")
	gpus := []string{"H100-80GB"}
	if *everyGPU {
		gpus = append(gpus, "A100-40GB", "RTX-4090")
	}
	var all tally
	for i, c := range list {
		for _, gpu := range gpus {
			q, p := requested(inFolder(t, c), gpu)
			all.addressed(t, c.Name, p)
			if *everyGPU || i%8 == 0 {
				all.advised(t, c.Name+" on "+gpu, q, p)
			}
		}
	}
	all.check(t)
	t.Logf("%d components have an address", all.components)
}

// pipelined are jobs of ranks that share the model, by the name of their file.
var pipelined = map[string]job.Request{
	"1f1b.toml":        {GPUs: 8, GPU: "RTX-4090"},
	"gpipe.toml":       {GPUs: 8, GPU: "A100-40GB"},
	"zero-bubble.toml": {GPUs: 8, GPU: "A100-40GB"},
	"batch.toml":       {GPUs: 8, GPU: "RTX-4090", Accumulation: 8, MicroBatch: 2},
	"plain.toml":       {GPUs: 8, GPU: "A100-40GB"},
	"tensor.toml":      {GPUs: 8, GPU: "RTX-4090"},
	"fsdp1.yaml":       {GPUs: 8, GPU: "RTX-4090", Model: "llama-3.1-8b", Precision: "amp-bf16", MicroBatch: 4},
	"fsdp2.yaml":       {GPUs: 8, GPU: "RTX-4090", Model: "llama-3.1-8b", Precision: "amp-bf16", MicroBatch: 4},
	"stages.yaml": {GPUs: 8, GPU: "RTX-4090", Model: "llama-3.1-8b", Precision: "amp-bf16", MicroBatch: 4,
		PipelineParallel: 2, Accumulation: 8},
	"pipeline.json": {GPUs: 8, GPU: "RTX-4090", Model: "llama-3.1-8b", Precision: "bf16", PipelineParallel: 4},
	"flags.yaml": {GPUs: 8, GPU: "A100-40GB", Model: "llama-3.1-8b", Precision: "amp-bf16", MicroBatch: 4,
		PipelineParallel: 4, PipelineSchedule: "GPipe", Accumulation: 8},
}

// usual are those that a test without -all plans.
var usual = []string{"1f1b.toml", "fsdp2.yaml", "pipeline.json", "plain.toml", "zero-bubble.toml"}

// quick are those that a test with -short plans.
var quick = []string{"1f1b.toml", "fsdp2.yaml", "pipeline.json"}

// pipelineFiles are the files of pipelined.
var pipelineFiles = map[string]string{
	"1f1b.toml": titanWith("local_batch_size = 8", `pipeline_parallel_degree = 4
pipeline_parallel_microbatch_size = 2`),
	"gpipe.toml": titanWith("local_batch_size = 16", `pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 4
pipeline_parallel_schedule = "GPipe"`),
	"zero-bubble.toml": strings.Replace(titanWith("local_batch_size = 8", `pipeline_parallel_degree = 2
pipeline_parallel_schedule = "InterleavedZeroBubble"`), `"selective"`, `"none"`, 1),
	"batch.toml": titanWith("local_batch_size = 8\nglobal_batch_size = 64", `pipeline_parallel_degree = 4
pipeline_parallel_microbatch_size = 2`),
	"plain.toml":  titanWith("local_batch_size = 8", ""),
	"tensor.toml": titanWith("local_batch_size = 4\nglobal_batch_size = 32", "tensor_parallel_degree = 2"),
	"fsdp1.yaml": `compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 8
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
`,
	"fsdp2.yaml":  fsdp2,
	"stages.yaml": strings.Replace(fsdp2, "false", "true", 1),
	"pipeline.json": `{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 1}}`,
	"flags.yaml": strings.Replace(fsdp2, "false", "true", 1),
}

const fsdp2 = `compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
`

// titanWith returns a file of torchtitan with lines about the batch and about parallelism.
func titanWith(batch, degrees string) string {
	return `[model]
name = "llama3"
flavor = "8B"
[training]
` + batch + `
seq_len = 4096
[parallelism]
` + degrees + `
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
`
}

// TestPipelines applies every advised edit to files of jobs whose ranks share the model, without -all to some. Each has
// advice that edits its file, and the batch of all ranks stays as it is.
func TestPipelines(t *testing.T) {
	var all tally
	for _, name := range slices.Sorted(maps.Keys(pipelined)) {
		if !*everyGPU && !slices.Contains(usual, name) || testing.Short() && !slices.Contains(quick, name) {
			continue
		}
		q := pipelined[name]
		path := filestest.InNewFolder(t)(name, pipelineFiles[name])
		q.Configs, q.HostMemory = []string{path}, 2*ledger.TiB
		p := planned(t, q)
		before := all
		list := all.advised(t, name, q, p)
		if all.jobs == before.jobs {
			t.Errorf("%s fits", name)
		}
		edits := 0
		for i := range list {
			edits += len(list[i].Edits)
			t.Logf("%s: %v %v: %v, %v", name, list[i].Edits, list[i].Flags, list[i].Frees(), list[i].Verdict)
			if now := resolved(t, list[i].Request, list[i].Texts); sequencesOf(now) != sequencesOf(p.Job) {
				t.Errorf("%s, %v %v: a step has %d sequences, before %d", name, list[i].Edits, list[i].Flags,
					sequencesOf(now), sequencesOf(p.Job))
			}
		}
		if edits == 0 {
			t.Errorf("%s: no advice edits the file", name)
		}
	}
	all.check(t)
}

// resolved returns the job of a request with edited texts.
func resolved(t *testing.T, q job.Request, texts files.Texts) *job.Job {
	t.Helper()
	q.Texts = texts
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// sequencesOf returns the number of sequences of all ranks in an optimizer step.
func sequencesOf(j *job.Job) int { return int(j.MicroBatch) * j.Micros() * j.DataRanks() }

// tally counts jobs that do not fit, their edits, and the jobs that the first advice mends.
type tally struct{ jobs, edits, mended, rungs, components int }

// addressed holds every component of a plan to have a formula and a source.
func (n *tally) addressed(t *testing.T, name string, p *plan.Plan) {
	t.Helper()
	if p == nil {
		return
	}
	components, missing := origintest.Unaddressed(p.Devices)
	n.components += components
	for _, m := range missing {
		t.Errorf("%s: %s", name, m)
	}
}

// TestForms applies every rung to jobs of every form of file: JSON, YAML and TOML, scripts, sources and notebooks of
// Python. Files that are not edited have their changes as flags. With -short there are two of them.
func TestForms(t *testing.T) {
	const model = `"meta-llama/Llama-3.1-8B"`
	source := `from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(` + model + `, torch_dtype="bfloat16")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, bf16=True)
Trainer(model=model, args=args).train()
`
	lines, err := json.Marshal(strings.SplitAfter(strings.TrimSpace(source), "\n"))
	if err != nil {
		t.Fatal(err)
	}
	var all tally
	for name, text := range map[string]string{
		"train.py": source,
		"train.ipynb": `{"cells": [{"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": null,
			"source": ` + string(lines) + `}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}`,
		"train.sh": "#!/bin/bash\ntrl sft --model_name_or_path " + model + " --dtype bfloat16 --output_dir out \\\n" +
			"  --per_device_train_batch_size 4 --max_length 4096\n",
		"args.json": `{"output_dir": "out", "per_device_train_batch_size": 4, "bf16": true}`,
		"sft.yaml": "model_name_or_path: " + model + "\ndtype: bfloat16\noutput_dir: out\n" +
			"per_device_train_batch_size: 4\nmax_length: 4096\n",
		"titan.toml": titanWith("local_batch_size = 8", ""),
	} {
		if testing.Short() && name != "train.ipynb" && name != "args.json" {
			continue
		}
		q := job.Request{Configs: []string{filestest.InNewFolder(t)(name, text)}, GPUs: 2, GPU: "RTX-4090",
			HostMemory: 512 * ledger.GiB}
		if name == "args.json" {
			q.Model = "llama-3.1-8b"
		}
		p := planned(t, q)
		before := all.rungs
		if all.advised(t, name, q, p); all.rungs == before {
			t.Errorf("%s has no rungs: %s", name, p.Verdict.Result)
		}
	}
	all.check(t)
}

// advised applies all advice on a job that does not fit.
func (n *tally) advised(t *testing.T, name string, q job.Request, p *plan.Plan) []Change {
	t.Helper()
	if p == nil || p.Verdict.Result != plan.DoesNotFit {
		return nil
	}
	n.jobs++
	list, err := asked(q, p)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return nil
	}
	for i := range list {
		checkApplied(t, name, &list[i])
		n.edits += len(list[i].Edits)
	}
	if len(list) > 0 && list[0].Verdict != plan.DoesNotFit {
		n.mended++
	}
	n.climbed(t, name, q, p)
	return list
}

// climbed applies the rungs of the ladder of a job that does not fit, one more each time.
func (n *tally) climbed(t *testing.T, name string, q job.Request, p *plan.Plan) {
	t.Helper()
	l, err := Climb(Question{Need: NeedOf(p), Request: q, Plan: p})
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	if l != nil {
		n.rungs += len(l.Rungs)
		checkRungs(t, name, q, l)
	}
}

// check says the counts, and fails if nothing was advised.
func (n *tally) check(t *testing.T) {
	t.Helper()
	t.Logf("%d jobs do not fit: %d edits, %d rungs, and the first advice mends %d of them", n.jobs, n.edits, n.rungs,
		n.mended)
	if n.jobs == 0 || n.edits == 0 || n.rungs == 0 {
		t.Error("no job that does not fit has advice")
	}
}

// checkApplied writes the edited files in place of the old ones, plans them, and puts the old ones back.
func checkApplied(t *testing.T, name string, a *Change) {
	t.Helper()
	for file, text := range a.Texts {
		old, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := os.WriteFile(file, old, 0o600); err != nil {
				t.Fatal(err)
			}
		}()
	}
	j, err := a.Request.Resolve()
	if err != nil {
		t.Errorf("%s, %v: %v", name, a.Edits, err)
		return
	}
	p, err := plan.New(j)
	if err != nil {
		t.Errorf("%s, %v: %v", name, a.Edits, err)
		return
	}
	if got, _ := p.Held(a.Device, nil); got != a.After || p.Verdict.Result != a.Verdict {
		t.Errorf("%s, %v %v: %v (%s), promised %v (%s)", name, a.Edits, a.Flags, got, p.Verdict.Result, a.After,
			a.Verdict)
	}
}

// asked returns the changes that plimsoll plan advises.
func asked(q job.Request, p *plan.Plan) ([]Change, error) {
	return For(Question{Need: NeedOf(p), Request: q, Plan: p})
}

// planned returns the plan of a request.
func planned(t *testing.T, q job.Request) *plan.Plan {
	t.Helper()
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.New(j)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestWaste: a job that leaves most of its GPU free hears what is faster.
func TestWaste(t *testing.T) {
	file := filestest.InNewFolder(t)
	q := job.Request{Model: "qwen2.5-0.5b", GPU: "H100-80GB", GPUs: 2, Sequence: 512, TrainingArgs: file("args.json",
		`{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": true,
		"gradient_checkpointing": true}`)}
	list, err := asked(q, planned(t, q))
	if err != nil || len(list) == 0 {
		t.Fatalf("%v, %v", list, err)
	}
	for _, a := range list {
		if a.Verdict != plan.Fits || a.Slower == nil || *a.Slower > 0 {
			t.Errorf("%+v", a)
		}
	}
}

// TestFlags: what a job says by flags, advice says by flags.
func TestFlags(t *testing.T) {
	for _, c := range []struct {
		request job.Request
		want    []string
	}{
		{job.Request{Model: "llama-3.1-8b", GPU: "A100-80GB", GPUs: 4, Sequence: 4096, Precision: "bf16",
			Shorthand: job.Shorthand{ZeRO: "1"}, HostMemory: 512 * ledger.GiB},
			[]string{"--zero 3", "--zero 2 --zero-offload optimizer"}},
		{job.Request{Model: "llama-2-7b", GPU: "RTX-4090", GPUs: 2, Sequence: 2048, Precision: "fp32",
			PipelineParallel: 2, PipelineSchedule: "GPipe", MicroBatch: 1, Accumulation: 16},
			[]string{"--pipeline-schedule 1F1B"}},
		{job.Request{Model: "qwen2.5-7b", GPU: "RTX-4090", Sequence: 512, Precision: "bf16", Optimizer: "adam"},
			[]string{"--optimizer adam/fused"}},
		{job.Request{Model: "llama-3.1-8b", GPU: "H100-80GB", GPUs: 8, Sequence: 2048, Precision: "bf16",
			MicroBatch: 1, Accumulation: 4, HostMemory: 100 * ledger.GiB,
			Shorthand: job.Shorthand{ZeRO: "2", ZeROOffload: []string{job.OffloadedOptimizer}}},
			[]string{"--nodes 2 --grad-accum 2", "without --zero-offload optimizer"}},
	} {
		q := c.request
		list, err := asked(q, planned(t, q))
		if err != nil {
			t.Fatal(err)
		}
		var flags []string
		for i := range list {
			checkApplied(t, "flags", &list[i])
			if first := list[i].First(); !strings.HasPrefix(first.Key, "--") || first.To == "" {
				t.Errorf("the first of %v is %v", list[i].Flags, first)
			}
			flags = append(flags, strings.Join(list[i].Flags, " "))
		}
		for _, want := range c.want {
			if !slices.Contains(flags, want) {
				t.Errorf("no advice %q in %q", want, flags)
			}
		}
		if !reflect.DeepEqual(q, c.request) {
			t.Errorf("advice changed the request: %+v", q)
		}
	}
}
