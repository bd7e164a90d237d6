//go:build linux

package simulation

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"plimsoll/internal/state/service"
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

// TestServiceSchedules runs schedules of a service with its keeper and its clients.
func TestServiceSchedules(t *testing.T) {
	covered := map[string]int{}
	folder, err := os.MkdirTemp("", "plimsoll-simulation-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	serial := undisturbed(t, folder)
	if *seedFlag >= 0 {
		trace, err := serviceSchedule(uint64(*seedFlag), folder, serial, true, covered)
		t.Logf("seed %d:\n%s", *seedFlag, strings.Join(trace, "\n"))
		if err != nil {
			t.Error(err)
		}
		return
	}
	count := *schedulesFlag
	if count == 0 {
		count = 200
	}
	began := time.Now()
	for seed := *firstFlag; seed < *firstFlag+uint64(count); seed++ {
		if _, err := serviceSchedule(seed, folder, serial, false, covered); err != nil {
			trace, again := serviceSchedule(seed, folder, serial, true, covered)
			t.Errorf("seed %d: %v\nonce more: %v\n%s", seed, err, again, strings.Join(trace, "\n"))
			break
		}
	}
	t.Logf("%d schedules in %v", count, time.Since(began))
	for _, key := range slices.Sorted(maps.Keys(covered)) {
		t.Logf("%-60s %d", key, covered[key])
	}
}

// serviceSchedule runs the schedule of a seed.
func serviceSchedule(seed uint64, folder string, serial [][]byte, tracing bool, covered map[string]int) ([]string, error) {
	w := newWorld(seed, tracing, covered)
	st, err := newStation(w, folder, serial)
	if err == nil {
		err = st.run()
	}
	return w.trace, err
}

// undisturbed returns the state after each step that a service makes without faults.
func undisturbed(t *testing.T, folder string) (states [][]byte) {
	w := newWorld(0, false, map[string]int{})
	st := &station{world: w, folder: folder, finished: -1, ranks: []*trainer{{}}}
	if err := st.startKeeper(); err != nil {
		t.Fatal(err)
	}
	defer st.keeper.Close()
	l := &serviceLife{station: st}
	st.life = l
	err := st.keeper.Here(func(given *service.Inherited, killed func()) error {
		server, err := service.NewServer("simulated", given, thisHost, allForUpdates, service.Tier{}, st.logf)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() { served <- server.Serve(ctx) }()
		err = st.open(st.ranks[0])
		for step := int64(0); err == nil && step <= mostSteps; step++ {
			if step > 0 {
				err = st.makeStep(step)
			}
			if state, failed := st.ranks[0].state(); err == nil {
				states, err = append(states, state), failed
			}
		}
		st.hangUp()
		cancel()
		return errors.Join(err, <-served)
	})
	if err != nil {
		t.Fatal(err)
	}
	return states
}
