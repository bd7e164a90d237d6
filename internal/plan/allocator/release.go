package allocator

import "plimsoll/internal/base/ledger"

// EmptyCache waits for all streams and returns unused memory to the driver: whole
// segments, and the unused pages of expandable segments.
func (c *CUDA) EmptyCache() {
	c.Synchronize()
	for _, pool := range []*blockPool{&c.large, &c.small} {
		for _, b := range c.cached(pool) {
			if b.expandable {
				c.unmapBlock(b)
			} else if !b.isSplit() {
				c.releaseBlock(b)
			}
		}
	}
}

// cached lists the free blocks of a pool. The next call overwrites the list.
func (c *CUDA) cached(p *blockPool) []*block {
	c.scratch = c.scratch[:0]
	for _, s := range p.freeLists {
		s.free.Scan(func(e entry) bool {
			c.scratch = append(c.scratch, e.block)
			return true
		})
	}
	return c.scratch
}

// releaseBlock returns a segment to the driver. The segment is one free block.
func (c *CUDA) releaseBlock(b *block) {
	c.remove(b)
	c.statistics.Reserved.add(-b.size)
	c.statistics.Segments.add(-1)
	c.blocks.giveBack(b)
}

// releaseOversize returns oversize blocks of a stream to the driver: the best
// fit, or the largest ones until they add up to the request. It reports whether
// a second attempt makes sense.
func (c *CUDA) releaseOversize(s *freeList, size ledger.Bytes) bool {
	if c.maxSplit == limitless {
		return false
	}
	wanted := max(size, c.maxSplit)
	chosen, sum := c.scratch[:0], ledger.Bytes(0)
	choose := func(e entry) bool {
		if sum >= wanted || e.size < c.maxSplit {
			return false
		}
		// A segment of large_segment_size_mb may be oversize and split.
		if !e.block.expandable && !e.block.isSplit() {
			chosen = append(chosen, e.block)
			sum += e.size
		}
		return true
	}
	s.free.Ascend(entry{place: place{size: wanted}}, choose)
	if sum == 0 {
		s.free.Reverse(choose)
	}
	// PyTorch releases the blocks even if they are not enough.
	for _, b := range chosen {
		c.releaseBlock(b)
	}
	c.scratch = chosen
	return sum >= wanted
}

// collectGarbage releases whole segments of the large pool until the threshold
// is met or none is left. Segments that were free for longer than the average go
// first.
func (c *CUDA) collectGarbage() {
	excess := c.statistics.Reserved.Now - c.threshold
	if excess <= 0 {
		return
	}
	age := func(b *block) int { return c.large.searches - b.since }
	candidates, sum := c.cached(&c.large)[:0], 0
	for _, b := range c.scratch {
		if !b.isSplit() && !b.expandable {
			candidates = append(candidates, b)
			sum += age(b)
		}
	}
	for excess > 0 && len(candidates) > 0 {
		average := float64(sum) / float64(len(candidates))
		kept := candidates[:0]
		for _, b := range candidates {
			if float64(age(b)) < average {
				kept = append(kept, b)
				continue
			}
			sum -= age(b)
			excess -= b.size
			c.releaseBlock(b)
		}
		candidates = kept
	}
}
