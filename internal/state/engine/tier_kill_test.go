//go:build linux

package engine

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/tier/tiertest"
)

// stopAt leaves the memory and the disk of a shard as a process leaves them that is killed before a store of a number.
// It reports whether there are so many stores.
func stopAt(s *Shard, disk *tiertest.Disk, store int, body func()) (now *tiertest.Disk, stopped bool) {
	var images [][]byte
	number := 0
	checked.BeforeStore = func(*checked.Word) {
		if number == store {
			now = disk.Copy()
			for _, a := range s.arenas {
				images = append(images, bytes.Clone(a.Bytes()))
			}
		}
		number++
	}
	body()
	checked.BeforeStore = nil
	if images == nil {
		return nil, false
	}
	for i, a := range s.arenas {
		copy(a.Bytes(), images[i])
	}
	s.config.Tier.Disk = now
	return now, true
}

// TestAKilledRollBackIsFinished: a process that is killed while it goes back leaves the state of one step or the other,
// at any instant.
func TestAKilledRollBackIsFinished(t *testing.T) {
	c := crashCases()[0].small()
	want := c.statesOf(t, 4)
	for store := 0; ; store++ {
		disk := tiertest.New()
		if _, err := c.run(t, disk, 3); err != nil {
			t.Fatal(err)
		}
		s := openOnTier(t, c.onTier(t, disk, 2, "/a", "/b"))
		if _, err := s.Restore(); err != nil {
			t.Fatal(err)
		}
		if _, stopped := stopAt(s, disk, store, func() {
			if err := s.RollBack(2); err != nil {
				t.Fatal(err)
			}
		}); !stopped {
			t.Logf("killed before each of %d stores", store)
			break
		}
		next := attachOther(t, s, 1, kernel.Generic)
		next.Finish()
		for range 2 {
			if steps := next.Steps(); !bytes.Equal(stateOf(t, next), want[steps]) {
				t.Fatalf("killed before store %d: step %d, and not its bits", store, steps)
			}
			if err := stepOn(next); err != nil {
				t.Fatalf("killed before store %d: %v", store, err)
			}
		}
		next.Close()
		s.Close()
	}
}

// TestWhatANextProcessFindsIsOnTheDisk: a process is killed after it has written a commit, and before that is on the
// disk. The next process finds the step and tells of it. Then the power goes off.
func TestWhatANextProcessFindsIsOnTheDisk(t *testing.T) {
	c := crashCases()[0].small()
	want := c.statesOf(t, 3)
	whole := tiertest.New()
	if _, err := c.run(t, whole, 1); err != nil {
		t.Fatal(err)
	}
	ahead := 0
	for call := range whole.Calls() {
		for seed := range uint64(4) {
			disk := tiertest.New()
			disk.At, disk.Fault, disk.Err = call, tiertest.Fail, errors.New("killed")
			seen, err := c.run(t, disk, 1)
			if err == nil {
				continue
			}
			found := c.isWhole(t, disk, want, "after the kill")
			if found > seen {
				ahead++
			}
			rebooted := disk.Reboot(rand.New(rand.NewPCG(uint64(call), seed)))
			after := c.isWhole(t, rebooted, want, "after the loss of power")
			if after < found {
				t.Fatalf("killed at call %d, seed %d: a process has found step %d, and after the power was lost there "+
					"is step %d", call, seed, found, after)
			}
		}
	}
	if ahead == 0 {
		t.Error("no process has found a step that the one before had not finished: that proves little")
	}
}

// TestFinishEndsWithAnErrorOfTheDisk: a killed process leaves a chunk in the window that the files lack. If the next
// one cannot write it, it finishes and commits nothing.
func TestFinishEndsWithAnErrorOfTheDisk(t *testing.T) {
	c := crashCases()[0].small()
	want := c.statesOf(t, 2)
	refused := 0
	for store := 0; ; store++ {
		for late := range 12 {
			disk := tiertest.New()
			if _, err := c.run(t, disk, 1); err != nil {
				t.Fatal(err)
			}
			s := openOnTier(t, c.onTier(t, disk, 1, "/a", "/b"))
			if _, err := s.Restore(); err != nil {
				t.Fatal(err)
			}
			setGradientsOf(s, 2)
			disk, stopped := stopAt(s, disk, store, func() {
				if err := beginNext(s); err != nil {
					t.Fatal(err)
				}
				s.Wait()
			})
			if !stopped {
				t.Logf("killed before each of %d stores; %d errors", store, refused)
				if refused == 0 {
					t.Error("that proves little")
				}
				return
			}
			refused += finishWithError(t, disk, s, late, want)
			s.Close()
		}
	}
}

// finishWithError has the next process finish a step while a call of the disk fails, and the one after it without.
func finishWithError(t *testing.T, disk *tiertest.Disk, s *Shard, late int, want [][]byte) (refused int) {
	t.Helper()
	next := attachOther(t, s, 1, kernel.Generic)
	disk.At, disk.Fault, disk.Err = disk.Calls()+late, tiertest.Fail, errors.New("no space left on device")
	next.Finish()
	if next.Err() != nil {
		refused = 1
		if next.Steps() != 1 {
			t.Fatalf("step %d is finished, with the error %v", next.Steps(), next.Err())
		}
	}
	disk.At = -1
	next.Close()
	last := attachOther(t, s, 1, kernel.Generic)
	defer last.Close()
	last.Finish()
	if err := last.Err(); err != nil || !bytes.Equal(stateOf(t, last), want[last.Steps()]) {
		t.Fatalf("step %d, and not its bits: %v", last.Steps(), err)
	}
	return refused
}

// TestASnapshotFailsWithDamage that its own goroutine finds.
func TestASnapshotFailsWithDamage(t *testing.T) {
	x := newFlipped(t, false)
	snapshot := x.Snapshot(nil)
	journal := x.journal().Bytes()
	journal[24+len(x.config.fingerprint())]++ // how many updates were finished
	if err := snapshot.Run(t.Context(), nil); !errors.Is(err, ErrDamaged) {
		t.Errorf("the error is %v", err)
	}
	x.restore()
}
