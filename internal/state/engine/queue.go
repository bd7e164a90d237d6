package engine

import (
	"slices"
	"sync"
	"sync/atomic"

	"plimsoll/internal/state/shard"
)

// queue says which chunks of an update the workers take before all others, and lets each chunk be taken once.
type queue struct {
	taken  []atomic.Uint64 // by chunk: the mark of the last update for which a worker has taken it
	order  *order          // of the update under way; nil: each worker walks its own range
	wanted *order          // from the next update on
	urgent urgent
}

// urgent holds the chunks that goroutines wait for, in the order of the waits.
type urgent struct {
	waiting atomic.Bool // whether there are any: workers look here, without the mutex, before every chunk
	mutex   sync.Mutex
	chunks  []shard.Range // numbers; those of the ranges before first were taken
	first   int
}

// order is an order of all chunks. Without one, chunks are in the order of their numbers.
type order struct {
	chunks []int32 // numbers, by place
	places []int32 // by chunk
}

func (o *order) chunk(place int) int {
	if o == nil {
		return place
	}
	return int(o.chunks[place])
}

func (o *order) place(chunk int) int {
	if o == nil {
		return chunk
	}
	return int(o.places[chunk])
}

// newQueue returns the queue of a shard without an order.
func newQueue(chunks int) queue { return queue{taken: make([]atomic.Uint64, chunks)} }

// begin readies the queue for the next update. No worker uses it.
func (q *queue) begin() {
	q.order = q.wanted
	q.urgent.mutex.Lock()
	defer q.urgent.mutex.Unlock()
	q.urgent.clear()
}

// take reports whether the caller is the first that takes a chunk in the update of a mark.
func (q *queue) take(unit int, mark uint64) bool {
	before := q.taken[unit].Load()
	return before != mark && q.taken[unit].CompareAndSwap(before, mark)
}

// add makes chunks urgent, after those that are urgent already.
func (u *urgent) add(chunks shard.Range) {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	u.chunks = append(u.chunks, chunks)
	u.waiting.Store(true)
}

// next returns the next urgent chunk that suits the caller. It drops the ones before.
func (u *urgent) next(suits func(unit int) bool) (unit int, ok bool) {
	if !u.waiting.Load() {
		return 0, false
	}
	u.mutex.Lock()
	defer u.mutex.Unlock()
	for ; u.first < len(u.chunks); u.first++ {
		for r := &u.chunks[u.first]; r.Count > 0; {
			unit := int(r.First)
			*r = shard.Between(r.First+1, r.End())
			if suits(unit) {
				return unit, true
			}
		}
	}
	u.clear()
	return 0, false
}

// clear empties the list. The caller holds the mutex.
func (u *urgent) clear() {
	u.chunks, u.first = u.chunks[:0], 0
	u.waiting.Store(false)
}

// SetOrder sets the order in which the next updates take chunks: those of the ranges first, in the order of the ranges,
// then all others in the order of the shard. All workers then take from this one order, so that they finish its first
// range together. Without ranges, each worker takes its own share of the shard first, and then helps the others. The
// order changes no result.
//
// An order costs memory bandwidth if the workers are on several NUMA nodes: pages are on the nodes of the workers that
// have them in their shares ([Shard.Populate]), and all workers work on the same few shares at a time.
func (s *Shard) SetOrder(ranges []shard.Range) {
	if len(ranges) == 0 {
		s.queue.wanted = nil
		return
	}
	o, listed := &order{places: make([]int32, s.config.Chunks)}, make([]bool, s.config.Chunks)
	for _, r := range append(slices.Clone(ranges), s.config.Range()) {
		chunks := s.config.ChunksOf(r)
		for unit := chunks.First; unit < chunks.End(); unit++ {
			if !listed[unit] {
				listed[unit] = true
				o.places[unit] = int32(len(o.chunks))
				o.chunks = append(o.chunks, int32(unit))
			}
		}
	}
	s.queue.wanted = o
}

// updateNext updates the urgent chunks, and then the chunk of a number or, with an order, of a place in the order.
func (s *Shard) updateNext(worker, place int) {
	unit := s.queue.order.chunk(place)
	s.updateUrgent(worker)
	if s.take(unit) {
		s.updateUnit(worker, unit)
	}
}

// updateUrgent updates the chunks that goroutines wait for.
func (s *Shard) updateUrgent(worker int) {
	for {
		unit, ok := s.queue.urgent.next(s.takeUrgent)
		if !ok {
			return
		}
		s.updateUnit(worker, unit)
	}
}

// take reports whether a worker is the first that takes a chunk in the update begun last.
func (s *Shard) take(unit int) bool {
	mark := s.counters.mark()
	if s.phase().isDecided() {
		mark++ // chunks that were taken before the verdict are taken again
	}
	return s.queue.take(unit, mark)
}

// takeIfArrived is take for a chunk whose gradients may be missing.
func (s *Shard) takeIfArrived(unit int) bool { return s.hasArrived(unit) && s.take(unit) }
