// Package overlap predicts how long a trainer waits for the optimizer on the host, and from how many tokens on it
// waits for nothing. docs/overlap.md derives the law.
package overlap

import (
	"slices"
	"time"
)

// Mode is what of a training step the update runs behind.
type Mode string

// The modes.
const (
	None     Mode = "none"     // the trainer waits until all is updated
	Forward  Mode = "forward"  // behind the next forward pass: exact, with clipping
	Backward Mode = "backward" // behind the backward pass and the next forward pass: exact, without clipping
	Async    Mode = "async"    // behind the whole next step: parameters are one step late
	ZenFlow  Mode = "zenflow"  // a few columns at the end of every step, all others in mode async every few steps
)

// Modes returns the names of all modes.
func Modes() []string {
	return []string{string(None), string(Forward), string(Backward), string(Async), string(ZenFlow)}
}

// Layer is a part of the model that a pass of the trainer waits for as a whole. Each number is a share, from 0 to 1.
type Layer struct {
	Name string
	// Update is the layer's share of the update.
	Update float64
	// Needed is the share of the forward pass that is over when the pass needs the layer's parameters.
	Needed float64
	// Final is the share of the backward pass that is over when the layer's gradients are final.
	Final float64
}

// Step is a steady training step: every step takes as long as the one before it.
type Step struct {
	Mode   Mode
	Layers []Layer
	// Forward and Backward are the times of the passes if they wait for nothing.
	Forward, Backward time.Duration
	// Update is the time in which the host's workers update all layers. Norm is the time in which they add up the
	// squares of all gradients; 0 if nothing needs the norm.
	Update, Norm time.Duration
	// Important is the share of the columns that are updated at the end of every step, with state of their own.
	// Interval is the number of steps from one update of all others to the next. Only ZenFlow has them.
	Important float64
	Interval  int
}

// Exposed returns how long the trainer waits in a step; with ZenFlow, the mean over an interval.
func (s Step) Exposed() time.Duration {
	switch s.Mode {
	case Forward:
		return s.exposedNorm() + s.lateness(s.Update, func(l Layer) (release, deadline time.Duration) {
			return 0, part(l.Needed, s.Forward)
		})
	case Backward:
		return s.lateness(s.Update, func(l Layer) (release, deadline time.Duration) {
			return part(l.Final, s.Backward), s.Backward + part(l.Needed, s.Forward)
		})
	case Async:
		return s.exposedAsync()
	case ZenFlow:
		return part(s.Important, s.Update+s.Norm) + s.exposedAsync()/time.Duration(s.Interval)
	}
	return s.exposedNorm() + s.Update
}

// exposedAsync returns how long the trainer waits in a step with the update of the step before behind it. It waits for
// the memory of the gradients that the update reads, which the next gradients of the layer take, and for the norm.
func (s Step) exposedAsync() time.Duration {
	update := s.lateness(s.Update, func(l Layer) (release, deadline time.Duration) {
		return 0, s.Forward + part(l.Final, s.Backward)
	})
	if s.Interval > 1 { // the norm comes in a later step
		return update + s.exposedNorm()
	}
	return max(update+s.exposedNorm(), s.Update+s.Norm-s.Forward-s.Backward)
}

// exposedNorm returns how long the trainer waits for the norm after the backward pass. The squares of a layer's
// gradients are added up once these are final.
func (s Step) exposedNorm() time.Duration {
	return s.lateness(s.Norm, func(l Layer) (release, deadline time.Duration) {
		return part(l.Final, s.Backward), s.Backward
	})
}

// part returns a share of a time.
func part(share float64, of time.Duration) time.Duration { return time.Duration(share * float64(of)) }

// task is the work for one layer: it may begin at its release, and somebody waits for it from its deadline on.
type task struct {
	work, release, deadline time.Duration
}

// lateness returns how long after their deadlines the layers are done, at most, if workers always take the released
// layer with the earliest deadline. No order is better (W. Horn, "Some simple scheduling algorithms", 1974). A trainer
// that has waited once has moved all later deadlines by as much, so the most is also the sum of its waits.
func (s Step) lateness(total time.Duration, when func(Layer) (release, deadline time.Duration)) time.Duration {
	var tasks []task
	for _, l := range s.Layers {
		release, deadline := when(l)
		tasks = append(tasks, task{part(l.Update, total), release, deadline})
	}
	slices.SortStableFunc(tasks, func(a, b task) int { return int(a.deadline - b.deadline) })
	late, now := time.Duration(0), time.Duration(0)
	for len(tasks) > 0 {
		at, next := earliest(tasks, now)
		if at < 0 {
			now = next
			continue
		}
		done := now + tasks[at].work
		if next < done { // another layer is released before: it may be needed earlier
			tasks[at].work -= next - now
			now = next
			continue
		}
		now = done
		late = max(late, done-tasks[at].deadline)
		tasks = slices.Delete(tasks, at, at+1)
	}
	return late
}

// earliest returns the number of the first task that is released, or -1. It also returns when the next one is released
// before which tasks were sorted; never is the end of time.
func earliest(tasks []task, now time.Duration) (at int, next time.Duration) {
	const never = time.Duration(1<<63 - 1)
	next = never
	for i, t := range tasks {
		if t.release <= now {
			return i, next
		}
		next = min(next, t.release)
	}
	return -1, next
}
