package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/after/explain"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/show/report"
)

const (
	jobsToExplain = "testdata/explain"
	publicConfigs = "../../../shared/data/configs"
)

// failures are files of failures, by what was full.
var failures = map[ledger.Kind]string{ledger.GPU: jobsToExplain + "/oom.log", ledger.Host: jobsToExplain + "/dmesg.txt"}

// explainedJob is the document of plimsoll explain for a failure beside files of a job and flags.
func explainedJob(t *testing.T, failure string, arguments ...string) *explain.Explanation {
	t.Helper()
	out, stderr, code := runs(append([]string{"explain", "--json"}, append(arguments, failure)...)...)
	var e explain.Explanation
	if err := json.Unmarshal([]byte(out), &e); err != nil || code != exitFailed {
		t.Fatalf("%q: exit code %d, %v\n%s", arguments, code, err, stderr)
	}
	return &e
}

// plannedJob is the document of plimsoll plan with all advice, or nil for a job that cannot be planned.
func plannedJob(t *testing.T, arguments ...string) *report.PlanDocument {
	t.Helper()
	out, _, code := runs(append([]string{"plan", "--json"}, arguments...)...)
	if code == exitInput {
		return nil
	}
	var d report.PlanDocument
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		t.Fatalf("%q: %v", arguments, err)
	}
	return &d
}

// TestExplainReadsJobs: explain plans the job of every file that plan reads, without --model where the file names it.
func TestExplainReadsJobs(t *testing.T) {
	for file, want := range map[string]struct{ job, edit string }{
		"axolotl.yml":        {"4 x 4,096 tokens", "micro_batch_size"},
		"llama_factory.yaml": {"8 x 2,048 tokens", "per_device_train_batch_size"},
		"torchtitan.toml":    {"4 x 4,096 tokens", "training.local_batch_size"},
		"swift.sh":           {"4 x 4,096 tokens", "--fsdp"}, // scripts are not edited
	} {
		path := filepath.Join(jobsToExplain, file)
		e := explainedJob(t, failures[ledger.GPU], path, "--gpus", "8", "--gpu", "A100-40GB")
		if notes := strings.Join(e.Notes, "\n"); !strings.Contains(notes, want.job) {
			t.Errorf("%s: no plan of %s: %s", file, want.job, notes)
		}
		found := false
		for _, edit := range e.Edits {
			if edit.Key == want.edit {
				found = edit.Planned != nil && edit.Frees > 0 &&
					(edit.File == path && edit.Line > 0 || file == "swift.sh")
			}
		}
		if !found {
			t.Errorf("%s: no edit of %s with its line: %+v", file, want.edit, e.Edits)
		}
	}
}

// TestExplainReadsPublicJobs: configurations of axolotl and LLaMA-Factory stand beside the error of a GPU.
func TestExplainReadsPublicJobs(t *testing.T) {
	filestest.PublicConfigs(t, publicConfigs)
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	for name, file := range map[string]bool{
		"axolotl-ai-cloud_axolotl__examples_mistral_config.yml":                      true,
		"hiyouga_LLaMA-Factory__examples_extras_fp8_llama3_fp8_fsdp_sft.yaml":        true,
		"hiyouga_LLaMA-Factory__examples_accelerate_fsdp_config_multiple_nodes.yaml": true,
	} {
		path := filepath.Join(publicConfigs, name)
		flags := []string{path, "--gpus", "8", "--gpu", "A100-40GB"}
		if strings.Contains(name, "accelerate") {
			flags = append(flags, "--model", "llama-3.1-8b", "--seq-len", "8192")
		}
		e := explainedJob(t, failures[ledger.GPU], flags...)
		edits := 0
		for _, edit := range e.Edits {
			if edit.Planned != nil && edit.File == path && edit.Line > 0 {
				edits++
			}
		}
		if len(e.Edits) == 0 || e.Edits[0].Planned == nil || (edits > 0) != file {
			t.Errorf("%s: %+v, %q: expected planned edits", name, e.Edits, e.Notes)
		}
	}
}

// TestExplainAnswersAsPlan: for a job that does not fit, explain and plan offer the same changes in the same order, of
// the same bytes, time and verdict. With -short it takes few of the public configurations.
func TestExplainAnswersAsPlan(t *testing.T) {
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	stride := 5
	if testing.Short() {
		stride = 25
	}
	compared := map[ledger.Kind]int{}
	for i, c := range filestest.PublicConfigs(t, publicConfigs) {
		if i%stride != 0 {
			continue
		}
		job := []string{c.Path, "--gpu", "A100-40GB"}
		if f, err := recipe.LoadFramework(c.Path, recipe.Source{}); err != nil || f == nil || f.Model == "" {
			job = append(job, "--model", "llama-3.1-8b")
		}
		for kind, memory := range map[ledger.Kind]string{ledger.GPU: "2TiB", ledger.Host: "100GiB"} {
			flags, d := largestPlanned(t, append(slices.Clone(job), "--host-memory", memory))
			if d != nil && d.Verdict != plan.Fits && d.Limit.Device == kind {
				compared[kind]++
				checkSame(t, c.Name, d, explainedJob(t, failures[kind], flags...))
			}
		}
	}
	if t.Logf("jobs that lack memory: %v", compared); compared[ledger.GPU] == 0 || compared[ledger.Host] == 0 {
		t.Error("no job lacks memory of a GPU, or none of a host")
	}
}

// largestPlanned plans a job on 8 GPUs, or on as many as it accepts. It returns no plan for a job that is refused.
func largestPlanned(t *testing.T, flags []string) ([]string, *report.PlanDocument) {
	t.Helper()
	for gpus := 8; gpus > 0; gpus /= 2 {
		with := append(slices.Clone(flags), "--gpus", fmt.Sprint(gpus))
		if d := plannedJob(t, with...); d != nil {
			return with, d
		}
	}
	return nil, nil
}

func checkSame(t *testing.T, name string, d *report.PlanDocument, e *explain.Explanation) {
	t.Helper()
	var offered []lever.Change
	for _, edit := range e.Edits {
		if edit.Planned != nil {
			offered = append(offered, *edit.Planned)
		}
	}
	if len(offered) != len(d.Advice) || len(offered) > 0 && !reflect.DeepEqual(offered, d.Advice) {
		t.Errorf("%s: explain offers %d changes, plan %d:\n%+v\n%+v", name, len(offered), len(d.Advice), offered,
			d.Advice)
	}
}

// TestExplainTakesFlagsOfPlan: every flag of plan that says what a job and a machine are is one of explain.
func TestExplainTakesFlagsOfPlan(t *testing.T) {
	of := explainCommand().Flags()
	planned := planCommand().Flags()
	for _, name := range strings.Fields(`model config online deepspeed training-args accelerate adapter quantization gpu
		gpus nodes gpu-memory host-memory numa-nodes cpu seq-len micro-batch grad-accum images precision optimizer clip
		gradient-checkpointing attention loss lora zero zero-offload fsdp tensor-parallel pipeline-parallel torch
		alloc-conf factors offload master machine link-in host-bandwidth tflops network`) {
		if of.Lookup(name) == nil || planned.Lookup(name) == nil {
			t.Errorf("--%s is not a flag of both", name)
		}
	}
	for _, flags := range [][]string{
		{"--model", "qwen3-4b", "--gradient-checkpointing", "full"},
		{"--config", jobsToExplain + "/axolotl.yml", "--gpu-memory", "39GiB", "--host-memory", "512GiB"},
	} {
		e := explainedJob(t, failures[ledger.GPU], flags...)
		if len(e.Notes) == 0 || !strings.Contains(e.Notes[0], "were planned for") {
			t.Errorf("%q: %q, expected a plan of the job", flags, e.Notes)
		}
	}
}

// TestCommandsInEvidence: a log and a pod that name the command of a training are evidence, and no job.
func TestCommandsInEvidence(t *testing.T) {
	file := filestest.InNewFolder(t)
	pod := file("pod.yaml", `apiVersion: v1
kind: Pod
spec:
  containers:
  - name: train
    args: ["swift sft --model Qwen/Qwen3-4B --train_type full"]
status:
  containerStatuses:
  - name: train
    state:
      terminated:
        exitCode: 137
        reason: OOMKilled
`)
	log := file("log.json", `{"log": "swift sft --model Qwen/Qwen3-4B --train_type full", "stream": "stdout"}
{"log": "OSError: [Errno 28] No space left on device", "stream": "stderr"}
`)
	for path, want := range map[string]explain.Resource{pod: explain.CGroup, log: explain.Disk} {
		out, stderr, _ := runs("explain", "--json", path)
		var e explain.Explanation
		if err := json.Unmarshal([]byte(out), &e); err != nil || e.Cause.Resource != want {
			t.Errorf("%s: %+v, %v, %s: expected %s", path, e.Cause, err, stderr, want)
		}
	}
}
