package allocator

import (
	"math/bits"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

// PinnedStatistics are those of the pinned host allocator.
type PinnedStatistics struct {
	Requested Gauge[ledger.Bytes] // bytes the program asked for
	Allocated Gauge[ledger.Bytes] // blocks the program holds
	Pinned    Gauge[ledger.Bytes] // pinned memory, unused blocks and the reserved slab included
}

// Pinned is the caching allocator of pinned host memory. It never splits or
// merges blocks, and it keeps freed blocks.
type Pinned struct {
	rounds  bool // rounds sizes up to a power of two
	bestFit bool // may serve a request from a larger block

	maxRound, maxCached ledger.Bytes
	slab, slabLeft      ledger.Bytes // slab becomes 0 when it is allocated

	blocks     blockStore
	made       int                       // blocks created so far
	free       *set                      // with bestFit: free blocks by size
	stacks     map[ledger.Bytes][]*block // without: free blocks by size, last in first out
	statistics PinnedStatistics
}

// Alignment of blocks that are not rounded to a power of two, and of blocks in
// the slab.
const (
	hostAlignment = 512
	slabAlignment = 4096
)

// NewPinned returns an empty allocator that behaves as that version of torch.
// Torch up to 2.5 serves the best fit. Torch 2.6 and later reuses a block only
// if its size equals the size of a new block. Plimsoll assumes the same for
// sizes that PinnedMaxRound exempts from rounding; this errs towards more memory.
func NewPinned(configuration Configuration, v version.Version) *Pinned {
	p := &Pinned{
		rounds:    v.AtLeast(1, 11, 0),
		bestFit:   !v.AtLeast(2, 6, 0),
		maxRound:  limitless,
		maxCached: limitless,
		slab:      configuration.PinnedReserve,
		free:      newSet(bySize),
		stacks:    map[ledger.Bytes][]*block{},
	}
	if limit := configuration.PinnedMaxRound; limit != nil {
		p.maxRound = *limit
	}
	if limit := configuration.PinnedMaxCached; limit != nil {
		p.maxCached = *limit
	}
	return p
}

// Allocate serves a request. It has no limit: the plan says whether host memory
// suffices.
func (p *Pinned) Allocate(size ledger.Bytes) (Block, error) {
	switch {
	case size < 0:
		return Block{}, negative(size)
	case size == 0:
		return Block{}, nil
	case size > limitless-p.statistics.Pinned.Now-p.slab:
		return Block{}, fault.Inputf("pinned memory of %v on top of %v, expected less than %v", size,
			p.statistics.Pinned.Now, limitless)
	}
	b := p.reuse(size)
	if b == nil {
		b = p.pin(p.Rounded(size))
	}
	p.statistics.Allocated.add(b.size)
	p.statistics.Requested.add(size)
	return p.blocks.handOut(b, size), nil
}

// Free frees a block that no stream uses.
func (p *Pinned) Free(name Block) error {
	if name == (Block{}) {
		return nil
	}
	b := p.blocks.find(name)
	if b == nil {
		return errNotAllocated
	}
	p.statistics.Allocated.add(-b.size)
	p.statistics.Requested.add(-b.requested)
	b.state = free
	switch {
	case b.size > p.maxCached:
		p.unpin(b)
	case p.bestFit:
		p.free.Set(entry{b.place, b})
	default:
		p.stacks[b.size] = append(p.stacks[b.size], b)
	}
	return nil
}

// EmptyCache frees all unused blocks, as torch._C._host_emptyCache does.
// torch.cuda.empty_cache leaves pinned memory alone.
func (p *Pinned) EmptyCache() {
	for e, any := p.free.PopMin(); any; e, any = p.free.PopMin() {
		p.unpin(e.block)
	}
	for _, stack := range p.stacks {
		for _, b := range stack {
			p.unpin(b)
		}
	}
	clear(p.stacks)
}

// Statistics returns the current levels and their peaks.
func (p *Pinned) Statistics() PinnedStatistics { return p.statistics }

// ResetPeaks sets every peak to the current level.
func (p *Pinned) ResetPeaks() {
	p.statistics.Requested.reset()
	p.statistics.Allocated.reset()
	p.statistics.Pinned.reset()
}

// Rounded returns the size of a new block for a request.
func (p *Pinned) Rounded(size ledger.Bytes) ledger.Bytes {
	switch {
	case !p.rounds:
		return size
	case size <= p.maxRound && size <= p.maxCached:
		return 1 << bits.Len64(uint64(size-1))
	default:
		return roundUp(size, hostAlignment)
	}
}

func (p *Pinned) reuse(size ledger.Bytes) *block {
	if p.bestFit {
		var best *block
		p.free.Ascend(entry{place: place{size: size}}, func(e entry) bool {
			best = e.block
			return false
		})
		if best != nil {
			p.free.Delete(entry{place: best.place})
		}
		return best
	}
	size = p.Rounded(size)
	stack := p.stacks[size]
	if len(stack) == 0 {
		return nil
	}
	top := len(stack) - 1
	p.stacks[size] = stack[:top]
	return stack[top]
}

// inSlab is the segment number of all blocks in the slab. Other blocks have a
// segment each.
const inSlab = 0

// pin creates a block, in the slab while it has room.
func (p *Pinned) pin(size ledger.Bytes) *block {
	if p.slab > 0 {
		p.statistics.Pinned.add(p.slab)
		p.slabLeft, p.slab = p.slab, 0
	}
	b := p.blocks.take()
	b.size = size
	if aligned := roundUp(size, slabAlignment); aligned <= p.slabLeft {
		p.slabLeft -= aligned
		b.segment = inSlab
		return b
	}
	p.made++
	b.segment = p.made
	p.statistics.Pinned.add(size)
	return b
}

// unpin ends a block. A block of the slab leaves a hole that is never reused.
func (p *Pinned) unpin(b *block) {
	if b.segment != inSlab {
		p.statistics.Pinned.add(-b.size)
	}
	p.blocks.giveBack(b)
}
