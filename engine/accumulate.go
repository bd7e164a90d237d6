package engine

import (
	"fmt"

	"plimsoll/dtype"
	"plimsoll/optim/kernel"
)

// Accumulation is what is added to the gradients: so many numbers of a type, from an
// element of the shard on.
type Accumulation struct {
	First, Count int64
	Type         dtype.Type
}

func (a Accumulation) String() string {
	return fmt.Sprintf("elements %d to %d in %v", a.First, a.First+a.Count, a.Type)
}

// Additions is how many gradients were added since all were cleared, and the step
// that the state was at then. The last of them, and whether it is only half
// added, by a process that was killed, is what comes next.
func (s *Shard) Accumulations() (finished, cleared int64, last Accumulation, half bool) {
	a := s.accumulations
	return a.finished.Load(), a.cleared.Load(), a.last, s.isAccumulating()
}

// Accumulate adds a gradient, of any type, to the gradients from element first
// on, for trainers that run several backward passes before a step. Where another
// process has half added one, this has to be the same.
func (s *Shard) Accumulate(first int64, gradient kernel.Array) error {
	a, now := s.accumulations, Accumulation{first, int64(gradient.Len()), gradient.Type}
	end := first + now.Count
	if first < 0 || end > s.config.Elements {
		panic(fmt.Sprintf("engine: gradients %d to %d of a shard of %d", first, end, s.config.Elements))
	}
	s.Wait()
	switch {
	case s.isUnderway():
		return fmt.Errorf("a gradient cannot be added: step %d is under way", s.Steps()+1)
	case s.isAccumulating() && now != a.last:
		return fmt.Errorf("a gradient of %v cannot be added: one of %v is half added: add it again, or clear all", now, a.last)
	case s.isAccumulating():
		for _, slot := range s.slots {
			s.resumeAccumulation(slot, gradient)
		}
	default:
		s.beginAccumulation(now)
	}
	s.start(int64(s.chunkAt(int(first))), int64(s.chunkAt(int(end-1))+1), true, func(worker, unit int) {
		s.addUnit(worker, unit, gradient)
	})
	s.wait()
	a.finished.Store(a.begun.Load())
	return nil
}

// beginAccumulation begins an addition. From the store of its number on it can be gone
// on with: all that takes has been stored before.
func (s *Shard) beginAccumulation(now Accumulation) {
	s.clearLogs()
	s.accumulations.last = now
	s.accumulations.marks.Add(1)
	s.accumulations.begun.Add(1)
}

func (s *Shard) addUnit(worker, unit int, gradient kernel.Array) {
	sum, part := s.sumOf(unit, gradient)
	if s.slots == nil {
		s.config.Kernel.Accumulate(sum, part)
		return
	}
	if s.isAdded(unit) {
		return // by another process
	}
	slot := s.slots[worker]
	slot.begin(unit)
	s.config.Kernel.AccumulateLogged(sum, part, 0, slot.undo)
	s.done[unit].Store(s.accumulations.mark())
}

// resumeAccumulation adds the rest to the chunk that a slot is the log of.
func (s *Shard) resumeAccumulation(slot slot, gradient kernel.Array) {
	unit := int(slot.unit.Load())
	if !slot.undo.Begun() || s.isAdded(unit) {
		return
	}
	sum, part := s.sumOf(unit, gradient)
	s.config.Kernel.AccumulateLogged(sum, part, slot.undo.RestoreSum(sum), slot.undo)
	s.done[unit].Store(s.accumulations.mark())
}

// sumOf is what the addition begun last adds to in a chunk, and what it adds.
func (s *Shard) sumOf(unit int, gradient kernel.Array) (sum, part kernel.Array) {
	c, first := s.chunks[unit], int(s.accumulations.last.First)
	from := max(c.section.first+c.first, first)
	to := min(c.section.first+c.end, first+gradient.Len())
	return s.gradient.Slice(from, to), gradient.Slice(from-first, to-first)
}

// ClearGradients sets all gradients to 0, so that others can be accumulated. Of
// one that is half added nothing is left.
func (s *Shard) ClearGradients() {
	s.Wait()
	a := s.accumulations
	a.clearing.Store(true)
	s.startChunks(true, func(_, unit int) { clear(s.chunks[unit].state().Gradient.Data) })
	s.wait()
	a.cleared.Store(s.Steps())
	a.begun.Store(0)
	a.finished.Store(0)
	a.clearing.Store(false)
}
