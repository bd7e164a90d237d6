package allocator

import (
	"github.com/tidwall/btree"

	"plimsoll/ledger"
)

// place is where bytes are. Segments are numbered in the order in which they
// were made, which stands for their addresses: these break ties between
// blocks of one size.
type place struct {
	size    ledger.Bytes
	segment int
	offset  ledger.Bytes
}

type state uint8

const (
	free state = iota
	allocated
	pending // freed by the program, still used by another stream
)

// block is a part of a segment. The blocks of a segment are linked in the
// order of their offsets, and no two neighbours are both free and both mapped
// or unmapped.
type block struct {
	place
	state    state
	unmapped bool // address space without memory, in an expandable segment
	// expandable tells the kind of segment.
	expandable bool
	shelf      *shelf
	prev, next *block
	requested  ledger.Bytes
	since      int // free: how many searches the pool had seen

	index, generation uint32
}

// isSplit tells whether the block is only a part of its segment.
func (b *block) isSplit() bool { return b.prev != nil || b.next != nil }

// reach is the size that a free block can grow to without moving.
func (b *block) reach() ledger.Bytes {
	if b.next != nil && b.next.unmapped {
		return b.size + b.next.size
	}
	return b.size
}

// entry is a block in an ordered set, with what it is ordered by at hand.
type entry struct {
	place
	block *block
}

type set = btree.BTreeG[entry]

func newSet(less func(a, b entry) bool) *set {
	return btree.NewBTreeGOptions(less, btree.Options{NoLocks: true})
}

func byAddress(a, b entry) bool {
	if a.segment != b.segment {
		return a.segment < b.segment
	}
	return a.offset < b.offset
}

func bySize(a, b entry) bool {
	if a.size != b.size {
		return a.size < b.size
	}
	return byAddress(a, b)
}

// shelf holds the unused blocks of one stream in one pool: memory that was
// used by a stream is not given to another one.
type shelf struct {
	pool     *pool
	free     *set // by size
	unmapped *set // by address
}

// of is the set that an unused block belongs in.
func (s *shelf) of(b *block) *set {
	if b.unmapped {
		return s.unmapped
	}
	return s.free
}

// pool is one of the two that requests are divided into by size.
type pool struct {
	isSmall  bool
	page     ledger.Bytes // what expandable segments are mapped in
	shelves  map[int]*shelf
	searches int
}

func (p *pool) shelf(stream int) *shelf {
	s := p.shelves[stream]
	if s == nil {
		s = &shelf{p, newSet(bySize), newSet(byAddress)}
		p.shelves[stream] = s
	}
	return s
}

// store makes blocks and takes them back, so that a long replay does not
// leave one behind for every split.
type store struct {
	chunks [][]block
	unused *block // linked by next
}

const chunkSize = 512

func (s *store) take() *block {
	if s.unused == nil {
		chunk := make([]block, chunkSize)
		for i := range chunk {
			chunk[i].index = uint32(len(s.chunks)*chunkSize + i)
			chunk[i].next, s.unused = s.unused, &chunk[i]
		}
		s.chunks = append(s.chunks, chunk)
	}
	b := s.unused
	s.unused = b.next
	*b = block{index: b.index, generation: b.generation}
	return b
}

func (s *store) giveBack(b *block) {
	b.state = free
	b.next, s.unused = s.unused, b
}

// handOut marks the block as allocated and names it.
func (s *store) handOut(b *block, requested ledger.Bytes) Block {
	b.state, b.requested = allocated, requested
	b.generation++ // from 1, so that no name is the zero Block
	return Block{b.index, b.generation}
}

// find is the allocated block of that name, or nil.
func (s *store) find(name Block) *block {
	chunk := int(name.index / chunkSize)
	if chunk >= len(s.chunks) {
		return nil
	}
	b := &s.chunks[chunk][name.index%chunkSize]
	if b.state != allocated || b.generation != name.generation {
		return nil
	}
	return b
}
