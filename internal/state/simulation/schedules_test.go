//go:build linux

package simulation

import (
	"flag"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var (
	seedFlag      = flag.Int64("seed", -1, "run the schedule of this seed, and print what happens in it with -v")
	schedulesFlag = flag.Int("schedules", 0, "how many schedules run")
	firstFlag     = flag.Uint64("first", 1, "the first seed")
)

// TestSchedules runs schedules of shards in memory and on a tier.
func TestSchedules(t *testing.T) {
	for _, m := range models {
		m.serial()
	}
	covered := map[string]int{}
	defer inOrder()()
	if *seedFlag >= 0 {
		trace, err := schedule(t, uint64(*seedFlag), true, covered)
		t.Logf("seed %d:\n%s", *seedFlag, strings.Join(trace, "\n"))
		if err != nil {
			t.Error(err)
		}
		return
	}
	count := *schedulesFlag
	if count == 0 {
		count = 1000
	}
	began := time.Now()
	for seed := *firstFlag; seed < *firstFlag+uint64(count); seed++ {
		if _, err := schedule(t, seed, false, covered); err != nil {
			trace, again := schedule(t, seed, true, map[string]int{})
			t.Errorf("seed %d: %v\nonce more: %v\n%s", seed, err, again, strings.Join(trace, "\n"))
			break
		}
	}
	t.Logf("%d schedules in %v", count, time.Since(began))
	for _, key := range slices.Sorted(maps.Keys(covered)) {
		t.Logf("%-60s %d", key, covered[key])
	}
}

// TestSeedsAreSchedules: the same seed is the same schedule, call by call.
func TestSeedsAreSchedules(t *testing.T) {
	defer inOrder()()
	for seed := range uint64(3000) {
		first, _ := schedule(t, seed, true, map[string]int{})
		again, _ := schedule(t, seed, true, map[string]int{})
		if !slices.Equal(first, again) {
			at := 0
			for at < min(len(first), len(again)) && first[at] == again[at] {
				at++
			}
			t.Errorf("seed %d: line %d is not the same:\n%s\n\n%s", seed, at,
				strings.Join(first[max(0, at-3):min(at+3, len(first))], "\n"),
				strings.Join(again[max(0, at-3):min(at+3, len(again))], "\n"))
		}
	}
}

// inOrder has goroutines that become ready together run in that order, until the function that it returns is called:
// one at a time, and no garbage collection comes between them.
func inOrder() (undo func()) {
	processors, percent := runtime.GOMAXPROCS(1), debug.SetGCPercent(-1)
	return func() {
		runtime.GOMAXPROCS(processors)
		debug.SetGCPercent(percent)
	}
}

// collected is how many schedules run between collections of garbage.
const collected = 64

// schedule runs the schedule of a seed, in a bubble of its own.
func schedule(t *testing.T, seed uint64, tracing bool, covered map[string]int) (trace []string, err error) {
	if seed%collected == 0 {
		runtime.GC()
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(seed, tracing, covered)
		defer func() {
			trace = w.trace
			if cause := recover(); cause != nil {
				err = fmt.Errorf("panic: %v", cause)
				panic(fmt.Sprintf("seed %d: %v", seed, cause))
			}
		}()
		err = newJob(w).run()
	})
	return trace, err
}
