//go:build linux

package simulation

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// suite is schedules of one sort.
type suite struct {
	count       int // that run; 0: short or long
	short, long int
	must        []mustMeetRow
	run         func(seed uint64, tracing bool, covered coverage) (trace []string, err error)
}

// child is set in processes that run a part of a suite for another one.
const child = "PLIMSOLL_SIMULATION_PART"

// collected is how many schedules run between collections of garbage.
const collected = 64

// test runs one schedule, or many: in as many processes as there are processors, as a process runs one at a time.
func (s suite) test(t *testing.T) {
	switch {
	case *seedFlag >= 0:
		defer inOrder()()
		trace, err := s.run(uint64(*seedFlag), true, coverage{})
		t.Logf("seed %d:\n%s", *seedFlag, strings.Join(trace, "\n"))
		if err != nil {
			t.Error(err)
		}
		return
	case s.count == 0 && testing.Short():
		s.count = s.short
	case s.count == 0:
		s.count = s.long
	}
	began, covered := time.Now(), coverage{}
	if parts := runtime.NumCPU(); os.Getenv(child) == "" && parts > 1 && !testing.Short() {
		s.divide(t, parts, covered)
	} else {
		s.series(t, covered)
	}
	if os.Getenv(child) != "" {
		covered.print(os.Stdout)
		return
	}
	t.Logf("%d schedules, seeds %d to %d, in %v: no invariant broken: %t\n%v", s.count, *firstFlag,
		*firstFlag+uint64(s.count)-1, time.Since(began).Round(time.Millisecond), !t.Failed(), covered)
	for _, row := range s.must {
		for _, missing := range row.missing(covered, s.count) {
			t.Errorf("no schedule has met %v: the simulation tests less than it says", missing)
		}
	}
}

// series runs schedules one after the other. Seeds of a part are some apart.
func (s suite) series(t *testing.T, covered coverage) {
	defer inOrder()()
	first, apart := *firstFlag, uint64(1)
	_, _ = fmt.Sscanf(os.Getenv(child), "%d %d", &first, &apart)
	var before leftover
	for number := range s.count {
		if number%collected == 0 {
			runtime.GC()
			now := whatIsLeft(t)
			if number == 0 {
				before = now
			}
			if now != before {
				t.Errorf("before seed %d there are %+v, and there were %+v", first+uint64(number)*apart, now, before)
				return
			}
		}
		seed := first + uint64(number)*apart
		if _, err := s.run(seed, false, covered); err != nil {
			trace, again := s.run(seed, true, coverage{})
			t.Errorf("seed %d: %v\nthe same seed again: %v\n%s\nreplay it: go test ./internal/state/simulation "+
				"-run '^%s$' -seed %d -v", seed, err, again, strings.Join(trace, "\n"), t.Name(), seed)
			return
		}
	}
}

// leftover is what schedules must not leave in this process.
type leftover struct{ descriptors, arenas int }

// whatIsLeft counts open descriptors and mapped arenas.
func whatIsLeft(t *testing.T) (left leftover) {
	t.Helper()
	descriptors, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return leftover{len(descriptors), bytes.Count(maps, []byte("/memfd:plimsoll/"))}
}

// divide has processes run the parts of a suite side by side, and adds up what they have met.
func (s suite) divide(t *testing.T, parts int, covered coverage) {
	var running sync.WaitGroup
	var mutex sync.Mutex
	for part := range parts {
		running.Go(func() {
			count := (s.count - part + parts - 1) / parts
			command := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.timeout", "0",
				"-schedules", fmt.Sprint(count), "-services", fmt.Sprint(count))
			command.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d", child, *firstFlag+uint64(part), parts))
			out, err := command.CombinedOutput()
			mutex.Lock()
			defer mutex.Unlock()
			covered.read(out)
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	running.Wait()
}

// meeting is a state that a fault has met: what was being done, and the call that was about to be made.
type meeting struct {
	phase string
	kind  kind
	fault faultKind
}

func (m meeting) String() string {
	return fmt.Sprintf("%v while %s (%s)", m.fault, m.phase, kindNames[m.kind])
}

// coverage counts meetings.
type coverage map[meeting]int

// met begins the lines with which a part tells what it has met.
const met = "met: "

func (c coverage) print(to *os.File) {
	for m, count := range c {
		fmt.Fprintf(to, "%s%d %d %d %s\n", met, count, m.kind, m.fault, m.phase)
	}
}

func (c coverage) read(out []byte) {
	for line := range bytes.Lines(out) {
		var m meeting
		count := 0
		rest, ok := strings.CutPrefix(string(line), met)
		if n, _ := fmt.Sscan(rest, &count, &m.kind, &m.fault); ok && n == 3 {
			m.phase = strings.TrimSpace(strings.SplitN(rest, " ", 4)[3])
			c[m] += count
		}
	}
}

// String is a table: a row for each state, and a column for each fault.
func (c coverage) String() string {
	rows := map[string]*[faultKinds]int{}
	for m, count := range c {
		name := m.phase + ", " + kindNames[m.kind]
		if rows[name] == nil {
			rows[name] = &[faultKinds]int{}
		}
		rows[name][m.fault] += count
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%-45s", "state, next call")
	for fault := kill; fault < faultKinds; fault++ {
		fmt.Fprintf(&text, "%13s", fault)
	}
	for _, name := range sortedKeys(rows) {
		fmt.Fprintf(&text, "\n%-45s", name)
		for fault := kill; fault < faultKinds; fault++ {
			fmt.Fprintf(&text, "%13d", rows[name][fault])
		}
	}
	return text.String()
}

func sortedKeys[V any](of map[string]V) (keys []string) {
	for key := range of {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// mustMeetRow lists meetings that some schedule must have, where at least so many run.
type mustMeetRow struct {
	schedules int
	phase     string
	kinds     []kind
	faults    []faultKind
}

func (r mustMeetRow) missing(covered coverage, schedules int) (list []meeting) {
	for _, kind := range r.kinds {
		for _, fault := range r.faults {
			if m := (meeting{r.phase, kind, fault}); schedules >= r.schedules && covered[m] == 0 {
				list = append(list, m)
			}
		}
	}
	return list
}

var (
	ends     = []faultKind{kill, powerLoss}
	failures = []faultKind{diskError, fullDisk, shortCall}
	all      = []faultKind{kill, powerLoss, diskError, fullDisk, shortCall, flippedBit}
)

// mustMeet is what schedules of shards meet.
var mustMeet = []mustMeetRow{
	{1000, "stepping", []kind{readFile, writeFile, storeNumber}, ends},
	{10_000, "creating", []kind{makeFile, nameFile, writeFile, syncFile, storeNumber}, ends},
	{10_000, "creating", []kind{openFile}, []faultKind{noDescriptor}},
	{10_000, "writing weights", []kind{writeFile, storeNumber}, ends},
	{10_000, "stepping", []kind{readFile, writeFile, syncFile}, all},
	{10_000, "stepping", []kind{changeChunk, copyChunk, storeNumber}, ends},
	{10_000, "stepping while gradients arrive", []kind{storeNumber}, []faultKind{kill, flippedBit}},
	{10_000, "restoring", []kind{readFile}, append(ends, failures...)},
	{10_000, "attaching", []kind{openFile, readFile}, ends},
	{10_000, "finishing", []kind{storeNumber}, ends},
	{10_000, "accumulating", []kind{storeNumber}, []faultKind{kill, powerLoss, flippedBit}},
	{10_000, "clearing gradients", []kind{storeNumber}, ends},
	{100_000, "finishing", []kind{readFile, writeFile, syncFile}, append(ends, failures...)},
	{100_000, "rolling back", []kind{readFile, storeNumber}, ends},
	{1_000_000, "rolling back", []kind{writeFile, syncFile}, ends}, // some three of 100,000 schedules
	{100_000, "bringing gradients again", []kind{storeNumber}, []faultKind{kill, flippedBit}},
	{100_000, "saving", []kind{copyChunk, readFile}, ends},
	{100_000, "scrubbing", []kind{readFile}, ends},
	{100_000, "reading", []kind{readFile}, append(ends, failures...)},
}

// mustMeetService is what schedules of a service meet.
var mustMeetService = []mustMeetRow{
	{60, "opening", []kind{storeNumber}, []faultKind{kill}},
	{60, "stepping", []kind{storeNumber}, []faultKind{kill}},
	{20_000, "starting", []kind{storeNumber, openFile}, ends},
	{20_000, "opening", []kind{makeFile, nameFile, writeFile, syncFile, storeNumber}, ends},
	{20_000, "writing weights", []kind{writeFile, syncFile, storeNumber}, ends},
	{2000, "preparing", []kind{storeNumber}, ends},
	{2000, "stepping", []kind{writeFile, syncFile}, append(ends, failures...)},
	{2000, "stepping", []kind{storeNumber}, ends},
	{2000, "making the prepared step", []kind{storeNumber}, []faultKind{kill}},
	{2000, "stepping", []kind{storeNumber}, []faultKind{flippedBit}},
	{2000, "holding", []kind{storeNumber}, []faultKind{kill, flippedBit}},
	{2000, "moving states", []kind{storeNumber}, []faultKind{kill, flippedBit}},
	{20_000, "saving states", []kind{storeNumber}, []faultKind{kill, flippedBit}},
	{20_000, "loading states", []kind{storeNumber}, []faultKind{kill}},
	{20_000, "loading", []kind{storeNumber}, ends},
	{20_000, "loading", []kind{writeFile}, ends},
	{20_000, "going back", []kind{writeFile}, ends},
}
