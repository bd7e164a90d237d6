package advice

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/files/filestest"
	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/origin/origintest"
	"plimsoll/plan"
	"plimsoll/recipe"
	"plimsoll/steptime"
)

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
func requested(path string) (job.Request, *plan.Plan) {
	q := job.Request{Configs: []string{path}, GPUs: 8, GPU: "H100-80GB", HostMemory: 512 * ledger.GiB}
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
// once more: the plan changes by the number that was promised. Every component of all plans has a formula and a source.
func TestPublicConfigs(t *testing.T) {
	if testing.Short() {
		t.Skip("plans hundreds of jobs")
	}
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	jobs, edits, mended, plans, components := 0, 0, 0, 0, 0
	for _, c := range filestest.PublicConfigs(t, "../../shared/data/configs") {
		q, p := requested(inFolder(t, c))
		if p != nil {
			n, missing := origintest.Unaddressed(p.Devices)
			plans, components = plans+1, components+n
			for _, m := range missing {
				t.Errorf("%s: %s", c.Name, m)
			}
		}
		if p == nil || p.Verdict.Result != plan.DoesNotFit {
			continue
		}
		jobs++
		list, err := For(q, p, steptime.Machine{})
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		for i := range list {
			checkApplied(t, c.Name, &list[i])
			edits += len(list[i].Edits)
		}
		if len(list) > 0 && list[0].Verdict != plan.DoesNotFit {
			mended++
		}
	}
	t.Logf("%d components of %d plans", components, plans)
	t.Logf("%d jobs do not fit: %d edits, and the first advice mends %d of them", jobs, edits, mended)
	if jobs == 0 || edits == 0 {
		t.Error("no job that does not fit has advice")
	}
}

// checkApplied writes the edited files in place of the old ones, plans them, and puts the old ones back.
func checkApplied(t *testing.T, name string, a *Advice) {
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
	if got := peakOf(p, a.Device); got != a.After || p.Verdict.Result != a.Verdict {
		t.Errorf("%s, %v %v: %v (%s), promised %v (%s)", name, a.Edits, a.Flags, got, p.Verdict.Result, a.After,
			a.Verdict)
	}
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
	list, err := For(q, planned(t, q), steptime.Machine{})
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
	q := job.Request{Model: "llama-3.1-8b", GPU: "A100-80GB", GPUs: 4, Sequence: 4096, Precision: "bf16",
		Shorthand: job.Shorthand{ZeRO: "1"}, HostMemory: 512 * ledger.GiB}
	list, err := For(q, planned(t, q), steptime.Machine{})
	if err != nil {
		t.Fatal(err)
	}
	var flags []string
	for i := range list {
		checkApplied(t, "flags", &list[i])
		flags = append(flags, strings.Join(list[i].Flags, " "))
	}
	for _, want := range []string{"--zero 3", "--zero 2 --zero-offload optimizer"} {
		if !slices.Contains(flags, want) {
			t.Errorf("no advice %q in %q", want, flags)
		}
	}
	if q.ZeRO != "1" || len(q.ZeROOffload) > 0 {
		t.Errorf("advice changed the request: %+v", q.Shorthand)
	}
}
