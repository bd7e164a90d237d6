package allocator

import (
	"math/bits"

	"plimsoll/ledger"
	"plimsoll/version"
)

// Pinned is the allocator of page-locked host memory. Blocks are powers of two
// from torch 1.11 on, are never split, and go back to the system only when the
// cache is emptied (pytorch issues 95823 and 150517).
type Pinned struct {
	configuration Configuration
	torch         version.Version
	free          map[ledger.Bytes]int // blocks by size
	slab          ledger.Bytes         // of pinned_reserve_segment_size_mb, not yet given out
	started       bool
	statistics    PinnedStatistics
}

// PinnedStatistics are in bytes.
type PinnedStatistics struct {
	Requested, Locked         ledger.Bytes // asked for and not freed; page-locked
	PeakRequested, PeakLocked ledger.Bytes
}

// NewPinned is an empty allocator.
func NewPinned(c Configuration, torch version.Version) *Pinned {
	return &Pinned{configuration: c, torch: torch, free: map[ledger.Bytes]int{}}
}

// PinnedBlock is page-locked memory.
type PinnedBlock struct {
	Size, requested ledger.Bytes
	slab            bool
}

// Rounded is the size of the block for a request.
func (p *Pinned) Rounded(bytes ledger.Bytes) ledger.Bytes {
	if !p.torch.AtLeast(1, 11, 0) {
		return bytes
	}
	c := p.configuration
	if p.torch.AtLeast(2, 13, 0) && (c.PinnedThreshold > 0 && bytes > c.PinnedThreshold || c.PinnedCached > 0 && bytes > c.PinnedCached) {
		return roundUp(bytes, minBlock)
	}
	return 1 << bits.Len64(uint64(bytes-1))
}

// Allocate serves a request. A request of no bytes has no block.
func (p *Pinned) Allocate(bytes ledger.Bytes) *PinnedBlock {
	if bytes <= 0 {
		return nil
	}
	b := &PinnedBlock{Size: p.Rounded(bytes), requested: bytes}
	if !p.started && p.configuration.PinnedReserve > 0 {
		p.slab = p.configuration.PinnedReserve
		p.statistics.Locked += p.slab
	}
	p.started = true
	switch {
	case p.slab >= b.Size:
		p.slab -= b.Size
		b.slab = true
	case p.reuse(b):
	default:
		p.statistics.Locked += b.Size
	}
	s := &p.statistics
	s.Requested += bytes
	s.PeakRequested, s.PeakLocked = max(s.PeakRequested, s.Requested), max(s.PeakLocked, s.Locked)
	return b
}

// reuse takes a free block: of the same size from torch 2.6 on, before that the
// smallest that is large enough.
func (p *Pinned) reuse(b *PinnedBlock) bool {
	size := b.Size
	if p.free[size] == 0 && !p.torch.AtLeast(2, 6, 0) {
		size = 0
		for free, count := range p.free {
			if count > 0 && free >= b.requested && (size == 0 || free < size) {
				size = free
			}
		}
	}
	if size == 0 || p.free[size] == 0 {
		return false
	}
	p.free[size]--
	b.Size = size
	return true
}

// Free gives a block back to the allocator, which keeps it.
func (p *Pinned) Free(b *PinnedBlock) {
	if b == nil {
		return
	}
	p.statistics.Requested -= b.requested
	switch limit := p.configuration.PinnedCached; {
	case b.slab: // bump allocation: not given out again
	case limit > 0 && b.Size > limit && p.torch.AtLeast(2, 13, 0):
		p.statistics.Locked -= b.Size
	default:
		p.free[b.Size]++
	}
}

// EmptyCache gives all free blocks back to the system.
func (p *Pinned) EmptyCache() {
	for size, count := range p.free {
		p.statistics.Locked -= size * ledger.Bytes(count)
	}
	clear(p.free)
}

// Statistics are the counters.
func (p *Pinned) Statistics() PinnedStatistics { return p.statistics }
