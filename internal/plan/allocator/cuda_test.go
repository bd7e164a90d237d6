package allocator

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

const mib = ledger.MiB

func replay(t *testing.T, c *CUDA, sizes ...ledger.Bytes) []Block {
	t.Helper()
	blocks := []Block{}
	for _, size := range sizes {
		b, err := c.Allocate(size, 0)
		if err != nil {
			t.Fatal(err)
		}
		blocks = append(blocks, b)
	}
	return blocks
}

func TestRounding(t *testing.T) {
	for _, test := range []struct {
		text                           string
		size                           ledger.Bytes
		requested, allocated, reserved ledger.Bytes
	}{
		{"", 0, 0, 0, 0},
		{"", 1, 1, 512, 2 * mib},
		{"", mib, mib, mib, 2 * mib},
		{"", mib + 1, mib + 1, mib + 512, 20 * mib},
		{"", 10*mib - 512, 10*mib - 512, 10*mib - 512, 20 * mib},
		{"", 10 * mib, 10 * mib, 10 * mib, 10 * mib},
		{"", 19 * mib, 19 * mib, 20 * mib, 20 * mib}, // the rest is not above 1 MiB
		{"", 19*mib - 512, 19*mib - 512, 19*mib - 512, 20 * mib},
		{"large_segment_size_mb:12", 3 * mib, 3 * mib, 3 * mib, 12 * mib},
		{"expandable_segments:True", 30 * mib, 30 * mib, 30 * mib, 40 * mib},
		{"expandable_segments:True,large_segment_size_mb:12", 30 * mib, 30 * mib, 30 * mib, 36 * mib},
		{"expandable_segments:True", 20*mib - 511, 20*mib - 511, 20 * mib, 20 * mib}, // exactly one page
		{"roundup_power2_divisions:4", 1200, 1200, 1536, 2 * mib},                    // too small to be divided
		{"roundup_power2_divisions:4", 2049, 2049, 2560, 2 * mib},
		{"roundup_power2_divisions:4", 33 * mib, 33 * mib, 40 * mib, 40 * mib},
		{"roundup_power2_divisions:4", 64 * mib, 64 * mib, 64 * mib, 64 * mib},
		{"roundup_power2_divisions:1", 33 * mib, 33 * mib, 34 * mib, 34 * mib}, // 1 means off
		{"roundup_power2_divisions:[4:4,32:2,>:8]", 33 * mib, 33 * mib, 36 * mib, 36 * mib},
		{"roundup_power2_divisions:[4:4,32:2]", 33 * mib, 33 * mib, 48 * mib, 48 * mib},
		{"roundup_power2_divisions:[4:4,32:2]", mib + 1, mib + 1, mib + mib/4, 20 * mib}, // as the first entry
		{"roundup_power2_divisions:[4:4,32:2]", 9 * mib, 9 * mib, 9 * mib, 20 * mib},     // no entry
	} {
		configuration, err := ParseConfiguration(test.text, version.Version{Major: 2, Minor: 13})
		if err != nil {
			t.Fatal(err)
		}
		c := NewCUDA(configuration, 0)
		replay(t, c, test.size)
		s := c.Statistics()
		if s.Requested.Now != test.requested || s.Allocated.Now != test.allocated || s.Reserved.Now != test.reserved {
			t.Errorf("%q: %d bytes: requested %d, allocated %d, reserved %d; want %d, %d, %d", test.text, test.size,
				s.Requested.Now, s.Allocated.Now, s.Reserved.Now, test.requested, test.allocated, test.reserved)
		}
	}
}

func TestReuse(t *testing.T) {
	c := NewCUDA(Configuration{}, 0)
	b := replay(t, c, 20*mib)
	if err := c.Free(b[0]); err != nil {
		t.Fatal(err)
	}
	replay(t, c, 20_132_659) // leaves less than 1 MiB, so it gets all
	if s := c.Statistics(); s.Allocated.Now != 20*mib || s.Reserved.Now != 20*mib {
		t.Errorf("allocated %d, reserved %d", s.Allocated.Now, s.Reserved.Now)
	}
	c = NewCUDA(Configuration{}, 0)
	replay(t, c, 11*mib, 13*mib-1)
	if s := c.Statistics(); s.Requested.Now != 24*mib-1 || s.Allocated.Now != 26*mib || s.Reserved.Now != 26*mib {
		t.Errorf("%+v", s)
	}
}

// TestOutOfMemory fills a device of 100 MiB and looks at what is given back
// before a request is refused.
func TestOutOfMemory(t *testing.T) {
	c := NewCUDA(Configuration{}, 100*mib)
	b := replay(t, c, 40*mib, 40*mib, 1)
	_, err := c.Allocate(30*mib-1, 0)
	if want := (OutOfMemory{30*mib - 1, 30 * mib, 80*mib + 512, 82 * mib, 18 * mib}); err == nil ||
		*err.(*OutOfMemory) != want {
		t.Fatalf("%v, want %v", err, &want)
	}
	const text = "a request for 30.0 MiB needs 30.0 MiB of the device, which has 18.0 MiB free; " +
		"80.0 MiB are allocated, 2.00 MiB more are reserved"
	if !strings.Contains(err.Error(), text) {
		t.Errorf("%v, want %s", err, text)
	}
	if err := c.Free(b[1]); err != nil {
		t.Fatal(err)
	}
	replay(t, c, 50*mib) // instead of the 40 MiB
	if s := c.Statistics(); s.Reserved.Now != 92*mib || s.Retries != 2 || s.Segments.Peak != 3 {
		t.Errorf("%+v", s)
	}
	if _, err := c.Allocate(1<<62, 0); !errors.As(err, new(*OutOfMemory)) {
		t.Error(err)
	}
}

func TestOtherStreams(t *testing.T) {
	c := NewCUDA(Configuration{}, 4*mib)
	b := replay(t, c, 1)
	if err := c.FreeLater(b[0]); err != nil {
		t.Fatal(err)
	}
	if s := c.Statistics(); s.Allocated.Now != 0 || s.Active.Now != 512 || s.Requested.Now != 1 {
		t.Errorf("%+v", s)
	}
	c.Synchronize()
	replay(t, c, mib, mib)
	if _, err := c.Allocate(1, 1); err != nil {
		t.Error(err)
	}
	if s := c.Statistics(); s.Active.Now != 2*mib+512 || s.Reserved.Now != 4*mib || s.Segments.Now != 2 {
		t.Errorf("%+v", s)
	}
}

func TestBadNames(t *testing.T) {
	c, p := NewCUDA(Configuration{}, 0), NewPinned(Configuration{}, version.Version{Major: 2, Minor: 6})
	first := replay(t, c, 1)[0]
	pinned, err := p.Allocate(1)
	if err := errors.Join(err, c.Free(Block{}), p.Free(Block{}), c.Free(first), p.Free(pinned)); err != nil {
		t.Fatal(err)
	}
	if c.Free(first) == nil || c.FreeLater(first) == nil || p.Free(pinned) == nil {
		t.Error("a block was freed twice")
	}
	if c.Free(Block{1 << 30, 1}) == nil || c.Free(Block{chunkSize - 1, 0}) == nil || p.Free(Block{1 << 30, 1}) == nil {
		t.Error("a block was freed that never was")
	}
	again := replay(t, c, 1)[0]
	if again == first || c.Free(first) == nil {
		t.Error("the name of a freed block frees the block that took its place")
	}
	_, err = c.Allocate(-1, 0)
	_, pinnedErr := p.Allocate(-1)
	_, large := p.Allocate(limitless + 1)
	for _, err := range []error{err, pinnedErr, large} {
		if !errors.As(err, new(*fault.Input)) {
			t.Error(err)
		}
	}
}

// TestGarbageCollection needs a fraction, without which the threshold does
// nothing.
func TestGarbageCollection(t *testing.T) {
	for _, test := range []struct {
		fraction float64
		reserved ledger.Bytes
	}{{0, 100 * mib}, {0.9, 80 * mib}} {
		c := NewCUDA(Configuration{GarbageCollection: 0.5, MemoryFraction: test.fraction}, 200*mib)
		b := replay(t, c, 20*mib, 30*mib, 50*mib) // 100 MiB: above 0.5 * 0.9 * 200
		if err := c.Free(b[0]); err != nil {
			t.Fatal(err)
		}
		replay(t, c, 40*mib)
		if got := c.Statistics().Reserved.Now - 40*mib; got != test.reserved {
			t.Errorf("fraction %v: %v are left, want %v", test.fraction, got, test.reserved)
		}
	}
	c := NewCUDA(Configuration{GarbageCollection: 0.4, MemoryFraction: 0.5}, 1000*mib)
	b := replay(t, c, 100*mib, 90*mib, 30*mib) // 20 MiB above the threshold
	for _, block := range b[:2] {
		if err := c.Free(block); err != nil {
			t.Fatal(err)
		}
		if err := c.Free(replay(t, c, 2*mib)[0]); err != nil { // time passes
			t.Fatal(err)
		}
	}
	replay(t, c, 110*mib)
	if got := c.Statistics().Reserved.Now; got != 230*mib {
		t.Errorf("%v are reserved, want the older block gone and the younger one there: 230 MiB", got)
	}
}

// TestOversize fills a device with unused blocks, all but one of them oversize:
// no more of these are given back than a request needs, the largest first.
func TestOversize(t *testing.T) {
	for _, test := range []struct {
		size, reserved    ledger.Bytes
		segments, retries int
	}{
		{70 * mib, 138 * mib, 3, 0},
		{150 * mib, 178 * mib, 2, 0},
		{160 * mib, 160 * mib, 1, 1}, // those do not suffice
	} {
		c := NewCUDA(Configuration{MaxSplit: 30 * mib}, 180*mib)
		for _, b := range replay(t, c, 40*mib, 50*mib, 60*mib, 28*mib) {
			if err := c.Free(b); err != nil {
				t.Fatal(err)
			}
		}
		replay(t, c, test.size)
		if s := c.Statistics(); s.Reserved.Now != test.reserved || s.Segments.Now != test.segments ||
			s.Retries != test.retries {
			t.Errorf("%v: %+v", test.size, s)
		}
	}
}

// drawSizes favours the sizes at which policies change, and makes few of them,
// so that blocks of one size meet.
func drawSizes(t *rapid.T) []ledger.Bytes {
	return rapid.SliceOfN(rapid.Custom(drawSize), 1, 8).Draw(t, "sizes")
}

func drawSize(t *rapid.T) ledger.Bytes {
	edge := rapid.SampledFrom(
		[]ledger.Bytes{
			512,
			4096,
			mib,
			2 * mib,
			9 * mib,
			10 * mib,
			12 * mib,
			19 * mib,
			20 * mib,
			24 * mib,
			40 * mib,
			60 * mib,
			64 * mib,
		},
	).Draw(
		t,
		"edge",
	)
	return max(
		1,
		edge+rapid.SampledFrom([]ledger.Bytes{0, 0, -1, 1, -512, 512, -mib, mib, 3 * mib}).Draw(t, "distance"),
	)
}

func drawConfiguration(t *rapid.T) Configuration {
	c := Configuration{
		Expandable:          rapid.Bool().Draw(t, "expandable"),
		MaxSplit:            rapid.SampledFrom([]ledger.Bytes{0, 0, 20 * mib, 21 * mib, 40 * mib}).Draw(t, "max split"),
		MaxNonSplitRounding: rapid.SampledFrom([]ledger.Bytes{0, 21 * mib}).Draw(t, "rounding"),
		LargeSegment: rapid.SampledFrom(
			[]ledger.Bytes{0, 0, 10 * mib, 12 * mib, 32 * mib, 64 * mib},
		).Draw(
			t,
			"large segment",
		),
		GarbageCollection: rapid.SampledFrom([]float64{0, 0.3, 0.8}).Draw(t, "threshold"),
		MemoryFraction:    rapid.SampledFrom([]float64{0, 0.7, 1}).Draw(t, "fraction"),
	}
	for i := range c.Divisions {
		c.Divisions[i] = rapid.SampledFrom([]ledger.Bytes{0, 0, 1, 4, 8}).Draw(t, "divisions")
	}
	return c
}

// checkOften runs thousands of traces: they take microseconds each, and the
// edges of the policies are hit by one in a hundred.
func checkOften(t *testing.T, property func(*rapid.T)) {
	for range 30 {
		rapid.Check(t, property)
	}
}

// TestAgainstNaive replays random traces through both implementations, and
// holds the identities of the statistics after every operation.
func TestAgainstNaive(t *testing.T) {
	checkOften(t, func(t *rapid.T) {
		configuration := drawConfiguration(t)
		capacity := rapid.SampledFrom([]ledger.Bytes{90 * mib, 200 * mib, 1000 * mib}).Draw(t, "capacity")
		c, n := NewCUDA(configuration, capacity), &naive{configuration: configuration, capacity: capacity}
		type held struct {
			block Block
			name  int
		}
		all, sizes := []held{}, drawSizes(t)
		var peaks Statistics
		steps := rapid.IntRange(1, 200).Draw(t, "steps")
		for step := 1; step <= steps; step++ {
			kind := rapid.IntRange(0, 20).Draw(t, "kind")
			switch {
			case kind == 0:
				c.EmptyCache()
				n.emptyCache()
			case kind == 1:
				c.Synchronize()
				n.synchronize()
			case kind < 10 && len(all) > 0:
				i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
				free, how := c.Free, "free"
				if kind == 2 {
					free, how = c.FreeLater, "waiting"
				}
				if err := free(all[i].block); err != nil {
					t.Fatal(err)
				}
				n.free(all[i].name, how)
				all = slices.Delete(all, i, i+1)
			default:
				size, stream := rapid.SampledFrom(sizes).Draw(t, "size"), rapid.IntRange(0, 1).Draw(t, "stream")
				b, err := c.Allocate(size, stream)
				where := n.allocate(step, size, stream)
				if (where != nil) != (err == nil) || err == nil && c.blocks.find(b).place != *where {
					t.Fatalf("step %d: %d bytes: %+v, %v, but naive %+v", step, size, b, err, where)
				}
				if err == nil {
					all = append(all, held{b, step})
				}
			}
			compare(t, c, n, &peaks)
			if rapid.IntRange(0, 30).Draw(t, "reset") == 0 {
				c.ResetPeaks()
				peaks = Statistics{}
				compare(t, c, n, &peaks)
			}
		}
		for _, h := range all {
			if err := c.Free(h.block); err != nil {
				t.Fatal(err)
			}
		}
		c.EmptyCache()
		s := c.Statistics()
		if s.Requested.Now != 0 || s.Allocated.Now != 0 || s.Active.Now != 0 || s.Reserved.Now != 0 ||
			s.InactiveSplit.Now != 0 ||
			s.Segments.Now != 0 {
			t.Fatalf("all was freed and given back, but %+v", s)
		}
	})
}

// compare holds the levels against those of naive and raises the peaks that
// were seen between operations, which peaks must not be below.
func compare(t *rapid.T, c *CUDA, n *naive, peaks *Statistics) {
	s := c.Statistics()
	levels := n.levels()
	for _, gauge := range []struct {
		name                string
		got, want, seenPeak *Gauge[ledger.Bytes]
	}{
		{"requested", &s.Requested, &levels.Requested, &peaks.Requested},
		{"allocated", &s.Allocated, &levels.Allocated, &peaks.Allocated},
		{"active", &s.Active, &levels.Active, &peaks.Active},
		{"reserved", &s.Reserved, &levels.Reserved, &peaks.Reserved},
		{"inactive split", &s.InactiveSplit, &levels.InactiveSplit, &peaks.InactiveSplit},
	} {
		gauge.seenPeak.Peak = max(gauge.seenPeak.Peak, gauge.want.Now)
		if gauge.got.Now != gauge.want.Now || gauge.got.Peak < gauge.seenPeak.Peak {
			t.Fatalf(
				"%s is %d, naive says %d; its peak is %d, but %d was seen",
				gauge.name,
				gauge.got.Now,
				gauge.want.Now,
				gauge.got.Peak,
				gauge.seenPeak.Peak,
			)
		}
		gauge.seenPeak.Peak = gauge.got.Peak // peaks never fall
	}
	if s.Segments.Now != levels.Segments.Now || s.Retries != levels.Retries {
		t.Fatalf(
			"%d segments and %d retries, naive says %d and %d",
			s.Segments.Now,
			s.Retries,
			levels.Segments.Now,
			levels.Retries,
		)
	}
	inactive := ledger.Bytes(0)
	for _, pool := range []*blockPool{&c.small, &c.large} {
		for _, b := range c.cached(pool) {
			inactive += b.size
		}
	}
	if s.Reserved.Now != s.Active.Now+inactive || s.Allocated.Now > s.Active.Now || s.Requested.Now > s.Active.Now ||
		s.InactiveSplit.Now > inactive ||
		len(c.pending) == 0 && s.Requested.Now > s.Allocated.Now {
		t.Fatalf("%+v with %d inactive", s, inactive)
	}
}

// TestGrowing: an allocator that grows is PyTorch's while the device suffices. Beyond, it first returns its cache, and
// the device gets no more than the request then lacks.
func TestGrowing(t *testing.T) {
	for _, settings := range []string{"", "expandable_segments:True"} {
		configuration, err := ParseConfiguration(settings, version.Version{Major: 2, Minor: 13})
		if err != nil {
			t.Fatal(err)
		}
		c := NewGrowingCUDA(configuration, 100*ledger.MiB)
		allocate := func(size ledger.Bytes) Block {
			b, err := c.Allocate(size, 0)
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
		kept, cached := allocate(40*ledger.MiB), allocate(60*ledger.MiB)
		if got := c.Statistics(); got.Reserved.Now != 100*ledger.MiB || got.Retries != 0 {
			t.Errorf("%q: %v reserved after %d retries", settings, got.Reserved.Now, got.Retries)
		}
		if err := c.Free(cached); err != nil {
			t.Fatal(err)
		}
		allocate(80 * ledger.MiB) // 20 MiB more than the device has left without the cache
		if got := c.Statistics(); got.Reserved.Now != 120*ledger.MiB || got.Reserved.Peak != 120*ledger.MiB {
			t.Errorf("%q: %v reserved, %v at the peak, expected 120 MiB", settings, got.Reserved.Now, got.Reserved.Peak)
		}
		if c.capacity != 120*ledger.MiB {
			t.Errorf("%q: the device has %v, expected 120 MiB", settings, c.capacity)
		}
		if err := c.Free(kept); err != nil {
			t.Error(err)
		}
	}
}

// TestGrowingIsLimited: while the device suffices, an allocator that grows takes what one with a limit takes, also
// where an expandable segment has used up its address space.
func TestGrowingIsLimited(t *testing.T) {
	for _, settings := range []string{"", "expandable_segments:True"} {
		configuration, err := ParseConfiguration(settings, version.Version{Major: 2, Minor: 13})
		if err != nil {
			t.Fatal(err)
		}
		for seed := range uint64(200) {
			draws := rand.New(rand.NewPCG(seed, 0))
			limited, grows := NewCUDA(configuration, ledger.GiB), NewGrowingCUDA(configuration, ledger.GiB)
			var held [][2]Block
			for range 100 {
				if i := draws.IntN(4); i < len(held) {
					if err := errors.Join(limited.Free(held[i][0]), grows.Free(held[i][1])); err != nil {
						t.Fatal(err)
					}
					held = slices.Delete(held, i, i+1)
				}
				size := ledger.Bytes(1+draws.IntN(400)) * ledger.MiB
				a, err := limited.Allocate(size, 0)
				if err != nil {
					break
				}
				b, err := grows.Allocate(size, 0)
				if err != nil {
					t.Fatal(err)
				}
				held = append(held, [2]Block{a, b})
				if limited.Statistics() != grows.Statistics() {
					t.Fatalf("%q, %d: %+v with a limit, %+v growing", settings, seed, limited.Statistics(),
						grows.Statistics())
				}
			}
		}
	}
}
