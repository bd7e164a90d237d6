package main

import (
	"math"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
)

// TestModelAgreesWithProgram plans one job in both ways.
func TestModelAgreesWithProgram(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-ghost runs it")
	}
	python := torchtest.Python(t)
	c := command{python: python, catalog: "../../internal/input/model/catalog", gpu: "H200"}
	got := c.compare(row{Name: "Trainer", Model: "qwen2.5-0.5b", Sequence: 1024, Arguments: plain})
	if got.failed != "" {
		t.Fatal(got)
	}
	for level := range levels {
		hand, program := got.hand.peak(level), got.program.peak(level)
		if math.Abs(apart(hand, program)) > 2 || program < 3*ledger.GiB {
			t.Error(got)
		}
	}
}

// TestRows finds every job's model, and no job twice.
func TestRows(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range rows() {
		if seen[r.Name+r.Model] {
			t.Errorf("%s of %s is there twice", r.Name, r.Model)
		}
		seen[r.Name+r.Model] = true
		if found, _ := filepath.Glob("../../internal/input/model/catalog/" + r.Model + ".json"); len(found) == 0 {
			t.Errorf("%s is not in the catalog", r.Model)
		}
	}
	if len(seen) < 40 {
		t.Errorf("%d jobs", len(seen))
	}
}

func TestPage(t *testing.T) {
	of := func(hand, program ledger.Bytes) compared {
		return compared{row: row{Name: "n", Model: "m"}, hand: figures{"first step": {hand, hand}},
			program: figures{"first step": {program, program}}}
	}
	text := page([]compared{of(101, 100), of(110, 100), of(100, 100), {row: row{Name: "x"}, failed: "it failed"}}, nil)
	want := "Of 4 jobs, allocated bytes are within 2 % for 2, and reserved bytes for 2; half are within 1.0 % and " +
		"1.0 %.\n"
	if !strings.Contains(text, want) {
		t.Errorf("the page is\n%s", text)
	}
}

// recordedJobs are the drawn jobs whose programs have run.
func recordedJobs(t *testing.T) []recorded {
	t.Helper()
	list, err := readRecorded("testdata/drawn.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// TestDrawn plans every recorded job by the planner's own model, and holds it to what the program held.
func TestDrawn(t *testing.T) {
	c := command{catalog: "../../internal/input/model/catalog", gpu: "H200", chosen: func(row) bool { return true }}
	done := c.outcomes(recordedJobs(t))
	planned := map[string]bool{}
	for _, o := range done {
		planned[o.name()] = true
		why, isMissed := missed[o.name()]
		switch isClose := o.refused == nil && o.isClose(); {
		case isClose && isMissed:
			t.Errorf("%s is close, so it is no longer missed: %s", o.name(), why)
		case !isClose && !isMissed:
			t.Errorf("%s: allocated %+.1f %%, reserved %+.1f %%, refused %v", o.name(), o.errorOf(allocated),
				o.errorOf(reserved), o.refused)
		}
	}
	for name := range missed {
		if !planned[name] {
			t.Errorf("%s is missed and not recorded", name)
		}
	}
	_, of := distributions(done)
	for _, most := range []struct {
		what                  string
		median, ninetyPercent float64
	}{{"allocated, peak", 0.2, 2.5}, {"reserved, peak", 1.2, 5.5}} {
		d := of[most.what]
		if d.at(0.5) > most.median || d.at(0.9) > most.ninetyPercent {
			t.Errorf("%s: median %.2f %%, 90th percentile %.2f %%", most.what, d.at(0.5), d.at(0.9))
		}
	}
}

// TestDrawAgain draws the same job from a seed and a number, and others from others.
func TestDrawAgain(t *testing.T) {
	seen := map[string]bool{}
	for number := range uint64(200) {
		r := draw(7, number)
		if again := draw(7, number); r.hash() != again.hash() {
			t.Errorf("%d: %s and %s", number, r.Name, again.Name)
		}
		seen[r.hash()] = true
	}
	if len(seen) < 195 {
		t.Errorf("%d jobs of 200 differ", len(seen))
	}
}

// TestRecorded finds no job twice, and what the first score of a job was by.
func TestRecorded(t *testing.T) {
	seen := map[string]bool{}
	for _, line := range recordedJobs(t) {
		if seen[line.name()] || seen[line.Job.hash()] {
			t.Errorf("%s is there twice", line.name())
		}
		seen[line.name()], seen[line.Job.hash()] = true, true
		if line.Program != nil && (line.Unseen == nil || line.Unseen.Commit == "") {
			t.Errorf("%s was never scored before it was seen", line.name())
		}
		if line.Program == nil && line.Failed == "" {
			t.Errorf("%s has neither figures nor a failure", line.name())
		}
	}
}
