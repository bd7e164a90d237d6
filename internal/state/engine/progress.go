package engine

import (
	"fmt"
	"sync/atomic"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// progress is how far updates, accumulations and writes of moments have come. It
// lies in the journal if the shard has one, else on the heap.
//
// A chunk is done when its mark equals the mark of the update or accumulation that
// was begun last. Marks of updates are even, those of accumulations are odd, and
// neither is ever set back. A speculated update has a mark of its own (speculation.go).
//
// Every number carries its checksum (package checked), which every read of it verifies.
type progress struct {
	*counters
	accumulations *accumulations
	ownSteps
	constants []constants    // in the update begun last; at most one for each section
	done      []checked.Word // by chunk: the mark of the last update or accumulation that it has had
	slots     []slot         // of each worker; none without a journal
	decided   *verdict
	writing   *checked.Flag // whether slots are undo logs of a write of moments
	restoring *checked.Flag // whether the state is being replaced by the last commit of a tier
	chunkSums sums
	entries   []atomic.Uint64 // of the parts of chunks on a tier
	lanes     []checked.Int   // by lane: 1 more than the chunk that it holds and the tier has not; 0 for none
}

// constants are the constants of an update, with their checksum.
type constants struct {
	kernel.Constants
	sum checked.Sum
}

// counters count updates.
type counters struct {
	begun, finished checked.Word // they differ by one while an update is under way
	before          checked.Int  // the step of the state before the first update
	arriving        checked.Word // the number of the last update that was begun before its gradients were there
	damaged         checked.Word // 1 more than the place in the checksums of one that was found wrong; 0 for none
}

// accumulations count gradients that were added since all gradients were cleared.
type accumulations struct {
	begun, finished checked.Int  // they differ by one while an accumulation is under way
	clearing        checked.Flag // gradients are being cleared, and the counts are void
	cleared         checked.Int  // the step of the state when they were cleared
	marks           checked.Word
	first, count    checked.Int // of the one begun last, written before it is counted
	of              checked.Word
}

// last returns the accumulation that was begun last.
func (a *accumulations) last() Accumulation {
	return Accumulation{shard.Range{First: a.first.Load(), Count: a.count.Load()}, dtype.Type(a.of.Load())}
}

func (a *accumulations) setLast(last Accumulation) {
	a.first.Store(last.First)
	a.count.Store(last.Count)
	a.of.Store(uint64(last.Type))
}

// slot is a worker's part of the journal: the undo log of a chunk.
type slot struct {
	unit *checked.Int // the chunk, if undo has begun
	// retracts says that the undo log is of a retraction of the chunk, not of an update.
	retracts *checked.Flag
	undo     kernel.Undo
}

// begin starts an empty undo log for a chunk.
func (s slot) begin(unit int) {
	s.undo.Begin() // before the chunk: the old log is void
	s.unit.Store(int64(unit))
	s.retracts.Store(false)
}

// beginRetraction starts an empty undo log for a chunk whose update is being retracted.
func (s slot) beginRetraction(unit int) {
	s.begin(unit)
	s.retracts.Store(true)
}

// newProgress returns progress on the heap.
func newProgress(c ShardConfig) progress {
	sections := len(c.Sections())
	numbers := func() []checked.Int { return make([]checked.Int, sections) }
	p := progress{
		counters:      &counters{},
		accumulations: &accumulations{},
		ownSteps:      ownSteps{lists{numbers(), numbers()}, make([]checked.Word, sections)},
		constants:     make([]constants, sections),
		done:          make([]checked.Word, c.Chunks),
		writing:       &checked.Flag{},
		restoring:     &checked.Flag{},
		decided:       &verdict{},
	}
	p.chunkSums.streams = c.summed()
	p.chunkSums.list = make([]atomic.Uint64, c.Chunks*len(p.chunkSums.streams))
	p.entries, p.lanes = make([]atomic.Uint64, c.entries()), make([]checked.Int, c.lanes())
	p.init()
	return p
}

// place names a number of the progress, and its place if it is in a list.
type place struct {
	name   string
	number int // -1: in no list
}

func (p place) String() string {
	if p.number < 0 {
		return p.name
	}
	return fmt.Sprintf("%s %d", p.name, p.number)
}

// words calls yield for every number.
func (p *progress) words(yield func(at place, word *checked.Word) bool) {
	a := p.accumulations
	heads := []struct {
		name string
		word *checked.Word
	}{
		{"updates begun", &p.begun}, {"updates finished", &p.finished}, {"steps before", &p.before.Word},
		{"update whose gradients arrive", &p.arriving}, {"chunk found damaged", &p.damaged},
		{"accumulations begun", &a.begun.Word},
		{"accumulations finished", &a.finished.Word}, {"gradients are being cleared", &a.clearing.Word},
		{"step of the clearing", &a.cleared.Word}, {"mark of accumulations", &a.marks},
		{"first element accumulated", &a.first.Word}, {"elements accumulated", &a.count.Word},
		{"type accumulated", &a.of}, {"moments are being written", &p.writing.Word},
		{"state is being restored", &p.restoring.Word},
		{"verdict on a speculated update", &p.decided.word},
		{"steps before a speculated update", &p.decided.before.Word},
		{"checksum of a factor of gradients", &p.decided.scaleSum.Word},
	}
	for _, head := range heads {
		if !yield(place{head.name, -1}, head.word) {
			return
		}
	}
	p.listed(yield)
}

// listed is words for the numbers that are in lists.
func (p *progress) listed(yield func(at place, word *checked.Word) bool) {
	for i := range p.rows {
		if !yield(place{"constants of section", i}, &p.rows[i]) ||
			!yield(place{"steps of section after even updates", i}, &p.own[0][i].Word) ||
			!yield(place{"steps of section after odd updates", i}, &p.own[1][i].Word) ||
			!yield(place{"checksum of constants", i}, &p.constants[i].sum.Word) {
			return
		}
	}
	for i := range p.done {
		if !yield(place{"mark of chunk", i}, &p.done[i]) {
			return
		}
	}
	for i := range p.lanes {
		if !yield(place{"chunk of lane", i}, &p.lanes[i].Word) {
			return
		}
	}
	for i := range p.slots {
		if !yield(place{"chunk of slot", i}, &p.slots[i].unit.Word) ||
			!yield(place{"retraction in slot", i}, &p.slots[i].retracts.Word) {
			return
		}
	}
}

// init writes 0 to every number.
func (p *progress) init() {
	for _, word := range p.words {
		word.Store(0)
	}
}

// Steps returns the number of finished steps. With a journal it outlives the process.
func (p *progress) Steps() int64 { return p.before.Load() + int64(p.finished.Load()) }

// isUnderway reports whether an update was begun, by any process, and not finished.
func (p *progress) isUnderway() bool { return p.begun.Load() != p.finished.Load() }

// isArriving reports whether the update under way was begun before its gradients were there, by any process, and there
// is no verdict on it.
func (p *progress) isArriving() bool {
	return p.isUnderway() && p.arriving.Load() == p.begun.Load() && !p.phase().isDecided()
}

// isAccumulating reports whether an accumulation was begun, by any process, and
// not finished.
func (p *progress) isAccumulating() bool {
	return p.accumulations.begun.Load() != p.accumulations.finished.Load()
}

func (c *counters) mark() uint64 { return c.begun.Load() << 2 }

func (a *accumulations) mark() uint64 { return a.marks.Load()<<1 | 1 }

// isDone reports whether a chunk has had the update that was begun last, for good unless there is no verdict yet.
func (p *progress) isDone(unit int) bool {
	mark := p.done[unit].Load()
	return mark == p.counters.mark() || mark == p.counters.speculatedMark() && p.phase().keepsSpeculated()
}

// isAdded reports whether a chunk has had the accumulation that was begun last.
func (p *progress) isAdded(unit int) bool { return p.done[unit].Load() == p.accumulations.mark() }

// clearLogs empties all undo logs. It comes before anything else is begun.
func (p *progress) clearLogs() {
	for _, slot := range p.slots {
		slot.undo.Begin()
	}
}
