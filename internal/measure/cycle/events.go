//go:build linux

package cycle

import (
	"sync"
	"time"
)

// events are what an actor has done in a step, one after the other, and when. Other actors wait for them.
type events struct {
	lock  sync.Mutex
	more  sync.Cond
	times []time.Time
}

func newEvents(most int) *events {
	e := &events{times: make([]time.Time, 0, most)}
	e.more.L = &e.lock
	return e
}

func (e *events) reset() { e.times = e.times[:0] }

// happened records the next event.
func (e *events) happened(at time.Time) {
	e.lock.Lock()
	e.times = append(e.times, at)
	e.lock.Unlock()
	e.more.Broadcast()
}

// wait returns when event number n has happened, and when that was.
func (e *events) wait(n int) time.Time {
	e.lock.Lock()
	defer e.lock.Unlock()
	for len(e.times) <= n {
		e.more.Wait()
	}
	return e.times[n]
}
