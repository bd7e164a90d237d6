package allocator

import (
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
)

func TestGlibcThreshold(t *testing.T) {
	g := NewGlibc()
	// Above the threshold a block is a mapping, and goes back at once.
	b := g.Allocate(8 * ledger.MiB)
	if r := g.Statistics().Resident; r < 8*ledger.MiB || r > 8*ledger.MiB+2*pageSize {
		t.Errorf("%v resident for 8 MiB", r)
	}
	g.Free(b)
	if r := g.Statistics().Resident; r != 0 {
		t.Errorf("%v resident after a mapping was freed", r)
	}
	// From then on blocks of its size come from the heap, and what is freed
	// below one in use is a hole that stays.
	low, high := g.Allocate(7*ledger.MiB), g.Allocate(ledger.MiB)
	g.Free(low)
	if s := g.Statistics(); s.Resident < 8*ledger.MiB || s.Used > ledger.MiB+pageSize {
		t.Errorf("%+v with a hole of 7 MiB", s)
	}
	// The hole is used again, and with the top everything goes back but what is
	// kept for the next.
	again := g.Allocate(6 * ledger.MiB)
	if r := g.Statistics().Resident; r > 9*ledger.MiB {
		t.Errorf("%v resident, the hole was not used", r)
	}
	g.Free(again)
	g.Free(high)
	if r := g.Statistics().Resident; r > 16*ledger.MiB+topPad {
		t.Errorf("%v resident with nothing in use", r)
	}
	// A block above the largest threshold is a mapping whatever was freed.
	g.Free(g.Allocate(100 * ledger.MiB))
	before := g.Statistics().Resident
	huge := g.Allocate(64 * ledger.MiB)
	g.Free(huge)
	if r := g.Statistics().Resident; r != before {
		t.Errorf("%v resident after a large block, %v before", r, before)
	}
}

// TestGlibcTrim frees blocks of 100 KiB, which are 102464 bytes with their
// header, in the order in which they were allocated: they are a hole until the
// last is freed, and then the top.
func TestGlibcTrim(t *testing.T) {
	const block = 102_464
	for _, test := range []struct {
		mapping          ledger.Bytes // freed before: it raises the thresholds
		blocks           int
		before, resident ledger.Bytes
	}{
		{0, 1, block, block},                      // the top is trimmed to its pad, which was never written
		{0, 10, 10 * block, topPad},               // above 128 KiB
		{ledger.MiB, 19, 19 * block, 19 * block},  // 1.9 MB, below 2 * 1052672
		{ledger.MiB, 25, 25 * block, topPad},      // above
		{64 * ledger.MiB, 10, 10 * block, topPad}, // too large to raise anything
	} {
		g := NewGlibc()
		g.Free(g.Allocate(test.mapping))
		var blocks []*GlibcBlock
		for range test.blocks {
			blocks = append(blocks, g.Allocate(100*ledger.KiB))
		}
		for _, b := range blocks[:test.blocks-1] {
			g.Free(b)
		}
		if s := g.Statistics(); s.Resident != test.before || s.Used != block {
			t.Errorf("%+v: %+v before the last is freed", test, s)
		}
		g.Free(blocks[test.blocks-1])
		if s := g.Statistics(); s.Resident != test.resident || s.Used != 0 {
			t.Errorf("%+v: %+v", test, s)
		}
	}
	// The smallest block that is a mapping has 128 KiB with its header.
	g := NewGlibc()
	if b := g.Allocate(firstThreshold - header); !b.mapping || g.Statistics().Resident != firstThreshold+pageSize {
		t.Errorf("%+v, %+v", b, g.Statistics())
	}
	if b := g.Allocate(firstThreshold - header - 1); !b.mapping {
		t.Errorf("%+v: rounded up it is as large", b)
	}
	if b := g.Allocate(firstThreshold - header - alignment); b.mapping {
		t.Errorf("%+v", b)
	}
}

// TestGlibcSplits: a chunk is split where what is left could be a chunk.
func TestGlibcSplits(t *testing.T) {
	for rest, want := range map[ledger.Bytes]int{alignment: 0, 2 * alignment: 1, 3 * alignment: 1} {
		g := NewGlibc()
		freed := g.Allocate(10*alignment - header)
		g.Allocate(alignment) // keeps the chunk from the top
		g.Free(freed)
		g.Allocate(10*alignment - rest - header)
		if got := g.free.Len(); got != want {
			t.Errorf("of a chunk with %v to spare, %d chunks are free, want %d", rest, got, want)
		}
	}
}

func TestGlibcProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := NewGlibc()
		type held struct {
			block *GlibcBlock
			size  ledger.Bytes
		}
		var live []held
		for range rapid.IntRange(1, 200).Draw(t, "events") {
			if len(live) > 0 && rapid.Bool().Draw(t, "free") {
				i := rapid.IntRange(0, len(live)-1).Draw(t, "which")
				g.Free(live[i].block)
				live = append(live[:i], live[i+1:]...)
			} else {
				size := ledger.Bytes(rapid.Int64Range(0, 1<<rapid.IntRange(1, 28).Draw(t, "magnitude")).Draw(t, "size"))
				live = append(live, held{g.Allocate(size), size})
			}
			var asked, blocks ledger.Bytes
			for _, h := range live {
				asked += h.size
				if h.block != nil {
					blocks += h.block.size
				}
			}
			s := g.Statistics()
			if s.Used != blocks || s.Used < asked || s.Resident < s.Used || s.PeakUsed < s.Used ||
				s.PeakResident < s.Resident {
				t.Fatalf("%+v, blocks of %v, asked for %v", s, blocks, asked)
			}
			free, last := ledger.Bytes(0), (*chunk)(nil)
			for c := g.last; c != nil; c = c.previous {
				if c.next != last || last != nil && c.address+c.size != last.address ||
					!c.inUse && last != nil && !last.inUse {
					t.Fatal("chunks of the heap do not follow each other, or free ones were not joined")
				}
				if !c.inUse {
					free += c.size
				}
				last = c
			}
			if last != nil && last.address != 0 || g.free.Len() > 0 && free == 0 {
				t.Fatal("the heap does not begin at its start")
			}
		}
		for _, h := range live {
			g.Free(h.block)
		}
		if s := g.Statistics(); s.Used != 0 || s.Resident > g.trim+topPad+pageSize || g.last != nil {
			t.Fatalf("%+v with nothing in use", s)
		}
	})
}
