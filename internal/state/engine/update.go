package engine

import (
	"fmt"
	"sync"
	"time"
	"unsafe"

	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Update is what a step is made with.
type Update struct {
	Step       int64             // its number
	GradScale  float64           // by which every gradient is multiplied
	Optimizers []optim.Optimizer // of each parameter group
	// LeftAlone are sections that have no gradients. They keep their weights and moments, and the step is none of
	// theirs. What is in the arena of gradients counts for the norm alone.
	LeftAlone []int
	// Speculates says that the step waits for a verdict ([Shard.Decide]): whether it counts, and with which factor. Its
	// gradients arrive while it is made.
	Speculates bool
}

// Begin begins the next step. It multiplies every gradient by scale and updates each
// parameter group with its optimizer. It returns at once: call [Shard.Wait] or
// [Shard.WaitRange] before reading parameters or writing gradients.
func (s *Shard) Begin(step int64, gradScale float64, optimizers []optim.Optimizer) error {
	return s.BeginThen(Update{Step: step, GradScale: gradScale, Optimizers: optimizers}, nil)
}

// BeginThen is [Shard.Begin] with a function that the worker that finishes the step
// calls: no other thread needs to be woken for it. The shard's workers are busy until
// it returns. The caller updates a one-chunk shard itself; waking a worker would take
// as long as the update.
func (s *Shard) BeginThen(u Update, then func()) error {
	if err := s.MayBegin(u); err != nil {
		return err
	}
	if u.Speculates {
		return fmt.Errorf("step %d cannot speculate: its gradients are there", u.Step)
	}
	s.update(u, then, false)
	return nil
}

// MayBegin refuses a step that is not the next, or whose numbers make no sense.
func (s *Shard) MayBegin(u Update) error {
	if err := s.Err(); err != nil {
		return fmt.Errorf("step %d cannot begin: %w", u.Step, err)
	}
	switch next := s.Steps() + 1; {
	case s.isUnderway():
		return fmt.Errorf("step %d cannot begin: step %d is under way", u.Step, next)
	case s.isAccumulating():
		return fmt.Errorf("step %d cannot begin: an accumulation is half done: accumulate that gradient again, or "+
			"clear all gradients", u.Step)
	case u.Step != next:
		return fmt.Errorf("step %d cannot begin: the next one is %d", u.Step, next)
	case u.Speculates && !s.config.Retracts:
		return fmt.Errorf("step %d cannot speculate: there is no log to retract it with", u.Step)
	case len(u.Optimizers) < s.config.Groups:
		return fmt.Errorf("step %d cannot begin: there are %d parameter groups and %d optimizers",
			u.Step, s.config.Groups, len(u.Optimizers))
	}
	for group := range s.config.Groups {
		if err := s.suits(group, u.Optimizers[group]); err != nil {
			return fmt.Errorf("step %d cannot begin: %w", u.Step, err)
		}
	}
	for _, section := range u.LeftAlone {
		if section < 0 || section >= len(s.sections) {
			return fmt.Errorf("step %d cannot begin: it leaves section %d alone, and there are %d", u.Step, section,
				len(s.sections))
		}
	}
	if err := s.checkConstants(u); err != nil {
		return fmt.Errorf("step %d cannot begin: %w", u.Step, err)
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
// binary32 would make NaN. It leaves the constants in the journal as they are.
func (s *Shard) checkConstants(u Update) error {
	s.assign()
	for _, of := range s.assigned.list {
		if err := u.constants(&s.trial, of); err != nil {
			return fmt.Errorf("parameter group %d: %v: %w", of.group, u.Optimizers[of.group], err)
		}
	}
	return nil
}

// constants computes the constants of sections.
func (u *Update) constants(c *kernel.Constants, of row) error {
	return u.Optimizers[of.group].Constants(c, of.had+1, u.GradScale)
}

// update begins an update whose constants were checked. The store of its number
// comes last: from then on, any process that attaches the shard can finish it. If
// gradients are still arriving, it can do so once they are all there.
func (s *Shard) update(u Update, then func(), arriving bool) {
	s.prepareUpdate(u, then, arriving)
	s.scrubbing.set(true) // it stays away from what is under way
	s.begun.Add(1)
	s.scrubbing.set(false)
	s.run(int64(s.config.Chunks))
}

// prepareUpdate writes what an update is made with, all but its number.
func (s *Shard) prepareUpdate(u Update, then func(), arriving bool) {
	s.ForgetArrived()
	s.wait() // for the worker that tells of the last step
	s.noted.begin(s.Steps() + 1)
	s.current.then = then
	s.current.untold.Store(then != nil)
	for i, of := range s.assigned.list {
		_ = u.constants(&s.constants[i].Constants, of) // was checked
		s.constants[i].sum.Write(memoryOf(&s.constants[i].Constants))
	}
	for section, row := range s.assigned.of {
		s.rows[section].Store(uint64(row))
	}
	s.countSteps(u.LeftAlone)
	s.clearLogs()
	s.arriving.Store(0)
	if arriving {
		s.arriving.Store(s.begun.Load() + 1)
	}
	s.beginSpeculation(u.Speculates)
}

// Finish finishes what another process has begun: a step, clearing the gradients, and
// [Shard.RollBack]. It restores blocks that the process was writing. It reports whether it
// finished a step. A step that waits for gradients is finished when they have arrived
// again ([Shard.MissesGradients]).
func (s *Shard) Finish() bool {
	if s.restoring.Load() {
		_, _ = s.Restore() // Err has its error
		return false
	}
	s.undoWrite()
	if s.accumulations.clearing.Load() {
		s.ClearGradients()
	}
	if !s.isUnderway() {
		s.writeHeld()
		return false
	}
	s.findFactor()
	for _, slot := range s.slots {
		s.resume(slot)
	}
	if s.writeHeld(); s.Err() != nil {
		return false // the files lack what a lane holds
	}
	left := s.unitsLeft()
	if left == 0 && !s.AwaitsVerdict() {
		if !s.commitOnce() {
			return false
		}
		s.end()
		return true
	}
	s.run(left)
	if s.MissesGradients() {
		return false
	}
	s.Wait()
	return s.Err() == nil
}

// run has the workers update all chunks that lack the update begun last; left is how
// many these are.
func (s *Shard) run(left int64) {
	s.wait() // for workers that got no chunk of the last update
	s.queue.begin()
	s.current.underway.Store(s.begun.Load())
	s.current.left.Store(left)
	switch {
	case s.tier != nil:
		s.startUpdateOnTier()
		return
	case s.isArriving():
		s.startArriving()
		return
	}
	if s.current.then != nil && s.config.Chunks == 1 {
		defer s.catch()
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
	if !s.needsWork(unit) {
		return // another process has updated it
	}
	state := s.chunk(unit).state()
	if made, sound := s.changeUnit(worker, unit, &state); !sound {
		return
	} else if s.isArriving() {
		s.arrivals.done()
		if !made {
			return
		}
	}
	if s.current.left.Add(-1) == 0 && !s.AwaitsVerdict() {
		s.end()
		s.tell()
	}
}

// changeUnit makes of a chunk what the update under way asks for. It reports whether the chunk has what it asks for,
// and whether memory was as it should be. Only an update that speculates leaves a chunk for later.
func (s *Shard) changeUnit(worker, unit int, state *kernel.Chunk) (made, sound bool) {
	phase, began := s.phase(), s.config.begin()
	if s.done[unit].Load() == s.speculatedMark() && !s.retract(worker, unit, state) {
		return false, false
	}
	if phase == skipped {
		s.config.observe(worker, Work{Elements: s.chunk(unit).Range}, began)
		s.wakeFor(unit)
		return true, true
	}
	if phase == speculated && !s.isLeft(s.chunks[unit].Section) && !s.prepareRetraction(worker, unit, state) {
		return false, true
	}
	return true, s.makeUpdate(worker, unit, state, began)
}

// end ends the update under way.
func (s *Shard) end() {
	if s.phase() == skipped {
		s.forgetSkipped()
	} else {
		s.finished.Store(s.begun.Load())
	}
	s.arrivals.restIsOver()
	s.current.watchers.wake()
}

// makeUpdate updates a chunk, on which the worker has been at work since began. It reports whether the chunk had the
// sums that it should have had.
func (s *Shard) makeUpdate(worker, unit int, state *kernel.Chunk, began time.Time) bool {
	c := s.chunk(unit)
	if s.isLeft(c.Section) {
		s.noted.none(unit)
		s.setDone(unit)
		return true
	}
	if x := s.snapshot.Load(); x != nil {
		x.copyOnWrite(unit, state)
	}
	switch {
	case s.chunkSums.any() || s.noted.on():
		if !s.updateSummed(worker, unit, c, state) {
			return false
		}
	case s.slots == nil:
		s.config.Kernel.Update(c.section.format, s.constantsOf(c), *state)
	default:
		s.change(s.slots[worker], unit, state)
	}
	s.config.observe(worker, Work{Elements: c.Range}, began) // before the end is told: then nobody is observed any more
	s.setDone(unit)
	return true
}

func (s *Shard) setDone(unit int) {
	mark := s.counters.mark()
	if s.phase() == speculated && !s.isLeft(s.chunks[unit].Section) {
		mark = s.speculatedMark()
	}
	s.done[unit].Store(mark)
	s.wakeFor(unit)
}

// wakeFor wakes who waits for a chunk.
func (s *Shard) wakeFor(unit int) {
	if s.current.awaited[unit].Load() {
		s.current.awaited[unit].Store(false)
		s.current.watchers.wake()
	}
}

// isOver reports whether the update that this process began last is finished, or was stopped by damage.
func (s *Shard) isOver() bool {
	return s.damage.Load() != nil || s.finished.Load() >= s.current.underway.Load()
}

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
	if s.isOver() || s.current.left.Load() > int64(s.workers.Count()+s.config.lanes()) {
		return // a worker counts the chunk that it has done before it takes another, and so does a lane
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
func (s *Shard) change(slot slot, unit int, state *kernel.Chunk) {
	slot.begin(unit)
	s.updateFrom(slot, unit, state, 0)
}

// updateFrom updates a chunk, beginning at an element.
func (s *Shard) updateFrom(slot slot, unit int, state *kernel.Chunk, first int) {
	c := s.chunk(unit)
	s.config.Kernel.UpdateLogged(c.section.format, s.constantsOf(c), *state, first, slot.undo)
}

// constantsOf returns the constants of a chunk in the update that was begun last.
func (s *Shard) constantsOf(c chunk) *kernel.Constants {
	if s.phase() == redone {
		return &s.speculation.again[s.rows[c.Section].Load()]
	}
	return s.speculatedConstants(c)
}

// speculatedConstants returns the constants with which the update was begun: those of a speculation, if it is one.
func (s *Shard) speculatedConstants(c chunk) *kernel.Constants {
	return &s.verifiedConstants(s.rows[c.Section].Load()).Constants
}

func (s *Shard) verifiedConstants(row uint64) *constants {
	of := &s.constants[row]
	of.sum.Verify(memoryOf(&of.Constants))
	return of
}

// memoryOf returns the memory of a value.
func memoryOf[T any](value *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(value)), unsafe.Sizeof(*value))
}

// resume finishes the chunk of a slot's undo log. If this process is killed, too,
// the slot still says where to go on.
func (s *Shard) resume(slot slot) {
	unit := int(slot.unit.Load())
	if !slot.undo.Begun() || s.done[unit].Load() == s.counters.mark() {
		return
	}
	if isSpeculated := s.done[unit].Load() == s.speculatedMark(); slot.retracts.Load() || isSpeculated {
		if slot.retracts.Load() && isSpeculated {
			s.resumeRetraction(slot, unit)
		}
		return
	}
	state := s.heldState(unit)
	s.updateFrom(slot, unit, &state, slot.undo.Restore(s.chunk(unit).section.format, state))
	s.chunkSums.renew(unit, &state)
	s.setDone(unit)
}
