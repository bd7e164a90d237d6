package kernel

import (
	"iter"
	"math"
	"math/bits"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// Changes says which parameters of a chunk an update has changed, and what they were. The update notes it block by
// block, while the block is in the first-level cache. So no parameter is read again, and none is copied for longer than
// its block.
//
// At small learning rates most parameters keep their 16 bits, and most others become the next number or the one before.
// For these, two bits say what they were.
//
// Parameters in fp32 are noted without what they were: nearly all of them change in every step.
type Changes struct {
	// Changed has a bit for each element, and Lower those whose number became lower, as an integer of 16 bits. Bits
	// behind the last element are 0. Both have [ChangeWords] words.
	Changed, Lower []uint64
	// Far are the elements that moved by more than one, in order.
	Far []FarChange
}

// FarChange is an element of a chunk whose number moved by more than one.
type FarChange struct {
	Element uint32
	Old     uint16
}

// ChangeWords returns the number of words that have a bit for each of some elements.
func ChangeWords(elements int) int { return (elements + 63) / 64 }

// notedBlock is the number of elements that are updated and then compared: they and their copy stay in the first-level
// cache, and a call of a kernel takes little beside them.
const notedBlock = 1024

// noting is the old parameters of a block, and what is made of them.
type noting struct {
	masters     [notedBlock]float32
	old, now    [notedBlock]uint16
	far         [notedBlock / 64]uint64
	lanes, none abi.Sums
}

// UpdateNoted is [Set.Update], with an undo log if u is not empty, and with sums unless they are nil. It notes which
// parameters have changed. The bits are the same.
func (s Set) UpdateNoted(f Format, constants *Constants, c Chunk, u Undo, sums *Sums, changes *Changes) {
	n := c.check(f)
	var block noting
	var inKernel *abi.Sums
	var rest Chunk // that the kernels do not sum
	if sums != nil {
		rest = c.Slice(s.summedInKernel(f, n), n)
		*sums = Sums{}
		rest.sum(&sums.Before)
		if rest.Len() < n {
			inKernel = &block.lanes
		}
	}
	changes.Far = changes.Far[:0]
	for first := 0; first < n; first += notedBlock {
		part := c.Slice(0, min(first+notedBlock, n))
		block.keep(f, &part, first)
		s.updateFrom(first, f, constants, &part, u, inKernel)
		s.note(&block, f, &part, first, changes)
		if inKernel != nil {
			sums.add(inKernel)
			block.lanes = block.none
		}
	}
	if sums != nil {
		after := sums.After
		rest.sum(&sums.After)
		for number := range after {
			sums.After[number] += after[number]
		}
	}
}

// keep copies what the parameters from an element on are before an update.
func (b *noting) keep(f Format, c *Chunk, first int) {
	if f.State == FP32 {
		copy(b.masters[:], c.Master[first:])
		return
	}
	copy(b.old[:], c.Parameter[first:])
}

// note compares the parameters from an element on with what they were.
func (s Set) note(b *noting, f Format, c *Chunk, first int, to *Changes) {
	n := c.Len() - first
	from, end := ChangeWords(first), ChangeWords(first+n)
	changed, lower, far := to.Changed[from:end], to.Lower[from:end], b.far[:end-from]
	switch {
	case !f.hasParameter():
		compareMasters(b.masters[:n], c.Master[first:], changed)
		return
	case f.State == FP32:
		// The kernel has written the parameters past the caches.
		rounded(f.Parameter, b.masters[:n], &b.old)
		rounded(f.Parameter, c.Master[first:], &b.now)
	}
	now := b.now[:n]
	if f.State != FP32 {
		now = c.Parameter[first:]
	}
	if !s.compare(b.old[:n], now, changed, lower, far) {
		return
	}
	for i, word := range far {
		for ; word != 0; word &= word - 1 {
			place := 64*i + bits.TrailingZeros64(word)
			to.Far = append(to.Far, FarChange{uint32(first + place), b.old[place]})
		}
	}
}

// rounded rounds masters to the type of parameters, as an update does.
func rounded(to dtype.Type, from []float32, words *[notedBlock]uint16) {
	Array{Type: to, Data: bytesOf(words[:len(from)])}.store(from)
}

// compareMasters sets a bit for each number that has other bits than before.
func compareMasters(old, now []float32, changed []uint64) {
	was, is := view[uint32](bytesOf(old)), view[uint32](bytesOf(now))
	for word := range changed {
		from, end := 64*word, min(64*word+64, len(was))
		mask := uint64(0)
		for i := from; i < end; i++ {
			mask |= isNot0(uint64(was[i]^is[i])) << (i - from)
		}
		changed[word] = mask
	}
}

// compare sets a bit for each parameter that has changed, that became lower, and that moved by more than one. It
// reports whether any moved that far.
func (s Set) compare(old, now []uint16, changed, lower, far []uint64) bool {
	whole := 0
	any := false
	if s.inRegisters() {
		if whole = len(old) &^ 63; whole > 0 {
			any = s.compareWords(whole, old, now, changed, lower, far)
		}
	}
	return compareInWords(old[whole:], now[whole:], changed[whole/64:], lower[whole/64:], far[whole/64:]) || any
}

// compareInWords is compare in plain Go.
func compareInWords(old, now []uint16, changed, lower, far []uint64) bool {
	any := uint64(0)
	for word := range changed {
		from, end := 64*word, min(64*word+64, len(old))
		var c, l, f uint64
		for i := from; i < end; i++ {
			if old[i] != now[i] {
				by := now[i] - old[i]
				c |= 1 << (i - from)
				l |= uint64(by>>15) << (i - from)
				f |= isNot0(uint64((by+1)&^2)) << (i - from)
			}
		}
		changed[word], lower[word], far[word] = c, l, f
		any |= f
	}
	return any != 0
}

// isNot0 returns 1 unless x is 0.
func isNot0(x uint64) uint64 { return (x | -x) >> 63 }

// All yields the elements of 16 bits that changed, in order, with what they were.
func (c *Changes) All(now []uint16) iter.Seq2[int, uint16] {
	return func(yield func(element int, old uint16) bool) {
		far := c.Far
		for i, word := range c.Changed {
			for ; word != 0; word &= word - 1 {
				element := 64*i + bits.TrailingZeros64(word)
				old := now[element] - 1 + uint16(c.Lower[i]>>(element%64)&1)*2
				if len(far) > 0 && int(far[0].Element) == element {
					old, far = far[0].Old, far[1:]
				}
				if !yield(element, old) {
					return
				}
			}
		}
	}
}

// Count returns how many elements have changed.
func (c *Changes) Count() (n int) {
	for _, word := range c.Changed {
		n += bits.OnesCount64(word)
	}
	return n
}

// ParameterBits returns the number that the trainer reads as parameter i, as an integer.
func (c *Chunk) ParameterBits(f Format, i int) uint32 {
	if !f.hasParameter() {
		return math.Float32bits(c.Master[i])
	}
	return uint32(c.Parameter[i])
}
