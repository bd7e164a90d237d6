package kernel

import (
	"encoding/binary"

	"plimsoll/internal/state/optim/kernel/abi"
)

// Sums are sums of the streams of a chunk: of the 64-bit words of each, modulo 2^64, the last padded with zeros. A sum
// finds every flip of one bit, and flips of several unless they cancel each other. A kernel adds words up in the
// registers that it has them in, so a sum costs no read of memory. (A CRC of the same bytes took longer than the
// update.)
type Sums struct {
	Before, After [abi.UndoStreams]uint64 // the update; see [Chunk.Sum] for their order
}

// summedRoles are the streams of sums. Of masters in two halves, the lower one alone: the trainer has the other.
var summedRoles = [abi.UndoStreams]Role{
	abi.UndoMaster: MasterRole, abi.UndoLow: LowRole, abi.UndoMoment1: FirstMomentRole,
	abi.UndoMoment2: SecondMomentRole, abi.UndoHeaders: HeaderRole,
}

// SumOf returns the number of a stream in sums; ok is false if it has none.
func SumOf(role Role) (number int, ok bool) {
	for number, summed := range summedRoles {
		if summed == role {
			return number, true
		}
	}
	return 0, false
}

// Sum returns the sum of a stream.
func (c *Chunk) Sum(number int) uint64 { return wordSum(c.Summed(number)) }

// Summed returns the memory of a stream.
func (c *Chunk) Summed(number int) []byte { return c.Bytes(summedRoles[number]) }

// wordSum adds up the words of some bytes.
func wordSum(bytes []byte) (sum uint64) {
	words := view[uint64](bytes)
	var sums [4]uint64
	for len(words) >= 4 {
		part := words[:4:4]
		sums[0] += part[0]
		sums[1] += part[1]
		sums[2] += part[2]
		sums[3] += part[3]
		words = words[4:]
	}
	for _, word := range words {
		sum += word
	}
	var last [8]byte
	copy(last[:], bytes[len(bytes)&^7:])
	return sum + sums[0] + sums[1] + sums[2] + sums[3] + binary.LittleEndian.Uint64(last[:])
}

// SumsAreFree reports whether sums take at most 2 % of an update of a state that no cache holds. There an update sums
// its streams in the registers that it has them in. BenchmarkSums of package engine measures it: masters in fp32 or 24
// bits take 1 to 5 % longer, and int8 moments, whose chunks are read twice more, twice as long.
func (s Set) SumsAreFree(f Format) bool {
	return s.inRegisters() && f.Moments != MomentsInt8 && f.State == Split
}

// UpdateSummed is [Set.Update], with an undo log if u is not empty. It sets the sums of the streams that it reads and
// overwrites, unless they are nil. The bits are the same.
func (s Set) UpdateSummed(f Format, constants *Constants, c Chunk, u Undo, sums *Sums) {
	s.updateBeside(f, constants, c, u, sums, nil)
}

// updateBeside updates a chunk. Beside it makes what is not nil or empty: an undo log, sums and changes.
func (s Set) updateBeside(f Format, constants *Constants, c Chunk, u Undo, sums *Sums, changes *Changes) {
	c.check(f)
	totals := s.beginSums(f, &c, sums)
	s.updateFrom(0, f, constants, &c, u, totals.lanes(), changes)
	totals.add()
	totals.end()
}

// totals makes the sums of an update that kernels make in several parts.
type totals struct {
	sums   *Sums // nil for none
	rest   Chunk // that kernels do not sum
	kernel bool  // whether they sum anything
	added  Sums
	parts  abi.Sums
}

// beginSums sums what kernels do not sum, before an update.
func (s Set) beginSums(f Format, c *Chunk, sums *Sums) (t totals) {
	if sums == nil {
		return t
	}
	n := c.Len()
	summed := s.summedInKernel(f, n)
	t.sums, t.rest, t.kernel = sums, c.Slice(summed, n), summed > 0
	t.rest.sum(&t.added.Before)
	return t
}

// lanes returns where a kernel sums, or nil.
func (t *totals) lanes() *abi.Sums {
	if !t.kernel {
		return nil
	}
	t.parts = abi.Sums{}
	return &t.parts
}

// add adds what a kernel has summed of a part.
func (t *totals) add() {
	if t.kernel {
		t.added.add(&t.parts)
	}
}

// end sets the sums after the update.
func (t *totals) end() {
	if t.sums == nil {
		return
	}
	t.rest.sum(&t.sums.After)
	t.sums.Before = t.added.Before
	for number, sum := range t.added.After {
		t.sums.After[number] += sum
	}
}

// summedInKernel returns how many of the first elements a kernel sums in its registers.
func (s Set) summedInKernel(f Format, n int) int {
	if !s.inRegisters() || f.Moments == MomentsInt8 {
		return 0
	}
	return n - n%f.granule()
}

// updateFrom updates a chunk from an element on, the first of a tile. Beside it makes what is not nil or empty: an undo
// log, sums and changes.
func (s Set) updateFrom(first int, f Format, constants *Constants, c *Chunk, u Undo, sums *abi.Sums,
	changes *Changes) {
	n := c.Len()
	if whole := n - n%f.granule(); s.inRegisters() && first < whole {
		s.update(first, whole, f, constants, c, pointer(u.bytes), sums, changes)
		first = whole
	}
	log := &u
	if u.bytes == nil {
		log = nil
	}
	s.updateInTiles(f, constants, c, first, log, changes)
}

// add adds what a kernel has summed. They are the sums of more elements of the same streams.
func (sums *Sums) add(lanes *abi.Sums) {
	for number := range lanes {
		for lane := range lanes[number][0] {
			sums.Before[number] += lanes[number][0][lane]
			sums.After[number] += lanes[number][1][lane]
		}
	}
}

// sum sets the sums of all streams.
func (c *Chunk) sum(sums *[abi.UndoStreams]uint64) {
	for number := range sums {
		sums[number] = c.Sum(number)
	}
}
