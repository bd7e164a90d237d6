package main

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/ledger"
	"plimsoll/optim/optimtest"
	"plimsoll/reconcile"
	"plimsoll/report"
	"plimsoll/samples"
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
	python := optimtest.Python(t)
	const slope = 4 * ledger.MiB
	for leak, want := range map[string]*reconcile.Growth{
		"none":      nil,
		"gradients": {Kind: reconcile.Anonymous, Role: samples.RankProcess, Component: ledger.Gradients},
		"mapping":   {Kind: reconcile.Shared, Role: samples.RankProcess},
		"loader":    {Kind: reconcile.Anonymous, Role: samples.Child},
	} {
		t.Run(leak, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "run.jsonl")
			newJob(t, "--record", file, "--interval", "100ms", "--", python, "testdata/compare/train.py", leak).
				start(t).ends(t, 0)
			d, code := compared(t, file)
			if code != 0 {
				t.Errorf("exit code %d", code)
			}
			var leaks []reconcile.Growth
			firstStep := false
			for _, g := range d.Growth {
				if g.IsLeak() {
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
				(leak == "mapping") != strings.Contains(g.Mapping, "cache") {
				t.Errorf("found %+v, want %+v", g, want)
			}
		})
	}
}
