package allocator

import "plimsoll/internal/base/ledger"

// expand maps the pages that a request needs, at the lowest address with enough
// room.
func (c *CUDA) expand(s *freeList, size ledger.Bytes) *block {
	b := c.findExpandable(s, size)
	if b.unmapped && !c.mapBlock(b, min(b.size, size)) {
		return nil
	}
	for b.size < size {
		next := b.next
		if !c.mapBlock(next, min(next.size, size-b.size)) {
			return nil // PyTorch keeps the pages that were mapped so far
		}
		b = next // mapBlock merged b into it
	}
	c.remove(b)
	return b
}

// findExpandable returns the first block of a free run that is large enough. If
// there is none, it creates a segment. Unmapped blocks are few: one for each
// segment, and one for each hole that released memory has left.
func (c *CUDA) findExpandable(s *freeList, size ledger.Bytes) *block {
	var found *block
	s.unmapped.Scan(func(e entry) bool {
		first := e.block
		if first.prev != nil && first.prev.state == free {
			first = first.prev
		}
		var sum ledger.Bytes
		for b := first; b != nil && b.state == free && sum < size; b = b.next {
			sum += b.size
		}
		if sum >= size {
			found = first
		}
		return found == nil
	})
	if found != nil {
		return found
	}
	// Address space costs nothing, so PyTorch reserves an eighth more than the
	// device has memory: a segment can grow past its holes, until that is used
	// up. The space of a device that has grown has no end.
	space := c.capacity
	if c.hasGrown {
		space = limitless
	}
	b := c.newSegment(s, roundUp(space+space/8, s.pool.page))
	b.unmapped = true
	c.insert(b)
	return b
}

// mapBlock maps the pages of the first size bytes of an unmapped block. It
// returns false, and maps nothing, if the device has too little memory.
func (c *CUDA) mapBlock(b *block, size ledger.Bytes) bool {
	size = roundUp(size, b.list.pool.page)
	if c.statistics.Reserved.Now+size > c.capacity {
		return false
	}
	c.remove(b)
	if size < b.size {
		c.insert(c.cut(b, size))
	}
	b.unmapped = false
	c.mergeAndInsert(b)
	c.statistics.Reserved.add(size)
	return true
}

// unmapBlock returns the whole pages of a free block to the driver. A segment
// with no page left ends.
func (c *CUDA) unmapBlock(b *block) {
	page := b.list.pool.page
	begin, end := roundUp(b.offset, page), (b.offset+b.size)/page*page
	if begin >= end {
		return
	}
	c.remove(b)
	if before := begin - b.offset; before > 0 {
		rest := c.cut(b, before)
		c.insert(b)
		b = rest
	}
	if size := end - begin; size < b.size {
		c.insert(c.cut(b, size))
	}
	b.unmapped = true
	c.mergeAndInsert(b)
	c.statistics.Reserved.add(begin - end)
	if !b.isSplit() {
		c.remove(b)
		c.blocks.giveBack(b)
	}
}

// unmappedOf returns the pages that expand maps for a request.
func (c *CUDA) unmappedOf(s *freeList, size ledger.Bytes) (bytes ledger.Bytes) {
	b := c.findExpandable(s, size)
	for missing := size; missing > 0; b = b.next {
		part := min(b.size, missing)
		if b.unmapped {
			bytes += roundUp(part, s.pool.page)
		}
		missing -= part
	}
	return bytes
}
