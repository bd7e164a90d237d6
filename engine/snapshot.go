package engine

import (
	"context"
	"sync"

	"plimsoll/optim/kernel"
)

// Snapshot is the state of a shard at one instant, which is handed out while
// steps go on: a worker that is about to change a chunk hands it out first.
type Snapshot struct {
	shard *Shard
	copy  func(Unit) error

	mutex   sync.Mutex
	changed sync.Cond
	states  []handing // of each chunk
	copying int       // chunks that are with copy now
	err     error     // the first of copy
}

// handing is what has become of a chunk.
type handing uint8

const (
	notHanded handing = iota
	inCopy
	handed
)

// Unit is a stretch of a shard that a snapshot hands out.
type Unit struct {
	First   int64 // element of the shard
	Section int   // number of the section in the configuration
	// MomentsFirst is the place of the first element among those whose moments
	// have that type: its place in the arenas of the moments. That of the
	// headers of int8 moments is State.First / kernel.Block.
	MomentsFirst int64
	Moments      kernel.MomentType
	// State are all streams. Gradients are not part of the snapshot: they may
	// be changed meanwhile.
	State kernel.Chunk
}

// Snapshot begins a snapshot of the state as it is now; no step may be under
// way, and no other snapshot. Every chunk is handed to copy once: by
// [Snapshot.Run], in order, or by a worker right before it changes the chunk.
// So copy is called concurrently, and a step waits for it. The caller has to
// call Run, and must not change the state otherwise before that returns.
func (s *Shard) Snapshot(copy func(Unit) error) *Snapshot {
	if s.isUnderway() {
		panic("engine: a snapshot while a step is under way")
	}
	x := &Snapshot{shard: s, copy: copy, states: make([]handing, len(s.chunks))}
	x.changed.L = &x.mutex
	if !s.snapshot.CompareAndSwap(nil, x) {
		panic("engine: a snapshot while another is being taken")
	}
	return x
}

// Run hands out what no worker has handed out, and returns when all is with the
// saver. It calls pace, which may be nil, before every chunk: whatever Run has to
// wait for it waits for there, where no worker waits for it. It gives up at the
// first error of pace or of copy, from whichever goroutine, and when the context
// is cancelled. After it copy is not called any more.
func (x *Snapshot) Run(ctx context.Context, pace func(context.Context) error) error {
	for unit := range x.states {
		if pace != nil {
			x.fail(pace(ctx))
		}
		x.shard.Wait() // a step that is under way hands out all that is left
		if ctx.Err() != nil {
			x.fail(context.Cause(ctx))
		}
		if !x.hand(unit) {
			break
		}
	}
	x.mutex.Lock()
	defer x.mutex.Unlock()
	for x.copying > 0 {
		x.changed.Wait()
	}
	x.shard.snapshot.Store(nil)
	return x.err
}

// hand hands a chunk out, unless that was done, and returns when it may be
// changed. It says whether the snapshot can still become whole.
func (x *Snapshot) hand(unit int) bool {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	for x.states[unit] == inCopy {
		x.changed.Wait()
	}
	if x.states[unit] == notHanded && x.err == nil {
		x.states[unit] = inCopy
		x.copying++
		x.mutex.Unlock()
		err := x.copy(x.shard.unit(unit))
		x.mutex.Lock()
		x.states[unit] = handed
		x.copying--
		x.keep(err)
		x.changed.Broadcast()
	}
	return x.err == nil
}

func (x *Snapshot) fail(err error) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	x.keep(err)
}

// keep keeps the first error.
func (x *Snapshot) keep(err error) {
	if x.err == nil {
		x.err = err
	}
}

// unit is a chunk as a snapshot hands it out.
func (s *Shard) unit(number int) Unit {
	c := s.chunks[number]
	return Unit{
		First:        int64(c.section.first + c.first),
		Section:      c.section.number,
		MomentsFirst: int64(c.section.momentsFirst + c.first),
		Moments:      c.section.format.Moments,
		State:        c.state(),
	}
}
