package engine

import (
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// WriteMoment writes values of the first (number 0) or second (1) moment, beginning
// at element first. With a journal, a kill leaves no block of int8 moments half
// written once [Shard.Finish] was called. Writing the same values twice gives the
// same bits as writing them once.
func (s *Shard) WriteMoment(number int, first int64, values []float32) {
	if s.Wait(); s.isUnderway() || s.isAccumulating() {
		panic("engine: moments are written while a step or an accumulation is under way")
	}
	if s.slots != nil {
		s.clearLogs()
		s.writing.Store(true)
		defer s.writing.Store(false)
	}
	defer s.scrubbing.keepOut()()
	all := shard.Range{First: first, Count: int64(len(values))}
	s.eachState(s.config.ChunksOf(all), helping, changes, func(worker, unit int, state kernel.Chunk) {
		c := s.chunks[unit]
		own := c.Intersect(all)
		s.writeUnit(worker, unit, &state, number, int(own.First-c.First), values[own.First-first:own.End()-first])
	})
}

// writeUnit writes values of a moment, beginning at an element of a chunk.
func (s *Shard) writeUnit(worker, unit int, state *kernel.Chunk, number, from int, values []float32) {
	undo := kernel.Undo{}
	if s.slots != nil {
		undo = s.slots[worker].undo
		s.slots[worker].begin(unit)
	}
	if !s.isSound(unit, state) {
		return
	}
	s.chunkSums.void(unit)
	state.PutMoment(s.chunk(unit).section.format, number, from, values, undo)
	s.chunkSums.renew(unit, state)
}

// undoWrite restores the blocks that a killed process was writing.
func (s *Shard) undoWrite() {
	if s.slots == nil || !s.writing.Load() {
		return
	}
	for _, slot := range s.slots {
		if slot.undo.Begun() {
			unit := int(slot.unit.Load())
			state := s.heldState(unit)
			slot.undo.RestoreMoments(s.chunk(unit).section.format, state)
			s.chunkSums.renew(unit, &state)
		}
	}
	s.writing.Store(false)
}
