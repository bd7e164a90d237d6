//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/show/report"
	"plimsoll/internal/state/tier"
)

// TestTiersAreRefused where they cannot be what was asked for, before anything is allocated.
func TestTiersAreRefused(t *testing.T) {
	folder := t.TempDir()
	release, err := tier.Lock([]string{folder})
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	file := filepath.Join(folder, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const (
		small  = "rehearse --model ../../examples/config.json --steps 1"
		locked = "another service or rehearsal has its tier"
	)
	socket, free := filepath.Join(t.TempDir(), "socket"), " --tier "+t.TempDir()
	for line, want := range map[string]string{
		small + " --memory 1GiB":                                   "there is no --tier",
		small + " --tier " + folder + "/none":                      "does not exist",
		small + " --tier " + file:                                  "is a file, expected a folder",
		small + " --tier " + folder + ",":                          "--tier has an empty path",
		small + " --tier " + folder:                                locked,
		small + free + " --memory 1MiB":                            "--memory 1.00 MiB is too little",
		small + free + " --overlap forward --forward-ms 9":         "--tier is given, and --overlap forward",
		small + free + " --offload states":                         "--offload states is given, and --tier",
		"serve --socket " + socket + " --tier " + folder:           locked,
		"serve --socket " + socket + " --tier " + folder + "/none": "does not exist",
		"serve --socket " + socket + " --memory 1GiB":              "there is no --tier",
		"plan --model gpt2 --tier /mnt/a/,/mnt/a":                  "expected folders that differ",
		"plan --model gpt2 --optimizer plimsoll --tenants 0":       "expected a whole number from 1 on",
	} {
		_, stderr, code := runs(strings.Fields(line)...)
		if code != exitInput || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit code %d and %q, want %q", line, code, stderr, want)
		}
	}
}

// TestTierOnPaper: what plan says of a tier on paper is what a rehearsal takes on disks, and both say it.
func TestTierOnPaper(t *testing.T) {
	const model = " --model ../../examples/config.json --memory 32MiB --json --tier "
	var planned struct{ Tier report.PlannedTier }
	var rehearsed struct{ Tier report.RehearsedTier }
	for line, to := range map[string]any{
		"plan --gpu H100-80GB --optimizer plimsoll --precision bf16 --seq-len 64" + model + "/mnt/a,/mnt/b": &planned,
		"rehearse --steps 1" + model + t.TempDir() + "," + t.TempDir():                                      &rehearsed,
	} {
		out, stderr, code := runs(strings.Fields(line)...)
		if code != 0 {
			t.Fatalf("%s: exit code %d and %q", line, code, stderr)
		}
		if err := json.Unmarshal([]byte(out), to); err != nil {
			t.Fatal(err)
		}
	}
	// A rehearsal has a section for each kind of tensor, whose last chunks are rounded up to blocks of the disks, and
	// one part, so that half of the window need not be left to others.
	p, r := planned.Tier, rehearsed.Tier
	for what, bytes := range map[string][2]ledger.Bytes{"files": {p.Files, r.Files},
		"reads": {p.StepReads, r.StepReads}, "writes": {p.StepWrites, r.StepWrites}} {
		if ratio := float64(bytes[0]) / float64(bytes[1]); !(ratio > 0.999 && ratio < 1.001) {
			t.Errorf("%s: %v are planned, and %v rehearsed", what, bytes[0], bytes[1])
		}
	}
	if p.Disks != 2 || p.Lanes < 1 || p.Lanes > r.Lanes || p.Window > r.Window {
		t.Errorf("planned %+v, rehearsed %+v", p, r)
	}
}
