// Package allocator models the allocators below PyTorch: the caching allocator
// of CUDA memory (c10/cuda/CUDACachingAllocator.cpp) and the allocator of
// pinned host memory (ATen/core/CachingHostAllocator.h). It answers how much
// is taken from the device for what a program asks for.
package allocator

import (
	"fmt"

	"github.com/tidwall/btree"

	"plimsoll/ledger"
)

// The constants of the allocator (c10/core/AllocatorConfig.h).
const (
	minBlock   = 512
	smallSize  = ledger.MiB      // the largest block of the small pool
	smallPage  = 2 * ledger.MiB  // a segment of the small pool
	largePage  = 20 * ledger.MiB // a segment of the large pool, for requests below minLarge
	minLarge   = 10 * ledger.MiB // from here on a request has a segment of its own
	roundLarge = 2 * ledger.MiB  // which is a multiple of this
)

// CUDA is the caching allocator of one GPU.
type CUDA struct {
	configuration Configuration
	capacity      ledger.Bytes // 0 = unlimited
	small, large  *pool
	address       ledger.Bytes
	statistics    Statistics
	spare         []*Block
}

// Statistics are those of torch.cuda.memory_stats, in bytes but for counts.
type Statistics struct {
	Requested, Allocated, Reserved ledger.Bytes
	// Peaks since the last ResetPeaks. They need not be of one moment.
	PeakRequested, PeakAllocated, PeakReserved ledger.Bytes
	// Segments counts cudaMalloc's blocks; expandable ones are not counted.
	Segments int
	// InactiveSplit is what is free in segments that are in use.
	InactiveSplit ledger.Bytes
	// Retries counts how often cached memory was given back because the device
	// had no more.
	Retries int
}

// Block is a piece of a segment.
type Block struct {
	address, size, requested ledger.Bytes
	stream                   int
	pool                     *pool
	previous, next           *Block
	allocated                bool
	unmapped                 bool // of an expandable segment
	expandable               bool
}

// pool is the small or the large pool. Free blocks are in order of stream,
// size and address.
type pool struct {
	small    bool
	page     ledger.Bytes // of expandable segments
	free     *btree.BTreeG[*Block]
	unmapped map[int][]*Block // by stream, by address
}

func newPool(small bool, page ledger.Bytes) *pool {
	less := func(a, b *Block) bool {
		switch {
		case a.stream != b.stream:
			return a.stream < b.stream
		case a.size != b.size:
			return a.size < b.size
		}
		return a.address < b.address
	}
	return &pool{small: small, page: page, free: btree.NewBTreeGOptions(less, btree.Options{NoLocks: true}), unmapped: map[int][]*Block{}}
}

// NewCUDA is an empty allocator of a device with this capacity; 0 means that
// the device never runs out.
func NewCUDA(c Configuration, capacity ledger.Bytes) *CUDA {
	if c.MemoryFraction > 0 {
		capacity = ledger.Bytes(c.MemoryFraction * float64(capacity))
	}
	return &CUDA{configuration: c, capacity: capacity, small: newPool(true, smallPage), large: newPool(false, c.largeSegment())}
}

// OutOfMemory says that a request cannot be served.
type OutOfMemory struct {
	Requested ledger.Bytes
	// Segment is what would have been taken from the device: the "Tried to
	// allocate" of PyTorch's message.
	Segment                       ledger.Bytes
	Allocated, Reserved, Capacity ledger.Bytes
}

func (e *OutOfMemory) Error() string {
	return fmt.Sprintf("out of memory: tried to allocate %v for a request of %v; of %v, %v are allocated and %v are reserved and unallocated",
		e.Segment, e.Requested, e.Capacity, e.Allocated, e.Reserved-e.Allocated)
}

// Allocate serves a request on a stream. A request of no bytes has no block.
func (a *CUDA) Allocate(bytes ledger.Bytes, stream int) (*Block, error) {
	if bytes <= 0 {
		return nil, nil
	}
	size := a.configuration.round(bytes)
	p := a.large
	if size <= smallSize {
		p = a.small
	}
	b := a.find(p, size, stream)
	if b == nil {
		var ok bool
		if b, ok = a.segment(p, size, stream); !ok {
			a.statistics.Retries++
			a.EmptyCache()
			if b, ok = a.segment(p, size, stream); !ok {
				s := a.statistics
				return nil, &OutOfMemory{bytes, a.segmentSize(p, size), s.Allocated, s.Reserved, a.capacity}
			}
		}
	}
	a.split(b, size)
	b.allocated, b.requested = true, bytes
	s := &a.statistics
	s.Requested += bytes
	s.Allocated += b.size
	s.PeakRequested, s.PeakAllocated = max(s.PeakRequested, s.Requested), max(s.PeakAllocated, s.Allocated)
	return b, nil
}

// find takes the smallest free block of the stream that is large enough.
func (a *CUDA) find(p *pool, size ledger.Bytes, stream int) *Block {
	var found *Block
	p.free.Ascend(&Block{stream: stream, size: size}, func(b *Block) bool {
		switch {
		case b.stream != stream:
			return false
		case found == nil:
			found = b
			// Of expandable blocks one in the middle goes before the one at the end,
			// which could grow.
			return b.expandable && a.growth(b) > b.size
		case b.expandable && a.growth(b) < a.growth(found):
			found = b
			return true
		}
		return false
	})
	limit := a.configuration.MaxSplit
	if found == nil || limit > 0 && (size < limit && found.size >= limit || size >= limit && found.size >= size+a.configuration.maxRounding()) {
		return nil
	}
	a.unlist(found)
	return found
}

// growth is the size that a free block could have with what can be mapped
// behind it.
func (a *CUDA) growth(b *Block) ledger.Bytes {
	if b.next != nil && b.next.unmapped {
		return b.size + b.next.size
	}
	return b.size
}

// list and unlist put a free block into its pool and take it out. The free
// parts of segments in use count as inactive, but for expandable ones.
func (a *CUDA) list(b *Block) {
	b.pool.free.Set(b)
	if !b.expandable && (b.previous != nil || b.next != nil) {
		a.statistics.InactiveSplit += b.size
	}
}

func (a *CUDA) unlist(b *Block) {
	b.pool.free.Delete(b)
	if !b.expandable && (b.previous != nil || b.next != nil) {
		a.statistics.InactiveSplit -= b.size
	}
}

// segmentSize is what is taken from the device for a block.
func (a *CUDA) segmentSize(p *pool, size ledger.Bytes) ledger.Bytes {
	switch {
	case p.small:
		return smallPage
	case size < minLarge:
		return a.configuration.largeSegment()
	}
	return roundUp(size, roundLarge)
}

func roundUp(n, step ledger.Bytes) ledger.Bytes { return (n + step - 1) / step * step }

// segment takes memory from the device; false if it has no more.
func (a *CUDA) segment(p *pool, size ledger.Bytes, stream int) (*Block, bool) {
	if a.configuration.Expandable {
		return a.expand(p, size, stream)
	}
	bytes := a.segmentSize(p, size)
	if !a.reserve(bytes) {
		return nil, false
	}
	a.statistics.Segments++
	b := a.newBlock()
	*b = Block{address: a.address, size: bytes, stream: stream, pool: p}
	a.address += bytes
	return b, true
}

func (a *CUDA) reserve(bytes ledger.Bytes) bool {
	s := &a.statistics
	if a.capacity > 0 && s.Reserved+bytes > a.capacity {
		return false
	}
	s.Reserved += bytes
	s.PeakReserved = max(s.PeakReserved, s.Reserved)
	return true
}

// reservation is the address space of an expandable segment; it takes no
// memory.
const reservation = ledger.Bytes(1) << 46

// expand maps pages behind the blocks of a stream's expandable segment, at the
// lowest address that has room.
func (a *CUDA) expand(p *pool, size ledger.Bytes, stream int) (*Block, bool) {
	if len(p.unmapped[stream]) == 0 {
		b := a.newBlock()
		*b = Block{address: a.address, size: reservation, stream: stream, pool: p, expandable: true, unmapped: true}
		a.address += reservation
		p.unmapped[stream] = []*Block{b}
	}
	for i, hole := range p.unmapped[stream] {
		before := hole.previous
		if before != nil && (before.allocated || before.unmapped) {
			before = nil
		}
		var have ledger.Bytes
		if before != nil {
			have = before.size
		}
		if have+hole.size+freeBehind(hole) < size {
			continue
		}
		pages := min(roundUp(size-have, p.page), hole.size)
		if !a.reserve(pages) {
			return nil, false
		}
		mapped := a.newBlock()
		*mapped = Block{address: hole.address, size: pages, stream: stream, pool: p, expandable: true, previous: hole.previous, next: hole}
		if hole.previous != nil {
			hole.previous.next = mapped
		}
		hole.previous = mapped
		hole.address += pages
		hole.size -= pages
		if hole.size == 0 {
			a.remove(hole)
			p.unmapped[stream] = append(p.unmapped[stream][:i], p.unmapped[stream][i+1:]...)
		}
		return a.merge(mapped), true
	}
	return nil, false
}

// freeBehind is the size of a free block right behind a hole.
func freeBehind(hole *Block) ledger.Bytes {
	if b := hole.next; b != nil && !b.allocated && !b.unmapped {
		return b.size
	}
	return 0
}

// split gives back the rest of a block that is larger than asked for.
func (a *CUDA) split(b *Block, size ledger.Bytes) {
	rest := b.size - size
	splits := rest >= minBlock
	if !b.pool.small && !a.configuration.Expandable {
		limit := a.configuration.MaxSplit
		splits = rest > smallSize && (limit == 0 || size < limit)
	}
	if !splits {
		return
	}
	tail := a.newBlock()
	*tail = Block{address: b.address + size, size: rest, stream: b.stream, pool: b.pool, expandable: b.expandable, previous: b, next: b.next}
	if b.next != nil {
		b.next.previous = tail
	}
	b.size, b.next = size, tail
	a.list(tail)
}

// Free gives a block back.
func (a *CUDA) Free(b *Block) {
	if b == nil {
		return
	}
	s := &a.statistics
	s.Requested -= b.requested
	s.Allocated -= b.size
	b.allocated = false
	a.list(a.merge(b))
}

// merge joins a block that is in no pool with free neighbours.
func (a *CUDA) merge(b *Block) *Block {
	for _, other := range []*Block{b.previous, b.next} {
		if other == nil || other.allocated || other.unmapped {
			continue
		}
		a.unlist(other)
		b.address = min(b.address, other.address)
		b.size += other.size
		a.remove(other)
	}
	return b
}

// remove takes a block out of its segment.
func (a *CUDA) remove(b *Block) {
	if b.previous != nil {
		b.previous.next = b.next
	}
	if b.next != nil {
		b.next.previous = b.previous
	}
	a.spare = append(a.spare, b)
}

func (a *CUDA) newBlock() *Block {
	if n := len(a.spare); n > 0 {
		b := a.spare[n-1]
		a.spare = a.spare[:n-1]
		return b
	}
	return &Block{}
}

// EmptyCache gives back segments of which nothing is in use, and whole pages of
// expandable ones.
func (a *CUDA) EmptyCache() {
	for _, p := range []*pool{a.small, a.large} {
		for _, b := range p.free.Items() {
			switch {
			case b.expandable:
				a.unmap(b)
			case b.previous == nil && b.next == nil:
				a.unlist(b)
				a.statistics.Reserved -= b.size
				a.statistics.Segments--
				a.remove(b)
			}
		}
	}
}

// unmap gives back the whole pages inside a free block.
func (a *CUDA) unmap(b *Block) {
	// Pages are counted from the start of the segment.
	start := b
	for start.previous != nil {
		start = start.previous
	}
	first := start.address + roundUp(b.address-start.address, b.pool.page)
	last := start.address + (b.address+b.size-start.address)/b.pool.page*b.pool.page
	if last <= first {
		return
	}
	a.unlist(b)
	a.statistics.Reserved -= last - first
	if rest := b.address + b.size - last; rest > 0 {
		tail := a.newBlock()
		*tail = Block{address: last, size: rest, stream: b.stream, pool: b.pool, expandable: true, previous: b, next: b.next}
		if b.next != nil {
			b.next.previous = tail
		}
		b.next = tail
		b.size -= rest
		a.list(tail)
	}
	if head := first - b.address; head > 0 {
		front := a.newBlock()
		*front = Block{address: b.address, size: head, stream: b.stream, pool: b.pool, expandable: true, previous: b.previous, next: b}
		if b.previous != nil {
			b.previous.next = front
		}
		b.previous = front
		b.address, b.size = first, b.size-head
		a.list(front)
	}
	b.unmapped = true
	a.hole(b)
}

// hole lists an unmapped block, joined with unmapped neighbours, by address.
func (a *CUDA) hole(b *Block) {
	holes := b.pool.unmapped[b.stream]
	for _, other := range []*Block{b.previous, b.next} {
		if other == nil || !other.unmapped {
			continue
		}
		for i, h := range holes {
			if h == other {
				holes = append(holes[:i], holes[i+1:]...)
				break
			}
		}
		b.address = min(b.address, other.address)
		b.size += other.size
		a.remove(other)
	}
	at := 0
	for at < len(holes) && holes[at].address < b.address {
		at++
	}
	holes = append(holes, nil)
	copy(holes[at+1:], holes[at:])
	holes[at] = b
	b.pool.unmapped[b.stream] = holes
}

// Statistics are the counters.
func (a *CUDA) Statistics() Statistics { return a.statistics }

// ResetPeaks begins a new measurement of peaks.
func (a *CUDA) ResetPeaks() {
	s := &a.statistics
	s.PeakRequested, s.PeakAllocated, s.PeakReserved = s.Requested, s.Allocated, s.Reserved
}
