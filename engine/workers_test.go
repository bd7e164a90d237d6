package engine

import (
	"runtime"
	"sync"
	"testing"
)

// TestGoRunsBesideWorkers: while workers are in kernels, Go has threads for the
// rest of the program, and has again what it had when they are gone.
func TestGoRunsBesideWorkers(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	var group sync.WaitGroup
	shards := make([]*Workers, 3)
	for i := range shards { // at the same time, as the ranks of a host are opened
		group.Go(func() {
			w, err := NewWorkers(cpus(t, 2))
			if err != nil {
				t.Error(err)
			}
			shards[i] = w
		})
	}
	group.Wait()
	if now := runtime.GOMAXPROCS(0); now < before || now < 6+min(before, beside) || now > max(before, 6+beside) {
		t.Errorf("Go runs %d threads at a time with 6 workers, and %d without", now, before)
	}
	for _, w := range shards {
		group.Go(w.Close)
	}
	group.Wait()
	if _, err := NewWorkers([]int{1 << 20}); err == nil {
		t.Error("a worker is on a CPU that is not there")
	}
	if now := runtime.GOMAXPROCS(0); now != before {
		t.Errorf("Go runs %d threads at a time after the workers, and %d before", now, before)
	}
}
