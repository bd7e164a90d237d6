//go:build linux

package engine

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// beginNextArriving is beginNext for a step whose gradients are not there.
func beginNextArriving(s *Shard) error {
	return s.BeginArriving(nextUpdate(s), nil)
}

// arriveAnyhow has all gradients arrive in random ranges, in random order, some of them more than once. It calls write
// before the gradients of a range arrive. The sections that the step leaves alone get none.
func arriveAnyhow(s *Shard, random *rand.Rand, write func(shard.Range)) {
	if err := s.LeaveMissing(leftNext(s)...); err != nil {
		panic(err)
	}
	var ranges []shard.Range
	for first := int64(0); first < s.config.Elements; {
		count := min(1+random.Int64N(1+random.Int64N(s.config.Elements)), s.config.Elements-first)
		ranges = append(ranges, shard.Range{First: first, Count: count})
		first += count
	}
	random.Shuffle(len(ranges), func(i, j int) { ranges[i], ranges[j] = ranges[j], ranges[i] })
	for i, r := range ranges {
		write(r)
		s.GradientsArrived(r)
		if random.IntN(4) == 0 {
			time.Sleep(20 * time.Microsecond) // others may wait meanwhile
		}
		if again := ranges[random.IntN(i+1)]; random.IntN(4) == 0 && s.MissesGradients() {
			half := again.Count / 2
			s.GradientsArrived(shard.Range{First: again.First + half, Count: again.Count - half})
		}
	}
}

func writeNothing(shard.Range) {}

// TestGradientsArriveInTheStep writes gradients while the step is under way, and waits for random ranges. The bits are
// those of a step whose gradients are there.
func TestGradientsArriveInTheStep(t *testing.T) {
	for _, c := range crashCases() {
		t.Run(c.name, func(t *testing.T) {
			plain, s := c.newShard(t, false), c.newShard(t, true)
			gradients := bytes.Clone(s.gradient.Data)
			size := int64(s.gradient.Type.Size())
			rapid.Check(t, func(t *rapid.T) {
				random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				for i := range s.gradient.Data {
					s.gradient.Data[i] = byte(random.Int())
				}
				s.SetOrder(randomRanges(s, random, 2))
				if err := beginNextArriving(s); err != nil {
					t.Fatal(err)
				}
				wait := waitAnywhere(s, random)
				arriveAnyhow(s, random, func(r shard.Range) {
					copy(s.gradient.Data[r.First*size:r.End()*size], gradients[r.First*size:])
				})
				s.Wait()
				wait()
				makeSteps(t, plain, 1)
				if !bytes.Equal(imageOf(s), imageOf(plain)) {
					t.Fatalf("step %d: the state is another than if the gradients had been there", s.Steps())
				}
			})
		})
	}
}

// TestBrokenOffArrivals breaks a step off while gradients are missing. Another process hears of all gradients again,
// and ends with the same bits.
func TestBrokenOffArrivals(t *testing.T) {
	for _, c := range crashCases() {
		t.Run(c.name, func(t *testing.T) {
			s := c.newShard(t, true)
			makeSteps(t, s, 1)
			before := imageOf(s)
			makeSteps(t, s, 1)
			after := imageOf(s)
			rapid.Check(t, func(t *rapid.T) {
				random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				s.arriving.Store(2)
				other := breakSecondStepOff(t, s, before, random)
				defer other.Close()
				if other.Finish() != !other.isUnderway() {
					t.Fatal("a step that waits for gradients is finished, or the other way round")
				}
				if other.MissesGradients() {
					if beginNext(other) == nil {
						t.Fatal("a step began before the one under way was finished")
					}
					arriveAnyhow(other, random, writeNothing)
				}
				if other.Wait(); other.Steps() != 2 {
					t.Fatalf("at step %d, want 2", other.Steps())
				}
				if !bytes.Equal(imageOf(s), after) {
					t.Fatal("the state is another than after a step that is not broken off")
				}
			})
		})
	}
}

// TestMissingGradientsAreKnown goes through a step whose gradients arrive in two parts.
func TestMissingGradientsAreKnown(t *testing.T) {
	s := oneWorker(t) // ten chunks of 100
	told := 0
	scale, optimizers := nextStep(s)
	begun := time.Now()
	u := Update{Step: 1, GradScale: scale, Optimizers: optimizers}
	if err := s.BeginArriving(u, func() { told++ }); err != nil {
		t.Fatal(err)
	}
	first := shard.Range{First: 0, Count: 250}
	s.GradientsArrived(first)
	s.WaitRange(shard.Range{First: 0, Count: 200})
	await(t, func() bool { // it only waits, as the watchdog of the service must see
		number, left := s.Underway()
		return number == 0 && left == 0
	})
	waits := time.Now()
	time.Sleep(20 * time.Millisecond)
	if number, left := s.Underway(); number != 0 || left != 0 {
		t.Errorf("step %d, of which %d chunks are left, is being made; it waits for gradients", number, left)
	}
	for _, c := range []struct{ within, missing shard.Range }{
		{shard.Range{First: 0, Count: 150}, shard.Range{}},
		{shard.Range{First: 150, Count: 60}, shard.Range{First: 250, Count: 50}},
		{shard.Range{First: 610, Count: 10}, shard.Range{First: 600, Count: 100}},
	} {
		if missing, ok := s.Misses(c.within); missing.Count != c.missing.Count || ok != (missing.Count > 0) ||
			ok && missing != c.missing {
			t.Errorf("%v misses %v (%v), want %v", c.within, missing, ok, c.missing)
		}
	}
	if !s.MissesGradients() || s.Steps() != 0 || told != 0 {
		t.Errorf("a step without all gradients is at %d, misses gradients: %v", s.Steps(), s.MissesGradients())
	}
	waited := time.Since(waits)
	s.GradientsArrived(shard.Range{First: 250, Count: 750})
	s.Wait()
	s.wait()
	if s.MissesGradients() || s.Steps() != 1 || told != 1 {
		t.Errorf("the step is at %d, misses gradients: %v; told %d times", s.Steps(), s.MissesGradients(), told)
	}
	if took, all := s.UpdateTime(), time.Since(begun); took <= 0 || took > all-waited {
		t.Errorf("ten chunks were updated in %v of %v, with a pause of %v", took, all, waited)
	}
	for block := range s.summed {
		if s.summed[block].Load() {
			t.Error("the norm was added up of gradients of a step under way")
		}
	}
}

// TestAwaitedChunksWaitForGradients: being urgent does not replace gradients.
func TestAwaitedChunksWaitForGradients(t *testing.T) {
	s := oneWorker(t)
	if err := beginNextArriving(s); err != nil {
		t.Fatal(err)
	}
	var waiting sync.WaitGroup
	waiting.Go(func() { s.WaitRange(shard.Range{First: 500, Count: 500}) })
	await(t, s.queue.urgent.waiting.Load)
	s.GradientsArrived(shard.Range{Count: 100})
	s.wait()
	for unit := range s.done {
		if s.isDone(unit) != (unit == 0) {
			t.Errorf("chunk %d is done: %v; only the gradients of chunk 0 are there", unit, s.isDone(unit))
		}
	}
	s.GradientsArrived(s.config.Range())
	waiting.Wait()
}

// TestSnapshotsWhileGradientsArrive: a save does not wait for gradients, which may come from a client that waits for
// the save. It is of the state before the step.
func TestSnapshotsWhileGradientsArrive(t *testing.T) {
	s := oneWorker(t)
	before, copied := imageOf(s), map[int64][][]byte{}
	var mutex sync.Mutex
	x := s.Snapshot(func(at shard.Chunk, state kernel.Chunk) error {
		mutex.Lock()
		defer mutex.Unlock()
		copied[at.First] = copyStreams(s, state)
		return nil
	})
	if err := beginNextArriving(s); err != nil {
		t.Fatal(err)
	}
	s.GradientsArrived(shard.Range{Count: 450})
	if err := x.Run(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	s.GradientsArrived(shard.Range{First: 450, Count: 550})
	s.Wait()
	s.wait()
	restoreImage(s, before)
	for unit := range s.config.Chunks {
		c := s.chunk(unit)
		if !slices.EqualFunc(copied[c.First], copyStreams(s, c.state()), bytes.Equal) {
			t.Errorf("chunk %d was copied in another state than before the step", unit)
		}
	}
}

// TestAbandonedSteps gives steps up before and after a chunk has had them.
func TestAbandonedSteps(t *testing.T) {
	s := oneWorker(t)
	makeSteps(t, s, 3)
	for arrived, torn := range map[int64]bool{99: false, 100: true} {
		if err := beginNextArriving(s); err != nil {
			t.Fatal(err)
		}
		s.GradientsArrived(shard.Range{Count: arrived})
		if got := s.Abandon(); got != torn {
			t.Errorf("the state is torn: %v, want %v", got, torn)
		}
		if s.Wait(); s.Steps() != 3 || s.isUnderway() {
			t.Errorf("a step that was given up counts: %d", s.Steps())
		}
	}
	makeSteps(t, s, 1) // the next step is made as always
	if s.Steps() != 4 {
		t.Errorf("at step %d", s.Steps())
	}
}

// TestArrivingAllocatesNothing covers a step whose gradients arrive in many ranges.
func TestArrivingAllocatesNothing(t *testing.T) {
	s := crashCases()[0].newShard(t, true)
	optimizers := []optim.Optimizer{optim.DefaultAdamW()}
	if allocations := testing.AllocsPerRun(50, func() {
		if err := s.BeginArriving(Update{Step: s.Steps() + 1, GradScale: 1, Optimizers: optimizers}, nil); err != nil {
			t.Error(err)
		}
		for _, i := range []int{3, 1, 0, 2} {
			s.GradientsArrived(s.config.Range().Share(i, 4))
		}
		s.Wait()
	}); allocations != 0 {
		t.Errorf("%v heap allocations a step", allocations)
	}
	if s.Arena(ledger.StepJournal) == nil {
		t.Error("the step had no journal")
	}
}

// TestCover compares covered ranges with a list of elements.
func TestCover(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var a arrivals
		var has [64]bool
		for range rapid.IntRange(1, 20).Draw(t, "ranges") {
			first := rapid.Int64Range(0, 62).Draw(t, "first")
			r := shard.Between(first, rapid.Int64Range(first+1, 63).Draw(t, "end"))
			for i := r.First; i < r.End(); i++ {
				has[i] = true
			}
			full := shard.Between(r.First, r.End())
			for full.First > 0 && has[full.First-1] {
				full = shard.Between(full.First-1, full.End())
			}
			for has[full.End()] {
				full.Count++
			}
			if got := a.cover(r); got != full {
				t.Fatalf("%v is in %v, want %v", r, got, full)
			}
		}
		var covered [64]bool
		end := int64(-1)
		for _, r := range a.ranges {
			if r.First <= end {
				t.Fatalf("%v has no gap before %v", a.ranges, r)
			}
			for end = r.First; end < r.End(); end++ {
				covered[end] = true
			}
		}
		if covered != has {
			t.Fatalf("covered are %v", a.ranges)
		}
	})
}

// TestArrivedChunksAreTakenInOrder: of the chunks whose gradients have arrived, workers take the first of the order.
func TestArrivedChunksAreTakenInOrder(t *testing.T) {
	for name, c := range map[string]struct {
		order []shard.Range
		want  []int64
	}{
		"no order": {nil, []int64{9, 0, 1, 2, 3, 4, 5, 6, 7, 8}},
		"an order": {[]shard.Range{{First: 650, Count: 100}, {First: 0, Count: 301}},
			[]int64{9, 6, 7, 0, 1, 2, 3, 4, 5, 8}},
	} {
		s := oneWorker(t)
		s.SetOrder(c.order)
		began := func(s *Shard) error {
			err := beginNextArriving(s)
			s.GradientsArrived(shard.Range{First: 900, Count: 100})
			return err
		}
		got := updates(t, s, began, func() {
			for first := int64(800); first >= 0; first -= 100 { // as a backward pass goes
				s.GradientsArrived(shard.Range{First: first, Count: 100})
			}
		})
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: chunks were taken in the order %v, want %v", name, got, c.want)
		}
	}
}

// TestSnapshotsOfStepsInARow: a save that waits for a step does not wait for the gradients of the next one, either.
func TestSnapshotsOfStepsInARow(t *testing.T) {
	s := oneWorker(t)
	for range 300 {
		x := s.Snapshot(func(shard.Chunk, kernel.Chunk) error { return nil })
		if err := beginNext(s); err != nil {
			t.Fatal(err)
		}
		ran := make(chan error, 1)
		go func() { ran <- x.Run(t.Context(), nil) }()
		s.Wait()
		if err := beginNextArriving(s); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ran:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(time.Minute):
			t.Fatal("a save waits for gradients")
		}
		s.GradientsArrived(s.config.Range())
		s.Wait()
	}
}
