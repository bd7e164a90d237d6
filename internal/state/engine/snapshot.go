package engine

import (
	"context"
	"sync"

	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Snapshot is the state of a shard at one instant, copied while steps go on. It is
// copy-on-write: a worker copies a chunk before it changes it.
type Snapshot struct {
	shard *Shard
	copy  func(at shard.Chunk, state kernel.Chunk) error
	sound func(unit int, state kernel.Chunk) error // copySound, bound once

	mutex   sync.Mutex
	changed sync.Cond
	states  []copyState // of each chunk
	copying int         // chunks that are with copy now
	err     error       // the first of copy
}

// copyState says whether a chunk was copied.
type copyState uint8

const (
	notCopied copyState = iota
	beingCopied
	copied
)

// Snapshot begins a snapshot of the state as it is now. No step and no other
// snapshot may be under way. Every chunk goes to copy once: from [Snapshot.Run],
// in order, or from a worker right before it changes the chunk. So copy is called
// concurrently, and a step waits for it. Gradients are not part of the snapshot: they
// may be changed meanwhile. The caller must call Run. Until Run returns, only steps
// may change the state.
func (s *Shard) Snapshot(copy func(at shard.Chunk, state kernel.Chunk) error) *Snapshot {
	if s.isUnderway() {
		panic("engine: a snapshot while a step is under way")
	}
	x := &Snapshot{shard: s, copy: copy, states: make([]copyState, s.config.Chunks)}
	x.changed.L, x.sound = &x.mutex, x.copySound
	if !s.snapshot.CompareAndSwap(nil, x) {
		panic("engine: a snapshot while another is being taken")
	}
	return x
}

// Run copies the chunks that no worker has copied, and returns when all are
// copied. It calls pace, unless that is nil, before every chunk: pace may wait, as
// no worker waits for it. Run gives up at the first error of pace or of copy, from
// whichever goroutine, and when the context is cancelled. After Run has returned,
// copy is not called again.
func (x *Snapshot) Run(ctx context.Context, pace func(context.Context) error) error {
	for unit := range x.states {
		if pace != nil {
			x.fail(pace(ctx))
		}
		x.fail(x.shard.caught(x.await))
		if ctx.Err() != nil {
			x.fail(context.Cause(ctx))
		}
		if !x.copyOnWrite(unit, nil) {
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

// await waits for a step that is under way: it copies all that is left.
func (x *Snapshot) await() error {
	x.shard.waitUnlessArriving()
	return nil
}

// copyOnWrite copies a chunk, unless that was done, and returns when the chunk may be
// changed. It reports whether the snapshot can still become complete. A caller that has the chunk's state gives it.
func (x *Snapshot) copyOnWrite(unit int, held *kernel.Chunk) bool {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	for x.states[unit] == beingCopied {
		x.changed.Wait()
	}
	if x.states[unit] == notCopied && x.err == nil {
		x.states[unit] = beingCopied
		x.copying++
		x.mutex.Unlock()
		err := x.shard.caught(func() error { return x.shard.withState(unit, held, x.sound) })
		x.mutex.Lock()
		x.states[unit] = copied
		x.copying--
		x.keep(err)
		x.changed.Broadcast()
	}
	return x.err == nil
}

// copySound copies a chunk whose sums are right.
func (x *Snapshot) copySound(unit int, state kernel.Chunk) error {
	if !x.shard.isSound(unit, &state) {
		return x.shard.Err()
	}
	return x.copy(x.shard.chunks[unit], state)
}

func (x *Snapshot) fail(err error) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	x.keep(err)
}

func (x *Snapshot) keep(err error) {
	if x.err == nil {
		x.err = err
	}
}
