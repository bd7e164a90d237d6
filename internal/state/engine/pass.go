package engine

import (
	"sync/atomic"

	"plimsoll/internal/state/shard"
)

// pass is one walk of all workers over units of work: chunks or norm blocks.
type pass struct {
	workers *Workers
	sharing sharing
	body    func(worker, unit int)
	cursors []cursor
	walk    func(worker int) // walkUnits, bound once: a step allocates nothing
	caught  func()           // deferred by every walk: records the damage that it finds
}

// sharing says how workers share the units of a pass.
type sharing int

const (
	apart    sharing = iota // each worker walks a contiguous range of its own
	helping                 // as apart, and a worker that is through with its own range helps the others
	together                // all workers walk one range: each takes the next unit
)

// cursor counts through the units of one worker's own range. Each cursor has a
// cache line of its own.
type cursor struct {
	next atomic.Int64
	end  int64
	_    [48]byte
}

// open gives a rank's shard a worker on each CPU.
func (p *pass) open(rank int, cpus []int) (err error) {
	p.walk, p.cursors = p.walkUnits, make([]cursor, len(cpus))
	p.workers, err = NewWorkers(rank, cpus)
	return err
}

// close ends the workers, unless other shards of the rank use them.
func (p *pass) close() {
	if p.workers != nil {
		p.workers.Close()
	}
}

// start begins a pass over units of work.
func (p *pass) start(units shard.Range, sharing sharing, body func(worker, unit int)) {
	p.wait()
	p.sharing, p.body = sharing, body
	for w := range p.cursors {
		own := units.Share(w, len(p.cursors))
		if sharing == together {
			own = units // of which all workers use the first cursor
		}
		p.cursors[w].next.Store(own.First)
		p.cursors[w].end = own.End()
	}
	p.workers.Start(p.walk)
}

// wait returns when the pass is done.
func (p *pass) wait() { p.workers.Wait() }

func (p *pass) walkUnits(worker int) {
	defer p.caught()
	first, cursors := worker, 1
	switch p.sharing {
	case helping:
		cursors = len(p.cursors)
	case together:
		first = 0
	}
	for i := range cursors {
		own := &p.cursors[(first+i)%len(p.cursors)]
		for {
			unit := own.next.Add(1) - 1
			if unit >= own.end {
				break
			}
			p.body(worker, int(unit))
		}
	}
}
