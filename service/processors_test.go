package service

import (
	"runtime"
	"sync"
	"testing"
)

// TestGoRunsBesideWorkers: while workers are in kernels, Go has threads for the
// rest of the service, and has again what it had when they are gone.
func TestGoRunsBesideWorkers(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	check := func(workers int) {
		t.Helper()
		if now := runtime.GOMAXPROCS(0); now != max(before, workers+min(before, threadsBeside)) {
			t.Errorf("Go runs %d threads at a time with %d workers, and %d without", now, workers, before)
		}
	}
	for _, each := range []int{1, before, 3 * before} {
		var group sync.WaitGroup
		for range 3 { // at the same time, as the ranks of a host are opened
			group.Go(func() { addProcessors(each) })
		}
		group.Wait()
		check(3 * each)
		for range 3 {
			group.Go(func() { addProcessors(-each) })
		}
		group.Wait()
		if now := runtime.GOMAXPROCS(0); now != before {
			t.Errorf("Go runs %d threads at a time after the workers, and %d before", now, before)
		}
	}
}

// TestSessionsLeaveGoItsThreads over all of their lives.
func TestSessionsLeaveGoItsThreads(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	t.Run("service", func(t *testing.T) {
		_, socket := serveHere(t)
		workers := 0
		for _, part := range []string{"a", "b"} {
			s := mustOpen(t, socket, testDocument(func(d *Document) { d.Part = part }))
			workers += 2
			if now := runtime.GOMAXPROCS(0); now < workers+1 || now < before {
				t.Errorf("Go runs %d threads at a time with %d workers, and %d without", now, workers, before)
			}
			if part == "a" {
				defer s.Close() // the other one the service ends itself
			}
		}
	})
	if now := runtime.GOMAXPROCS(0); now != before {
		t.Errorf("Go runs %d threads at a time after the service, and %d before", now, before)
	}
}
