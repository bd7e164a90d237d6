package allocator

import (
	"github.com/tidwall/btree"

	"plimsoll/internal/base/ledger"
)

// place is the position of a block. Segments are numbered in order of creation,
// and the number stands for the address: it breaks ties between blocks of one
// size.
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

// block is a part of a segment. The blocks of a segment form a list in order of
// offset. Two free neighbours are never both mapped or both unmapped: they would
// have been merged.
type block struct {
	place
	state      state
	unmapped   bool // address space without memory, in an expandable segment
	expandable bool // the segment is an expandable one
	list       *freeList
	prev, next *block
	requested  ledger.Bytes
	since      int // searches the pool had seen when the block became free

	index, generation uint32
}

// isSplit reports whether the block is only a part of its segment.
func (b *block) isSplit() bool { return b.prev != nil || b.next != nil }

// reach returns the size that a free block can grow to without moving.
func (b *block) reach() ledger.Bytes {
	if b.next != nil && b.next.unmapped {
		return b.size + b.next.size
	}
	return b.size
}

// entry is a block in an ordered set. It carries a copy of the sort key.
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

// freeList holds the free blocks of one stream in one pool. PyTorch never gives
// memory of one stream to another.
type freeList struct {
	pool     *blockPool
	free     *set // by size
	unmapped *set // by address
}

// of returns the set that a free block belongs in.
func (s *freeList) of(b *block) *set {
	if b.unmapped {
		return s.unmapped
	}
	return s.free
}

// blockPool is PyTorch's BlockPool: one for small requests, one for large ones.
type blockPool struct {
	isSmall   bool
	page      ledger.Bytes // unit in which expandable segments are mapped
	freeLists map[int]*freeList
	searches  int
}

func (p *blockPool) freeList(stream int) *freeList {
	s := p.freeLists[stream]
	if s == nil {
		s = &freeList{p, newSet(bySize), newSet(byAddress)}
		p.freeLists[stream] = s
	}
	return s
}

// blockStore allocates and recycles block structs, so that a long replay does
// not leave one behind for every split.
type blockStore struct {
	chunks [][]block
	unused *block // linked by next
}

const chunkSize = 512

func (s *blockStore) take() *block {
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

func (s *blockStore) giveBack(b *block) {
	b.state = free
	b.next, s.unused = s.unused, b
}

// handOut marks the block allocated and returns its name.
func (s *blockStore) handOut(b *block, requested ledger.Bytes) Block {
	b.state, b.requested = allocated, requested
	b.generation++ // starts at 1, so no name equals the zero Block
	return Block{b.index, b.generation}
}

// find returns the allocated block of that name, or nil.
func (s *blockStore) find(name Block) *block {
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
