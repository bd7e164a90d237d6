package engine

import (
	"fmt"
	"sync"

	"plimsoll/optim"
	"plimsoll/shard"
)

// SetSteps sets the number of steps that the state has seen, for a state that was
// loaded. A step that another process has begun is forgotten.
func (s *Shard) SetSteps(n int64) {
	s.Wait()
	s.finished.Store(s.begun.Load())
	s.before.Store(n - int64(s.finished.Load()))
}

// Begin begins the next step. It multiplies every gradient by scale and updates each
// parameter group with its optimizer. It returns at once: call [Shard.Wait] or
// [Shard.WaitRange] before reading parameters or writing gradients.
func (s *Shard) Begin(step int64, gradScale float64, optimizers []optim.Optimizer) error {
	return s.BeginThen(step, gradScale, optimizers, nil)
}

// BeginThen is [Shard.Begin] with a function that the worker that finishes the step
// calls: no other thread needs to be woken for it. The shard's workers are busy until
// it returns. The caller updates a one-chunk shard itself; waking a worker would take
// as long as the update.
func (s *Shard) BeginThen(step int64, gradScale float64, optimizers []optim.Optimizer, then func()) error {
	if err := s.mayBegin(step, gradScale, optimizers); err != nil {
		return err
	}
	s.update(step, gradScale, optimizers, then, false)
	return nil
}

// mayBegin refuses a step that is not the next, or whose numbers make no sense.
func (s *Shard) mayBegin(step int64, gradScale float64, optimizers []optim.Optimizer) error {
	switch next := s.Steps() + 1; {
	case s.isUnderway():
		return fmt.Errorf("step %d cannot begin: step %d is under way", step, next)
	case s.isAccumulating():
		return fmt.Errorf("step %d cannot begin: an accumulation is half done: accumulate that gradient again, or "+
			"clear all gradients", step)
	case step != next:
		return fmt.Errorf("step %d cannot begin: the next one is %d", step, next)
	case len(optimizers) < len(s.constants):
		return fmt.Errorf("step %d cannot begin: there are %d parameter groups and %d optimizers",
			step, len(s.constants), len(optimizers))
	}
	for group := range s.constants {
		if err := s.suits(group, optimizers[group]); err != nil {
			return fmt.Errorf("step %d cannot begin: %w", step, err)
		}
	}
	if err := s.checkConstants(step, gradScale, optimizers); err != nil {
		return fmt.Errorf("step %d cannot begin: %w", step, err)
	}
	return nil
}

// suits refuses an optimizer that cannot update a parameter group.
func (s *Shard) suits(group int, o optim.Optimizer) error {
	if err := o.Validate(); err != nil {
		return fmt.Errorf("parameter group %d: %v: %w", group, o, err)
	}
	if algorithm := s.config.Format.Algorithm; o.Algorithm() != algorithm {
		return fmt.Errorf("parameter group %d: the state is of %v, but the optimizer is %v", group, algorithm, o)
	}
	return nil
}

// checkConstants refuses hyperparameters and a scale with which an update in
// binary32 would make NaN. It leaves the journal as it is.
func (s *Shard) checkConstants(step int64, gradScale float64, optimizers []optim.Optimizer) error {
	for group := range s.constants {
		if err := optimizers[group].Constants(&s.trial, step, gradScale); err != nil {
			return fmt.Errorf("parameter group %d: %v: %w", group, optimizers[group], err)
		}
	}
	return nil
}

// update begins an update whose constants were checked. The store of its number
// comes last: from then on, any process that attaches the shard can finish it. If
// gradients are still arriving, it can do so once they are all there.
func (s *Shard) update(step int64, gradScale float64, optimizers []optim.Optimizer, then func(), arriving bool) {
	s.ForgetArrived()
	s.wait() // for the worker that tells of the last step
	s.current.then = then
	for i := range s.constants {
		_ = optimizers[i].Constants(&s.constants[i], step, gradScale) // was checked
	}
	s.clearLogs()
	s.arriving.Store(0)
	if arriving {
		s.arriving.Store(s.begun.Load() + 1)
	}
	s.begun.Add(1)
	s.run(int64(s.config.Chunks))
}

// Finish finishes what another process has begun: a step, and clearing the
// gradients. It restores blocks that the process was writing. It reports whether it
// finished a step. A step that waits for gradients is finished when they have arrived
// again ([Shard.MissesGradients]).
func (s *Shard) Finish() bool {
	s.undoWrite()
	if s.accumulations.clearing.Load() {
		s.ClearGradients()
	}
	if !s.isUnderway() {
		return false
	}
	for _, slot := range s.slots {
		s.resume(slot)
	}
	left := int64(0)
	for unit := range s.done {
		if !s.isDone(unit) {
			left++
		}
	}
	if left == 0 {
		s.end()
		return true
	}
	s.run(left)
	if s.MissesGradients() {
		return false
	}
	s.Wait()
	return true
}

// run has the workers update all chunks that lack the update begun last; left is how
// many these are.
func (s *Shard) run(left int64) {
	s.wait() // for workers that got no chunk of the last update
	s.queue.begin()
	s.current.underway.Store(s.begun.Load())
	s.current.left.Store(left)
	if s.isArriving() {
		s.startArriving()
		return
	}
	if s.current.then != nil && s.config.Chunks == 1 {
		s.updateUnit(0, 0)
		return
	}
	sharing := helping
	if s.queue.order != nil {
		sharing = together
	}
	s.startChunks(sharing, s.updateChunk)
}

// updateUnit updates a chunk. The worker that updates the last chunk finishes the
// update. It does not wait for workers that got no chunk because other processes
// use their CPUs.
func (s *Shard) updateUnit(worker, unit int) {
	if s.isDone(unit) {
		return // another process has updated it
	}
	s.makeUpdate(worker, unit)
	if s.isArriving() {
		s.arrivals.done()
	}
	if s.current.left.Add(-1) == 0 {
		s.end()
		if s.current.then != nil {
			s.current.then()
		}
	}
}

// end ends the update under way.
func (s *Shard) end() {
	s.finished.Store(s.begun.Load())
	s.current.watchers.wake()
}

func (s *Shard) makeUpdate(worker, unit int) {
	if x := s.snapshot.Load(); x != nil {
		x.copyOnWrite(unit)
	}
	began, c := s.config.begin(), s.chunk(unit)
	if s.slots == nil {
		s.config.Kernel.Update(c.section.format, &s.constants[c.section.group], c.state())
	} else {
		s.change(s.slots[worker], unit)
	}
	s.config.observe(worker, Work{Elements: c.Range}, began) // before the end is told: then nobody is observed any more
	s.setDone(unit)
}

func (s *Shard) setDone(unit int) {
	s.done[unit].Store(s.counters.mark())
	if s.current.awaited[unit].Load() {
		s.current.awaited[unit].Store(false)
		s.current.watchers.wake()
	}
}

// isOver reports whether the update that this process began last is finished.
func (s *Shard) isOver() bool { return s.finished.Load() >= s.current.underway.Load() }

// Underway returns the number of the update that this process is making, and how many
// of its chunks are left. It returns 0 and 0 if no update is under way, or if it can
// only wait for gradients.
func (s *Shard) Underway() (number uint64, left int64) {
	if s.isOver() || s.MissesGradients() && s.arrivals.isIdle() {
		return 0, 0
	}
	return s.current.underway.Load(), s.current.left.Load()
}

// Wait returns when the step that was begun last is finished.
func (s *Shard) Wait() { s.current.watchers.wait(s.isOver) }

// WaitRange returns when a range of parameters has had the step that was begun last. Workers take the chunks of the
// range before all others, except for those that other goroutines wait for already. If the full shard has had the step,
// the step is finished when WaitRange returns.
func (s *Shard) WaitRange(r shard.Range) {
	chunks := s.config.ChunksOf(r)
	if !s.isOver() {
		s.queue.urgent.add(chunks)
	}
	// Workers come to the last chunks last. Waiting for those first means waking
	// up least often.
	for unit := int(chunks.End()) - 1; unit >= int(chunks.First); unit-- {
		s.current.watchers.wait(func() bool {
			if s.isOver() || s.isDone(unit) {
				return true
			}
			s.current.awaited[unit].Store(true)
			return s.isDone(unit) // a worker that looked before the mark does not wake anybody
		})
	}
	s.waitForEnd()
}

// waitForEnd returns at once, unless all chunks are done: then it waits until the step is finished.
func (s *Shard) waitForEnd() {
	if s.isOver() || s.current.left.Load() > int64(s.workers.Count()) {
		return // a worker counts the chunk that it has done before it takes another
	}
	for unit := range s.done {
		if !s.isDone(unit) {
			return
		}
	}
	s.Wait()
}

// watchers wait for the end of an update, or for chunks that they have marked.
// Waking them for every chunk would take longer than the chunk.
type watchers struct {
	mutex sync.Mutex
	moved sync.Cond
}

// wait returns when the condition holds. The goroutine that makes it true calls wake.
func (w *watchers) wait(holds func() bool) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	for !holds() {
		w.moved.Wait()
	}
}

func (w *watchers) wake() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.moved.Broadcast()
}

// change updates a chunk and keeps an undo log of it.
func (s *Shard) change(slot slot, unit int) {
	slot.begin(unit)
	s.updateFrom(slot, unit, 0)
}

// updateFrom updates a chunk, beginning at an element.
func (s *Shard) updateFrom(slot slot, unit, first int) {
	c := s.chunk(unit)
	s.config.Kernel.UpdateLogged(c.section.format, &s.constants[c.section.group], c.state(), first, slot.undo)
}

// resume finishes the chunk of a slot's undo log. If this process is killed, too,
// the slot still says where to go on.
func (s *Shard) resume(slot slot) {
	unit := int(slot.unit.Load())
	if !slot.undo.Begun() || s.isDone(unit) {
		return
	}
	c := s.chunk(unit)
	s.updateFrom(slot, unit, slot.undo.Restore(c.section.format, c.state()))
	s.setDone(unit)
}
