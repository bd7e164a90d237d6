package kernel

import (
	"iter"
	"math"
	"math/bits"

	"plimsoll/internal/state/optim/kernel/abi"
)

// Changes says which parameters of a chunk an update has changed, and what they were. A kernel notes it when it is
// about to replace parameters, while it has the old ones in a line of the first-level cache. So no parameter is read
// again, and none is copied for longer than that.
//
// At small learning rates most parameters keep their 16 bits, and most others become the next number or the one before.
// Two bits say so. The old words are kept of groups of 16 in which any moved further.
//
// Of parameters in fp32 the changes say only which have changed: nearly all do in every step.
type Changes struct {
	// Moves has a word for each 16 elements: bits 0 to 15 are those that moved to the next number or the one before,
	// as integers of 16 bits. Bits 16 to 31 are those that became lower or moved further. Of elements in fp32, bits 0
	// to 15 are those that changed.
	Moves []uint32
	Old   []uint16 // 16 words of every group in which any moved further, in order
}

// ChangeGroup is the number of elements whose moves are one word.
const ChangeGroup = abi.Group

// NewChanges returns room for the changes of some elements.
func NewChanges(elements int) Changes {
	return Changes{Moves: make([]uint32, (elements+ChangeGroup-1)/ChangeGroup)}
}

// RoomWords returns the capacity of Old that an update may need: kernels write one group more than they keep.
func (c *Changes) RoomWords() int { return (len(c.Moves) + 1) * ChangeGroup }

// None says that nothing has changed.
func (c *Changes) None() {
	clear(c.Moves)
	c.Old = c.Old[:0]
}

// room returns where the old words of the next elements go.
func (c *Changes) room(elements int) []uint16 {
	kept := len(c.Old)
	return c.Old[kept : kept+(elements/ChangeGroup+1)*ChangeGroup]
}

// All yields the elements of 16 bits that changed, in order, with what they were. now are the parameters after the
// update.
func (c *Changes) All(now []uint16) iter.Seq2[int, uint16] {
	return func(yield func(element int, old uint16) bool) {
		kept := c.Old
		for group, moves := range c.Moves {
			near, lower := moves&0xffff, moves>>16
			changed := near | lower
			if changed == 0 {
				continue
			}
			first := ChangeGroup * group
			var old []uint16
			if lower&^near != 0 {
				old, kept = kept[:ChangeGroup], kept[ChangeGroup:]
			}
			for ; changed != 0; changed &= changed - 1 {
				i := bits.TrailingZeros32(changed)
				was := now[first+i] - 1 + uint16(lower>>i&1)*2
				if old != nil {
					was = old[i]
				}
				if !yield(first+i, was) {
					return
				}
			}
		}
	}
}

// Changed yields the elements that changed, in order.
func (c *Changes) Changed() iter.Seq[int] {
	return func(yield func(element int) bool) {
		for group, moves := range c.Moves {
			for changed := moves&0xffff | moves>>16; changed != 0; changed &= changed - 1 {
				if !yield(ChangeGroup*group + bits.TrailingZeros32(changed)) {
					return
				}
			}
		}
	}
}

// Count returns how many elements have changed.
func (c *Changes) Count() (n int) {
	for _, moves := range c.Moves {
		n += bits.OnesCount32(moves&0xffff | moves>>16)
	}
	return n
}

// UpdateNoted is [Set.Update], with an undo log if u is not empty, and with sums unless they are nil. It notes which
// parameters have changed. The bits are the same.
func (s Set) UpdateNoted(f Format, constants *Constants, c Chunk, u Undo, sums *Sums, changes *Changes) {
	changes.Old = changes.Old[:0]
	if f.hasParameter() {
		s.updateBeside(f, constants, c, u, sums, changes)
		return
	}
	s.updateComparing(f, constants, c, u, sums, changes)
}

// comparedBlock is the number of elements that are updated and then compared. They and their copy stay in the
// first-level cache.
const comparedBlock = 4096

// updateComparing updates a chunk of fp32 parameters block by block, and compares each block with a copy of what it
// was.
func (s Set) updateComparing(f Format, constants *Constants, c Chunk, u Undo, sums *Sums, changes *Changes) {
	var old [comparedBlock]float32
	n := c.check(f)
	totals := s.beginSums(f, &c, sums)
	for first := 0; first < n; first += comparedBlock {
		part := c.Slice(0, min(first+comparedBlock, n))
		copy(old[:], part.Master[first:])
		s.updateFrom(first, f, constants, &part, u, totals.lanes(), nil)
		totals.add()
		compareMasters(old[:], part.Master[first:], changes.Moves[first/ChangeGroup:])
	}
	totals.end()
}

// compareMasters notes the numbers that have other bits than before.
func compareMasters(old, now []float32, moves []uint32) {
	was, is := view[uint32](bytesOf(old)), view[uint32](bytesOf(now))
	for len(is) > 0 {
		n, mask := min(ChangeGroup, len(is)), uint32(0)
		for i, x := range is[:n] {
			if x != was[i] {
				mask |= 1 << i
			}
		}
		moves[0] = mask
		was, is, moves = was[n:], is[n:], moves[1:]
	}
}

// note compares parameters with what they were, beginning at an element that is the first of a group.
func (c *Changes) note(first int, old, now []uint16) {
	for len(now) > 0 {
		n := min(ChangeGroup, len(now))
		near, lower := uint32(0), uint32(0)
		for i, word := range now[:n] {
			if word == old[i] {
				continue
			}
			if by := word - old[i]; by+1 <= 2 {
				near |= 1 << i
				lower |= uint32(by>>15) << i
			} else {
				lower |= 1 << i
			}
		}
		c.Moves[first/ChangeGroup] = near | lower<<16
		if lower&^near != 0 {
			var group [ChangeGroup]uint16
			copy(group[:], old[:n])
			c.Old = append(c.Old, group[:]...)
		}
		old, now, first = old[n:], now[n:], first+n
	}
}

// ParameterBits returns the number that the trainer reads as parameter i, as an integer.
func (c *Chunk) ParameterBits(f Format, i int) uint32 {
	if !f.hasParameter() {
		return math.Float32bits(c.Master[i])
	}
	return uint32(c.Parameter[i])
}
