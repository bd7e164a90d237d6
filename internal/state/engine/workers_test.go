//go:build linux

package engine

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"
)

func threads(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestShardsOfARankShareWorkers: hundreds of shards take as many threads as one.
func TestShardsOfARankShareWorkers(t *testing.T) {
	cpus := []int{0, 0}
	first, err := NewWorkers(77, cpus)
	if err != nil {
		t.Fatal(err)
	}
	before := threads(t)
	all := []*Workers{first}
	for range 300 {
		w, err := NewWorkers(77, cpus)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, w)
	}
	if now := threads(t); now > before+20 { // Go's own come and go
		t.Errorf("there are %d threads with 301 shards, and %d with one", now, before)
	}
	// Passes of all shards at once: each is done when its own workers are, and each worker
	// takes part once.
	var passes sync.WaitGroup
	for _, w := range all {
		passes.Go(func() {
			for range 20 {
				var turns [2]atomic.Int32
				w.Start(func(worker int) { turns[worker].Add(1) })
				w.Wait()
				if turns[0].Load() != 1 || turns[1].Load() != 1 {
					t.Errorf("the workers have had %d and %d turns: expected one each",
						turns[0].Load(), turns[1].Load())
				}
			}
		})
	}
	passes.Wait()
	other, err := NewWorkers(78, cpus)
	if err != nil {
		t.Fatal(err)
	}
	if other.crew == first.crew {
		t.Error("two ranks share workers: one that waits would keep the other waiting")
	}
	for _, w := range append(all, other) {
		w.Close()
	}
	crews.Lock()
	defer crews.Unlock()
	for name, c := range crews.byName {
		if c == first.crew || c == other.crew {
			t.Errorf("the workers %s are there still", name)
		}
	}
}
