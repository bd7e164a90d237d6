package allocator

import (
	"errors"
	"fmt"
	"math/bits"

	"plimsoll/fault"
	"plimsoll/ledger"
)

// limitless stands for no capacity. PyTorch refuses any request of this size.
const limitless = ledger.Bytes(1 << 60)

// Statistics are those of torch.cuda.memory_stats.
type Statistics struct {
	Requested     Gauge[ledger.Bytes] // what the program asked for, until no stream uses it
	Allocated     Gauge[ledger.Bytes] // the blocks that the program holds
	Active        Gauge[ledger.Bytes] // and those that a stream still uses
	Reserved      Gauge[ledger.Bytes] // what was taken from the driver
	InactiveSplit Gauge[ledger.Bytes] // free parts of segments in use; expandable ones do not count
	Segments      Gauge[int]          // allocations from the driver; expandable segments do not count
	Retries       int                 // how often the cache was released to go on
}

// CUDA is the caching allocator of one device.
type CUDA struct {
	capacity     ledger.Bytes
	allowed      ledger.Bytes // by MemoryFraction; 0 for none
	threshold    ledger.Bytes // of garbage collection; 0 for none
	maxSplit     ledger.Bytes // limitless for none
	maxRounding  ledger.Bytes
	largeSegment ledger.Bytes
	expandable   bool
	divisions    [16]ledger.Bytes

	small, large pool
	blocks       store
	segments     int // made so far
	pending      []*block
	scratch      []*block
	statistics   Statistics
}

// NewCUDA is an empty allocator of a device that has the given capacity for
// it; 0 or less means without limit. MemoryFraction is a part of capacity.
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
	c.small = pool{isSmall: true, page: smallSegment, shelves: map[int]*shelf{}}
	c.large = pool{page: c.largeSegment, shelves: map[int]*shelf{}}
	return c
}

// OutOfMemory says that a request could not be served even after all unused
// memory had been given back to the driver.
type OutOfMemory struct {
	Requested ledger.Bytes // by the program
	Segment   ledger.Bytes // what the driver was asked for
	Allocated ledger.Bytes
	Reserved  ledger.Bytes
	Free      ledger.Bytes // what the driver had left
}

func (e *OutOfMemory) Error() string {
	return fmt.Sprintf("CUDA out of memory: a request for %v needs %v of the device, which has %v free; %v are allocated, %v more are reserved",
		e.Requested, e.Segment, e.Free, e.Allocated, e.Reserved-e.Allocated)
}

// Allocate serves a request of a stream. The error is an *OutOfMemory, or a
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
	shelf := pool.shelf(stream)
	pool.searches++
	b := c.reuse(shelf, rounded)
	if b == nil {
		b = c.obtain(shelf, rounded)
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
	return &fault.Input{What: fmt.Sprintf("an allocation of %d bytes, expected 0 or more", int64(size))}
}

var errNotAllocated = errors.New("freed a block that is not allocated")

// Free takes back a block that no other stream uses.
func (c *CUDA) Free(name Block) error {
	b, err := c.giveUp(name)
	if b != nil {
		c.release(b)
	}
	return err
}

// FreeLater takes back a block that other streams still use (a tensor with
// record_stream). It is active until Synchronize, or until the allocator runs
// out of memory and waits for all streams itself.
func (c *CUDA) FreeLater(name Block) error {
	b, err := c.giveUp(name)
	if b != nil {
		b.state = pending
		c.pending = append(c.pending, b)
	}
	return err
}

// Synchronize says that all streams have done what they were given.
func (c *CUDA) Synchronize() {
	for _, b := range c.pending {
		c.release(b)
	}
	c.pending = c.pending[:0]
}

// giveUp ends the program's use of a block. It is nil for the zero Block.
func (c *CUDA) giveUp(name Block) (*block, error) {
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

// Statistics are the levels now and their peaks.
func (c *CUDA) Statistics() Statistics { return c.statistics }

// ResetPeaks makes the levels of now the peaks.
func (c *CUDA) ResetPeaks() {
	s := &c.statistics
	for _, gauge := range []*Gauge[ledger.Bytes]{&s.Requested, &s.Allocated, &s.Active, &s.Reserved, &s.InactiveSplit} {
		gauge.reset()
	}
	s.Segments.reset()
}

func (c *CUDA) outOfMemory(size, segment ledger.Bytes) error {
	return &OutOfMemory{size, segment, c.statistics.Allocated.Now, c.statistics.Reserved.Now, c.capacity - c.statistics.Reserved.Now}
}

// round is the size of the block for a request.
func (c *CUDA) round(size ledger.Bytes) ledger.Bytes {
	if size < minimumBlock {
		return minimumBlock
	}
	// The highest bit of size says how it is divided, from 1 MiB on.
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

// reuse takes the best fit of a shelf: the smallest block that is large
// enough, at the lowest address. Where that one ends at unmapped space, what
// it can grow to is its size, so that holes are filled before a segment grows.
func (c *CUDA) reuse(s *shelf, size ledger.Bytes) *block {
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

// obtain takes memory from the driver, and first gives back to it what has to
// be given back.
func (c *CUDA) obtain(s *shelf, size ledger.Bytes) *block {
	if c.threshold > 0 {
		c.collectGarbage()
	}
	b := c.reserve(s, size)
	if b == nil && c.releaseOversize(s, size) {
		b = c.reserve(s, size)
	}
	if b == nil {
		c.EmptyCache()
		c.statistics.Retries++
		b = c.reserve(s, size)
	}
	return b
}

// reserve makes a segment or, in expandable mode, lets one grow. It is nil
// where the driver has too little.
func (c *CUDA) reserve(s *shelf, size ledger.Bytes) *block {
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

func (c *CUDA) newSegment(s *shelf, size ledger.Bytes) *block {
	c.segments++
	b := c.blocks.take()
	b.place, b.shelf, b.expandable = place{size: size, segment: c.segments}, s, c.expandable
	return b
}

// split cuts what a request does not need off its block, unless the rest is
// too small to be worth it.
func (c *CUDA) split(b *block, size ledger.Bytes) {
	rest := b.size - size
	if b.shelf.pool.isSmall || c.expandable {
		if rest < minimumBlock {
			return
		}
	} else if size >= c.maxSplit || rest <= smallLimit {
		return
	}
	c.insert(c.cut(b, size))
}

// cut shortens a block to size and is the rest of it, in no set yet.
func (c *CUDA) cut(b *block, size ledger.Bytes) *block {
	rest := c.blocks.take()
	rest.place = place{b.size - size, b.segment, b.offset + size}
	rest.shelf, rest.expandable, rest.unmapped = b.shelf, b.expandable, b.unmapped
	rest.prev, rest.next = b, b.next
	if rest.next != nil {
		rest.next.prev = rest
	}
	b.next, b.size = rest, size
	return rest
}

// release makes a block free that no stream uses any more.
func (c *CUDA) release(b *block) {
	c.statistics.Active.add(-b.size)
	c.statistics.Requested.add(-b.requested)
	b.state = free
	c.mergeAndInsert(b)
}

// mergeAndInsert joins an unused block with its unused neighbours.
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
	b.since = b.shelf.pool.searches
	b.shelf.of(b).Set(entry{b.place, b})
	if b.isSplit() && !b.expandable {
		c.statistics.InactiveSplit.add(b.size)
	}
}

func (c *CUDA) remove(b *block) {
	b.shelf.of(b).Delete(entry{place: b.place})
	if b.isSplit() && !b.expandable {
		c.statistics.InactiveSplit.add(-b.size)
	}
}
