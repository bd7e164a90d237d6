package allocator

import (
	"testing"

	"pgregory.net/rapid"

	"plimsoll/ledger"
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
			if s.Used != blocks || s.Used < asked || s.Resident < s.Used || s.PeakUsed < s.Used || s.PeakResident < s.Resident {
				t.Fatalf("%+v, blocks of %v, asked for %v", s, blocks, asked)
			}
			free, last := ledger.Bytes(0), (*chunk)(nil)
			for c := g.last; c != nil; c = c.previous {
				if c.next != last || last != nil && c.address+c.size != last.address || !c.inUse && last != nil && !last.inUse {
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
