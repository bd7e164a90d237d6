package kernel

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// Undo is an undo log. An update, or another change of a chunk, keeps the values in
// it that it is about to overwrite. So a change that was broken off can be made again.
//
// An update changes the chunk in tiles. Before it changes a tile, or a part of one,
// it copies the old values to a ring and stores how far it got. The ring has room for
// a few tiles and stays in the first-level cache. Only the tile that was kept last
// can be half changed or, with int8 moments, also the one before it.
//
// The log is made for threads that are killed. Such a thread has made all stores
// before some instruction, and none after it.
type Undo struct {
	bytes []byte
}

// UndoBytes returns the size of a log for updates of a format and for accumulations to
// its gradients, in full cache lines.
func (f Format) UndoBytes() int {
	_, _, bytes := abi.UndoLayout(f.State, f.Moments, f.Algorithm.Moments())
	return (max(bytes, sumRing+sumTiles*sumTile*int(f.Gradient.Size())) + 63) &^ 63
}

// UndoIn returns the log in some memory, which must be aligned to a cache line.
func UndoIn(memory []byte) Undo { return Undo{memory} }

// undoHead is the beginning of a log.
type undoHead struct {
	kept  atomic.Int64 // the element up to which the rings hold the old values; 0 before the first tile
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

// Check refuses a log that does not fit a chunk of so many elements.
func (u Undo) Check(elements int) error {
	kept, first := u.head().kept.Load(), u.head().first.Load()
	if kept < 0 || kept > int64(elements) || first < 0 || first > int64(elements) {
		return fmt.Errorf("its undo log goes from element %d to %d of %d", first, kept, elements)
	}
	return nil
}

// UpdateLogged is [Set.Update], beginning at element first, which is the first of a
// tile. It keeps an undo log. The bits are the same.
func (s Set) UpdateLogged(f Format, constants *Constants, c Chunk, first int, u Undo) {
	c.check(f)
	s.updateFrom(first, f, constants, &c, u, nil, nil)
}

// Restore restores a chunk to its values after some full tiles of a logged update,
// and returns the element to go on with. If this is broken off, or the update that
// goes on with the same log, the chunk can be restored again.
func (u Undo) Restore(f Format, c Chunk) int {
	head, tile := u.head(), f.granule()
	kept := int(head.kept.Load())
	first := max(beginning(kept, tile)-tile, int(head.first.Load()))
	for at := first; at < kept; at += tile {
		part := c.Slice(at, min(at+tile, kept))
		log := u.tile(f, at)
		for i, stream := range part.changed(f) {
			copy(stream, log[i])
		}
	}
	// From here on the rings no longer hold the tile before the first.
	head.first.Store(int64(first))
	return first
}

// keep copies a tile to the log.
func (u Undo) keep(f Format, part *Chunk, first int) {
	log := u.tile(f, first)
	for i, stream := range part.changed(f) {
		copy(log[i], stream)
	}
	u.head().kept.Store(int64(first + part.Len()))
}

// beginning returns the first element of the last tile that is kept.
func beginning(kept, tile int) int { return (kept - 1) / tile * tile }

// tile returns the memory of a tile in the log.
func (u Undo) tile(f Format, first int) (log [abi.UndoStreams][]byte) {
	tile, ring, _ := abi.UndoLayout(f.State, f.Moments, f.Algorithm.Moments())
	number := first / f.granule() % abi.UndoTiles
	for i, size := range tile {
		log[i] = u.bytes[ring[i]+number*size:][:size]
	}
	return log
}

// changed returns the bytes that an update reads and overwrites, in the order of the
// log.
func (c *Chunk) changed(f Format) [abi.UndoStreams][]byte {
	master, low := bytesOf(c.Parameter), c.low()
	if f.State == FP32 { // its parameters are only written
		master = bytesOf(c.Master)
	}
	return [abi.UndoStreams][]byte{master, low, c.Moments[0].Data, c.Moments[1].Data, bytesOf(c.Headers)}
}

// Accumulations to a sum ([Set.AccumulateLogged]) have tiles of their own, in a ring of
// two: one is complete while the next is being kept. A tile is large enough for a
// call of the kernel, and its log stays in the first-level cache.
const (
	sumTile  = 512 // elements
	sumTiles = 2
	sumRing  = 64 // where the ring begins
)

// AccumulateLogged is [Set.Accumulate], beginning at element first, which is the first
// of a tile. It keeps an undo log.
func (s Set) AccumulateLogged(sum, gradient Array, first int, u Undo) {
	n := sum.Len()
	if gradient.Len() != n {
		panic("kernel: a gradient and the sum that it is added to differ in length")
	}
	for ; first < n; first += sumTile {
		end := min(first+sumTile, n)
		part := sum.Slice(first, end)
		copy(u.sumTile(sum.Type, first), part.Data)
		u.head().kept.Store(int64(end))
		s.Accumulate(part, gradient.Slice(first, end))
	}
}

// RestoreSum restores a sum to its values after some full tiles of a logged accumulation,
// and returns the element to go on with. If this is broken off, or the accumulation that
// goes on with the same log, the sum can be restored again.
func (u Undo) RestoreSum(sum Array) int {
	kept := int(u.head().kept.Load())
	first := beginning(kept, sumTile)
	copy(sum.Slice(first, kept).Data, u.sumTile(sum.Type, first))
	return first
}

// sumTile returns the memory of a tile of an accumulation in the log.
func (u Undo) sumTile(of dtype.Type, first int) []byte {
	size := sumTile * int(of.Size())
	return u.bytes[sumRing+first/sumTile%sumTiles*size:][:size]
}

// keepMoments copies the int8 moments of a block to the log. [Chunk.PutMoment] changes
// nothing else of a chunk.
func (u Undo) keepMoments(f Format, c Chunk, first int) {
	c = c.Slice(first, min(first+Block, c.Len()))
	log := u.tile(f, first)
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
	log := u.tile(f, first)
	c = c.Slice(first, kept)
	for i, stream := range c.changed(f) {
		if i >= abi.UndoMoment1 {
			copy(stream, log[i])
		}
	}
}
