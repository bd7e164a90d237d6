//go:build linux

package main

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/show/report"
)

// compared runs compare with --json.
func compared(t *testing.T, arguments ...string) (*report.Comparison, int) {
	t.Helper()
	command := exec.Command(program(t), append([]string{"compare", "--json"}, arguments...)...)
	out, err := command.Output()
	if command.ProcessState == nil {
		t.Fatal(err)
	}
	d := &report.Comparison{}
	if err := json.Unmarshal(out, d); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return d, command.ProcessState.ExitCode()
}

// TestLeaksOfRealTraining trains with PyTorch on the CPU. Every leak is 4 MiB a step, and each is found, sized within
// 5 %, and told apart from the others.
func TestLeaksOfRealTraining(t *testing.T) {
	if testing.Short() {
		t.Skip("trains for a minute")
	}
	python := torchtest.Python(t)
	// The heap of malloc keeps holes, so a process grows by 3.7 to 4.3 MiB a step. Mapped tensors leave none.
	t.Setenv("MALLOC_MMAP_THRESHOLD_", "131072")
	const slope = 4 * ledger.MiB
	for leak, want := range map[string]*reconcile.Growth{
		"none":      nil,
		"gradients": {Kind: reconcile.Anonymous, Role: samples.RankProcess, Component: ledger.Gradients},
		"mapping":   {Kind: reconcile.Shared, Role: samples.RankProcess},
		"loader":    {Kind: reconcile.Anonymous, Role: samples.Child},
	} {
		t.Run(leak, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "run.jsonl")
			j := newJob(t, "--record", file, "--interval", "100ms", "--", python, "testdata/compare/train.py", leak)
			j.start(t).ends(t, 0)
			if said := strings.Contains(j.stderr.String(), "plimsoll: leak: rank 0"); said != (want != nil) {
				t.Errorf("run says at its end:\n%s", &j.stderr)
			}
			d, code := compared(t, file)
			if code != 0 {
				t.Errorf("exit code %d", code)
			}
			var leaks []reconcile.Growth
			firstStep := false
			for _, g := range d.Growth {
				// A process that takes batches over may grow by a little of its own, as malloc keeps more memory.
				if g.IsLeak() && (want == nil || g.BytesPerStep > slope/4) {
					leaks = append(leaks, g)
				}
				firstStep = firstStep || g.Shape == reconcile.FirstStep && g.Role == samples.RankProcess
			}
			if !firstStep {
				t.Errorf("the optimizer's states do not appear in the first step: %+v", d.Growth)
			}
			if want == nil {
				if len(leaks) > 0 {
					t.Errorf("found %+v", leaks)
				}
				return
			}
			if len(leaks) != 1 {
				t.Fatalf("found %d leaks: %+v", len(leaks), leaks)
			}
			g := leaks[0]
			off := float64(g.BytesPerStep-slope) / float64(slope)
			t.Logf("%v a step, %.1f %% off", g.BytesPerStep, 100*off)
			if off < -0.05 || off > 0.05 {
				t.Errorf("%v a step, want %v", g.BytesPerStep, slope)
			}
			if g.Kind != want.Kind || g.Role != want.Role || want.Component != "" && g.Component != want.Component ||
				g.Mapping != "" && !strings.Contains(g.Mapping, "cache") { // mappings are read rarely
				t.Errorf("found %+v, want %+v", g, want)
			}
		})
	}
}

// TestCompareExample compares the recording of the examples: the exit code follows --tolerance, and every format has
// the verdict.
func TestCompareExample(t *testing.T) {
	d, code := compared(t, examplePlan, exampleRecording)
	if code != exitDiffers || d.Within || d.Farthest == nil || d.Schema != report.ComparisonSchema {
		t.Errorf("exit code %d, farthest %+v", code, d.Farthest)
	}
	if d, code = compared(t, exampleRecording, examplePlan, "--tolerance", "25"); code != 0 || !d.Within {
		t.Errorf("exit code %d with a tolerance of 25 %%", code)
	}
	for _, p := range d.Peaks {
		if p.Measured != nil && p.Iteration != "" &&
			float64(max(p.Unexplained, -p.Unexplained)) > 0.02*float64(*p.Measured) {
			t.Errorf("%v of %v are unexplained in %s", p.Unexplained, *p.Measured, p.Phase)
		}
	}
	first := d.Growth[0]
	if first.Shape != reconcile.FirstStep || len(first.Appeared) < 2 || first.Appeared[0].Component != ledger.ExpAvg {
		t.Errorf("growth %+v", d.Growth)
	}
	if alone, code := compared(t, exampleRecording); code != 0 || alone.Farthest != nil || len(alone.Growth) == 0 {
		t.Errorf("without a plan: exit code %d, %+v", code, alone.Farthest)
	}
	for _, format := range report.Formats() {
		out, err := exec.Command(program(t), "compare", examplePlan, exampleRecording, "--tolerance", "25", "--format",
			format).Output()
		if err != nil || !strings.Contains(string(out), "25") {
			t.Errorf("%s: %v\n%s", format, err, out)
		}
	}
}

// TestCompareRefuses bad files and flags.
func TestCompareRefuses(t *testing.T) {
	for want, arguments := range map[string][]string{
		"there is no recording":        {examplePlan},
		"is one, too":                  {exampleRecording, exampleRecording},
		"lost.jsonl: no such file":     {exampleRecording, "lost.jsonl"},
		"lost.json: no such file":      {"lost.json", exampleRecording},
		"away.jsonl: no such file":     {examplePlan, "away.jsonl"},
		"no such file":                 {"missing.jsonl"},
		"--learn needs a plan":         {exampleRecording, "--learn", "factors.json"},
		"--tolerance is -1":            {exampleRecording, "--tolerance", "-1"},
		"compare takes a plan and a r": {},
	} {
		command := exec.Command(program(t), append([]string{"compare"}, arguments...)...)
		out, _ := command.CombinedOutput()
		if command.ProcessState.ExitCode() != exitInput || !strings.Contains(string(out), want) {
			t.Errorf("%v: exit code %d, %s", arguments, command.ProcessState.ExitCode(), out)
		}
	}
}
