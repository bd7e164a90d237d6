package main

import (
	"math"
	"os/exec"
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
	program := filepath.Join(t.TempDir(), "plimsoll")
	if said, err := exec.Command("go", "build", "-o", program, "../plimsoll").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	c := command{plimsoll: program, python: python, catalog: "../../internal/input/model/catalog", gpu: "H200"}
	got := c.compare(row{name: "Trainer", model: "qwen2.5-0.5b", sequence: 1024, arguments: plain})
	if got.failed != "" {
		t.Fatal(got)
	}
	a, r := apart(got.hand.allocated, got.program.allocated), apart(got.hand.reserved, got.program.reserved)
	if math.Abs(a) > 2 || math.Abs(r) > 2 || got.program.allocated < 3*ledger.GiB {
		t.Error(got)
	}
}

// TestRows finds every job's model, and no job twice.
func TestRows(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range rows() {
		if seen[r.name+r.model] {
			t.Errorf("%s of %s is there twice", r.name, r.model)
		}
		seen[r.name+r.model] = true
		if found, _ := filepath.Glob("../../internal/input/model/catalog/" + r.model + ".json"); len(found) == 0 {
			t.Errorf("%s is not in the catalog", r.model)
		}
	}
	if len(seen) < 40 {
		t.Errorf("%d jobs", len(seen))
	}
}

func TestPage(t *testing.T) {
	of := func(hand, program ledger.Bytes) compared {
		return compared{row: row{name: "n", model: "m"}, hand: peaks{allocated: hand, reserved: hand},
			program: peaks{allocated: program, reserved: program}}
	}
	text := page([]compared{of(101, 100), of(110, 100), of(100, 100), {row: row{name: "x"}, failed: "it failed"}})
	want := "Of 4 jobs, allocated bytes are within 2 % for 2, and reserved bytes for 2; half are within 1.0 % and " +
		"1.0 %.\n"
	if !strings.Contains(text, want) {
		t.Errorf("the page is\n%s", text)
	}
}
