//go:build linux

package simulation

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"plimsoll/internal/state/service"
)

var (
	seedFlag      = flag.Int64("seed", -1, "run the schedule of this seed alone; -v prints what happens in it")
	schedulesFlag = flag.Int("schedules", 0, "how many schedules of shards run; 0: as many as a test has time for")
	servicesFlag  = flag.Int("services", 0, "how many schedules of a service run; 0: as many as a test has time for")
	plantedFlag   = flag.Bool("planted", false, "plant faults on purpose, and expect that they are found (minutes)")
	firstFlag     = flag.Uint64("first", 1, "the first seed")
)

// TestSchedules runs schedules of shards in memory and on a tier.
func TestSchedules(t *testing.T) {
	for _, m := range models {
		m.serial() // outside of any bubble
	}
	suite{
		count: *schedulesFlag, short: 1000, long: 10_000, must: mustMeet,
		run: func(seed uint64, tracing bool, covered coverage) ([]string, error) {
			return schedule(t, seed, tracing, covered)
		},
	}.test(t)
}

// TestServiceSchedules runs schedules of a service with its keeper and its clients.
func TestServiceSchedules(t *testing.T) {
	folder, err := os.MkdirTemp("", "plimsoll-simulation-") // a short path: a socket's may have 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	serial := undisturbed(t, folder)
	suite{
		count: *servicesFlag, short: 60, long: 500, must: mustMeetService,
		run: func(seed uint64, tracing bool, covered coverage) ([]string, error) {
			return serviceSchedule(seed, folder, serial, tracing, covered)
		},
	}.test(t)
}

// TestSeedsAreSchedules: the same seed is the same schedule, call by call.
func TestSeedsAreSchedules(t *testing.T) {
	if raced {
		t.Skip("the race detector decides the order of goroutines that become ready together")
	}
	for _, m := range models {
		m.serial()
	}
	defer inOrder()()
	seeds := uint64(1000)
	if testing.Short() {
		seeds = 100
	}
	for seed := range seeds {
		first, _ := schedule(t, seed, true, coverage{})
		again, _ := schedule(t, seed, true, coverage{})
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

// TestServiceSeedsAreSchedules: the same seed has the same requests, faults and findings, until several things are at
// work at once: reads beside the requests, for a save and to find what has flipped; and the disks of a tier, when one
// fails or the power goes. Which of them comes first is up to the host.
func TestServiceSeedsAreSchedules(t *testing.T) {
	folder, err := os.MkdirTemp("", "plimsoll-simulation-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	serial := undisturbed(t, folder)
	defer inOrder()()
	seeds := uint64(300)
	if testing.Short() {
		seeds = 30
	}
	for seed := range seeds {
		first, err := serviceSchedule(seed, folder, serial, true, coverage{})
		again, failed := serviceSchedule(seed, folder, serial, true, coverage{})
		if err != nil || failed != nil || !slices.Equal(ofTrainers(first), ofTrainers(again)) {
			t.Errorf("seed %d: %v and %v\n%s\n\n%s", seed, err, failed, strings.Join(first, "\n"),
				strings.Join(again, "\n"))
		}
	}
}

// atOnce matches lines of a trace from which on several things may be at work at once.
var atOnce = regexp.MustCompile(`^saving|^flipped|, (?:read|write|sync): |: power loss`)

// ofTrainers returns the lines of a trace that trainers and faults have, before the first that atOnce matches.
func ofTrainers(trace []string) []string {
	if end := slices.IndexFunc(trace, atOnce.MatchString); end >= 0 {
		trace = trace[:end]
	}
	return slices.DeleteFunc(slices.Clone(trace), func(line string) bool { return strings.HasPrefix(line, ofService) })
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

// schedule runs the schedule of a seed, in a bubble of its own.
func schedule(t *testing.T, seed uint64, tracing bool, covered coverage) (trace []string, err error) {
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

// serviceSchedule runs the schedule of a seed.
func serviceSchedule(seed uint64, folder string, serial [][]byte, tracing bool, covered coverage) ([]string, error) {
	w := newWorld(seed, tracing, covered)
	st, err := newStation(w, folder, serial)
	if err == nil {
		err = st.run()
	}
	return w.trace, err
}

// undisturbed returns the state after each step that a service makes without faults.
func undisturbed(t *testing.T, folder string) (states [][]byte) {
	w := newWorld(0, false, coverage{})
	w.steady = true
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
