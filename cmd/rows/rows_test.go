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
	text := page([]compared{of(101, 100), of(110, 100), of(100, 100), {row: row{Name: "x"}, failed: "it failed"}})
	want := "Of 4 jobs, allocated bytes are within 2 % for 2, and reserved bytes for 2; half are within 1.0 % and " +
		"1.0 %.\n"
	if !strings.Contains(text, want) {
		t.Errorf("the page is\n%s", text)
	}
}
