package report

import (
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

// variedRun is a run whose step holds 100 bytes, and whose backward pass 10 for each sequence.
func variedRun(value string, batch ledger.Bytes) VariedRun {
	phase := func(name ledger.PhaseName, bytes ledger.Bytes) ledger.Phase {
		return ledger.Phase{Name: name, Iteration: ledger.Steady, PeakAllocated: bytes,
			PeakReserved: max(bytes, 100) + 8, PeakUsed: max(bytes, 100) + 12}
	}
	gpu := ledger.Device{Kind: ledger.GPU, Capacity: 150, Phases: []ledger.Phase{phase(ledger.Backward, 10*batch),
		phase(ledger.Step, 100)}}
	gpu.Interval.Upper = gpu.Peak().PeakUsed
	run := VariedRun{Value: value, Verdict: plan.Fits, Devices: []ledger.Device{gpu}}
	if gpu.Interval.Upper > gpu.Capacity {
		run.Verdict = plan.DoesNotFit
	}
	return run
}

// TestInterpolated: another phase holds most at one end than at the other, and what lies between follows both.
func TestInterpolated(t *testing.T) {
	runs := []VariedRun{variedRun("1", 1), variedRun("13", 13), variedRun("14", 14), variedRun("40", 40)}
	d := NewVaried("1", []string{"python", "{batch}"}, "batch", true, runs)
	want := map[string]ledger.Bytes{"1": 100, "2": 100, "4": 100, "8": 100, "13": 130, "14": 140, "16": 160, "32": 320,
		"40": 400}
	for _, row := range d.Rows {
		if row.Allocated != want[row.Value] || row.Interpolated != (row.Verdict == "") {
			t.Errorf("%+v, want %d allocated", row, want[row.Value])
		}
		delete(want, row.Value)
	}
	if len(want) > 0 || d.Largest != "13" || !d.Fits() {
		t.Errorf("no rows of %v, and the largest is %q", want, d.Largest)
	}
	var text strings.Builder
	if err := d.Page().Write(&text, Text); err != nil ||
		!strings.Contains(text.String(), "largest that fits: batch 13; 14 does not") {
		t.Errorf("%v: %s", err, &text)
	}
}

// TestVariedFailures: what failed has no figures, and nothing lies between it and its neighbor.
func TestVariedFailures(t *testing.T) {
	runs := []VariedRun{variedRun("1", 1), {Value: "8", Failed: "the program failed"}}
	d := NewVaried("1", nil, "batch", true, runs)
	if len(d.Rows) != 2 || d.Largest != "" || d.Rows[1].Failed == "" {
		t.Errorf("%+v", d)
	}
	none := NewVaried("1", nil, "batch", false, []VariedRun{variedRun("40", 40)})
	if none.Fits() || none.Page().Verdict != "no value fits for certain" {
		t.Errorf("%+v", none)
	}
}
