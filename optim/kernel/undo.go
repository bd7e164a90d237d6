package kernel

import (
	"sync/atomic"
	"unsafe"

	"plimsoll/dtype"
	"plimsoll/optim/kernel/abi"
)

// Undo is an undo log. An update, or another change of a chunk, keeps the values in
// it that it is about to overwrite. So a change that was broken off can be made again.
//
// An update changes the chunk in turns. Before it changes a turn, or a part of one,
// it copies the old values to a ring and stores how far it got. The ring has room for
// a few turns and stays in the first-level cache. Only the turn that was kept last
// can be half changed or, with int8 moments, also the one before it.
//
// The log is made for threads that are killed. Such a thread has made all stores
// before some instruction, and none after it.
type Undo struct {
	bytes []byte
}

// UndoBytes returns the size of a log for updates of a format and for additions to
// its gradients, in full cache lines.
func (f Format) UndoBytes() int {
	_, _, bytes := abi.UndoLayout(f.State, f.Moments, f.Algorithm.Moments())
	return (max(bytes, sumRing+sumTurns*sumTurn*int(f.Gradient.Size())) + 63) &^ 63
}

// UndoIn returns the log in some memory, which must be aligned to a cache line.
func UndoIn(memory []byte) Undo { return Undo{memory} }

// undoHead is the beginning of a log.
type undoHead struct {
	kept  atomic.Int64 // the element up to which the rings hold the old values; 0 before the first turn
	first atomic.Int64 // the element that the update began with
}

func (u Undo) head() *undoHead { return (*undoHead)(unsafe.Pointer(pointer(u.bytes))) }

// Begin empties the log: the update has changed nothing yet.
func (u Undo) Begin() {
	u.head().kept.Store(0)
	u.head().first.Store(0)
}

// Begun reports whether the chunk may have been changed.
func (u Undo) Begun() bool { return u.head().kept.Load() > 0 }

// UpdateLogged is [Set.Update], beginning at element first, which is the first of a
// turn. It keeps an undo log. The bits are the same.
func (s Set) UpdateLogged(f Format, constants *Constants, c Chunk, first int, u Undo) {
	n := c.check(f)
	if whole := n - n%f.granule(); s.inRegisters() && first < whole {
		s.update(first, whole, f, constants, &c, pointer(u.bytes))
		first = whole
	}
	s.updateOnDesk(f, constants, &c, first, &u)
}

// Restore restores a chunk to its values after some full turns of a logged update,
// and returns the element to go on with. If this is broken off, or the update that
// goes on with the same log, the chunk can be restored again.
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

// keep copies a turn to the log.
func (u Undo) keep(f Format, part *Chunk, first int) {
	log := u.turn(f, first)
	for i, stream := range part.changed(f) {
		copy(log[i], stream)
	}
	u.head().kept.Store(int64(first + part.Len()))
}

// beginning returns the first element of the last turn that is kept.
func beginning(kept, turn int) int { return (kept - 1) / turn * turn }

// turn returns the memory of a turn in the log.
func (u Undo) turn(f Format, first int) (log [abi.UndoStreams][]byte) {
	turn, ring, _ := abi.UndoLayout(f.State, f.Moments, f.Algorithm.Moments())
	number := first / f.granule() % abi.UndoTurns
	for i, size := range turn {
		log[i] = u.bytes[ring[i]+number*size:][:size]
	}
	return log
}

// changed returns the bytes that an update reads and overwrites, in the order of the
// log.
func (c *Chunk) changed(f Format) [abi.UndoStreams][]byte {
	master, low := bytesOf(c.Parameter), bytesOf(c.Low)
	if f.State == FP32 { // its parameters are only written
		master = bytesOf(c.Master)
	}
	return [abi.UndoStreams][]byte{master, low, c.Moments[0].Data, c.Moments[1].Data, bytesOf(c.Headers)}
}

// Additions to a sum ([Set.AccumulateLogged]) have turns of their own, in a ring of
// two: one is complete while the next is being kept. A turn is large enough for a
// call of the kernel, and its log stays in the first-level cache.
const (
	sumTurn  = 512 // elements
	sumTurns = 2
	sumRing  = 64 // where the ring begins
)

// AccumulateLogged is [Set.Accumulate], beginning at element first, which is the first
// of a turn. It keeps an undo log.
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

// RestoreSum restores a sum to its values after some full turns of a logged addition,
// and returns the element to go on with. If this is broken off, or the addition that
// goes on with the same log, the sum can be restored again.
func (u Undo) RestoreSum(sum Array) int {
	kept := int(u.head().kept.Load())
	first := beginning(kept, sumTurn)
	copy(sum.Slice(first, kept).Data, u.sumTurn(sum.Type, first))
	return first
}

// sumTurn returns the memory of a turn of an addition in the log.
func (u Undo) sumTurn(of dtype.Type, first int) []byte {
	size := sumTurn * int(of.Size())
	return u.bytes[sumRing+first/sumTurn%sumTurns*size:][:size]
}

// keepMoments copies the int8 moments of a block to the log. [Chunk.PutMoment] changes
// nothing else of a chunk.
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

// RestoreMoments restores the block of int8 moments that [Chunk.PutMoment] was
// changing.
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
