package allocator

import (
	"errors"
	"fmt"
	"math/bits"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// limitless stands for "no limit". PyTorch refuses a request of this size.
const limitless = ledger.Bytes(1 << 60)

// Statistics are those of torch.cuda.memory_stats.
type Statistics struct {
	Requested     Gauge[ledger.Bytes] // bytes the program asked for, until no stream uses them
	Allocated     Gauge[ledger.Bytes] // blocks the program holds
	Active        Gauge[ledger.Bytes] // Allocated, and freed blocks that a stream still uses
	Reserved      Gauge[ledger.Bytes] // memory taken from the driver
	InactiveSplit Gauge[ledger.Bytes] // free parts of segments in use, expandable segments excluded
	Segments      Gauge[int]          // cudaMalloc'ed segments, expandable segments excluded
	Retries       int                 // times the allocator emptied its cache and tried again
}

// CUDA is the caching allocator of one device.
type CUDA struct {
	capacity     ledger.Bytes
	allowed      ledger.Bytes // limit set by MemoryFraction; 0 for none
	threshold    ledger.Bytes // garbage collection starts above it; 0 for never
	maxSplit     ledger.Bytes // limitless for none
	maxRounding  ledger.Bytes
	largeSegment ledger.Bytes
	expandable   bool
	grows        bool // instead of running out of memory
	hasGrown     bool
	divisions    [16]ledger.Bytes

	small, large blockPool
	blocks       blockStore
	segments     int // created so far
	pending      []*block
	scratch      []*block
	statistics   Statistics
}

// NewCUDA returns an empty allocator with that many bytes of device memory.
// A capacity of 0 or less means no limit. MemoryFraction is a share of capacity.
func NewCUDA(configuration Configuration, capacity ledger.Bytes) *CUDA {
	c := &CUDA{
		capacity:     min(capacity, limitless),
		maxSplit:     configuration.MaxSplit,
		maxRounding:  configuration.MaxNonSplitRounding,
		largeSegment: configuration.largeSegment(),
		expandable:   configuration.Expandable,
		divisions:    configuration.Divisions,
	}
	if capacity <= 0 {
		c.capacity = limitless
	}
	if c.maxSplit == 0 {
		c.maxSplit = limitless
	}
	if c.maxRounding == 0 {
		c.maxRounding = defaultLargeSegment
	}
	if fraction := configuration.MemoryFraction; fraction > 0 && fraction < 1 {
		c.allowed = ledger.Bytes(fraction * float64(c.capacity))
		c.threshold = ledger.Bytes(configuration.GarbageCollection * float64(c.allowed))
	}
	c.small = blockPool{isSmall: true, page: smallSegment, freeLists: map[int]*freeList{}}
	c.large = blockPool{page: c.largeSegment, freeLists: map[int]*freeList{}}
	return c
}

// NewGrowingCUDA returns an allocator that never runs out of memory. Where PyTorch would, after it has returned its
// cache to the driver, the device gets as many bytes more as the request lacks.
func NewGrowingCUDA(configuration Configuration, capacity ledger.Bytes) *CUDA {
	c := NewCUDA(configuration, capacity)
	c.grows = true
	return c
}

// OutOfMemory reports a request that failed even after the allocator had
// returned all unused memory to the driver.
type OutOfMemory struct {
	Requested ledger.Bytes // by the program
	Segment   ledger.Bytes // by the allocator, from the driver
	Allocated ledger.Bytes
	Reserved  ledger.Bytes
	Free      ledger.Bytes // left at the driver
}

func (e *OutOfMemory) Error() string {
	return fmt.Sprintf(
		"CUDA out of memory: a request for %v needs %v of the device, which has %v free; "+
			"%v are allocated, %v more are reserved",
		e.Requested, e.Segment, e.Free, e.Allocated, e.Reserved-e.Allocated)
}

// Allocate serves a request on a stream. The error is an *OutOfMemory, or a
// *fault.Input for a negative size.
func (c *CUDA) Allocate(size ledger.Bytes, stream int) (Block, error) {
	switch {
	case size < 0:
		return Block{}, negative(size)
	case size == 0:
		return Block{}, nil
	case size >= limitless:
		return Block{}, c.outOfMemory(size, size)
	}
	rounded := c.round(size)
	pool := &c.large
	if rounded <= smallLimit {
		pool = &c.small
	}
	list := pool.freeList(stream)
	pool.searches++
	b := c.getFreeBlock(list, rounded)
	if b == nil {
		b = c.allocBlockWithRetries(list, rounded)
	}
	if b == nil {
		return Block{}, c.outOfMemory(size, c.segmentSize(rounded))
	}
	c.split(b, rounded)
	c.statistics.Allocated.add(b.size)
	c.statistics.Active.add(b.size)
	c.statistics.Requested.add(size)
	return c.blocks.handOut(b, size), nil
}

func negative(size ledger.Bytes) error {
	return fault.Inputf("an allocation of %d bytes, expected 0 or more", int64(size))
}

var errNotAllocated = errors.New("freed a block that is not allocated")

// Free frees a block that no other stream uses.
func (c *CUDA) Free(name Block) error {
	b, err := c.deallocate(name)
	if b != nil {
		c.freeBlock(b)
	}
	return err
}

// FreeLater frees a block that other streams still use (a tensor with
// record_stream). The block stays active until Synchronize. An allocator that
// runs out of memory synchronizes by itself.
func (c *CUDA) FreeLater(name Block) error {
	b, err := c.deallocate(name)
	if b != nil {
		b.state = pending
		c.pending = append(c.pending, b)
	}
	return err
}

// Synchronize reports that all streams have finished their work.
func (c *CUDA) Synchronize() {
	for _, b := range c.pending {
		c.freeBlock(b)
	}
	c.pending = c.pending[:0]
}

// deallocate ends the program's use of a block and returns it. The zero Block
// gives nil.
func (c *CUDA) deallocate(name Block) (*block, error) {
	if name == (Block{}) {
		return nil, nil
	}
	b := c.blocks.find(name)
	if b == nil {
		return nil, errNotAllocated
	}
	c.statistics.Allocated.add(-b.size)
	return b, nil
}

// Statistics returns the current levels and their peaks.
func (c *CUDA) Statistics() Statistics { return c.statistics }

// ResetPeaks sets every peak to the current level.
func (c *CUDA) ResetPeaks() {
	s := &c.statistics
	for _, gauge := range []*Gauge[ledger.Bytes]{&s.Requested, &s.Allocated, &s.Active, &s.Reserved, &s.InactiveSplit} {
		gauge.reset()
	}
	s.Segments.reset()
}

func (c *CUDA) outOfMemory(size, segment ledger.Bytes) error {
	capacity := c.capacity
	if c.grows {
		capacity = limitless
	}
	return &OutOfMemory{
		size,
		segment,
		c.statistics.Allocated.Now,
		c.statistics.Reserved.Now,
		capacity - c.statistics.Reserved.Now,
	}
}

// round returns the block size for a request.
func (c *CUDA) round(size ledger.Bytes) ledger.Bytes {
	if size < minimumBlock {
		return minimumBlock
	}
	// roundup_power2_divisions has one entry for each power of two from 1 MiB on.
	top := bits.Len64(uint64(size)) - 1
	divisions := c.divisions[max(0, min(top-20, len(c.divisions)-1))]
	if divisions > 1 && size > minimumBlock*divisions {
		return roundUp(size, max(1, (ledger.Bytes(1)<<top)/divisions))
	}
	return roundUp(size, minimumBlock)
}

func (c *CUDA) segmentSize(rounded ledger.Bytes) ledger.Bytes {
	switch {
	case rounded <= smallLimit:
		return smallSegment
	case rounded < ownSegment:
		return c.largeSegment
	default:
		return roundUp(rounded, ownSegmentStep)
	}
}

// getFreeBlock removes the best fit from a free list: the smallest block that
// is large enough, at the lowest address. A block that ends at unmapped space
// counts with the size it can grow to, so holes are filled before a segment
// grows.
func (c *CUDA) getFreeBlock(s *freeList, size ledger.Bytes) *block {
	var best *block
	s.free.Ascend(entry{place: place{size: size}}, func(e entry) bool {
		if best != nil && e.block.reach() >= best.reach() {
			return false
		}
		best = e.block
		return c.expandable
	})
	if best == nil ||
		size < c.maxSplit && best.size >= c.maxSplit ||
		size >= c.maxSplit && best.size >= size+c.maxRounding {
		return nil
	}
	c.remove(best)
	return best
}

// allocBlockWithRetries takes memory from the driver. Where the driver has too
// little, it releases cached blocks and tries again, as PyTorch does.
func (c *CUDA) allocBlockWithRetries(s *freeList, size ledger.Bytes) *block {
	if c.threshold > 0 {
		c.collectGarbage()
	}
	b := c.allocBlock(s, size)
	if b == nil && c.releaseOversize(s, size) {
		b = c.allocBlock(s, size)
	}
	if b == nil {
		c.EmptyCache()
		c.statistics.Retries++
		b = c.allocBlock(s, size)
	}
	if b == nil && c.grows {
		c.grow(s, size)
		b = c.allocBlock(s, size)
	}
	return b
}

// grow gives the device what a request lacks.
func (c *CUDA) grow(s *freeList, size ledger.Bytes) {
	c.hasGrown = true
	segment := c.segmentSize(size)
	if c.expandable {
		segment = c.unmappedOf(s, size)
	}
	needed := c.statistics.Reserved.Now + segment
	if needed > limitless {
		return
	}
	c.capacity = max(c.capacity, needed)
	if c.allowed > 0 {
		c.allowed = max(c.allowed, c.statistics.Reserved.Now+c.segmentSize(size))
	}
}

// allocBlock creates a segment, or grows one in expandable mode. It returns nil
// if the driver has too little memory.
func (c *CUDA) allocBlock(s *freeList, size ledger.Bytes) *block {
	segment := c.segmentSize(size)
	if c.allowed > 0 && c.statistics.Reserved.Now+segment > c.allowed {
		return nil
	}
	if c.expandable {
		return c.expand(s, size)
	}
	if c.statistics.Reserved.Now+segment > c.capacity {
		return nil
	}
	c.statistics.Reserved.add(segment)
	c.statistics.Segments.add(1)
	return c.newSegment(s, segment)
}

func (c *CUDA) newSegment(s *freeList, size ledger.Bytes) *block {
	c.segments++
	b := c.blocks.take()
	b.place, b.list, b.expandable = place{size: size, segment: c.segments}, s, c.expandable
	return b
}

// split returns the unneeded end of a block to the free list, unless that end
// is too small to be worth it.
func (c *CUDA) split(b *block, size ledger.Bytes) {
	rest := b.size - size
	if b.list.pool.isSmall || c.expandable {
		if rest < minimumBlock {
			return
		}
	} else if size >= c.maxSplit || rest <= smallLimit {
		return
	}
	c.insert(c.cut(b, size))
}

// cut shortens a block to size and returns the rest, which is in no free list
// yet.
func (c *CUDA) cut(b *block, size ledger.Bytes) *block {
	rest := c.blocks.take()
	rest.place = place{b.size - size, b.segment, b.offset + size}
	rest.list, rest.expandable, rest.unmapped = b.list, b.expandable, b.unmapped
	rest.prev, rest.next = b, b.next
	if rest.next != nil {
		rest.next.prev = rest
	}
	b.next, b.size = rest, size
	return rest
}

// freeBlock marks a block free once no stream uses it.
func (c *CUDA) freeBlock(b *block) {
	c.statistics.Active.add(-b.size)
	c.statistics.Requested.add(-b.requested)
	b.state = free
	c.mergeAndInsert(b)
}

// mergeAndInsert merges a free block with its free neighbours and puts it on its
// free list.
func (c *CUDA) mergeAndInsert(b *block) {
	if p := b.prev; p != nil && p.state == free && p.unmapped == b.unmapped {
		c.remove(p)
		b.offset, b.size = p.offset, p.size+b.size
		if b.prev = p.prev; b.prev != nil {
			b.prev.next = b
		}
		c.blocks.giveBack(p)
	}
	if n := b.next; n != nil && n.state == free && n.unmapped == b.unmapped {
		c.remove(n)
		b.size += n.size
		if b.next = n.next; b.next != nil {
			b.next.prev = b
		}
		c.blocks.giveBack(n)
	}
	c.insert(b)
}

func (c *CUDA) insert(b *block) {
	b.since = b.list.pool.searches
	b.list.of(b).Set(entry{b.place, b})
	if b.isSplit() && !b.expandable {
		c.statistics.InactiveSplit.add(b.size)
	}
}

func (c *CUDA) remove(b *block) {
	b.list.of(b).Delete(entry{place: b.place})
	if b.isSplit() && !b.expandable {
		c.statistics.InactiveSplit.add(-b.size)
	}
}
