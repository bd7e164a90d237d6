//go:build !linux

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"plimsoll/internal/show/report"
)

// TestVerbsThatNeedLinux: they say so, with the exit code of bad input, whatever their arguments.
func TestVerbsThatNeedLinux(t *testing.T) {
	for _, verb := range linuxVerbs {
		stdout, stderr, code := runs(verb.name, "--model", "gpt2")
		if code != exitInput || stdout != "" || !strings.Contains(stderr, "plimsoll "+verb.name+" needs Linux") {
			t.Errorf("%s: exit code %d: %s%s", verb.name, code, stdout, stderr)
		}
	}
	if _, stderr, code := runs("topology"); code != exitInput || !strings.Contains(stderr, "--fsroot") {
		t.Errorf("topology: exit code %d: %s", code, stderr)
	}
}

// TestPlanAnywhere plans, searches, and reads a recorded machine, a failure and a checkpoint.
func TestPlanAnywhere(t *testing.T) {
	stdout, stderr, code := runs("plan", "--model", "gpt2", "--gpu", "H100-80GB", "--json")
	var d report.PlanDocument
	if err := json.Unmarshal([]byte(stdout), &d); err != nil || code != exitDone {
		t.Fatalf("exit code %d, %v: %s%s", code, err, stdout, stderr)
	}
	for _, arguments := range [][]string{
		{"fit", "--model", "gpt2", "--gpu", "H100-80GB"},
		{"topology", "--fsroot", "../../examples/machines/two-socket.txtar"},
		{"explain", "../../examples/failures/see_memory_usage.log"},
		{"checkpoint", "inspect", "../../examples/checkpoints"},
		{"binding", "--ranks", "2", "--fsroot", "../../examples/machines/two-socket.txtar"},
	} {
		if stdout, stderr, code := runs(arguments...); code != exitDone || stdout == "" {
			t.Errorf("%s: exit code %d: %s%s", arguments, code, stdout, stderr)
		}
	}
}
