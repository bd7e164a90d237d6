//go:build linux

package report_test

import (
	"bytes"
	"strings"
	"testing"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/show/report"
)

// TestSkippedStepsAreNoMeasurement: the step time is that of the steps that were made, after the first of them.
func TestSkippedStepsAreNoMeasurement(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	job, err := rehearse.Request{Model: "gpt2", Ranks: 1, Steps: 5, Precision: "fp16"}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	plan, err := rehearse.NewPlacement(job, h)
	if err != nil {
		t.Fatal(err)
	}
	skipped := rehearse.Step{Seconds: 1, NormSeconds: 1, LossScale: 65536, Skipped: true}
	made := func(seconds float64) rehearse.Step {
		return rehearse.Step{Seconds: seconds, NormSeconds: 1, UpdateSeconds: seconds - 1,
			TrafficSeconds: (seconds - 1) / 2, LossScale: 16384}
	}
	for _, test := range []struct {
		steps            []rehearse.Step
		median, min, max float64
	}{
		{[]rehearse.Step{skipped, made(90), made(3), skipped, made(5)}, 4, 3, 5},
		{[]rehearse.Step{skipped, skipped, made(9), skipped}, 9, 9, 9},
		{[]rehearse.Step{skipped, skipped}, 0, 0, 0},
	} {
		updates := int64(0)
		for _, s := range test.steps {
			if !s.Skipped {
				updates++
			}
		}
		m := &rehearse.Measurement{Measured: plan.Planned, Steps: test.steps, Updates: updates, LossScale: 16384}
		r := report.NewRehearsal("test", plan, rehearse.Verdict{Fits: true}, m)
		if r.StepSecondsMedian != test.median || r.StepSecondsMin != test.min || r.StepSecondsMax != test.max {
			t.Errorf("%v: %g, %g to %g", test.steps, r.StepSecondsMedian, r.StepSecondsMin, r.StepSecondsMax)
		}
		if updates > 0 && r.MemoryBandwidth.Fraction != 0.5 {
			t.Errorf("%v: a fraction of %g", test.steps, r.MemoryBandwidth.Fraction)
		}
		if l := r.LossScaling; r.OptimizerSteps != updates || l.SkippedSteps != int64(len(test.steps))-updates ||
			l.FirstScale != 65536 || l.NextScale != 16384 {
			t.Errorf("%v: %d steps, %+v", test.steps, r.OptimizerSteps, l)
		}
		var text, json bytes.Buffer
		if err := r.Page().Write(&text, report.Text); err != nil {
			t.Fatal(err)
		}
		if err := r.Page().Write(&json, report.JSON); err != nil { // fails on numbers that are not finite
			t.Fatal(err)
		}
		if strings.Contains(text.String(), "optimizer step ") != (updates > 0) {
			t.Errorf("%d steps were made:\n%s", updates, text.String())
		}
	}
}
