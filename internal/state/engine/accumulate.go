package engine

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Accumulation is a gradient that is added to a range of the shard's gradients.
type Accumulation struct {
	shard.Range
	Type dtype.Type
}

func (a Accumulation) String() string {
	return fmt.Sprintf("elements %d to %d in %v", a.First, a.End(), a.Type)
}

// Accumulations returns how many gradients were added since all gradients were
// cleared, and the step of the state at that time. It also returns the last one
// begun, and whether that one is half added: the process that added it was killed.
func (s *Shard) Accumulations() (finished, cleared int64, last Accumulation, half bool) {
	a := s.accumulations
	return a.finished.Load(), a.cleared.Load(), a.last(), s.isAccumulating()
}

// Accumulate adds a gradient of any type to the shard's gradients, beginning at
// element first. Trainers that run several backward passes before a step need it.
// If another process has left an accumulation half done, this one must be the same.
func (s *Shard) Accumulate(first int64, gradient kernel.Array) error {
	a := s.accumulations
	now := Accumulation{shard.Range{First: first, Count: int64(gradient.Len())}, gradient.Type}
	if first < 0 || now.End() > s.config.Elements {
		panic(fmt.Sprintf("engine: gradients %d to %d of a shard of %d", first, now.End(), s.config.Elements))
	}
	s.Wait()
	switch {
	case s.isUnderway():
		return fmt.Errorf("gradients cannot be accumulated: step %d is under way", s.Steps()+1)
	case s.isAccumulating() && now != a.last():
		return fmt.Errorf("a gradient of %v cannot be accumulated: the accumulation of one of %v is half done: "+
			"accumulate that again, or clear all gradients",
			now, a.last())
	case s.isAccumulating():
		for _, slot := range s.slots {
			s.resumeAccumulation(slot, gradient)
		}
	default:
		s.beginAccumulation(now)
	}
	s.start(s.config.ChunksOf(now.Range), helping, func(worker, unit int) {
		s.addUnit(worker, unit, gradient)
	})
	s.wait()
	a.finished.Store(a.begun.Load())
	return nil
}

// beginAccumulation begins an accumulation. It stores the number last: from then
// on, another process can go on with it.
func (s *Shard) beginAccumulation(now Accumulation) {
	s.clearLogs()
	s.accumulations.setLast(now)
	s.accumulations.marks.Add(1)
	s.accumulations.begun.Store(s.accumulations.begun.Load() + 1)
}

func (s *Shard) addUnit(worker, unit int, gradient kernel.Array) {
	sum, part := s.sumOf(unit, gradient)
	if s.slots == nil {
		s.config.Kernel.Accumulate(sum, part)
		return
	}
	if s.isAdded(unit) {
		return // another process has added it
	}
	slot := s.slots[worker]
	slot.begin(unit)
	s.config.Kernel.AccumulateLogged(sum, part, 0, slot.undo)
	s.done[unit].Store(s.accumulations.mark())
}

// resumeAccumulation adds the rest of a gradient to the chunk of a slot's undo log.
func (s *Shard) resumeAccumulation(slot slot, gradient kernel.Array) {
	unit := int(slot.unit.Load())
	if !slot.undo.Begun() || s.isAdded(unit) {
		return
	}
	sum, part := s.sumOf(unit, gradient)
	s.config.Kernel.AccumulateLogged(sum, part, slot.undo.RestoreSum(sum), slot.undo)
	s.done[unit].Store(s.accumulations.mark())
}

// sumOf returns the part of a chunk that the accumulation begun last adds to, and
// the part of the gradient that it adds.
func (s *Shard) sumOf(unit int, gradient kernel.Array) (sum, part kernel.Array) {
	all := s.accumulations.last().Range
	own := s.chunks[unit].Intersect(all)
	from, to := int(own.First), int(own.End())
	return s.gradient.Slice(from, to), gradient.Slice(from-int(all.First), to-int(all.First))
}

// ClearGradients sets all gradients to 0. A half-done accumulation is discarded.
func (s *Shard) ClearGradients() {
	s.Wait()
	a := s.accumulations
	a.clearing.Store(true)
	s.startChunks(helping, func(_, unit int) { clear(s.chunk(unit).state().Gradient.Data) })
	s.wait()
	a.cleared.Store(s.Steps())
	a.begun.Store(0)
	a.finished.Store(0)
	a.clearing.Store(false)
}
