package profile

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
)

// measuredOf returns a profile of a host.
func measuredOf(h *host.Host) Profile {
	return Profile{
		Measured: time.Date(2026, 11, 23, 7, 0, 0, 0, time.UTC), Version: "(devel)", Topology: TopologyOf(h),
		Limits: LimitsOf(h), State: "split", Moments: "fp32", Overlap: "none", Load: LoadCommand,
		Command: []string{"python", "train.py"}, LoadTimes: TimeOfSteps, ShareOfBest: 0.95, Others: 0.25,
		Curves: []Curve{{Ranks: 1, NUMANode: AllNodes, State: "split", Moments: "fp32", BytesPerParameter: 26,
			Points: []Point{{1, 2.5e10, 9, 0.01}, {2, 4.5e10, 9, 0}}, Knee: 2}},
		TrainerTimes: []TrainerTimes{{Ranks: 1, Points: []TrainerPoint{{1, 0.2, 5}, {2, 0.1, 5}}}},
		Splits: []Split{{Ranks: 1, State: "split", Moments: "fp32", Trainer: 3, Optimizer: 1,
			BytesPerSecond: 2.5e10, Slowdown: 1.25}, {Ranks: 2, State: "split", Moments: "fp32", Trainer: 2,
			Optimizer: 2, Shared: true, BytesPerSecond: 4e10, Slowdown: 1}},
		Links: []Link{{"0000:17:00.0", 2.5e10, 2.6e10, 4.8e10}}, LinksNote: "",
	}
}

func recorded(t *testing.T) *host.Host {
	t.Helper()
	h, err := host.Of("../../../examples/machines/two-socket.txtar")
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestAFileIsReadAsWritten also checks that saving replaces a file as a whole.
func TestAFileIsReadAsWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plimsoll", "host.json")
	if _, err := Load(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	f, err := LoadOrNew(path)
	if err != nil {
		t.Fatal(err)
	}
	f.Put(measuredOf(recorded(t)))
	for range 2 {
		if err := f.Save(path); err != nil {
			t.Fatal(err)
		}
		got, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, f) {
			t.Errorf("read %+v, want %+v", got, f)
		}
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("temporary files are left: %v", entries)
	}
}

// TestOneProfileForAMachineAndItsLimits: a new measurement takes the place of the old one, and no other's.
func TestOneProfileForAMachineAndItsLimits(t *testing.T) {
	h := recorded(t)
	narrow, err := h.WithAffinity(cpuset.New(0, 1))
	if err != nil {
		t.Fatal(err)
	}
	f := &File{}
	for range 2 {
		f.Put(measuredOf(h))
		f.Put(measuredOf(narrow))
	}
	if len(f.Profiles) != 2 {
		t.Errorf("%d profiles, want 2", len(f.Profiles))
	}
	for i := range 2 * mostProfiles {
		p := measuredOf(h)
		p.Topology.Cores = 100 + i
		f.Put(p)
	}
	if n := len(f.Profiles); n != mostProfiles || f.Profiles[n-1].Topology.Cores != 99+2*mostProfiles {
		t.Errorf("%d profiles, the last of %d cores", n, f.Profiles[n-1].Topology.Cores)
	}
}

// TestAProfileGetsStale with everything that changes what was measured.
func TestAProfileGetsStale(t *testing.T) {
	h := recorded(t)
	f := &File{}
	f.Put(measuredOf(h))
	if p, why := f.For(h); p == nil || why != "" {
		t.Fatalf("the same host: %s", why)
	}
	if p, why := (&File{}).For(h); p != nil || why == "" {
		t.Errorf("an empty file: %v, %q", p, why)
	}
	for want, change := range map[string]func(h *host.Host){
		"CPU model: Two Socket Server CPU @ 2.00GHz when measured, Other now": func(h *host.Host) {
			h.Name = "Other"
		},
		"cores: 6 when measured, 5 now": func(h *host.Host) { h.Cores = h.Cores[:5] },
		"online CPUs: 0-11 when measured, 0-10 now": func(h *host.Host) {
			h.Online = h.Online.Difference(cpuset.New(11))
		},
		"NUMA nodes: 0 (CPUs 0-2,6-8), 1 (CPUs 3-5,9-11) when measured, 0 (CPUs 0-2,6-8) now": func(h *host.Host) {
			h.Nodes = h.Nodes[:1]
		},
		"memory: 128 GiB when measured, 64.0 GiB now": func(h *host.Host) { h.Memory.Total /= 2 },
		"cpuset: 0-11 when measured, 0-3 now":         func(h *host.Host) { h.Cpuset = cpuset.New(0, 1, 2, 3) },
		"usable CPUs: 0-11 when measured, 1-11 now":   func(h *host.Host) { h.CPUs = h.CPUs.Difference(cpuset.New(0)) },
		"CPU quota: none when measured, 2.5 CPUs now": func(h *host.Host) { h.Quota = 2.5 },
	} {
		other := *h
		change(&other)
		if p, why := f.For(&other); p != nil || why != want {
			t.Errorf("got %q, want %q", why, want)
		}
	}
	little := *h
	little.Memory.Total -= 100 * ledger.MiB
	if _, why := f.For(&little); why != "" {
		t.Errorf("another kernel keeps a little more memory: %s", why)
	}
}

func TestSplits(t *testing.T) {
	p := measuredOf(recorded(t))
	whole := binding.WholeTrainerShare
	for _, test := range []struct {
		ranks          int
		state, moments string
		want           string
		share          binding.TrainerShare
	}{
		{1, "", "", "3 cores for the trainer, 1 core for the optimizer", binding.TrainerShare{Cores: 3}},
		{2, "split", "fp32", "2 cores for trainer and optimizer in turns", whole},
		{2, "split", "int8", "", whole},
		{3, "", "", "", whole},
	} {
		s := p.Split(test.ranks, test.state, test.moments)
		if (s == nil) != (test.want == "") {
			t.Errorf("%+v: %v", test, s)
		} else if s != nil && (s.String() != test.want || s.TrainerCores(whole) != test.share) {
			t.Errorf("%+v: %s, %v", test, s, s.TrainerCores(whole))
		}
	}
	if got := p.RanksMeasured(); got != "1, 2" {
		t.Errorf("ranks %q", got)
	}
}

func text(t testing.TB, p Profile) string {
	t.Helper()
	text, err := json.MarshalIndent(File{Schema, []Profile{p}}, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestDamagedFilesAreRefusedWithTheirPlace(t *testing.T) {
	good := text(t, measuredOf(recorded(t)))
	for _, test := range []struct{ old, new, want string }{
		{`"plimsoll.host/1"`, `"plimsoll.host/2"`, `host.json:2:12: schema is "plimsoll.host/2", expected "plimsoll.host/1"`},
		{`"cores": 6,`, `"cores": 0,`, `profiles[0].topology.cores is 0, expected a whole number from 1 to 65536`},
		{`"cores": 6,`, ``, `profiles[0].topology has no key "cores"`},
		{`"cores": 6,`, `"cores": 6, "coers": 6,`, `plimsoll knows no key "coers"`},
		{`"usable_cpus": "0-11"`, `"usable_cpus": "0-x"`, `usable_cpus is "0-x", expected a list of CPUs such as 0-3,8`},
		{`"cpus": "0-2,6-8"`, `"cpus": "8-6"`, `cpus is "8-6", expected a list of CPUs`},
		{`2026-11-23T07:00:00Z`, `yesterday`, `measured is "yesterday", expected a time such as 2026-11-23T07:00:00Z`},
		{`"trainer_slowdown": 1.25`, `"trainer_slowdown": -1`, `trainer_slowdown is -1, expected a number of at least`},
		{`"moments": "fp32"`, `"moments": "fp4"`, `moments is "fp4", expected one of`},
		{good[len(good)/2:], ``, `the file ends too early`},
		{good, ``, `the file is empty`},
		{good, `[]`, `the file holds a list of 0, expected an object`},
	} {
		_, err := Parse("host.json", []byte(strings.Replace(good, test.old, test.new, 1)))
		var input *fault.Input
		if !errors.As(err, &input) || input.Where.Line == 0 || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s for %.40s: %v, want %s", test.new, test.old, err, test.want)
		}
	}
}

// FuzzParse: whatever is read can be written, and is read the same again.
func FuzzParse(f *testing.F) {
	h, err := host.Of("../../../examples/machines/two-socket.txtar")
	if err != nil {
		f.Fatal(err)
	}
	good := text(f, measuredOf(h))
	f.Add([]byte(good))
	f.Add([]byte(good[:len(good)/2]))
	f.Add([]byte(`{"schema": "plimsoll.host/1", "profiles": []}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		read, err := Parse("host.json", data)
		if err != nil {
			if !errors.As(err, new(*fault.Input)) {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		written, err := json.Marshal(read)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse("host.json", written)
		if err != nil {
			t.Fatalf("%v\n%s", err, written)
		}
		rewritten, _ := json.Marshal(again)
		if !bytes.Equal(written, rewritten) {
			t.Errorf("%s\nwant %s", rewritten, written)
		}
		if p, _ := read.For(h); p != nil {
			_ = p.Split(1, "", "")
		}
	})
}
