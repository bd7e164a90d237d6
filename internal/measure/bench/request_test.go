//go:build linux

package bench

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

func contains(err error, text string) bool { return err != nil && strings.Contains(err.Error(), text) }

func TestPlanTakesEveryCombination(t *testing.T) {
	r := usual()
	r.Optimizer, r.State, r.Moments = All, All, All
	r.Parameters, r.Workers = []string{"1Mi", "2Mi"}, []int{1}
	p := planOf(t, r, ledger.GiB)
	seen := map[string]bool{}
	for _, c := range p.Cases {
		seen[c.String()] = true
		if err := c.Format().Validate(); err != nil {
			t.Error(err)
		}
		if err := c.Optimizer.Validate(); err != nil || c.Optimizer.Algorithm() != c.Format().Algorithm {
			t.Errorf("%v: %v, %v", c, c.Optimizer, err)
		}
	}
	// int8 moments are for the two Adams only.
	if want := (5*2 + 2) * 3 * 2; len(seen) != want || len(p.Cases) != want {
		t.Errorf("%d cases, %d of them different; want %d", len(p.Cases), len(seen), want)
	}
}

// TestOneWorkerIsJudgedFirst: the lines of several workers depend on the mode of the memory.
func TestOneWorkerIsJudgedFirst(t *testing.T) {
	h := hostWith(t, ledger.GiB)
	if h.CPUs.Size() < 2 {
		t.Skip("needs two CPUs")
	}
	r := usual()
	r.State, r.Parameters, r.Workers = All, []string{"1Mi", "2Mi"}, []int{2, 1}
	p, err := NewSuite(r, h)
	if err != nil {
		t.Fatal(err)
	}
	var workers []int
	for _, c := range p.Cases {
		workers = append(workers, len(c.CPUs()))
	}
	if want := slices.Concat(slices.Repeat([]int{1}, 3*2), slices.Repeat([]int{2}, 3*2)); !slices.Equal(workers, want) {
		t.Errorf("workers of the lines: %v, want %v", workers, want)
	}
}

func TestDefaultSizesFollowMemory(t *testing.T) {
	for available, want := range map[ledger.Bytes]string{
		16 * ledger.GiB:  "16Ki 16Mi 256Mi",
		ledger.GiB:       "16Ki 16Mi",
		100 * ledger.MiB: "16Ki",
	} {
		r := usual()
		r.Workers = []int{1}
		var sizes []string
		for _, c := range planOf(t, r, available).Cases {
			sizes = append(sizes, Count(c.Held))
		}
		if got := strings.Join(sizes, " "); got != want {
			t.Errorf("%v: %s, want %s", available, got, want)
		}
	}
}

// TestWhatWasAskedForIsNotLeftOut: a size that does not fit is refused, never replaced by another size.
func TestWhatWasAskedForIsNotLeftOut(t *testing.T) {
	r := usual()
	r.Parameters = []string{"1Mi", "1Gi"}
	_, err := NewSuite(r, hostWith(t, ledger.GiB))
	var e *DoesNotFit
	if !errors.As(err, &e) || !strings.Contains(e.What, "1Gi parameters") || e.Available != ledger.GiB ||
		e.Needed < 14*ledger.GiB || e.LimitedBy != "MemAvailable" {
		t.Errorf("got %v", err)
	}
	// PyTorch needs more than twice the memory of the engine.
	r.Parameters = []string{"48Mi"}
	planOf(t, r, ledger.GiB)
	t.Setenv(PythonVariable, "no-such-python")
	r.Peer = PeerTorch
	if _, err := NewSuite(r, hostWith(t, ledger.GiB)); !errors.As(err, &e) {
		t.Errorf("got %v", err)
	}
}

// TestOneCoreCaseHoldsOneChunkForEachWorker: with two chunks, a worker would evict the first from its cache.
func TestOneCoreCaseHoldsOneChunkForEachWorker(t *testing.T) {
	p := &Suite{Host: hostWith(t, ledger.GiB), Kernel: kernel.Generic}
	rapid.Check(t, func(t *rapid.T) {
		cpus := make([]int, rapid.IntRange(1, 300).Draw(t, "workers"))
		size := rapid.Int64Range(1, 2*corePart*int64(len(cpus))).Draw(t, "size")
		f := kernel.Format{Parameter: dtype.BF16, Gradient: dtype.BF16}
		c, err := p.newCase(job{name: "adamw", format: f, parameters: size, world: 1,
			cores: cores{ranks: [][]int{cpus}}})
		if err != nil {
			t.Fatal(err)
		}
		if c.InCore != (size <= corePart*int64(len(cpus))) {
			t.Fatalf("%d parameters for %d workers: in core %v", size, len(cpus), c.InCore)
		}
		if chunk := c.Shards[0].ChunkElements; c.InCore &&
			(chunk > corePart || chunk*int64(len(cpus)) < size || c.Place != "L2") {
			t.Fatalf("%d parameters for %d workers: chunks of %d in %s", size, len(cpus), chunk, c.Place)
		}
	})
}

// TestPartOfAJob: the ranks on this host hold their parts, and nothing of the other ranks.
func TestPartOfAJob(t *testing.T) {
	r := usual()
	r.Parameters, r.Workers, r.Ranks, r.WorldSize = []string{"3085938688"}, []int{1}, 2, 16
	c := planOf(t, r, 64*ledger.GiB).Cases[0]
	if len(c.Shards) != 2 || c.Held != 3_085_938_688/8 || c.Scale() != 8 || c.WorldSize != 16 || c.InCore ||
		!c.Divided {
		t.Errorf("%+v", c)
	}
	if c.Shards[0].Rank == c.Shards[1].Rank || len(c.CPUs()) != 2 || c.SharedCores != (c.CPUs()[0] == c.CPUs()[1]) {
		t.Errorf("%v: CPUs %v", c, c.CPUs())
	}
	if least := 14 * ledger.Bytes(c.Held); c.Needed < least || c.Needed > least+least/100 {
		t.Errorf("needs %v, and its state alone is %v", c.Needed, least)
	}
	want := "adamw, state split, moments fp32, 385742336 of 3085938688 parameters, 2 ranks, 2 workers"
	if c.String() != want {
		t.Errorf("%v, want %s", c, want)
	}
	r.Parameters, r.Ranks, r.WorldSize = []string{"1000"}, 1, 0
	if c := planOf(t, r, ledger.GiB).Cases[0]; c.InCore || !c.Divided || c.Scale() != 1 {
		t.Errorf("%v must be updated by steps", c)
	}
}

// TestLargestPartThatFits: the error names the fewest ranks of a job whose parts on this host fit.
func TestLargestPartThatFits(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		r := usual()
		r.Parameters, r.Workers = []string{"3Gi"}, []int{1}
		r.Ranks = rapid.IntRange(1, 3).Draw(rt, "ranks")
		r.WorldSize = r.Ranks + rapid.IntRange(0, 2).Draw(rt, "more")
		h := hostWith(t, ledger.GiB*ledger.Bytes(rapid.IntRange(4, 13).Draw(rt, "GiB")))
		h.Caches = nil
		var tooLarge *DoesNotFit
		if _, err := NewSuite(r, h); !errors.As(err, &tooLarge) {
			rt.Fatalf("got %v", err)
		}
		for _, world := range []int{tooLarge.WorldSize - 1, tooLarge.WorldSize} {
			r.WorldSize = world
			if _, err := NewSuite(r, h); (err == nil) != (world == tooLarge.WorldSize) {
				rt.Fatalf("%d ranks of %d: %v", r.Ranks, world, err)
			}
		}
	})
}

// TestNoPartFits: the libraries of a peer alone need more memory than there is.
func TestNoPartFits(t *testing.T) {
	r := usual()
	r.Parameters, r.Workers, r.Peer = []string{"3Gi"}, []int{1}, PeerTorch
	h := hostWith(t, 500*ledger.MiB)
	for _, caches := range [][]host.Cache{nil, {{Level: 3, Size: 32 * ledger.MiB, CPUs: h.CPUs}}} {
		h.Caches = caches
		var tooLarge *DoesNotFit
		_, err := NewSuite(r, h)
		if !errors.As(err, &tooLarge) || tooLarge.WorldSize != 0 || contains(err, "--ranks") {
			t.Errorf("got %v", err)
		}
	}
}

// TestPartInACacheIsRefused: the time of a part that a cache holds says nothing about parameters in memory.
func TestPartInACacheIsRefused(t *testing.T) {
	h := hostWith(t, ledger.GiB)
	h.Caches = []host.Cache{{Level: 3, Size: 32 * ledger.MiB, CPUs: h.CPUs}}
	r := usual()
	r.Parameters, r.Workers, r.Ranks = []string{"8Mi"}, []int{1}, 1
	for world, want := range map[int]string{1: "DRAM", 3: "DRAM", 4: "", 64: ""} {
		r.WorldSize = world
		switch p, err := NewSuite(r, h); {
		case want == "" && (!errors.As(err, new(*fault.Input)) || !contains(err, "fit L3, and all 8Mi parameters")):
			t.Errorf("%d ranks: %v", world, err)
		case want != "" && (err != nil || p.Cases[0].Place != want):
			t.Errorf("%d ranks: %v", world, err)
		}
	}
	r.Parameters, r.WorldSize = []string{"2Mi"}, 4 // the cache holds all of them
	if p, err := NewSuite(r, h); err != nil || p.Cases[0].Place != "L3" {
		t.Errorf("got %v", err)
	}
}

func TestChecksAreOfTheLargestCase(t *testing.T) {
	r := usual()
	r.State, r.Checks = All, true
	r.Parameters = []string{"1Ki", "3Mi", "2Mi"}
	checked := 0
	for _, c := range planOf(t, r, ledger.GiB).Cases {
		if !c.Checks {
			continue
		}
		checked++
		if c.Held != 3<<20 || c.Format().State != kernel.Split {
			t.Errorf("%v is checked", c)
		}
	}
	if checked != 1 {
		t.Errorf("%d cases are checked", checked)
	}
	r.Parameters = []string{"1Ki"} // one chunk leaves nothing to check
	for _, c := range planOf(t, r, ledger.GiB).Cases {
		if c.Checks {
			t.Errorf("%v is checked", c)
		}
	}
}

func TestBadRequests(t *testing.T) {
	for want, change := range map[string]func(*testing.T, *Request){
		"--rounds is 0":                 func(_ *testing.T, r *Request) { r.Rounds = 0 },
		`did you mean "adamw"?`:         func(_ *testing.T, r *Request) { r.Optimizer = "adamv" },
		`--state is "int4"`:             func(_ *testing.T, r *Request) { r.State = "int4" },
		`--moments is "fp8"`:            func(_ *testing.T, r *Request) { r.Moments = "fp8" },
		"for adam and adamw":            func(_ *testing.T, r *Request) { r.Optimizer, r.Moments = "lion", "int8" },
		`--grad-dtype is "u16"`:         func(_ *testing.T, r *Request) { r.GradientType = "u16" },
		`"16M" is no number`:            func(_ *testing.T, r *Request) { r.Parameters = []string{"1Mi", "16M"} },
		"--workers is 0":                func(_ *testing.T, r *Request) { r.Workers = []int{1, 0} },
		"--workers is 99999":            func(_ *testing.T, r *Request) { r.Workers = []int{99999} },
		"--ranks is -1":                 func(_ *testing.T, r *Request) { r.Ranks = -1 },
		"--world-size is 1":             func(_ *testing.T, r *Request) { r.Ranks, r.WorldSize = 2, 1 },
		"--world-size is 65537":         func(_ *testing.T, r *Request) { r.WorldSize = mostRanks + 1 },
		"job's parameters is not given": func(_ *testing.T, r *Request) { r.WorldSize = 2 },
		"there are none for rank 1 of 2": func(_ *testing.T, r *Request) {
			r.Ranks, r.Parameters = 2, []string{"2"}
		},
		`--peer is "jax"`:     func(_ *testing.T, r *Request) { r.Peer = "jax" },
		"--optimizer is lion": func(_ *testing.T, r *Request) { r.Peer, r.Optimizer = PeerTorch, "lion" },
		"python3 -m pip install": func(t *testing.T,
			r *Request) {
			r.Peer = PeerTorch
			t.Setenv(PythonVariable, "false")
		},
		kernel.EnvironmentVariable: func(t *testing.T, _ *Request) { t.Setenv(kernel.EnvironmentVariable, "fast") },
	} {
		t.Run(want, func(t *testing.T) {
			r := usual()
			change(t, &r)
			_, err := NewSuite(r, hostWith(t, ledger.GiB))
			if !errors.As(err, new(*fault.Input)) || !contains(err, want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestParseCount(t *testing.T) {
	for text, want := range map[string]int64{"1": 1, "1024": 1024, "64Ki": 64 << 10, "16Mi": 16 << 20, "3Gi": 3 << 30,
		"1048576Gi": shard.MaxElements} {
		if got, err := ParseCount(text); err != nil || got != want {
			t.Errorf("%s is %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "0", "-1", "1K", "1Ti", "1.5Mi", "Mi", " 1", "1 Mi", "1048577Gi",
		"99999999999999999999", "0x10"} {
		if got, err := ParseCount(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
	if text := Count(3_085_938_688); text != "3085938688" {
		t.Errorf("a multiple of 1024 is written %s", text)
	}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(1, shard.MaxElements).Draw(t, "n")
		if got, err := ParseCount(Count(n)); err != nil || got != n {
			t.Fatalf("%d is written %s and read %d, %v", n, Count(n), got, err)
		}
	})
}

func FuzzParseCount(f *testing.F) {
	f.Add("16Mi")
	f.Add("9223372036854775807Gi")
	f.Fuzz(func(t *testing.T, text string) {
		n, err := ParseCount(text)
		if err == nil && (n < 1 || n > math.MaxInt64>>8) {
			t.Errorf("%q is %d", text, n)
		}
	})
}
