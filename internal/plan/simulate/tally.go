package simulate

import (
	"cmp"
	"slices"

	"plimsoll/internal/base/ledger"
)

// tally counts the blocks of a trace that are alive, by component and size.
type tally struct {
	sizes  []blockSize
	index  map[blockSize]int
	counts []int // by index
}

// blockSize is what blocks have in common that a formula counts together.
type blockSize struct {
	component int
	bytes     ledger.Bytes
}

// alike are tensors of one size.
type alike struct {
	count int64
	bytes ledger.Bytes // of each
}

// add counts a block, and returns the index of its size.
func (t *tally) add(component int, bytes ledger.Bytes) int {
	size := blockSize{component, bytes}
	i, known := t.index[size]
	if !known {
		if t.index == nil {
			t.index = map[blockSize]int{}
		}
		i = len(t.sizes)
		t.index[size] = i
		t.sizes, t.counts = append(t.sizes, size), append(t.counts, 0)
	}
	t.counts[i]++
	return i
}

func (t *tally) remove(size int) { t.counts[size]-- }

// blocks returns the blocks of each component at a moment with these counts, those that hold most first.
func (t *tally) blocks(counts []int, components int) [][]alike {
	list := make([][]alike, components)
	for i, count := range counts {
		if size := t.sizes[i]; count > 0 && size.bytes > 0 {
			list[size.component] = append(list[size.component], alike{int64(count), size.bytes})
		}
	}
	for _, of := range list {
		slices.SortFunc(of, func(a, b alike) int {
			return cmp.Or(cmp.Compare(b.total(), a.total()), cmp.Compare(b.bytes, a.bytes))
		})
	}
	return list
}

func (b alike) total() ledger.Bytes { return ledger.Bytes(b.count) * b.bytes }
