//go:build linux

package bench

import (
	"context"
	"errors"
	"os/exec"
	"slices"
	"testing"
	"time"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/host"
)

// TestDisturbedRoundsAreThrownAway lets other processes use the CPUs.
func TestDisturbedRoundsAreThrownAway(t *testing.T) {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	for range h.CPUs.Size() {
		other := exec.Command("sh", "-c", "while :; do :; done")
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			_ = other.Process.Kill()
			_ = other.Wait()
		}()
	}
	w := watch{cpus: h.CPUs}
	// used returns how long others have run, as the kernel counts it: it may count late what they have used.
	used := func() time.Duration {
		now, err := w.read()
		if err != nil {
			t.Fatal(err)
		}
		return now.busy - now.own
	}
	made := 0
	kept, r, err := rounds(context.Background(), w, 2, func() (int, error) {
		limit, begin := time.Now().Add(2*time.Minute), used()
		for used()-begin < time.Duration(h.CPUs.Size())*100*time.Millisecond {
			if time.Now().After(limit) {
				return 0, errors.New("the others have not run")
			}
			time.Sleep(20 * time.Millisecond) // leaves them the CPUs
		}
		made++
		return made, nil
	}, silent{})
	if err != nil {
		t.Fatal(err)
	}
	if want := (Rounds{ThrownAway: 2, Contended: 2}); r != want || !slices.Equal(kept, []int{3, 4}) {
		t.Errorf("%+v, kept %v", r, kept)
	}
}

func TestContended(t *testing.T) {
	for _, test := range []struct {
		whole, busy, own time.Duration
		cpus             int
		want             bool
	}{
		{time.Second, time.Second, time.Second, 1, false},
		{time.Second, 1040 * time.Millisecond, time.Second, 1, false},
		{time.Second, 1050 * time.Millisecond, time.Second, 1, true},
		{time.Second, 50 * time.Millisecond, 0, 2, false},
		{time.Second, 90 * time.Millisecond, 0, 2, true},
		{200 * time.Millisecond, 430 * time.Millisecond, 400 * time.Millisecond, 2, false},
		{200 * time.Millisecond, 440 * time.Millisecond, 400 * time.Millisecond, 2, true},
		{200 * time.Millisecond, 300 * time.Millisecond, 400 * time.Millisecond, 2, false}, // counted late
	} {
		start := reading{at: time.Unix(1, 0), busy: time.Hour, own: time.Minute}
		end := reading{at: start.at.Add(test.whole), busy: start.busy + test.busy, own: start.own + test.own}
		if got := contended(start, end, test.cpus); got != test.want {
			t.Errorf("%+v: %v", test, got)
		}
	}
}

const procStat = `cpu  100 0 100 900 0 0 0 0 0 0
cpu0 10 1 20 300 7 2 3 4 5 6
cpu1 100 0 0 300 0 0 0
cpu10 1000 0 0 0 0 0 0 0 0 0
intr 5 0 0
`

func TestParseBusy(t *testing.T) {
	for cpus, want := range map[string]int{"0": 40, "0-1": 140, "1,10": 1100} {
		set, err := cpuset.Parse(cpus)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := parseBusy(procStat, set); err != nil || got != time.Duration(want)*tick {
			t.Errorf("CPUs %s: %v, %v; want %d ticks", cpus, got, err, want)
		}
	}
	for text, cpus := range map[string]cpuset.CPUSet{procStat: cpuset.New(0, 2), "": cpuset.New(0),
		"cpu0 1 x 2": cpuset.New(0)} {
		if got, err := parseBusy(text, cpus); err == nil {
			t.Errorf("%q, CPUs %v: %v", text, cpus, got)
		}
	}
}

func TestParseProcess(t *testing.T) {
	text := "12 (python) 3.1 (x)) S 1 2 3 4 5 6 7 8 9 10 70 30 0 0 20 0\n"
	if got, err := parseProcess(text); err != nil || got != time.Second {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"", "12 (python) S 1", "12 (p) S 1 2 3 4 5 6 7 8 9 10 a 30"} {
		if got, err := parseProcess(text); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func FuzzParseBusy(f *testing.F) {
	f.Add(procStat)
	f.Fuzz(func(t *testing.T, text string) { _, _ = parseBusy(text, cpuset.New(0, 1)) })
}

func FuzzParseProcess(f *testing.F) {
	f.Add("12 (python) S 1 2 3 4 5 6 7 8 9 10 70 30 0 0 20 0\n")
	f.Fuzz(func(t *testing.T, text string) { _, _ = parseProcess(text) })
}

// TestCollectingSeesCollections checks that collections appear in the histogram that the check reads.
func TestCollectingSeesCollections(t *testing.T) {
	collections, h := collecting(func() {})
	if s := h.stops(); collections == 0 || s.NineInTen <= 0 || s.Longest < s.NineInTen || s.Longest > time.Minute {
		t.Errorf("%d collections with stops of %v", collections, s)
	}
}

func TestStopsOfAHistogram(t *testing.T) {
	h := histogram{1: 5, 2: 0, 3: 4, 4: 1, 9: 0}
	if got, want := h.stops(), (Stops{NineInTen: 3, Longest: 4}); got != want {
		t.Errorf("got %v, expected %v", got, want)
	}
	if got := (histogram{}).stops(); got != (Stops{}) {
		t.Errorf("no stops: got %v", got)
	}
}
