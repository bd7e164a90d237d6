//go:build linux

package simulation

import (
	"errors"
	"syscall"
)

// faultKind is what happens to a process or its world.
type faultKind uint8

const (
	noFault   faultKind = iota
	kill                // SIGKILL: memory in memfds and files stay as they are
	powerLoss           // memory is gone, and what was not brought to the disk is dropped, torn or reordered
	diskError           // a call fails, and nothing has happened
	fullDisk
	shortCall // a read or write of some of the bytes
	flippedBit
	noDescriptor // a limit on open files keeps an arena of a new shard from being made
	faultKinds
)

var faultNames = [faultKinds]string{"none", "kill", "power loss", "disk error", "full disk", "short call",
	"flipped bit", "no descriptor"}

func (f faultKind) String() string { return faultNames[f] }

// fault is what happens in a life, and when.
type fault struct {
	kind    faultKind
	atStore bool // counted in stores of numbers, else in calls
	at      int
}

// errShort has a file read or write half of the bytes.
var errShort = errors.New("half of the bytes")

// strike lets the fault come while a call waits. It reports whether the process ends.
func (f faultKind) strike(l *life, c *call) (ends bool) {
	w := l.world
	switch f {
	case kill:
		w.leaveHalf(l)
		w.captured()
		return true
	case powerLoss:
		w.leaveHalf(l)
		w.powerless = true
		return true
	case diskError:
		w.nextError = syscall.EIO
	case fullDisk:
		w.nextError = syscall.ENOSPC
	case shortCall:
		w.nextError = errShort
	case flippedBit:
		w.flipped = w.flip()
		w.logf("flipped: %s", w.flipped)
	}
	if c.kind >= storeNumber {
		w.nextError = nil // no call that can fail
	}
	return false
}

// leaveHalf does parts of the writes that a process has under way when it ends.
func (w *world) leaveHalf(l *life) {
	for _, c := range l.waiting {
		if c.apply != nil && w.chance(0.5) {
			c.apply(w.random.Float64() * 1.2)
		}
	}
}
