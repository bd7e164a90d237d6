package snapshottest

import "slices"

// heap is PyTorch's allocator with its standard settings, in the plainest form: it looks at every block.
type heap struct {
	segments []*segment
	reserved int64
	next     int64
}

type segment struct {
	addr, size int64
	small      bool
	first      *block
}

type block struct {
	segment    *segment
	addr, size int64
	requested  int64
	used       bool
	stack      []frame
	previous   *block
	next       *block
}

const mebibyte = 1 << 20

// alloc returns a block, and the segment that it took from the driver, if any.
func (h *heap) alloc(size int64) (*block, *segment) {
	size = max(512, (size+511)/512*512)
	small := size <= mebibyte
	var best *block
	for _, s := range h.segments {
		for b := s.first; b != nil && s.small == small; b = b.next {
			if !b.used && b.size >= size && (best == nil || b.size < best.size) {
				best = b
			}
		}
	}
	var made *segment
	if best == nil {
		made = h.segment(size, small)
		best = made.first
	}
	best.used = true
	if rest := best.size - size; small && rest >= 512 || rest > mebibyte {
		tail := &block{segment: best.segment, addr: best.addr + size, size: rest, previous: best, next: best.next}
		if best.next != nil {
			best.next.previous = tail
		}
		best.size, best.next = size, tail
	}
	return best, made
}

func (h *heap) segment(size int64, small bool) *segment {
	switch {
	case small:
		size = 2 * mebibyte
	case size < 10*mebibyte:
		size = 20 * mebibyte
	default:
		size = (size + 2*mebibyte - 1) / (2 * mebibyte) * 2 * mebibyte
	}
	s := &segment{addr: 0x7f00_0000_0000 + h.next, size: size, small: small}
	s.first = &block{segment: s, addr: s.addr, size: size}
	h.next += size + 2*mebibyte
	h.reserved += size
	h.segments = append(h.segments, s)
	return s
}

func (h *heap) free(b *block) {
	b.used, b.requested, b.stack = false, 0, nil
	if n := b.next; n != nil && !n.used {
		b.absorb(n)
	}
	if p := b.previous; p != nil && !p.used {
		p.absorb(b)
	}
}

// release returns the segments without an allocation to the driver.
func (h *heap) release() (released []*segment) {
	h.segments = slices.DeleteFunc(h.segments, func(s *segment) bool {
		if s.first.used || s.first.next != nil {
			return false
		}
		h.reserved -= s.size
		released = append(released, s)
		return true
	})
	return released
}

// absorb merges the next block into this one.
func (b *block) absorb(n *block) {
	b.size, b.next = b.size+n.size, n.next
	if n.next != nil {
		n.next.previous = b
	}
}
