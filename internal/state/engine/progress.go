package engine

import (
	"sync/atomic"

	"plimsoll/internal/state/optim/kernel"
)

// progress is how far updates, accumulations and writes of moments have come. It
// lies in the journal if the shard has one, else on the heap.
//
// A chunk is done when its mark equals the mark of the update or accumulation that
// was begun last. Marks of updates are even, those of accumulations are odd, and
// neither is ever set back.
type progress struct {
	*counters
	accumulations *accumulations
	ownSteps
	constants []kernel.Constants // in the update begun last; at most one for each section
	done      []atomic.Uint32    // by chunk: the mark of the last update or accumulation that it has had
	slots     []slot             // of each worker; none without a journal
	writing   *atomic.Bool       // whether slots are undo logs of a write of moments
}

// counters count updates.
type counters struct {
	begun, finished atomic.Uint64 // they differ by one while an update is under way
	before          atomic.Int64  // the step of the state before the first update
	arriving        atomic.Uint64 // the number of the last update that was begun before its gradients were there
}

// accumulations count gradients that were added since all gradients were cleared.
type accumulations struct {
	begun, finished atomic.Int64 // they differ by one while an accumulation is under way
	clearing        atomic.Bool  // gradients are being cleared, and the counts are void
	cleared         atomic.Int64 // the step of the state when they were cleared
	marks           atomic.Uint32
	last            Accumulation // the one begun last, written before it is counted
}

// slot is a worker's part of the journal: the undo log of a chunk.
type slot struct {
	unit *atomic.Int64 // the chunk, if undo has begun
	undo kernel.Undo
}

// begin starts an empty undo log for a chunk.
func (s slot) begin(unit int) {
	s.undo.Begin() // before the chunk: the old log is void
	s.unit.Store(int64(unit))
}

// newProgress returns progress on the heap.
func newProgress(c ShardConfig) progress {
	sections := len(c.Sections())
	return progress{
		counters:      &counters{},
		accumulations: &accumulations{},
		ownSteps:      ownSteps{lists{make([]int64, sections), make([]int64, sections)}, make([]uint32, sections)},
		constants:     make([]kernel.Constants, sections),
		done:          make([]atomic.Uint32, c.Chunks),
	}
}

// Steps returns the number of finished steps. With a journal it outlives the process.
func (p *progress) Steps() int64 { return p.before.Load() + int64(p.finished.Load()) }

// isUnderway reports whether an update was begun, by any process, and not finished.
func (p *progress) isUnderway() bool { return p.begun.Load() != p.finished.Load() }

// isArriving reports whether the update under way was begun before its gradients were there, by any process.
func (p *progress) isArriving() bool { return p.isUnderway() && p.arriving.Load() == p.begun.Load() }

// isAccumulating reports whether an accumulation was begun, by any process, and
// not finished.
func (p *progress) isAccumulating() bool {
	return p.accumulations.begun.Load() != p.accumulations.finished.Load()
}

func (c *counters) mark() uint32 { return uint32(c.begun.Load()) << 1 }

func (a *accumulations) mark() uint32 { return a.marks.Load()<<1 | 1 }

// isDone reports whether a chunk has had the update that was begun last.
func (p *progress) isDone(unit int) bool { return p.done[unit].Load() == p.counters.mark() }

// isAdded reports whether a chunk has had the accumulation that was begun last.
func (p *progress) isAdded(unit int) bool { return p.done[unit].Load() == p.accumulations.mark() }

// clearLogs empties all undo logs. It comes before anything else is begun.
func (p *progress) clearLogs() {
	for _, slot := range p.slots {
		slot.undo.Begin()
	}
}
