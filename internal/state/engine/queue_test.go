//go:build linux

package engine

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// randomRanges returns ranges of a shard, which may overlap.
func randomRanges(s *Shard, random *rand.Rand, most int) []shard.Range {
	ranges := make([]shard.Range, random.IntN(most+1))
	for i := range ranges {
		first := random.Int64N(s.config.Elements)
		ranges[i] = shard.Range{First: first, Count: 1 + random.Int64N(min(s.config.Elements-first, 20_000))}
	}
	return ranges
}

// waitAnywhere waits for random ranges of the step under way, in several goroutines.
func waitAnywhere(s *Shard, random *rand.Rand) (wait func()) {
	var group sync.WaitGroup
	for range random.IntN(5) {
		ranges := randomRanges(s, random, 20)
		group.Go(func() {
			for _, r := range ranges {
				s.WaitRange(r)
			}
		})
	}
	return group.Wait
}

// TestNoOrderChangesTheBits makes steps in random orders, while goroutines wait for random ranges.
func TestNoOrderChangesTheBits(t *testing.T) {
	for _, c := range crashCases() {
		t.Run(c.name, func(t *testing.T) {
			plain, s := c.newShard(t, false), c.newShard(t, true)
			rapid.Check(t, func(t *rapid.T) {
				random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				s.SetOrder(randomRanges(s, random, 8))
				if err := beginNext(s); err != nil {
					t.Fatal(err)
				}
				wait := waitAnywhere(s, random)
				s.Wait()
				wait()
				makeSteps(t, plain, 1)
				if !bytes.Equal(imageOf(s), imageOf(plain)) {
					t.Fatalf("step %d: the state is another than without an order", s.Steps())
				}
			})
		})
	}
}

// updates returns the chunks of a step in the order in which a single worker takes them. The first chunk of all stays
// until meanwhile has returned.
func updates(t *testing.T, s *Shard, begin func(*Shard) error, meanwhile func()) []int64 {
	t.Helper()
	entered, release := make(chan struct{}), make(chan struct{})
	var order []int64
	x := s.Snapshot(func(at shard.Chunk, _ kernel.Chunk) error {
		if order = append(order, int64(at.Number)); len(order) == 1 {
			close(entered)
			<-release
		}
		return nil
	})
	if err := begin(s); err != nil {
		t.Fatal(err)
	}
	<-entered
	meanwhile()
	close(release)
	s.Wait()
	if err := x.Run(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	return order
}

// oneWorker returns a shard of ten chunks with a single worker.
func oneWorker(t *testing.T) *Shard {
	format := crashCases()[0].format
	s, err := NewShard(ShardConfig{Layout: layout(format, 100, shard.Uniform(format, 1000)), CPUs: cpus(t, 1),
		Kernel: kernel.Generic, Journal: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	fillShard(s)
	return s
}

// await waits until a condition holds.
func await(t *testing.T, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("waited for a minute")
		}
	}
}

// TestChunksAreTakenInOrder checks the order itself: awaited chunks, then those of the order, then the others.
func TestChunksAreTakenInOrder(t *testing.T) {
	s := oneWorker(t)
	nothing := func() {}
	var waiting sync.WaitGroup
	defer waiting.Wait()
	// awaits has goroutines wait for ranges, one after the other.
	awaits := func(ranges ...shard.Range) func() {
		return func() {
			for i, r := range ranges {
				waiting.Go(func() { s.WaitRange(r) })
				await(t, func() bool {
					s.queue.urgent.mutex.Lock()
					defer s.queue.urgent.mutex.Unlock()
					return len(s.queue.urgent.chunks) == i+1
				})
			}
		}
	}
	order := []shard.Range{{First: 650, Count: 100}, {First: 200, Count: 1}, {First: 0, Count: 301}}
	for name, c := range map[string]struct {
		order     []shard.Range
		meanwhile func()
		want      []int64
	}{
		"no order": {nil, nothing, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
		"an order": {order, nothing, []int64{6, 7, 2, 0, 1, 3, 4, 5, 8, 9}},
		"awaited": {nil, awaits(shard.Range{First: 750, Count: 150}, shard.Range{First: 300, Count: 1}),
			[]int64{0, 7, 8, 3, 1, 2, 4, 5, 6, 9}},
		"awaited, and an order": {order, awaits(shard.Range{First: 999, Count: 1}, shard.Range{First: 500, Count: 200}),
			[]int64{6, 9, 5, 7, 2, 0, 1, 3, 4, 8}},
	} {
		s.SetOrder(c.order)
		if got := updates(t, s, beginNext, c.meanwhile); !slices.Equal(got, c.want) {
			t.Errorf("%s: chunks were updated in the order %v, want %v", name, got, c.want)
		}
	}
}

// TestWaitingForAllIsWaitingForTheStep: after all ranges were waited for, in any order, the step is finished.
func TestWaitingForAllIsWaitingForTheStep(t *testing.T) {
	format := crashCases()[0].format
	s, err := NewShard(ShardConfig{Layout: layout(format, 16, shard.Uniform(format, 160)), CPUs: cpus(t, 2),
		Kernel: kernel.Generic, Journal: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	fillShard(s)
	steps := int64(10_000)
	if testing.Short() {
		steps = 1000
	}
	for step := int64(1); step <= steps; step++ {
		if err := beginNext(s); err != nil {
			t.Fatal(err)
		}
		for i := range int64(2) {
			s.WaitRange(s.config.Range().Share(int(i+step)%2, 2))
		}
		if s.Steps() != step {
			t.Fatalf("all of step %d was waited for, and the shard is at step %d", step, s.Steps())
		}
	}
}
