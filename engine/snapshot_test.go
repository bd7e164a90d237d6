package engine

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// snapshotUnit is the copy of a unit that a saver keeps.
type snapshotUnit struct {
	Unit
	changed [][]byte
}

func keep(s *Shard, u Unit) snapshotUnit {
	kept := snapshotUnit{Unit: u}
	for _, stream := range changed(s.config.Format, &u.State) {
		kept.changed = append(kept.changed, bytes.Clone(stream))
	}
	return kept
}

// TestSnapshotsAreOfOneInstant takes snapshots while steps run, with a saver
// that is now faster and now slower than the workers.
func TestSnapshotsAreOfOneInstant(t *testing.T) {
	s := slowCase().newShard(t, true)
	rapid.Check(t, func(t *rapid.T) {
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		pause := time.Duration(random.IntN(20)) * time.Microsecond
		makeSteps(t, s, 1)
		before := map[int64]snapshotUnit{}
		for unit := range s.chunks {
			u := keep(s, s.unit(unit))
			before[u.First] = u
		}
		var mutex sync.Mutex
		taken := map[int64]snapshotUnit{}
		x := s.Snapshot(func(u Unit) error {
			kept := keep(s, u)
			if random := rand.IntN(50); random == 0 {
				time.Sleep(pause)
			}
			mutex.Lock()
			defer mutex.Unlock()
			if _, twice := taken[u.First]; twice {
				t.Errorf("element %d was handed out twice", u.First)
			}
			taken[u.First] = kept
			return nil
		})
		done := make(chan error, 1)
		startLate := random.IntN(4) == 0
		if !startLate {
			go func() { done <- x.Run(context.Background(), nil) }()
		}
		makeSteps(t, s, int64(random.IntN(3)))
		if startLate {
			done <- x.Run(context.Background(), nil)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if len(taken) != len(before) {
			t.Fatalf("%d chunks were handed out of %d", len(taken), len(before))
		}
		for first, want := range before {
			got := taken[first]
			if got.Section != want.Section || got.MomentsFirst != want.MomentsFirst || got.Moments != want.Moments {
				t.Fatalf("the unit at %d is %v, want %v", first, got.Unit, want.Unit)
			}
			for i, stream := range want.changed {
				if !bytes.Equal(got.changed[i], stream) {
					t.Fatalf("stream %d of the unit at %d is not as it was at the snapshot", i, first)
				}
			}
		}
	})
}

// TestUnitsSayWhereTheirMomentsAre rebuilds the arenas from units.
func TestUnitsSayWhereTheirMomentsAre(t *testing.T) {
	s := slowCase().newShard(t, true)
	makeSteps(t, s, 2)
	got := map[ledger.Component][]byte{}
	put := func(component ledger.Component, stream []byte, at int64) {
		if got[component] == nil {
			got[component] = make([]byte, s.Arena(component).Size())
		}
		copy(got[component][at:], stream)
	}
	suffix := map[kernel.MomentType]ledger.Component{kernel.MomentsFP32: "_fp32", kernel.MomentsBF16: "_bf16",
		kernel.MomentsInt8: ""}
	err := s.Snapshot(func(u Unit) error {
		put("exp_avg"+suffix[u.Moments], u.State.Moments[0].Data, u.MomentsFirst*u.Moments.Size())
		put("exp_avg_sq"+suffix[u.Moments], u.State.Moments[1].Data, u.MomentsFirst*u.Moments.Size())
		if u.Moments == kernel.MomentsInt8 {
			put("moment_headers", bytesOf(u.State.Headers), 2*u.State.First/kernel.Block)
		}
		return nil
	}).Run(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 7 {
		t.Errorf("%d arenas were put together, want 7", len(got))
	}
	for component, whole := range got {
		if !bytes.Equal(whole, s.Arena(component).Bytes()) {
			t.Errorf("%s is not what its units say", component)
		}
	}
}

// TestSnapshotsEndAtTheFirstError, in whichever goroutine: a step goes on without them.
func TestSnapshotsEndAtTheFirstError(t *testing.T) {
	s := slowShard(t)
	want := errors.New("no space left")
	cancelled, cancel := context.WithCancel(context.Background())
	defer cancel()
	for name, test := range map[string]struct {
		context context.Context
		step    bool
		want    error
	}{
		"the saver's":  {context.Background(), false, want},
		"a worker's":   {context.Background(), true, want},
		"cancellation": {cancelled, false, context.Canceled},
	} {
		var mutex sync.Mutex
		calls := 0
		x := s.Snapshot(func(u Unit) error {
			mutex.Lock()
			defer mutex.Unlock()
			if calls++; calls > 10 {
				cancel()
				if test.want == want {
					return want
				}
			}
			return nil
		})
		if test.step {
			makeSteps(t, s, 1)
		}
		if err := x.Run(test.context, nil); !errors.Is(err, test.want) {
			t.Errorf("%s: the error is %v, want %v", name, err, test.want)
		}
		after := calls
		makeSteps(t, s, 1)
		if calls != after || calls > 13 {
			t.Errorf("%s: copy was called %d times, and %d times when it had failed", name, after, calls-after)
		}
	}
}

func TestSnapshotsAreRefusedWhileAStepRuns(t *testing.T) {
	s := slowShard(t)
	refused := func(when string) {
		defer func() {
			if recover() == nil {
				t.Errorf("a snapshot %s was not refused", when)
			}
		}()
		s.Snapshot(func(Unit) error { return nil })
	}
	if err := beginNext(s); err != nil {
		t.Fatal(err)
	}
	refused("while a step is under way")
	s.Wait()
	x := s.Snapshot(func(Unit) error { return nil })
	refused("beside another")
	if err := x.Run(context.Background(), nil); err != nil {
		t.Error(err)
	}
}
