package engine

import "plimsoll/optim/kernel"

// WriteMoment writes a moment, first (number 0) or second (1), from element first
// on. With a journal, a process that is killed leaves every block of int8 moments
// as it was or as it is to be, once [Shard.Finish] has been called; and writing
// the same again gives the bits of having written it once.
func (s *Shard) WriteMoment(number int, first int64, values []float32) {
	if s.Wait(); s.isUnderway() || s.isAccumulating() {
		panic("engine: moments are written while a step or an addition is under way")
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

// writeUnit writes a moment from an element of a chunk on.
func (s *Shard) writeUnit(worker, unit, number, from int, values []float32) {
	undo := kernel.Undo{}
	if s.slots != nil {
		undo = s.slots[worker].undo
		s.slots[worker].begin(unit)
	}
	c := s.chunks[unit]
	c.state().PutMoment(c.section.format, number, from, values, undo)
}

// undoWrite makes the blocks what they were that a process was writing when it was
// killed.
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
