//go:build linux

package tune

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/measure/profile"
)

// silent is a progress that nobody sees.
type silent struct{}

func (silent) Begin(string, int64, activity.Unit) {}
func (silent) Advance(int64)                      {}
func (silent) End()                               {}

func request() Request {
	return Request{State: "split", Moments: "fp32", Overlap: profile.NoOverlap, Budget: time.Second, ShareOfBest: 0.95,
		Ranks: []int{1}}
}

func local(t testing.TB) *host.Host {
	t.Helper()
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestSizes: the state is twice as large as the caches, but never more than half of the memory that is left.
func TestSizes(t *testing.T) {
	for _, test := range []struct {
		cache, memory ledger.Bytes
		want          int64
	}{
		{ledger.MiB, 100 * ledger.GiB, fewestElements},
		{16 << 30, 100 * ledger.GiB, mostElements},
		{ledger.MiB, 100 * ledger.MiB, fewestElements / 8},
	} {
		h := *local(t)
		h.Caches = []host.Cache{{Level: 3, Size: test.cache, CPUs: h.CPUs}}
		h.Memory = host.Memory{Total: test.memory, Available: test.memory}
		tuning, err := New(request(), &h)
		if err != nil || tuning.Elements != test.want {
			t.Errorf("%v of cache, %v of memory: %v, %v; want %d", test.cache, test.memory, tuning, err, test.want)
		}
	}
	h := *local(t)
	h.Memory = host.Memory{Total: ledger.MiB, Available: ledger.MiB}
	var full *bench.DoesNotFit
	if _, err := New(request(), &h); !errors.As(err, &full) {
		t.Errorf("1 MiB: %v", err)
	}
}

// TestRunMeasuresEverything that a profile has, with little time. The file that it makes is read again.
func TestRunMeasuresEverything(t *testing.T) {
	overlaps := profile.Overlaps
	if testing.Short() {
		overlaps = []string{profile.NoOverlap, profile.OverlapForward}
	}
	for _, overlap := range overlaps {
		r := request()
		r.Parameters, r.Overlap = "64Ki", overlap
		h := local(t)
		tuning, err := New(r, h)
		if err != nil {
			t.Fatal(err)
		}
		p, err := tuning.Run(context.Background(), "test", silent{})
		if err != nil {
			t.Fatal(err)
		}
		cores, err := coresOf(h, 1)
		if err != nil {
			t.Fatal(err)
		}
		split := p.Split(1, "split", "fp32")
		switch {
		case split == nil || len(p.Curves) == 0 || len(p.TrainerTimes[0].Points) == 0:
			t.Fatalf("%s: %+v", overlap, p)
		case split.Shared != (split.Optimizer == cores):
			t.Errorf("%s: %+v of %d cores", overlap, split, cores)
		case !split.Shared && split.Optimizer+split.Trainer != cores:
			t.Errorf("%s: %+v of %d cores", overlap, split, cores)
		case overlap != profile.NoOverlap && cores > 1 && split.Shared:
			t.Errorf("%s: both roles have the same cores at the same time", overlap)
		}
		file := profile.File{}
		file.Put(*p)
		path := t.TempDir() + "/host.json"
		if err := file.Save(path); err != nil {
			t.Fatal(err)
		}
		read, err := profile.Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if found, why := read.For(h); found == nil {
			t.Error(why)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	tuning, err := New(request(), local(t))
	if err != nil {
		t.Fatal(err)
	}
	tuning.Elements = 1 << 16
	if _, err := tuning.Run(ctx, "test", silent{}); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

// TestNUMANodesAreMeasuredAlone, on a host that pretends that each of two cores is one; both are the same core where
// there is one.
func TestNUMANodesAreMeasuredAlone(t *testing.T) {
	h := *local(t)
	cores := h.UsableCores()
	ranks := []int{1, 2}[:min(2, len(cores))]
	h.Nodes = nil
	for id, core := range []host.Core{cores[0], cores[len(ranks)-1]} {
		node := host.NUMANode{ID: 4 * id, Class: host.NodeOrdinary, CPUs: core.Siblings, Allowed: true}
		h.Nodes = append(h.Nodes, node)
	}
	r := request()
	r.Ranks, r.Parameters = nil, "64Ki"
	tuning, err := New(r, &h)
	if err != nil || !slices.Equal(tuning.Ranks, ranks) {
		t.Fatalf("ranks %v: %v", tuning.Ranks, err)
	}
	p, err := tuning.Run(context.Background(), "test", silent{})
	if err != nil {
		t.Fatal(err)
	}
	measured := map[int]int{}
	for _, c := range p.Curves {
		if c.State == "split" && c.Moments == "fp32" {
			measured[c.NUMANode]++
			if last := c.Points[len(c.Points)-1].Cores; c.NUMANode != profile.AllNodes && last != 1 {
				t.Errorf("node %d has one core, but %d were measured", c.NUMANode, last)
			}
		}
	}
	if measured[profile.AllNodes] != len(ranks) || measured[0] != 1 || measured[4] != 1 || len(p.Splits) < len(ranks) {
		t.Errorf("curves by node: %v, splits %v", measured, p.Splits)
	}
}

// BenchmarkHere holds the search on this host against an exhaustive sweep. It needs a quiet host.
func BenchmarkHere(b *testing.B) {
	for range b.N {
		r := request()
		r.Budget = time.Minute
		h := local(b)
		tuning, err := New(r, h)
		if err != nil {
			b.Fatal(err)
		}
		cores, err := coresOf(h, 1)
		if err != nil {
			b.Fatal(err)
		}
		ctx := context.Background()
		curves := func() (update, trainer *Curve, s *Search) {
			update = NewCurve(tuning.update(ctx, h, tuning.formats[0], 1), 4*cores+mostPoints, never)
			trainer = NewCurve(tuning.imitation(ctx, 1), 4*cores+mostPoints, never)
			step := (&session{Tuning: tuning}).step(update, trainer)
			return update, trainer, &Search{Cores: cores, Update: update, Trainer: trainer, Step: step, Shares: true}
		}
		_, _, search := curves()
		choice, err := search.Choose()
		if err != nil {
			b.Fatal(err)
		}
		_, _, sweep := curves()
		for range 3 {
			for cores := 1; cores <= sweep.last(); cores++ {
				err := errors.Join(sweep.Update.again(cores), sweep.Trainer.again(sweep.trainerCores(cores)))
				if err != nil {
					b.Fatal(err)
				}
			}
		}
		best := sweep.best(sweep.last())
		lost := sweep.predict(choice.Optimizer)/sweep.predict(best) - 1
		b.ReportMetric(100*math.Max(lost, 0), "%-over-best")
		b.Logf("chose %d of %d cores, the sweep %d", choice.Optimizer, cores, best)
	}
}

// TestLinks of a host that shows a GPU but has no driver: there is no result, and a reason.
func TestLinks(t *testing.T) {
	found, note := links(context.Background(), &host.Host{})
	if len(found) > 0 || note != "this host has no GPU" {
		t.Errorf("no GPU: %v, %q", found, note)
	}
	t.Setenv("CUDA_VISIBLE_DEVICES", "") // a host may have CUDA
	found, note = links(context.Background(), &host.Host{GPUs: []host.Device{{Address: "0000:17:00.0"}}})
	if len(found) > 0 || !regexp.MustCompile(`^torch .* finds no CUDA$|^no interpreter has torch`).MatchString(note) {
		t.Errorf("no CUDA: %v, %q", found, note)
	}
	python := filepath.Join(t.TempDir(), "python")
	script := "#!/bin/sh\ncase \"$2\" in import*) exit 0; esac\necho 'RuntimeError: no driver' >&2\nexit 1\n"
	if err := os.WriteFile(python, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv(bench.PythonVariable, python)
	found, note = links(context.Background(), &host.Host{GPUs: []host.Device{{Address: "0000:17:00.0"}}})
	if len(found) > 0 || !strings.HasSuffix(note, "could not measure them: exit status 1: RuntimeError: no driver") {
		t.Errorf("a Python that fails: %v, %q", found, note)
	}
}
