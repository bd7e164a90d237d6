package engine

import "plimsoll/optim/kernel"

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
	end := int(first) + len(values)
	s.start(int64(s.chunkAt(int(first))), int64(s.chunkAt(end-1)+1), true, func(worker, unit int) {
		c := s.chunks[unit]
		place := c.section.first + c.first
		from, to := max(place, int(first)), min(c.section.first+c.end, end)
		s.writeUnit(worker, unit, number, from-place, values[from-int(first):to-int(first)])
	})
	s.wait()
}

// writeUnit writes values of a moment, beginning at an element of a chunk.
func (s *Shard) writeUnit(worker, unit, number, from int, values []float32) {
	undo := kernel.Undo{}
	if s.slots != nil {
		undo = s.slots[worker].undo
		s.slots[worker].begin(unit)
	}
	c := s.chunks[unit]
	c.state().PutMoment(c.section.format, number, from, values, undo)
}

// undoWrite restores the blocks that a killed process was writing.
func (s *Shard) undoWrite() {
	if s.slots == nil || !s.writing.Load() {
		return
	}
	for _, slot := range s.slots {
		if slot.undo.Begun() {
			c := s.chunks[slot.unit.Load()]
			slot.undo.RestoreMoments(c.section.format, c.state())
		}
	}
	s.writing.Store(false)
}
