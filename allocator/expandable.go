package allocator

import "plimsoll/ledger"

// expand maps as many pages as a request needs, at the lowest address where
// there is room for it.
func (c *CUDA) expand(s *shelf, size ledger.Bytes) *block {
	b := c.room(s, size)
	if b.unmapped && !c.commit(b, min(b.size, size)) {
		return nil
	}
	for b.size < size {
		next := b.next
		if !c.commit(next, min(next.size, size-b.size)) {
			return nil // what was mapped so far stays
		}
		b = next // which b is now a part of
	}
	c.remove(b)
	return b
}

// room is the first of a run of unused blocks that together are large enough,
// in a new segment if there is no such run. Unmapped blocks are few: one a
// segment, and one for each hole that giving memory back has left.
func (c *CUDA) room(s *shelf, size ledger.Bytes) *block {
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
	// Address space costs nothing, so a segment has more of it than the device
	// has memory: holes need not be filled before it can grow.
	b := c.newSegment(s, roundUp(c.capacity+c.capacity/8, s.pool.page))
	b.unmapped = true
	c.insert(b)
	return b
}

// commit maps the pages that the first bytes of an unmapped block lie in. It
// does nothing where the device has too little memory for them.
func (c *CUDA) commit(b *block, size ledger.Bytes) bool {
	size = roundUp(size, b.shelf.pool.page)
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

// decommit gives the whole pages of a free block back, and the segment itself
// when nothing of it is left.
func (c *CUDA) decommit(b *block) {
	page := b.shelf.pool.page
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
