package engine

import (
	"fmt"
	"sync/atomic"

	"plimsoll/dtype"
	"plimsoll/optim/kernel"
)

// additions count what was added to the gradients since all were cleared. With a
// journal they are in it, and who adds again what another process has half added
// goes on with it: chunks that have had it are marked, and the others are as they
// were, but for those that a slot is the log of.
type additions struct {
	begun, finished atomic.Int64 // one apart while one is under way
	clearing        atomic.Bool  // while the gradients are cleared; the numbers mean nothing then
	cleared         atomic.Int64 // the step that the state was at then
	// marks counts additions and is never set back, as those of chunks are not.
	marks atomic.Uint32
	last  Addition // the one that was begun last, written before its number
}

// Addition is what is added to the gradients: so many numbers of a type, from an
// element of the shard on.
type Addition struct {
	First, Count int64
	Type         dtype.Type
}

func (a Addition) String() string {
	return fmt.Sprintf("elements %d to %d in %v", a.First, a.First+a.Count, a.Type)
}

// Additions is how many gradients were added since all were cleared, and the step
// that the state was at then. The last of them, and whether it is only half
// added, by a process that was killed, is what comes next.
func (s *Shard) Additions() (finished, cleared int64, last Addition, half bool) {
	a := s.additions
	return a.finished.Load(), a.cleared.Load(), a.last, s.isAdding()
}

// isAdding says whether an addition was begun and is not finished, by whatever
// process.
func (s *Shard) isAdding() bool { return s.additions.begun.Load() != s.additions.finished.Load() }

// mark is that of chunks that have had the addition begun last. Those of updates
// are even.
func (a *additions) mark() uint32 { return a.marks.Load()<<1 | 1 }

// Accumulate adds a gradient, of any type, to the gradients from element first
// on, for trainers that run several backward passes before a step. Where another
// process has half added one, this has to be the same.
func (s *Shard) Accumulate(first int64, gradient kernel.Array) error {
	a, now := s.additions, Addition{first, int64(gradient.Len()), gradient.Type}
	end := first + now.Count
	if first < 0 || end > s.config.Elements {
		panic(fmt.Sprintf("engine: gradients %d to %d of a shard of %d", first, end, s.config.Elements))
	}
	s.Wait()
	switch {
	case s.isUnderway():
		return fmt.Errorf("a gradient cannot be added: step %d is under way", s.Steps()+1)
	case s.isAdding() && now != a.last:
		return fmt.Errorf("a gradient of %v cannot be added: one of %v is half added: add it again, or clear all", now, a.last)
	case s.isAdding():
		for _, slot := range s.slots {
			s.resumeAddition(slot, gradient)
		}
	default:
		s.beginAddition(now)
	}
	s.start(int64(s.chunkAt(int(first))), int64(s.chunkAt(int(end-1))+1), true, func(worker, unit int) {
		s.addUnit(worker, unit, gradient)
	})
	s.wait()
	a.finished.Store(a.begun.Load())
	return nil
}

// beginAddition begins an addition. From the store of its number on it can be gone
// on with: all that takes has been stored before.
func (s *Shard) beginAddition(now Addition) {
	s.forgetLogs()
	s.additions.last = now
	s.additions.marks.Add(1)
	s.additions.begun.Add(1)
}

// forgetLogs makes the slots the logs of nothing, before something is begun.
func (s *Shard) forgetLogs() {
	for _, slot := range s.slots {
		slot.undo.Begin()
	}
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
	s.done[unit].Store(s.additions.mark())
}

// resumeAddition adds the rest to the chunk that a slot is the log of.
func (s *Shard) resumeAddition(slot slot, gradient kernel.Array) {
	unit := int(slot.unit.Load())
	if !slot.undo.Begun() || s.isAdded(unit) {
		return
	}
	sum, part := s.sumOf(unit, gradient)
	s.config.Kernel.AccumulateLogged(sum, part, slot.undo.RestoreSum(sum), slot.undo)
	s.done[unit].Store(s.additions.mark())
}

func (s *Shard) isAdded(unit int) bool { return s.done[unit].Load() == s.additions.mark() }

// sumOf is what the addition begun last adds to in a chunk, and what it adds.
func (s *Shard) sumOf(unit int, gradient kernel.Array) (sum, part kernel.Array) {
	c, first := s.chunks[unit], int(s.additions.last.First)
	from := max(c.section.first+c.first, first)
	to := min(c.section.first+c.end, first+gradient.Len())
	return s.gradient.Slice(from, to), gradient.Slice(from-first, to-first)
}

// ClearGradients sets all gradients to 0, so that others can be accumulated. Of
// one that is half added nothing is left.
func (s *Shard) ClearGradients() {
	s.Wait()
	a := s.additions
	a.clearing.Store(true)
	s.startChunks(true, func(_, unit int) { clear(s.chunks[unit].state().Gradient.Data) })
	s.wait()
	a.cleared.Store(s.Steps())
	a.begun.Store(0)
	a.finished.Store(0)
	a.clearing.Store(false)
}
