//go:build linux

package main

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/profile"
)

// profileOf writes a profile of this host in which the trainer of each rank has so many cores of its own.
func profileOf(t *testing.T, ranks, trainer int) (file string, h *host.Host) {
	t.Helper()
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	cores := len(h.UsableCores()) / ranks
	if cores <= trainer {
		t.Skipf("the test needs %d cores for each of %d ranks", trainer+1, ranks)
	}
	f := profile.File{}
	f.Put(profile.Profile{
		Topology: profile.TopologyOf(h), Limits: profile.LimitsOf(h), State: "split", Moments: "fp32",
		Overlap: profile.OverlapForward, Load: profile.LoadBuiltIn, ShareOfBest: 0.95,
		Command: []string{}, Curves: []profile.Curve{}, TrainerTimes: []profile.TrainerTimes{}, Links: []profile.Link{},
		Splits: []profile.Split{{Ranks: ranks, State: "split", Moments: "fp32", Trainer: trainer,
			Optimizer: cores - trainer, BytesPerSecond: 1e10, Slowdown: 1}},
	})
	file = filepath.Join(t.TempDir(), "host.json")
	if err := f.Save(file); err != nil {
		t.Fatal(err)
	}
	return file, h
}

// TestServeLeavesTheTrainersCores also after the service was killed.
func TestServeLeavesTheTrainersCores(t *testing.T) {
	file, h := profileOf(t, 1, 1)
	_, open := serving(t, "--host-profile", file)
	want := len(h.UsableCores()) - 1
	workers := func() int {
		s := open()
		overview, err := s.Overview()
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
		return len(overview.Sessions[0].CPUs)
	}
	if n := workers(); n != want {
		t.Errorf("%d workers, want %d", n, want)
	}
	checkAfterKill(t, open, func() error { return nil })
	if n := workers(); n != want {
		t.Errorf("%d workers after a kill, want %d", n, want)
	}
}

// TestRunSplitsCoresAsTheProfileSays, with two ranks where there are cores for them.
func TestRunSplitsCoresAsTheProfileSays(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	ranks := min(2, len(h.UsableCores())/2)
	file, _ := profileOf(t, max(1, ranks), 1)
	out, err := exec.Command(program(t), "run", "--nproc", fmt.Sprint(ranks), "--host-profile", file, "--",
		"sh", "-c", "echo $(nproc) of $PLIMSOLL_OPTIMIZER_CPUS").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := strings.Count(string(out), " of "); n < ranks || strings.Contains(string(out), " of \n") ||
		!strings.Contains(string(out), "each rank has 1 core for the trainer, ") {
		t.Errorf("the ranks had no cores of the trainer's own:\n%s", out)
	}
}

// TestFormatThatWasNotMeasured: tune leaves formats out where it has no time for them. The commands say which is
// missing, and how to get it.
func TestFormatThatWasNotMeasured(t *testing.T) {
	file, _ := profileOf(t, 1, 1)
	out, err := exec.Command(program(t), "rehearse", "--model", "../../examples/config.json", "--steps", "0",
		"--moments", "bf16", "--host-profile", file).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := "has no split for state split with bf16 moments: plimsoll tune with a larger --budget measures it"
	if !strings.Contains(string(out), want) {
		t.Errorf("%q is missing:\n%s", want, out)
	}
}
