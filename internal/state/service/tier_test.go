//go:build linux

package service

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// onTier returns the variables of a service with a tier in some folders, and 64 MiB of memory for it.
func onTier(folders ...string) []string {
	return []string{tierVariable + "=" + strings.Join(folders, ",") + " 64"}
}

// TestATierOutlivesTheService and its keeper, and all memory. The next service goes on with the same bits.
func TestATierOutlivesTheService(t *testing.T) {
	of := func(state, moments, parameter string) *protocol.Document {
		return testDocument(small, func(d *protocol.Document) {
			d.State, d.Moments, d.Parameter, d.Parameters[1].Moments = state, moments, parameter, "fp32"
		})
	}
	for _, d := range []*protocol.Document{of("split", "fp32", "bf16"), of("split24", "bf16", "bf16"),
		of("split", "int8", "bf16"), of("fp32", "fp32", "fp32"), of("fp32", "int8", "fp16")} {
		t.Run(formatName(d), func(t *testing.T) {
			folders := []string{t.TempDir(), t.TempDir()}
			r := startService(t, onTier(folders...)...)
			s := begun(t, r.Socket, d)
			mustStep(t, s, 3)
			print := fingerprint(t, s)
			if err := s.Detach(); err != nil {
				t.Fatal(err)
			}
			r.end()
			r = startService(t, onTier(folders...)...)
			s = mustOpen(t, r.Socket, d)
			if !s.Welcome.Attached || !s.Welcome.Initialized || s.Welcome.Step != 3 || fingerprint(t, s) != print {
				t.Fatalf("the next service has %+v, %s, want %s", s.Welcome, fingerprint(t, s), print)
			}
			mustStep(t, s, 5)
			if got, want := fingerprint(t, s), undisturbed(t, d, 5); got != want {
				t.Errorf("after two more steps the state is %s, want %s", got, want)
			}
		})
	}
}

// TestATierIsCounted: the window is in the ledger, and what a step moves is in the status.
func TestATierIsCounted(t *testing.T) {
	r := startService(t, onTier(t.TempDir())...)
	s := begun(t, r.Socket, testDocument())
	mustStep(t, s, 1)
	first := r.overview(t)
	mustStep(t, s, 3)
	last := r.overview(t)
	before, status := first.Sessions[0].Tier, last.Sessions[0].Tier
	if status == nil || status.Window > 32*ledger.MiB || len(status.Folders) != 1 {
		t.Fatalf("the tier is %+v", status)
	}
	if moved := ledger.Bytes(status.Read - before.Read); moved != 2*status.StepReads {
		t.Errorf("two steps have read %v, and a step reads %v", moved, status.StepReads)
	}
	if moved := ledger.Bytes(status.Written - before.Written); moved != 2*status.StepWrites {
		t.Errorf("two steps have written %v, and a step writes %v", moved, status.StepWrites)
	}
	if window := measuredBytes(t, last, ledger.TierWindow); window < status.Window {
		t.Errorf("the window has %v resident of %v", window, status.Window)
	}
	for _, c := range []ledger.Component{ledger.ExpAvg, ledger.MasterWeightsLow} {
		for _, line := range last.Ledger {
			if strings.Contains(string(line.Component), string(c)) {
				t.Errorf("%s is in memory", c)
			}
		}
	}
}

// TestATierIsRemovedWithItsState, unless the client keeps it.
func TestATierIsRemovedWithItsState(t *testing.T) {
	folder := t.TempDir()
	r := startService(t, onTier(folder)...)
	left := func() (names []string) {
		found, _ := filepath.Glob(filepath.Join(folder, "*"))
		return found
	}
	s := begun(t, r.Socket, testDocument())
	if err := closeWith(s, protocol.GiveBack|protocol.KeepTier); err != nil || len(left()) != 2 {
		t.Fatalf("%v; the folder has %v", err, left())
	}
	if s = mustOpen(t, r.Socket, testDocument()); !s.Welcome.Attached {
		t.Error("the state was not found")
	}
	if err := closeWith(s, protocol.GiveBack); err != nil || len(left()) != 0 {
		t.Fatalf("%v; the folder has %v", err, left())
	}
	if s = mustOpen(t, r.Socket, testDocument()); s.Welcome.Attached {
		t.Error("a state was found that was given back")
	}
}

// rollBack goes back to the state before the last step.
func rollBack(s *servicetest.Session, step uint64) error {
	return s.Do(protocol.SetStep, protocol.SetStepBody{Step: step, Flags: protocol.RollBack}.Encode())
}

// closeWith closes a session with flags.
func closeWith(s *servicetest.Session, flags uint32) error {
	err := s.Do(protocol.Close, protocol.Encode(flags))
	return errors.Join(err, s.Detach())
}

// TestATierOfAnotherSessionIsRefused by name, and so is what a tier does not do.
func TestATierOfAnotherSessionIsRefused(t *testing.T) {
	folder := t.TempDir()
	r := startService(t, onTier(folder)...)
	s := begun(t, r.Socket, testDocument())
	wantError(t, s.BeginArriving(1, 1, hyperparametersOf("adamw")...), protocol.Refused,
		"step with flags 0x4: a session on a tier makes no step before its gradients are there*")
	wantError(t, rollBack(s, 0), protocol.OutOfOrder, "*only a state that was found on a tier can go back by a step*")
	if err := closeWith(s, protocol.GiveBack|protocol.KeepTier); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*protocol.Document){
		"it is of session rank0/bf16 of job test, and this is session rank0/bf16 of job another": func(
			d *protocol.Document) {
			d.Job = "another"
		},
		"it is of this session, but differs: optimizer is lion, and was adamw": func(d *protocol.Document) {
			d.Optimizer = "lion"
		},
	} {
		_, err := servicetest.Open(r.Socket, testDocument(change))
		wantError(t, err, protocol.Refused, "*"+want+"*")
	}
	_, err := servicetest.Hold(r.Socket, holdDocument())
	wantError(t, err, protocol.Refused, "hold: this service has a tier (--tier)*")
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	_, err = servicetest.Open(r.Socket, testDocument())
	wantError(t, err, protocol.DoesNotFit, "*the tier's folder "+folder+" does not exist*")
}

// TestAWindowHasToHaveRoom for a chunk of each part of each rank.
func TestAWindowHasToHaveRoom(t *testing.T) {
	r := startService(t, tierVariable+"="+t.TempDir()+" 1")
	_, err := servicetest.Open(r.Socket, testDocument())
	wantError(t, err, protocol.DoesNotFit, "*raise --memory")
}

// TestADamagedTierIsNotOpened: the error names the file, nothing stays in memory, and the files stay as they are.
func TestADamagedTierIsNotOpened(t *testing.T) {
	folder := t.TempDir()
	r := startService(t, onTier(folder)...)
	s := begun(t, r.Socket, testDocument())
	mustStep(t, s, 2)
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	r.end()
	path := filepath.Join(folder, "rank00000-bf16.1-of-1.data")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damaged := slices.Clone(whole)
	for at := 5000; at < len(damaged); at += 20_000 { // in each part of each chunk
		damaged[at] ^= 1
	}
	if err := os.WriteFile(path, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	r = startService(t, onTier(folder)...)
	_, err = servicetest.Open(r.Socket, testDocument())
	// Workers read side by side: any of them may be the first to find a part.
	wantError(t, err, protocol.Storage, "open: the tier of rank 0: "+path+": the * of chunk *have another checksum"+
		"*the tier keeps the state of step 2")
	if o := r.overview(t); len(o.Sessions)+len(o.SetAside) > 0 {
		t.Errorf("the service has %v and %v", o.Sessions, o.SetAside)
	}
	await(t, "the keeper to forget the arenas", func() bool {
		kept := memfds(t, os.Getpid())
		for _, file := range kept {
			_ = file.Close()
		}
		return len(kept) == 0
	})
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	if s = mustOpen(t, r.Socket, testDocument()); s.Welcome.Step != 2 || fingerprint(t, s) !=
		undisturbed(t, testDocument(), 2) {
		t.Errorf("the files that are whole again have %+v", s.Welcome)
	}
}

// TestRanksGoBackToOneStep where the power was lost after some of them had committed a step.
func TestRanksGoBackToOneStep(t *testing.T) {
	folder := t.TempDir()
	r := startService(t, onTier(folder)...)
	s := begun(t, r.Socket, tiny(0, 1))
	mustStep(t, s, 4)
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	r.end()
	r = startService(t, onTier(folder)...)
	mustOpen(t, r.Socket, tiny(0, 1))
	r.killAndWait(t) // the next service attaches to what this one has found
	s = mustOpen(t, r.Socket, tiny(0, 1))
	wantError(t, rollBack(s, 1), protocol.Refused, "*it has no state of step 1: the last is of step 4")
	if err := rollBack(s, 3); err != nil {
		t.Fatal(err)
	}
	if got, want := fingerprint(t, s), undisturbed(t, tiny(0, 1), 3); got != want {
		t.Errorf("the state is %s, want %s", got, want)
	}
	s.Welcome.Step = 3
	mustStep(t, s, 5)
	if got, want := fingerprint(t, s), undisturbed(t, tiny(0, 1), 5); got != want {
		t.Errorf("after two more steps the state is %s, want %s", got, want)
	}
}
