package engine

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// A step may speculate: chunks are updated as their gradients arrive, before it is known whether the norm of all
// gradients clips the step, or whether some are infinite or NaN and it does not count at all. Then comes a verdict
// ([Shard.Decide]): the updates stand, or each is retracted and made again with another factor, or each is retracted
// and the step is none. Any way has the bits of a step that has waited for the norm.
//
// A chunk is updated early only if a log in an arena of its own can retract that (kernel.Retraction). Other chunks wait
// for the verdict: those whose gradients are not finite, and nearly all in the first few steps.
//
// The log of a chunk is complete before the chunk changes. The verdict is one word of the journal, which comes after
// all that it needs, when no worker changes anything. So another process finishes what was speculated, retracted or
// made again when this one was killed. A chunk that is being retracted has an undo log in its worker's slot, as one
// that is being updated has.

// phase is how far the update under way is that speculates.
type phase uint64

const (
	plain      phase = iota // it does not speculate
	speculated              // there is no verdict yet
	confirmed               // updates stand
	redone                  // updates are retracted and made again with another factor
	skipped                 // updates are retracted
)

func (p phase) isDecided() bool { return p > speculated }

// keepsSpeculated reports whether a chunk is done that has had the speculated update.
func (p phase) keepsSpeculated() bool { return p == speculated || p == confirmed }

// phaseBits is how many bits of the word of a verdict are the phase. The others are the number of the update.
const phaseBits = 3

// verdict is the verdict on an update.
type verdict struct {
	word   checked.Word // the number of the update, and its phase
	before checked.Int  // the steps of the state before it
	// scale is the factor with which it is made again, as the bits of a binary64 number, and has a checksum.
	scale    atomic.Uint64
	scaleSum checked.Sum
}

// phase returns the phase of the update that was begun last.
func (p *progress) phase() phase {
	word := p.decided.word.Load()
	if word>>phaseBits != p.begun.Load() {
		return plain
	}
	return phase(word & (1<<phaseBits - 1))
}

func (p *progress) setPhase(number uint64, of phase) {
	p.decided.word.Store(number<<phaseBits | uint64(of))
}

// speculatedMark is the mark of a chunk that has had the update begun last as a speculation.
func (c *counters) speculatedMark() uint64 { return c.mark() | 2 }

// AwaitsVerdict reports whether the step under way speculates, and there is no verdict on it.
func (p *progress) AwaitsVerdict() bool { return p.isUnderway() && p.phase() == speculated }

// speculation is what a process needs to speculate.
type speculation struct {
	begins     []int64 // of the logs of chunks, in their arena
	retractors []*kernel.Retractor
	again      []kernel.Constants // of an update that is made again
}

// MayRetract refuses a shard whose updates cannot be retracted.
func (c ShardConfig) MayRetract() error {
	if c.Tier != nil {
		return errors.New("a step of a state on a tier cannot be retracted")
	}
	for section := range c.Sections() {
		if err := c.FormatOf(section).Retractable(); err != nil {
			return fmt.Errorf("a step of section %d cannot be retracted: %w", section, err)
		}
	}
	return nil
}

// retractionArena is the arena of the logs of all chunks.
func (c ShardConfig) retractionArena() arena.Plan {
	size := int64(0)
	for unit := range c.Chunks {
		size += int64(kernel.RetractionBytes(int(c.Chunk(unit).Count)))
	}
	return arena.Plan{
		Component: ledger.RetractionLog,
		Size:      ledger.Bytes(size),
		Why: fmt.Sprintf("1 B x %s parameters, and more for small ones: with what a step can be retracted that began "+
			"before the norm of its gradients was known", ledger.Count(c.Elements)),
	}
}

func (s *Shard) openSpeculation() {
	if !s.config.Retracts {
		return
	}
	x := &s.speculation
	next := int64(0)
	for _, c := range s.chunks {
		x.begins = append(x.begins, next)
		next += int64(kernel.RetractionBytes(int(c.Count)))
	}
	for range s.workers.Count() {
		x.retractors = append(x.retractors, &kernel.Retractor{})
	}
	x.again = make([]kernel.Constants, len(s.constants))
}

// logOf returns the log of a chunk.
func (s *Shard) logOf(unit int) kernel.Retraction {
	begin := s.speculation.begins[unit]
	size := kernel.RetractionBytes(int(s.chunks[unit].Count))
	return kernel.RetractionIn(s.Arena(ledger.RetractionLog).Bytes()[begin:][:size])
}

// beginSpeculation writes whether the update that begins next speculates.
func (s *Shard) beginSpeculation(speculates bool) {
	of := plain
	if speculates {
		of = speculated
		s.decided.before.Store(s.Steps())
	}
	s.setPhase(s.begun.Load()+1, of)
}

// prepareRetraction writes the log of a chunk that is about to be updated. It reports false if the update could not be
// retracted.
func (s *Shard) prepareRetraction(worker, unit int, state *kernel.Chunk) bool {
	c, log := s.chunk(unit), s.logOf(unit)
	if !s.speculation.retractors[worker].Prepare(s.config.Kernel, c.section.format, s.constantsOf(c), *state, log) {
		return false
	}
	sums := log.Sums()
	for number := range sums {
		sums[number] = s.chunkSums.known(unit, number, state)
	}
	return true
}

// known returns the sum of a stream of a chunk: that of the last update, if there is one.
func (s *sums) known(unit, number int, state *kernel.Chunk) uint64 {
	for i, of := range s.streams {
		if sum := s.of(unit)[i].Load(); of == number && sum != 0 {
			return sum - written
		}
	}
	return state.Sum(number)
}

// retract retracts the speculated update of a chunk. It reports whether the state before is there again.
func (s *Shard) retract(worker, unit int, state *kernel.Chunk) bool {
	undo := kernel.Undo{}
	if s.slots != nil {
		s.slots[worker].beginRetraction(unit)
		undo = s.slots[worker].undo
	}
	return s.retractFrom(worker, unit, state, 0, undo)
}

// resumeRetraction finishes a retraction in a slot, which another process has begun.
func (s *Shard) resumeRetraction(slot slot, unit int) {
	state := s.chunk(unit).state()
	s.retractFrom(0, unit, &state, slot.undo.Restore(s.chunk(unit).section.format, state), slot.undo)
}

// retractFrom retracts the update of a chunk from an element on.
func (s *Shard) retractFrom(worker, unit int, state *kernel.Chunk, first int, undo kernel.Undo) bool {
	c, log := s.chunk(unit), s.logOf(unit)
	retractor := s.speculation.retractors[worker]
	ok := retractor.Retract(s.config.Kernel, c.section.format, s.speculatedConstants(c), *state, log, first, undo)
	for number, sum := range log.Sums() {
		ok = ok && state.Sum(number) == sum
	}
	if !ok {
		s.fail(fmt.Errorf("rank %d: the update of chunk %d (elements %d to %d) in step %d cannot be retracted, as its "+
			"gradients or its state have changed since: %w; %s", s.config.Rank, unit, c.First, c.End(), s.Steps()+1,
			ErrDamaged, remedy))
		return false
	}
	s.chunkSums.renew(unit, state)
	s.noted.none(unit)
	s.done[unit].Store(0)
	return true
}

// Verdict is what becomes of a step that speculates.
type Verdict struct {
	Skip      bool    // it is none: the state stays that of the step before
	GradScale float64 // else, by which every gradient is multiplied
}

// Decide gives the verdict on the step under way, which speculates and whose gradients are all there. It returns when
// workers go on: the step is then one whose gradients were there from the beginning. A step can be skipped also while
// gradients are missing.
func (s *Shard) Decide(v Verdict) error {
	if err := s.mayDecide(v); err != nil {
		return err
	}
	s.arrivals.stopped.Store(true)
	s.wait() // each worker finishes its chunk
	s.ForgetArrived()
	s.clearLogs()
	of := skipped
	if !v.Skip {
		of = s.phaseAfter(v.GradScale)
	}
	s.setPhase(s.begun.Load(), of)
	s.arrivals.missing.Store(0) // those that a skipped step lacks are of no step
	s.findFactor()
	s.arrivals.restBegins()
	left := s.unitsLeft()
	if left == 0 {
		s.end()
		s.tell()
		return nil
	}
	s.run(left)
	return nil
}

// mayDecide refuses a verdict that cannot come now, or whose factor binary32 cannot hold.
func (s *Shard) mayDecide(v Verdict) error {
	switch step := s.Steps() + 1; {
	case s.Err() != nil:
		return fmt.Errorf("step %d cannot be decided: %w", step, s.Err())
	case !s.AwaitsVerdict():
		return fmt.Errorf("no step awaits a verdict: the last one finished is %d", step-1)
	case !v.Skip && s.arrivals.missing.Load() > 0:
		return fmt.Errorf("step %d cannot be decided: not all of its gradients are there", step)
	case !v.Skip:
		return s.trial.SetGradScale(v.GradScale)
	}
	return nil
}

// phaseAfter returns what follows from the factor of a verdict. It writes a factor with which the update is made again.
func (s *Shard) phaseAfter(gradScale float64) phase {
	if s.speculatedConstants(s.chunk(0)).GradScale() == float32(gradScale) {
		return confirmed
	}
	s.decided.scale.Store(math.Float64bits(gradScale))
	s.decided.scaleSum.Write(memoryOf(&s.decided.scale))
	return redone
}

// findFactor computes the constants of an update that is made again.
func (s *Shard) findFactor() {
	if s.phase() != redone {
		return
	}
	s.decided.scaleSum.Verify(memoryOf(&s.decided.scale))
	for section := range s.rows {
		row := s.rows[section].Load()
		s.speculation.again[row] = s.verifiedConstants(row).Constants
		_ = s.speculation.again[row].SetGradScale(math.Float64frombits(s.decided.scale.Load())) // was checked
	}
}

// needsWork reports whether the update under way has something left to do with a chunk.
func (p *progress) needsWork(unit int) bool {
	if p.phase() == skipped {
		return p.done[unit].Load() == p.speculatedMark()
	}
	return !p.isDone(unit)
}

// unitsLeft returns how many chunks these are.
func (p *progress) unitsLeft() (left int64) {
	for unit := range p.done {
		if p.needsWork(unit) {
			left++
		}
	}
	return left
}

// forgetSkipped ends an update that was skipped, when all of it is retracted: the state is of the step before. If this
// is broken off, another process does the same again.
func (s *Shard) forgetSkipped() {
	begun := s.begun.Load()
	copyNumbers(s.own.after(begun), s.own.after(begun-1))
	s.noted.after = s.noted.before
	s.before.Store(s.decided.before.Load() - int64(begun))
	s.finished.Store(begun)
}

// The norm

// listBlocks lists the norm blocks of a range that have not come before, and returns how many. Only an update that
// speculates has some.
func (a *arrivals) listBlocks(r shard.Range, elements int64) (came int) {
	end := r.End() / normBlock
	if r.End() == elements {
		end = int64(len(a.listed))
	}
	for block := (r.First + normBlock - 1) / normBlock; block < min(end, int64(len(a.listed))); block++ {
		if !a.listed[block] {
			a.listed[block] = true
			a.blocks = append(a.blocks, int(block))
			came++
		}
	}
	return came
}

// takeBlock returns a norm block that has come and that no worker has taken.
func (a *arrivals) takeBlock() (block int, ok bool) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	last := len(a.blocks) - 1
	if last < 0 {
		return 0, false
	}
	block, a.blocks = a.blocks[last], a.blocks[:last]
	return block, true
}

// sumArrived adds up the squares of gradients that have arrived: the verdict waits for them.
func (s *Shard) sumArrived(worker int) {
	for {
		block, ok := s.arrivals.takeBlock()
		if !ok {
			return
		}
		s.sumSquaresOfBlock(worker, block)
		s.summed[block].Store(true)
		if s.arrivals.unsummed.Add(-1) == 0 {
			s.current.watchers.wake()
		}
	}
}

// sumOfArrived returns the sum of the squares of all gradients, once workers have added up all of them. They do so
// before they take another chunk.
func (s *Shard) sumOfArrived() float64 {
	s.current.watchers.wait(func() bool { return s.arrivals.unsummed.Load() == 0 || s.Err() != nil })
	return s.addBlocksUp()
}

// MayBeNormed reports whether all gradients are there of the step that awaits a verdict.
func (s *Shard) MayBeNormed() bool { return s.AwaitsVerdict() && s.arrivals.missing.Load() == 0 }

// restBegins counts the time from the verdict on.
func (a *arrivals) restBegins() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.left > 0 {
		a.busy += time.Since(a.since)
	}
	a.left, a.rest, a.since = 0, true, time.Now()
}

// restIsOver ends that.
func (a *arrivals) restIsOver() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.rest {
		a.rest = false
		a.busy += time.Since(a.since)
	}
}
