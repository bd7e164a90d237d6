package allocator

import (
	"fmt"
	"math/bits"

	"plimsoll/fault"
	"plimsoll/ledger"
	"plimsoll/version"
)

// PinnedStatistics are those of the pinned host allocator.
type PinnedStatistics struct {
	Requested Gauge[ledger.Bytes] // what the program asked for
	Allocated Gauge[ledger.Bytes] // the blocks that it holds
	Locked    Gauge[ledger.Bytes] // page-locked memory, unused blocks and the reserved slab included
}

// Pinned is the caching allocator of page-locked host memory. It neither
// splits blocks nor merges them, and keeps those that are freed.
type Pinned struct {
	rounds  bool // sizes are rounded up to a power of two
	bestFit bool // a request may get a block that is larger than its own would be

	maxRound, maxCached ledger.Bytes
	slab, slabLeft      ledger.Bytes // slab is 0 once it is there

	blocks     store
	made       int                       // blocks so far
	free       *set                      // of bestFit: by size
	stacks     map[ledger.Bytes][]*block // of others: by size, the last one freed on top
	statistics PinnedStatistics
}

// The alignment of blocks that are not rounded to a power of two, and that of
// blocks within the slab.
const (
	hostAlignment = 512
	slabAlignment = 4096
)

// NewPinned is an empty allocator of that version of torch. Up to 2.5 it hands
// out the best fit; since 2.6 only blocks of the size that it would make. For
// sizes that PinnedMaxRound exempts from rounding this is an assumption, which
// errs towards more memory.
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

// Allocate serves a request. Host memory has no limit here: whether it fits is
// for the plan to say.
func (p *Pinned) Allocate(size ledger.Bytes) (Block, error) {
	switch {
	case size < 0:
		return Block{}, negative(size)
	case size == 0:
		return Block{}, nil
	case size > limitless-p.statistics.Locked.Now-p.slab:
		return Block{}, &fault.Input{What: fmt.Sprintf("pinned memory of %v on top of %v, expected less than %v", size, p.statistics.Locked.Now, limitless)}
	}
	b := p.reuse(size)
	if b == nil {
		b = p.lock(p.Rounded(size))
	}
	p.statistics.Allocated.add(b.size)
	p.statistics.Requested.add(size)
	return p.blocks.handOut(b, size), nil
}

// Free takes a block back that no stream uses any more.
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
		p.unlock(b)
	case p.bestFit:
		p.free.Set(entry{b.place, b})
	default:
		p.stacks[b.size] = append(p.stacks[b.size], b)
	}
	return nil
}

// EmptyCache unlocks all unused blocks, as torch._C._host_emptyCache does.
// torch.cuda.empty_cache does not.
func (p *Pinned) EmptyCache() {
	for e, any := p.free.PopMin(); any; e, any = p.free.PopMin() {
		p.unlock(e.block)
	}
	for _, stack := range p.stacks {
		for _, b := range stack {
			p.unlock(b)
		}
	}
	clear(p.stacks)
}

// Statistics are the levels now and their peaks.
func (p *Pinned) Statistics() PinnedStatistics { return p.statistics }

// ResetPeaks makes the levels of now the peaks.
func (p *Pinned) ResetPeaks() {
	p.statistics.Requested.reset()
	p.statistics.Allocated.reset()
	p.statistics.Locked.reset()
}

// Rounded is the size of a new block for a request.
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

// inSlab is the segment of all blocks in the slab; others have one each.
const inSlab = 0

// lock makes a block: in the slab while that has room, else of its own.
func (p *Pinned) lock(size ledger.Bytes) *block {
	if p.slab > 0 {
		p.statistics.Locked.add(p.slab)
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
	p.statistics.Locked.add(size)
	return b
}

// unlock ends a block. The slab stays, and so do its holes.
func (p *Pinned) unlock(b *block) {
	if b.segment != inSlab {
		p.statistics.Locked.add(-b.size)
	}
	p.blocks.giveBack(b)
}
