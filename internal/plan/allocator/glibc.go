package allocator

import (
	"github.com/tidwall/btree"

	"plimsoll/internal/base/ledger"
)

// Glibc is the malloc of the GNU C library (malloc/malloc.c) for one thread, as
// torch calls it for tensors on the CPU. A large block is a mapping of its own,
// and free returns it to the system. But the first free of such a mapping raises
// the mmap threshold to its size (the dynamic mmap threshold): blocks up to that
// size then come from the heap. Malloc returns only the top of the heap, so
// freed tensors leave holes that stay resident.
type Glibc struct {
	threshold ledger.Bytes // blocks of at least this size are mappings of their own
	trim      ledger.Bytes // malloc returns the top when it is larger than this
	free      *btree.BTreeG[*chunk]
	last      *chunk       // the chunk before the top
	end       ledger.Bytes // of the heap
	top       ledger.Bytes // offset of the top
	touched   ledger.Bytes // bytes of the heap that were written since they were taken
	mapped    ledger.Bytes // bytes in mappings

	used                    ledger.Bytes
	peakUsed, peakResidence ledger.Bytes
}

// chunk is a block of the heap, or a mapping.
type chunk struct {
	address, size  ledger.Bytes
	previous, next *chunk
	mapping, inUse bool
}

// The constants of malloc.c on 64-bit systems, and torch's alignment of tensors
// (c10/core/alignment.h).
const (
	firstThreshold   = 128 * ledger.KiB
	largestThreshold = 32 * ledger.MiB
	topPad           = 128 * ledger.KiB
	header           = 16
	alignment        = 64
	pageSize         = 4096
)

// NewGlibc returns an empty heap.
func NewGlibc() *Glibc {
	less := func(a, b *chunk) bool { return a.size < b.size || a.size == b.size && a.address < b.address }
	return &Glibc{
		threshold: firstThreshold,
		trim:      firstThreshold,
		free:      btree.NewBTreeGOptions(less, btree.Options{NoLocks: true}),
	}
}

// GlibcBlock is allocated memory.
type GlibcBlock = chunk

// Allocate models posix_memalign. A request for 0 bytes gets no block.
func (g *Glibc) Allocate(bytes ledger.Bytes) *GlibcBlock {
	if bytes <= 0 {
		return nil
	}
	size := roundUp(bytes+header, alignment)
	c := g.fit(size)
	switch {
	case c != nil:
	case g.end-g.top >= size:
		c = g.fromTop(size)
	case size >= g.threshold:
		c = &chunk{size: roundUp(size+alignment, pageSize), mapping: true}
		g.mapped += c.size
	default:
		g.end = roundUp(g.top+size+topPad, pageSize)
		c = g.fromTop(size)
	}
	c.inUse = true
	g.used += c.size
	g.peakUsed = max(g.peakUsed, g.used)
	g.peakResidence = max(g.peakResidence, g.resident())
	return c
}

// fit splits the smallest free chunk that is large enough.
func (g *Glibc) fit(size ledger.Bytes) *chunk {
	var c *chunk
	g.free.Ascend(&chunk{size: size}, func(found *chunk) bool {
		c = found
		return false
	})
	if c == nil {
		return nil
	}
	g.free.Delete(c)
	if rest := c.size - size; rest >= 2*alignment {
		tail := &chunk{address: c.address + size, size: rest, previous: c, next: c.next}
		if c.next != nil {
			c.next.previous = tail
		} else {
			g.last = tail
		}
		c.size, c.next = size, tail
		g.free.Set(tail)
	}
	return c
}

func (g *Glibc) fromTop(size ledger.Bytes) *chunk {
	c := &chunk{address: g.top, size: size, previous: g.last}
	if g.last != nil {
		g.last.next = c
	}
	g.last = c
	g.top += size
	g.touched = max(g.touched, g.top)
	return c
}

// Free frees a block.
func (g *Glibc) Free(c *GlibcBlock) {
	if c == nil {
		return
	}
	g.used -= c.size
	c.inUse = false
	if c.mapping {
		g.mapped -= c.size
		if c.size > g.threshold && c.size <= largestThreshold {
			g.threshold, g.trim = c.size, 2*c.size
		}
		return
	}
	if p := c.previous; p != nil && !p.inUse {
		g.free.Delete(p)
		g.join(p, c)
		c = p
	}
	if n := c.next; n != nil && !n.inUse {
		g.free.Delete(n)
		g.join(c, n)
	}
	if c != g.last {
		g.free.Set(c)
		return
	}
	// The chunk borders on the top and becomes part of it.
	g.last, g.top = c.previous, c.address
	if g.last != nil {
		g.last.next = nil
	}
	if g.end-g.top >= g.trim {
		g.end = roundUp(g.top+topPad, pageSize)
		g.touched = min(g.touched, g.end)
	}
}

// join merges two neighbouring chunks.
func (g *Glibc) join(c, n *chunk) {
	c.size += n.size
	c.next = n.next
	if n.next != nil {
		n.next.previous = c
	} else {
		g.last = c
	}
}

func (g *Glibc) resident() ledger.Bytes { return g.mapped + g.touched }

// GlibcStatistics counts bytes in use, headers included, and resident bytes.
type GlibcStatistics struct{ Used, Resident, PeakUsed, PeakResident ledger.Bytes }

// Statistics returns the counters.
func (g *Glibc) Statistics() GlibcStatistics {
	return GlibcStatistics{g.used, g.resident(), g.peakUsed, g.peakResidence}
}

// ResetPeaks sets every peak to the current level.
func (g *Glibc) ResetPeaks() { g.peakUsed, g.peakResidence = g.used, g.resident() }
