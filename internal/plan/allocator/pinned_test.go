package allocator

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

func TestPinnedRounding(t *testing.T) {
	const size = 129*mib + mib/2 // of pytorch issue 150517
	for _, test := range []struct {
		text   string
		minor  int
		locked ledger.Bytes
	}{
		{"", 5, 256 * mib},
		{"", 6, 256 * mib},
		{"", 13, 256 * mib},
		{"pinned_max_round_threshold_mb:64", 13, size},
		{"pinned_max_round_threshold_mb:0", 13, size},
		{"pinned_max_cached_size_mb:64", 13, size},
		{"pinned_max_round_threshold_mb:130", 13, 256 * mib},
		{"pinned_reserve_segment_size_mb:100", 13, 356 * mib}, // no room in the slab
		{"pinned_reserve_segment_size_mb:256", 13, 256 * mib},
	} {
		v := version.Version{Major: 2, Minor: test.minor}
		configuration, err := ParseConfiguration(test.text, v)
		if err != nil {
			t.Fatal(err)
		}
		p := NewPinned(configuration, v)
		if _, err := p.Allocate(size); err != nil {
			t.Fatal(err)
		}
		if got := p.Statistics().Pinned.Now; got != test.locked {
			t.Errorf("torch %s, %q: %d bytes locked, want %d", v, test.text, got, test.locked)
		}
	}
}

// TestPinnedReuse asks for 3 MiB when 8 MiB are unused.
func TestPinnedReuse(t *testing.T) {
	for v, want := range map[version.Version]ledger.Bytes{
		{Major: 1, Minor: 10}: 5 * mib, {Major: 1, Minor: 11}: 8 * mib,
		{Major: 2, Minor: 5}: 8 * mib, {Major: 2, Minor: 6}: 12 * mib,
	} {
		p := NewPinned(Configuration{}, v)
		b, err := p.Allocate(5 * mib)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Free(b); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Allocate(3 * mib); err != nil {
			t.Fatal(err)
		}
		if got := p.Statistics().Pinned.Now; got != want {
			t.Errorf("torch %s: %v locked, want %v", v, got, want)
		}
	}
}

func TestPinnedAgainstNaive(t *testing.T) {
	checkOften(t, func(t *rapid.T) {
		v := rapid.SampledFrom(
			[]version.Version{
				{Major: 1, Minor: 10},
				{Major: 1, Minor: 11},
				{Major: 2, Minor: 5},
				{Major: 2, Minor: 6},
				{Major: 2, Minor: 13},
			},
		).Draw(
			t,
			"version",
		)
		var c Configuration
		if v.Minor == 13 {
			limit := rapid.SampledFrom([]*ledger.Bytes{nil, new(2 * mib), new(20 * mib)})
			c.PinnedMaxRound, c.PinnedMaxCached = limit.Draw(t, "round"), limit.Draw(t, "cached")
			c.PinnedReserve = rapid.SampledFrom([]ledger.Bytes{0, 8192, 8 * mib, 100 * mib}).Draw(t, "slab")
		}
		p, n := NewPinned(c, v), &naivePinned{configuration: c, version: v}
		type held struct {
			block Block
			name  int
		}
		all, sizes := []held{}, drawSizes(t)
		var peak ledger.Bytes
		steps := rapid.IntRange(1, 200).Draw(t, "steps")
		for step := 1; step <= steps; step++ {
			kind := rapid.IntRange(0, 20).Draw(t, "kind")
			switch {
			case kind == 0:
				p.EmptyCache()
				n.emptyCache()
			case kind < 10 && len(all) > 0:
				i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
				if err := p.Free(all[i].block); err != nil {
					t.Fatal(err)
				}
				n.free(all[i].name, step)
				all = slices.Delete(all, i, i+1)
			default:
				size := rapid.SampledFrom(sizes).Draw(t, "size")
				b, err := p.Allocate(size)
				if err != nil {
					t.Fatal(err)
				}
				n.allocate(step, size)
				all = append(all, held{b, step})
			}
			s := p.Statistics()
			requested, allocated, locked := n.levels()
			peak = max(peak, locked)
			if s.Requested.Now != requested || s.Allocated.Now != allocated || s.Pinned.Now != locked ||
				s.Pinned.Peak != peak ||
				requested > allocated {
				t.Fatalf(
					"step %d: %+v, naive says %d, %d, %d with peak %d",
					step,
					s,
					requested,
					allocated,
					locked,
					peak,
				)
			}
			if rapid.IntRange(0, 30).Draw(t, "reset") == 0 {
				p.ResetPeaks()
				peak = locked
			}
		}
	})
}
