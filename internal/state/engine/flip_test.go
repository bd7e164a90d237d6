//go:build linux

package engine

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// flips counts what flips of bits have come to.
type flips struct{ tried, found, harmless, silent int }

func (f *flips) String() string {
	return fmt.Sprintf("%d flips: %d found, %d harmless, %d silent", f.tried, f.found, f.harmless, f.silent)
}

// flippedShard is a small shard of two sections and the state that its next step must leave.
type flippedShard struct {
	*Shard
	images [][]byte // of all arenas, at the instant of the flips
	want   []byte   // of all state, after that
	steps  int64
}

// newFlipped returns a shard with sums that has made two steps. If half is set, its third step is half made.
func newFlipped(t *testing.T, half bool) *flippedShard {
	f := kernel.Format{Algorithm: kernel.Adam, State: kernel.Split, Moments: kernel.MomentsInt8, Parameter: dtype.BF16,
		Gradient: dtype.BF16}
	sections := []shard.Section{{Elements: 700, Moments: kernel.MomentsInt8}, {Elements: 300, Group: 1}}
	available := kernel.Available()
	s, err := NewShard(ShardConfig{Layout: layout(f, 256, sections), CPUs: cpus(t, 1), Journal: true, Sums: true,
		Kernel: available[len(available)-1]})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	fillShard(s)
	makeSteps(t, s, 2)
	x := &flippedShard{Shard: s, steps: 3}
	if half {
		u := nextUpdate(s)
		s.assign()
		s.prepareUpdate(u, nil, false)
		s.begun.Add(1)
		s.updateUnit(0, 1)
	}
	for _, a := range s.arenas {
		x.images = append(x.images, bytes.Clone(a.Bytes()))
	}
	if other := attachOther(t, s, 1, kernel.Generic); half {
		other.Finish()
		other.Close()
	} else {
		other.Close()
		u := nextUpdate(s)
		if err := s.BeginThen(u, nil); err != nil {
			t.Fatal(err)
		}
		s.Wait()
	}
	if s.Steps() != 3 || s.Err() != nil {
		t.Fatalf("the third step is not made: %d steps, %v", s.Steps(), s.Err())
	}
	x.want = imageOf(s)
	return x
}

// restore writes the images back.
func (x *flippedShard) restore() {
	for i, a := range x.arenas {
		copy(a.Bytes(), x.images[i])
	}
}

// goOn attaches the shard, as the next service does, finishes or makes the third step and reads what it has left, as
// the step after it or a save does.
func (x *flippedShard) goOn() (err error) {
	files := map[string]*os.File{}
	for _, a := range x.arenas {
		files[a.Name()] = a.File()
	}
	s, err := AttachShard(x.config, files)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Guard(func() {
		if !s.Finish() && s.Err() == nil {
			u := nextUpdate(s)
			if err = s.BeginThen(u, nil); err != nil {
				panic(err)
			}
			s.Wait()
		}
		if s.Err() == nil && s.Steps() != x.steps {
			panic(fmt.Sprintf("the shard is at step %d", s.Steps()))
		}
		_ = s.ViewOf(s.config.Range(), func(shard.Chunk, kernel.Chunk) {}) // Guard returns it
	})
}

// flip flips a bit of an arena and goes on. It reports where the flip was not noticed and changed something.
func (x *flippedShard) flip(t *testing.T, count *flips, a *arena.Arena, bit int) {
	x.restore()
	a.Bytes()[bit/8] ^= 1 << (bit % 8)
	count.tried++
	switch err := x.goOn(); {
	case err != nil:
		count.found++
		if !strings.Contains(err.Error(), "arena "+path.Dir(a.Name())) || strings.Contains(err.Error(), "panic") {
			t.Errorf("%s, bit %d: the error does not say where: %v", a.Name(), bit, err)
		}
	case bytes.Equal(imageOf(x.Shard), x.want):
		count.harmless++
	default:
		count.silent++
		t.Errorf("%s, byte %d, bit %d: nobody has noticed", a.Name(), bit/8, bit%8)
	}
}

// TestEveryFlipOfAnArenaIsFound flips bits of every arena, between two steps and in the middle of one. Each is found
// before a step is published, or changes nothing. There are two exceptions, as documented: the trainer maps parameters
// and gradients and may write them, and an undo log has no checksum while a step is half made.
func TestEveryFlipOfAnArenaIsFound(t *testing.T) {
	tries := 10_000
	if testing.Short() {
		tries = 400
	}
	for _, half := range []bool{false, true} {
		x := newFlipped(t, half)
		random := rand.New(rand.NewPCG(1, 2))
		for _, a := range x.arenas {
			component := ledger.Component(path.Base(a.Name()))
			if slices.Contains([]ledger.Component{ledger.Parameters, ledger.Gradients}, component) {
				continue
			}
			for _, part := range x.parts(a, half) {
				bits, count := 8*int(part.Count), flips{}
				for _, bit := range random.Perm(bits)[:min(bits, tries)] {
					x.flip(t, &count, a, 8*int(part.First)+bit)
				}
				t.Logf("%s, bytes %d to %d, in the middle of a step: %t: %v", a.Name(), part.First, part.End(), half,
					&count)
			}
		}
	}
}

// parts returns the ranges of an arena whose bytes are flipped: the slots of a journal are a part of their own.
func (x *flippedShard) parts(a *arena.Arena, half bool) []shard.Range {
	all := shard.Range{Count: int64(len(a.Bytes()))}
	if path.Base(a.Name()) != string(ledger.StepJournal) {
		return []shard.Range{all}
	}
	slots := x.config.journalLayout().slotsBegin
	parts := []shard.Range{{Count: slots}, shard.Between(slots, all.Count)}
	if half {
		parts = parts[:1]
	}
	return parts
}

// TestFlipStopsStep: a process that finds a wrong sum in its own step publishes nothing, says where, and makes no
// step any more. Neither does the next process.
func TestFlipStopsStep(t *testing.T) {
	x := newFlipped(t, false)
	for _, half := range []int{0, 1} {
		x.restore()
		s := attachOther(t, x.Shard, 1+half, kernel.Generic)
		moments := s.Arena(ledger.ExpAvg).Bytes()
		moments[300] ^= 4
		var told atomic.Int32
		if err := s.BeginThen(nextUpdate(s), func() { told.Add(1) }); err != nil {
			t.Fatal(err)
		}
		s.Wait()
		s.WaitRange(s.config.Range())
		want := "exp_avg: chunk 1 (elements 256 to 512), 256 bytes from 256 on, has another sum after step 2"
		if err := s.Err(); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), want) || s.Steps() != 2 {
			t.Errorf("the error is %v at step %d, want %q", err, s.Steps(), want)
		}
		if err := s.BeginThen(nextUpdate(s), nil); !errors.Is(err, ErrDamaged) {
			t.Errorf("another step begins: %v", err)
		}
		if s.Close(); told.Load() != 1 { // it waits for the workers
			t.Errorf("the end was told %d times", told.Load())
		}
		if err := x.goOn(); !errors.Is(err, ErrDamaged) {
			t.Errorf("another process goes on: %v", err)
		}
	}
}

// TestFlipBeforeTheFirstStep: a new shard holds zeros, and a bit that flips in them is found as any other.
func TestFlipBeforeTheFirstStep(t *testing.T) {
	config := newFlipped(t, false).config
	for _, component := range []ledger.Component{ledger.MasterWeightsLow, ledger.ExpAvg, ledger.ExpAvgSq} {
		s, err := NewShard(config)
		if err != nil {
			t.Fatal(err)
		}
		s.Arena(component).Bytes()[17] ^= 8
		if err := s.BeginThen(nextUpdate(s), nil); err != nil {
			t.Fatal(err)
		}
		s.Wait()
		if err := s.Err(); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), string(component)) {
			t.Errorf("%s: the error is %v", component, err)
		}
		s.Close()
	}
}

// TestScrubFindsFlips: the scrubber finds a flip in a bounded number of calls, and judges nothing while a step changes
// the shard.
func TestScrubFindsFlips(t *testing.T) {
	x := newFlipped(t, false)
	for range 100 {
		x.Scrub()
	}
	if err := x.Err(); err != nil {
		t.Fatal(err)
	}
	x.Arena(ledger.ExpAvgSq).Bytes()[699] ^= 1
	for range x.config.Chunks {
		x.Scrub()
	}
	if err := x.Err(); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "exp_avg_sq: chunk 2") {
		t.Errorf("the error is %v", err)
	}
}

// TestDamageIsNotSaved: neither a snapshot nor a reader gets a chunk whose sum is wrong.
func TestDamageIsNotSaved(t *testing.T) {
	x := newFlipped(t, false)
	x.Arena(ledger.MasterWeightsLow).Bytes()[1000] ^= 1
	seen := 0
	err := x.ViewOf(x.config.Range(), func(at shard.Chunk, _ kernel.Chunk) { seen |= 1 << at.Number })
	if !errors.Is(err, ErrDamaged) || seen>>1&1 != 0 {
		t.Errorf("chunks %b are read: %v", seen, err)
	}
	snapshot := x.Snapshot(func(shard.Chunk, kernel.Chunk) error { return nil })
	if err := snapshot.Run(t.Context(), nil); !errors.Is(err, ErrDamaged) {
		t.Errorf("a snapshot: %v", err)
	}
}
