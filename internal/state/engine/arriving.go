package engine

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"plimsoll/internal/state/shard"
)

// arrivals are the gradients of an update that was begun before they were there, and the chunks that they complete.
//
// The update of a chunk waits for all of its gradients. Workers that have no such chunk do other shards' passes: they
// are called again when gradients arrive.
type arrivals struct {
	mutex  sync.Mutex
	ranges []shard.Range // whose gradients have arrived: in order, with gaps between them
	ready  []uint64      // a bit by place in the order: of chunks that have come and that no worker has taken
	first  int           // no word of ready before this one has a bit
	left   int           // chunks that have come and are not done, or are left for later
	blocks []int         // norm blocks that have come and that no worker has taken
	listed []bool        // norm blocks that have come
	rest   bool          // whether the update goes on after a verdict
	since  time.Time     // when there was such a chunk again
	busy   time.Duration // how long there were such chunks, up to then

	missing atomic.Int64    // chunks whose gradients have not all arrived; 0 if the update was begun with all of them
	marks   []atomic.Uint64 // by chunk: the mark of the last update in which all of its gradients have arrived
	called  []atomic.Bool   // by worker: whether a call has not been followed

	unsummed atomic.Int64 // norm blocks of a speculated update whose squares were not added up
	stopped  atomic.Bool  // workers take no more chunks: there is a verdict
}

// begin readies the arrivals for an update of chunks whose gradients are not there. No worker uses them.
func (a *arrivals) begin(chunks, workers, blocks int) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.marks == nil {
		a.marks, a.called = make([]atomic.Uint64, chunks), make([]atomic.Bool, workers)
		a.ready = make([]uint64, (chunks+63)/64)
	}
	clear(a.ready)
	if len(a.listed) != blocks {
		a.listed = make([]bool, blocks)
	}
	clear(a.listed)
	a.blocks, a.rest = a.blocks[:0], false
	a.stopped.Store(false)
	a.unsummed.Store(int64(blocks))
	a.ranges, a.first, a.left, a.busy = a.ranges[:0], len(a.ready), 0, 0
	a.missing.Store(int64(chunks))
}

// cover adds a range, and returns the one of the ranges that holds it now.
func (a *arrivals) cover(r shard.Range) shard.Range {
	// The first range that ends where r begins, or behind.
	from, _ := slices.BinarySearchFunc(a.ranges, r.First, func(x shard.Range, first int64) int {
		return cmp.Compare(x.End(), first)
	})
	to := from
	for to < len(a.ranges) && a.ranges[to].First <= r.End() {
		r = shard.Between(min(r.First, a.ranges[to].First), max(r.End(), a.ranges[to].End()))
		to++
	}
	a.ranges = slices.Replace(a.ranges, from, to, r)
	return r
}

// hasSome reports whether any gradients of a range have arrived.
func (a *arrivals) hasSome(r shard.Range) bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return slices.ContainsFunc(a.ranges, func(x shard.Range) bool { return x.Intersect(r).Count > 0 })
}

// add makes the chunk of a place one that workers take.
func (a *arrivals) add(place int) {
	a.ready[place/64] |= 1 << (place % 64)
	a.first = min(a.first, place/64)
}

// take returns the first place of a chunk whose gradients have arrived and which no worker has taken.
func (a *arrivals) take() (place int, ok bool) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	for ; a.first < len(a.ready); a.first++ {
		if word := &a.ready[a.first]; *word != 0 {
			bit := bits.TrailingZeros64(*word)
			*word &^= 1 << bit
			return 64*a.first + bit, true
		}
	}
	return 0, false
}

// done notes that a chunk was updated.
func (a *arrivals) done() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.left--; a.left == 0 {
		a.busy += time.Since(a.since)
	}
}

// isIdle reports whether every chunk that came is done.
func (a *arrivals) isIdle() bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.left == 0
}

// BeginArriving begins the next step before its gradients are there, as [Shard.BeginThen] begins one. A chunk is
// updated when all of its gradients have arrived since ([Shard.GradientsArrived]). They do not change until the step is
// finished. Until all have arrived, only GradientsArrived, LeaveMissing, Misses and Abandon may be called, beside what
// any goroutine may call.
//
// If the process ends meanwhile, the next one goes on after [Shard.Finish]: it is told again of all gradients that have
// arrived.
func (s *Shard) BeginArriving(u Update, then func()) error {
	if s.tier != nil {
		return fmt.Errorf("step %d cannot begin before its gradients are there: the state is on a tier", u.Step)
	}
	if err := s.MayBegin(u); err != nil {
		return err
	}
	s.update(u, then, true)
	return nil
}

// MissesGradients reports whether the step under way waits for gradients, as not all are known to have arrived, or for
// a verdict.
func (s *Shard) MissesGradients() bool {
	return s.isUnderway() && s.arrivals.missing.Load() > 0 && !s.phase().isDecided() || s.AwaitsVerdict()
}

// Misses returns a range of which gradients are missing in the step under way, within a range; ok is false if there are
// none. Any goroutine may call it.
func (s *Shard) Misses(r shard.Range) (missing shard.Range, ok bool) {
	if !s.MissesGradients() {
		return shard.Range{}, false
	}
	chunks := s.config.ChunksOf(r)
	first, end := s.chunks[chunks.First].First, s.chunks[chunks.End()-1].End()
	s.arrivals.mutex.Lock()
	defer s.arrivals.mutex.Unlock()
	for _, here := range s.arrivals.ranges {
		if here.First > first {
			return shard.Between(first, min(end, here.First)), first < end
		}
		first = max(first, here.End())
	}
	return shard.Between(first, end), first < end
}

// waitUnlessArriving returns when the step that was begun last is finished, or depends on gradients that arrive:
// whoever brings them may wait for the caller. A step may end, and the next be such a one, before the caller notices.
func (s *Shard) waitUnlessArriving() {
	s.current.watchers.wait(func() bool { return s.isOver() || s.isArriving() })
}

// startArriving begins to update the chunks whose gradients arrive. Those that another process has updated need none.
func (s *Shard) startArriving() {
	blocks := 0
	if s.AwaitsVerdict() {
		blocks = len(s.sums)
	}
	s.arrivals.begin(s.config.Chunks, s.workers.Count(), blocks)
	for unit := range s.done {
		if s.isDone(unit) {
			s.arrive(s.chunks[unit].Range)
		}
	}
}

// arrive has workers update the chunks that the gradients of a range complete.
func (s *Shard) arrive(r shard.Range) {
	if s.complete(r) > 0 {
		s.callWorkers()
	}
}

// complete notes that the gradients of a range have arrived, and returns how many chunks can now be updated, and norm
// blocks be added up.
func (s *Shard) complete(r shard.Range) (came int) {
	a, mark := &s.arrivals, s.counters.mark()
	a.mutex.Lock()
	defer a.mutex.Unlock()
	full, chunks := a.cover(r), s.config.ChunksOf(r)
	came += a.listBlocks(full, s.config.Elements)
	updates := 0
	for unit := int(chunks.First); unit < int(chunks.End()); unit++ {
		own := s.chunks[unit].Range
		if full.Intersect(own) != own || a.marks[unit].Swap(mark) == mark {
			continue
		}
		a.missing.Add(-1)
		if !s.isDone(unit) { // by another process
			a.add(s.queue.order.place(unit))
			updates++
		}
	}
	if a.left == 0 && updates > 0 {
		a.since = time.Now()
	}
	a.left += updates
	return came + updates
}

// hasArrived reports whether an update may change a chunk.
func (s *Shard) hasArrived(unit int) bool {
	return !s.isArriving() || s.arrivals.marks[unit].Load() == s.counters.mark()
}

// callWorkers has every worker look for chunks, unless one that was called has not looked yet.
func (s *Shard) callWorkers() {
	for worker := range s.arrivals.called {
		if s.arrivals.called[worker].CompareAndSwap(false, true) {
			s.workers.StartOne(worker, s.walkArrived)
		}
	}
}

// updateArrived has a worker update the chunks whose gradients have arrived, those first that goroutines wait for, and
// then those that the order has first. In the order of the next forward pass, what is left after the backward pass is
// what that pass needs last. In the order in which gradients arrive it would be what it needs first.
func (s *Shard) updateArrived(worker int) {
	defer s.catch()
	s.arrivals.called[worker].Store(false) // before it looks: later gradients call it again
	for !s.arrivals.stopped.Load() {
		s.sumArrived(worker)
		s.updateUrgent(worker)
		place, ok := s.arrivals.take()
		if !ok {
			return
		}
		if unit := s.queue.order.chunk(place); s.take(unit) {
			s.updateUnit(worker, unit)
		}
	}
}

// UpdateTime returns how long the last step that was begun by [Shard.BeginArriving] was being made, without the time in
// which it only waited for gradients.
func (s *Shard) UpdateTime() time.Duration {
	s.arrivals.mutex.Lock()
	defer s.arrivals.mutex.Unlock()
	return s.arrivals.busy
}

// Abandon gives up the step under way, whose gradients are not all there. It reports whether some chunks have had the
// step. The state is then torn: it is of no step, and must be replaced. A step that speculates may be skipped instead.
func (s *Shard) Abandon() (torn bool) {
	if !s.MissesGradients() {
		panic("engine: a step is given up that misses no gradients")
	}
	s.wait()
	for unit := range s.done {
		torn = torn || s.isDone(unit) && !s.isLeft(s.chunks[unit].Section)
	}
	s.setPhase(s.begun.Load(), plain) // after the look: what was speculated is not done any more
	steps := s.Steps()
	s.arrivals.missing.Store(0)
	copyNumbers(s.own.after(s.begun.Load()), s.own.after(s.begun.Load()-1))
	s.finished.Store(s.begun.Load())
	s.before.Store(steps - int64(s.finished.Load()))
	s.current.watchers.wake()
	return torn
}
