package report

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// made returns a plan with its inputs, written to the current folder.
func made(t testing.TB) []byte {
	t.Helper()
	if err := os.WriteFile("ds.json", []byte(
		`{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("args.json", []byte(
		`{"deepspeed": "ds.json", "bf16": true, "per_device_train_batch_size": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	request := job.Request{Model: "gpt2", TrainingArgs: "args.json", GPUs: 2, GPU: "H100-80GB"}
	job, err := request.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.New(job)
	if err != nil {
		t.Fatal(err)
	}
	d, err := NewPlanDocument("test", request, p)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := WriteJSON(&b, d); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("plan.json", []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return []byte(b.String())
}

// TestPlannedRun reads a plan back, and expects a refusal when an input file has changed.
func TestPlannedRun(t *testing.T) {
	t.Chdir(t.TempDir())
	text := string(made(t))
	p, err := NewPlannedRun("plan.json")
	if err != nil {
		t.Fatal(err)
	}
	if p.Model != "gpt2" || p.Verdict != plan.Fits || !strings.HasPrefix(p.Text, "fits: ") || len(p.SHA256) != 64 {
		t.Errorf("read %+v", p)
	}
	d, err := ReadPlan("plan.json")
	if err != nil {
		t.Fatal(err)
	}
	var again strings.Builder
	if err := WriteJSON(&again, d); err != nil {
		t.Fatal(err)
	}
	if again.String() != text {
		t.Error("the document is not what it was when it is read and written")
	}
	for _, test := range []struct {
		name, file, was, is, want string
	}{
		{"a file named on the command line", "args.json", "true", "true ",
			"plan.json: args.json has changed since the plan was made"},
		{"a file named by another file", "ds.json", "1,", "2,",
			"plan.json: ds.json has changed since the plan was made"},
		{"a file that is gone", "ds.json", "", "",
			"plan.json: a file that the plan was made from cannot be read: ds.json: no such file or directory"},
		{"the schema", "plan.json", "plimsoll.plan/2", "plimsoll.plan/9",
			`plan.json: the schema is "plimsoll.plan/9", but this version reads "plimsoll.plan/2"`},
		{"a hash", "plan.json", `"sha256": "`, `"sha256": "0`,
			"plan.json: args.json has changed since the plan was made"},
		{"a verdict", "plan.json", `"verdict": "fits"`, `"verdict": "maybe"`, "plan.json: the plan is incomplete"},
		{"a type", "plan.json", `"rank": 0`, `"rank": "zero"`,
			"plan.json: the plan is incomplete: json: cannot unmarshal"},
		{"half of it", "plan.json", text[len(text)/2:], "",
			": this is not JSON: unexpected end of JSON input\n  hint: plan the job again"},
		{"another document", "plan.json", text, "{}", "plan.json: this is no plan: it names no schema"},
		{"no document", "plan.json", text, "[1]", "plan.json: this is no plan: it names no schema"},
		{"no plan", "plan.json", "", "", "plan.json: no such file or directory"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			made(t)
			content, err := os.ReadFile(test.file)
			if err != nil {
				t.Fatal(err)
			}
			changed := strings.Replace(string(content), test.was, test.is, 1)
			if test.was == "" {
				err = os.Remove(test.file)
			} else if changed == string(content) {
				t.Fatalf("%s is not in %s", test.was, test.file)
			} else {
				err = os.WriteFile(test.file, []byte(changed), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			_, err = NewPlannedRun("plan.json")
			var input *fault.Input
			if !errors.As(err, &input) || !strings.Contains(err.Error(), test.want) || input.Hint == "" {
				t.Errorf("%v, want %s", err, test.want)
			}
		})
	}
}

// TestPlannedFolder expects the config.json of a folder among the inputs.
func TestPlannedFolder(t *testing.T) {
	j, err := job.Request{Model: "../../input/model/testdata/checkpoint"}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Join("../../input/model/testdata/checkpoint", "config.json")}
	if got := j.Files; !slices.Equal(got, want) {
		t.Errorf("files are %q, want %q", got, want)
	}
}

func FuzzPlan(f *testing.F) {
	f.Chdir(f.TempDir())
	f.Add(made(f))
	f.Add([]byte(`{"schema": "plimsoll.plan/2", "verdict": "fits", "devices": [{}]}`))
	f.Add([]byte(`{"schema": "plimsoll.plan/2", "verdict": "unknown", "devices": [{"phases": [{}]}], "limit": {}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := ParsePlan("plan.json", text)
		var input *fault.Input
		switch {
		case err == nil && d.verdictLine() == "":
			t.Error("no verdict")
		case err != nil && !errors.As(err, &input):
			t.Errorf("%T: %v", err, err)
		}
	})
}

// TestUnreadPacking: a verdict on weights whose packing only a flag says names the other form that they may have. With
// a quantization_config, and with weights that lack memory either way, nothing is left to say.
func TestUnreadPacking(t *testing.T) {
	file := filestest.InNewFolder(t)
	read := file("awq.json", `{"quant_method": "awq", "bits": 4, "group_size": 128}`)
	lora := job.Shorthand{LoRA: 8, LoRATargets: []string{"q_proj"}}
	for _, c := range []struct {
		quantization, gpu string
		want              bool
	}{
		{"awq", "H100-80GB", true}, {"gptq", "H100-80GB", true}, {"nf4", "H100-80GB", false},
		{read, "H100-80GB", false}, {"compressed-tensors", "H100-80GB", false}, {"awq", "T4", false},
	} {
		d := documentOf(t, job.Request{Model: "qwen2.5-32b", Shorthand: lora, Quantization: c.quantization,
			GPU: c.gpu, Sequence: 256})
		if d == nil {
			t.Fatalf("%s is refused", c.quantization)
		}
		if got := strings.Contains(d.Page().text(), "no file says"); got != c.want {
			t.Errorf("%s on %s: %v, want %v:\n%s", c.quantization, c.gpu, got, c.want, d.Page().text())
		}
		assumed := strings.Contains(strings.Join(d.Assumptions, "\n"), "a flag or a name alone says")
		if want := c.quantization == "awq" || c.quantization == "gptq"; assumed != want {
			t.Errorf("%s on %s: %v assumed, want %v", c.quantization, c.gpu, d.Assumptions, want)
		}
	}
}
