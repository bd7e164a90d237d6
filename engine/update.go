package engine

import (
	"fmt"
	"sync"

	"plimsoll/optim"
)

// Steps is the number of steps that are finished. With a journal it outlives
// the process.
func (s *Shard) Steps() int64 { return s.before.Load() + int64(s.finished.Load()) }

// SetSteps says that the state was loaded from elsewhere, where it had seen that
// many steps. A step that another process has begun is not finished any more.
func (s *Shard) SetSteps(n int64) {
	s.Wait()
	s.finished.Store(s.begun.Load())
	s.before.Store(n - int64(s.finished.Load()))
}

// Begin begins a step: the one after those that are finished. It multiplies
// every gradient by scale, and updates each parameter group with its optimizer.
// It returns at once; see [Shard.Wait] and [Shard.WaitRange]. Whoever writes
// gradients or reads parameters meanwhile has to wait first.
func (s *Shard) Begin(step int64, scale float64, optimizers []optim.Optimizer) error {
	return s.BeginThen(step, scale, optimizers, nil)
}

// BeginThen is [Shard.Begin] for those who want to hear of the end without a
// thread of theirs being woken for it: the worker that finishes the step calls
// then. The shard's workers are not free before that has returned. A shard of one
// chunk is updated at once, by the caller: to wake a worker would take as long.
func (s *Shard) BeginThen(step int64, scale float64, optimizers []optim.Optimizer, then func()) error {
	switch next := s.Steps() + 1; {
	case s.isUnderway():
		return fmt.Errorf("step %d cannot begin: step %d is under way", step, next)
	case s.isAdding():
		return fmt.Errorf("step %d cannot begin: a gradient is half added: add it again, or clear all", step)
	case step != next:
		return fmt.Errorf("step %d cannot begin: the next one is %d", step, next)
	case len(optimizers) < len(s.constants):
		return fmt.Errorf("step %d cannot begin: there are %d parameter groups and %d optimizers", step, len(s.constants), len(optimizers))
	}
	for group := range s.constants {
		if err := s.suits(group, optimizers[group]); err != nil {
			return fmt.Errorf("step %d cannot begin: %w", step, err)
		}
	}
	if err := s.checkConstants(step, scale, optimizers); err != nil {
		return fmt.Errorf("step %d cannot begin: %w", step, err)
	}
	s.update(step, scale, optimizers, then)
	return nil
}

// suits says whether an optimizer can update a parameter group.
func (s *Shard) suits(group int, o optim.Optimizer) error {
	if err := o.Validate(); err != nil {
		return fmt.Errorf("parameter group %d: %v: %w", group, o, err)
	}
	if algorithm := s.config.Format.Algorithm; o.Algorithm() != algorithm {
		return fmt.Errorf("parameter group %d: the state is that of %v, and the optimizer is %v", group, algorithm, o)
	}
	return nil
}

// isUnderway says whether an update was begun and is not finished, by whatever
// process.
func (s *Shard) isUnderway() bool { return s.begun.Load() != s.finished.Load() }

// checkConstants refuses hyperparameters and a scale of which updates in binary32
// would make NaN. The journal stays as it is.
func (s *Shard) checkConstants(step int64, scale float64, optimizers []optim.Optimizer) error {
	for group := range s.constants {
		if err := optimizers[group].Constants(&s.trial, step, scale); err != nil {
			return fmt.Errorf("parameter group %d: %v: %w", group, optimizers[group], err)
		}
	}
	return nil
}

// update begins an update whose constants were checked. From the store of its
// number on, whoever attaches the shard finishes it: all that takes has been
// stored before.
func (s *Shard) update(step int64, scale float64, optimizers []optim.Optimizer, then func()) {
	s.ForgetArrived()
	s.wait() // for the worker that tells of the last step
	s.then = then
	for i := range s.constants {
		_ = optimizers[i].Constants(&s.constants[i], step, scale) // was checked
	}
	s.forgetLogs()
	s.begun.Add(1)
	s.run()
}

// Finish finishes what another process has begun, where that needs nothing from
// anybody else: a step, of which it says whether there was one, and clearing the
// gradients. Of a write that was broken off, it restores the block that was being
// changed.
func (s *Shard) Finish() bool {
	s.undoWrite()
	if s.additions.clearing.Load() {
		s.ClearGradients()
	}
	if !s.isUnderway() {
		return false
	}
	for _, slot := range s.slots {
		s.resume(slot)
	}
	s.run()
	s.Wait()
	return true
}

// run has the workers update all chunks that have not had the update begun
// last.
func (s *Shard) run() {
	s.underway.Store(s.begun.Load())
	s.left.Store(int64(len(s.chunks)))
	if s.then != nil && len(s.chunks) == 1 {
		s.wait()
		s.updateUnit(0, 0)
		return
	}
	s.startChunks(true, s.updateChunk)
}

// updateUnit updates a chunk. The worker that updates the last one says that the
// update is finished, and does not wait for workers that have come to nothing
// because others use their CPUs.
func (s *Shard) updateUnit(worker, unit int) {
	if !s.isDone(unit) { // by another process, that is
		s.makeUpdate(worker, unit)
	}
	if s.left.Add(-1) == 0 {
		s.finished.Store(s.begun.Load())
		s.watchers.wake()
		if s.then != nil {
			s.then()
		}
	}
}

func (s *Shard) makeUpdate(worker, unit int) {
	if x := s.snapshot.Load(); x != nil {
		x.hand(unit)
	}
	if c := s.chunks[unit]; s.slots == nil {
		s.config.Kernel.Update(c.section.format, &s.constants[c.section.group], c.state())
	} else {
		s.change(s.slots[worker], unit)
	}
	s.setDone(unit)
}

// mark is that of chunks that have had the update begun last. Those of additions
// are odd.
func (c *counters) mark() uint32 { return uint32(c.begun.Load()) << 1 }

// isDone says whether a chunk has had the update begun last.
func (s *Shard) isDone(unit int) bool { return s.done[unit].Load() == s.counters.mark() }

func (s *Shard) setDone(unit int) {
	s.done[unit].Store(s.counters.mark())
	if s.awaited[unit].Load() {
		s.awaited[unit].Store(false)
		s.watchers.wake()
	}
}

// isOver says whether the update that this process began last is finished.
func (s *Shard) isOver() bool { return s.finished.Load() >= s.underway.Load() }

// Underway is the number of the update that this process is making, and how many
// chunks of it are left; 0 and 0 where it makes none.
func (s *Shard) Underway() (number uint64, left int64) {
	if s.isOver() {
		return 0, 0
	}
	return s.underway.Load(), s.left.Load()
}

// Wait returns when the step that was begun is finished.
func (s *Shard) Wait() { s.watchers.wait(s.isOver) }

// WaitRange returns when the parameters of a stretch of the shard are those
// after the step that was begun.
func (s *Shard) WaitRange(first, count int64) {
	if count <= 0 {
		return
	}
	// Workers come to the last chunks last: who waits for these first sleeps
	// least often.
	for unit := s.chunkAt(int(first + count - 1)); unit >= s.chunkAt(int(first)); unit-- {
		s.watchers.wait(func() bool {
			if s.isOver() || s.isDone(unit) {
				return true
			}
			s.awaited[unit].Store(true)
			return s.isDone(unit) // the worker may have looked before
		})
	}
}

// watchers wait for the end of an update, or for chunks that they have marked:
// to be woken for each would cost them and the workers more than the chunk.
type watchers struct {
	mutex sync.Mutex
	moved sync.Cond
}

// wait returns when a condition holds that comes true before a wake.
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
