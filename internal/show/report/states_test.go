//go:build linux

package report_test

import (
	"bytes"
	"strings"
	"testing"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/cycle"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/show/report"
)

// TestRoadIsChosen: the verdict names the road on which a trainer waits less, and why. Nothing is chosen without links.
func TestRoadIsChosen(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	// GPT-2 has 124,439,808 parameters: 1.2 GB go to the device, and 1.7 GB come back.
	step := cycle.Step{Seconds: 0.2, ReadySeconds: 0.1, ExposedSeconds: 0.15, InSeconds: 0.1, OutSeconds: 0.2}
	for _, test := range []struct {
		request cycle.Request
		seconds float64 // of a step by the CPU
		fits    bool
		want    string
	}{
		{cycle.Request{LinkIn: 400, LinkOut: 170}, 1, true,
			"take states in chunks: a trainer waits 1"},
		{cycle.Request{LinkIn: 10, LinkOut: 5}, 0.05, true, "take CPU step: a trainer waits "},
		{cycle.Request{LinkIn: 10, LinkOut: 5}, 0.05, true, "the link moves 14 B/parameter back at 5.0 GB/s"},
		{cycle.Request{LinkIn: 1, LinkOut: 50}, 0.05, true, "the link moves 10 B/parameter to the device at 1.0 GB/s"},
		{cycle.Request{LinkIn: 10}, 0.05, true, "no road was chosen: "},
		{cycle.Request{LinkIn: 10, LinkOut: 5}, 0, false, "take states in chunks: the update by the CPU does not fit"},
		{cycle.Request{LinkIn: 10, LinkOut: 5, Request: rehearse.Request{Optimizer: cycle.Muon}}, 0, true,
			"take states in chunks: Muon has no update by the CPU"},
	} {
		test.request.Model, test.request.Ranks, test.request.Steps = "gpt2", 1, 3
		job, err := test.request.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		p, err := cycle.NewPlacement(job, h)
		if err != nil {
			t.Fatal(err)
		}
		var cpu report.CPURoad
		if !job.Muon {
			if cpu.Placement, err = rehearse.NewPlacement(job.Job, h); err != nil {
				t.Fatal(err)
			}
			cpu.Verdict = rehearse.Verdict{Fits: test.fits}
		}
		if test.seconds > 0 {
			s := rehearse.Step{Seconds: test.seconds, UpdateSeconds: test.seconds, TrafficSeconds: test.seconds}
			cpu.Measurement = &rehearse.Measurement{Measured: cpu.Placement.Planned, Steps: []rehearse.Step{s, s},
				Updates: 2}
		}
		m := &cycle.Measurement{Measured: p.Planned, Steps: []cycle.Step{step, step}}
		r, err := report.NewStatesRehearsal("test", p, rehearse.Verdict{Fits: true}, m, cpu)
		if err != nil {
			t.Fatal(err)
		}
		if line := r.VerdictLine(); !strings.HasPrefix(line, "FITS: ") || !strings.Contains(line, test.want) {
			t.Errorf("%s, want %q", line, test.want)
		}
		for _, format := range []report.Format{report.Text, report.JSON, report.Markdown} {
			var out bytes.Buffer
			if err := r.Page().Write(&out, format); err != nil { // JSON fails on numbers that are not finite
				t.Fatal(err)
			}
		}
	}
}
