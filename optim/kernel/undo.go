package kernel

import (
	"sync/atomic"
	"unsafe"

	"plimsoll/dtype"
	"plimsoll/optim/kernel/abi"
)

// Undo is a log in which an update, and whatever else changes a chunk, keeps what
// it is about to overwrite, so that one that was broken off can be made again. It
// changes the chunk in turns. Before it changes anything of a turn, or of a part
// of one, it copies that to a ring that has room for a few turns, which stays in
// the first-level cache, and stores how far it got. What was being changed is the
// turn that was kept last or, with moments in int8, the one before it, too.
//
// It is made for a thread that is killed: that has made all its stores before
// some instruction, and none after.
type Undo struct {
	bytes []byte
}

// UndoBytes is the size of a log for updates of a format and for additions to its
// gradients, in whole lines of the cache.
func (f Format) UndoBytes() int {
	_, _, bytes := abi.UndoLayout(f.State, f.Moments, f.Algorithm.Moments())
	return (max(bytes, sumRing+sumTurns*sumTurn*int(f.Gradient.Size())) + 63) &^ 63
}

// UndoIn is the log in some memory, aligned to a line of the cache.
func UndoIn(memory []byte) Undo { return Undo{memory} }

// undoHead is what a log begins with.
type undoHead struct {
	kept  atomic.Int64 // the element up to which the rings hold what was; 0 before the first
	first atomic.Int64 // the element that the update began with
}

func (u Undo) head() *undoHead { return (*undoHead)(unsafe.Pointer(pointer(u.bytes))) }

// Begin makes the log that of an update of which nothing has been changed.
func (u Undo) Begin() {
	u.head().kept.Store(0)
	u.head().first.Store(0)
}

// Begun says whether anything may have been changed.
func (u Undo) Begun() bool { return u.head().kept.Load() > 0 }

// UpdateLogged updates a chunk from element first on, the first of a turn, and
// keeps in the log what it takes to make it again. The bits are those of
// [Set.Update].
func (s Set) UpdateLogged(f Format, constants *Constants, c Chunk, first int, u Undo) {
	n := c.check(f)
	if whole := n - n%f.granule(); s.inRegisters() && first < whole {
		s.update(first, whole, f, constants, &c, pointer(u.bytes))
		first = whole
	}
	s.updateOnDesk(f, constants, &c, first, &u)
}

// Restore makes a chunk what it was after some whole turns of a logged update,
// and returns the element that comes next. Should this be broken off, or what
// updates the chunk from there with the same log, it can be restored again.
func (u Undo) Restore(f Format, c Chunk) int {
	head, turn := u.head(), f.granule()
	kept := int(head.kept.Load())
	first := max(beginning(kept, turn)-turn, int(head.first.Load()))
	for at := first; at < kept; at += turn {
		part := c.Slice(at, min(at+turn, kept))
		log := u.turn(f, at)
		for i, stream := range part.changed(f) {
			copy(stream, log[i])
		}
	}
	// From here on the rings no longer hold the turn before the first.
	head.first.Store(int64(first))
	return first
}

// keep keeps a turn.
func (u Undo) keep(f Format, part *Chunk, first int) {
	log := u.turn(f, first)
	for i, stream := range part.changed(f) {
		copy(log[i], stream)
	}
	u.head().kept.Store(int64(first + part.Len()))
}

// beginning is where the turn begins that is kept up to an element.
func beginning(kept, turn int) int { return (kept - 1) / turn * turn }

// turn is where the log holds a turn.
func (u Undo) turn(f Format, first int) (log [abi.UndoStreams][]byte) {
	turn, ring, _ := abi.UndoLayout(f.State, f.Moments, f.Algorithm.Moments())
	number := first / f.granule() % abi.UndoTurns
	for i, size := range turn {
		log[i] = u.bytes[ring[i]+number*size:][:size]
	}
	return log
}

// changed lists the bytes that an update reads and overwrites, in the order of
// the log.
func (c *Chunk) changed(f Format) [abi.UndoStreams][]byte {
	master, low := bytesOf(c.Parameter), bytesOf(c.Low)
	if f.State == FP32 { // in which parameters are only written
		master = bytesOf(c.Master)
	}
	return [abi.UndoStreams][]byte{master, low, c.Moments[0].Data, c.Moments[1].Data, bytesOf(c.Headers)}
}

// Additions to a sum ([Set.AccumulateLogged]) are logged in turns of so many
// elements, in a ring of two: one is whole while the next is being kept. A turn is
// large enough for a call of the kernel, and its log stays in the first-level
// cache.
const (
	sumTurn  = 512
	sumTurns = 2
	sumRing  = 64 // where it begins
)

// AccumulateLogged is [Set.Accumulate] from element first on, the first of a
// turn, and keeps in the log what it takes to make the addition again.
func (s Set) AccumulateLogged(sum, gradient Array, first int, u Undo) {
	n := sum.Len()
	if gradient.Len() != n {
		panic("kernel: a gradient and the sum that it is added to differ in length")
	}
	for ; first < n; first += sumTurn {
		end := min(first+sumTurn, n)
		part := sum.Slice(first, end)
		copy(u.sumTurn(sum.Type, first), part.Data)
		u.head().kept.Store(int64(end))
		s.Accumulate(part, gradient.Slice(first, end))
	}
}

// RestoreSum makes a sum what it was after some whole turns of a logged addition,
// and returns the element that comes next. Should this be broken off, or what is
// added from there with the same log, it can be restored again.
func (u Undo) RestoreSum(sum Array) int {
	kept := int(u.head().kept.Load())
	first := beginning(kept, sumTurn)
	copy(sum.Slice(first, kept).Data, u.sumTurn(sum.Type, first))
	return first
}

// sumTurn is where the log holds the turn of an addition that begins with an
// element.
func (u Undo) sumTurn(of dtype.Type, first int) []byte {
	size := sumTurn * int(of.Size())
	return u.bytes[sumRing+first/sumTurn%sumTurns*size:][:size]
}

// keepMoments keeps the int8 moments of a block, which are all of a chunk that
// [Chunk.PutMoment] changes.
func (u Undo) keepMoments(f Format, c Chunk, first int) {
	c = c.Slice(first, min(first+Block, c.Len()))
	log := u.turn(f, first)
	for i, stream := range c.changed(f) {
		if i >= abi.UndoMoment1 {
			copy(log[i], stream)
		}
	}
	u.head().kept.Store(int64(first + c.Len()))
}

// RestoreMoments makes the block of int8 moments what it was that
// [Chunk.PutMoment] was changing.
func (u Undo) RestoreMoments(f Format, c Chunk) {
	kept := int(u.head().kept.Load())
	first := beginning(kept, Block)
	log := u.turn(f, first)
	c = c.Slice(first, kept)
	for i, stream := range c.changed(f) {
		if i >= abi.UndoMoment1 {
			copy(stream, log[i])
		}
	}
}
