//go:build linux

package service

import (
	"math"
	"slices"

	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/shard"
)

// A step may begin before its gradients are there: each chunk is updated when its gradients have come. Such a step
// needs the client that writes them. If the service dies, the next one goes on as soon as that client has said again
// which gradients are there. The client is known by its process. If another one opens the session, the step is given
// up: the state is torn if some of it has had the step.

// notArriving refuses requests that make no sense while the step under way waits for gradients.
func (s *heldShard) notArriving(kind protocol.Kind) error {
	if !s.shard.MissesGradients() {
		return nil
	}
	if s.shard.MayBeNormed() {
		return protocol.OutOfOrder.Errorf("%v: step %d speculates, and all of its gradients are there; send "+
			"decide first", kind, s.shard.Steps()+1)
	}
	return protocol.OutOfOrder.Errorf("%v: step %d is under way and waits for gradients; send ready for all of them "+
		"first, or give the step up with load", kind, s.shard.Steps()+1)
}

// isArrivingStep reports whether a request repeats the step that waits for gradients.
func (s *heldShard) isArrivingStep(b protocol.StepBody) bool {
	flags := uint32(protocol.ArrivingStep)
	if s.shard.AwaitsVerdict() {
		flags |= protocol.Speculating
	}
	if !s.shard.MissesGradients() || b.Flags != flags {
		return false
	}
	step, gradScale := s.header.asked()
	groups, _ := s.header.prepared()
	return b.Step == step && b.GradScale == gradScale && slices.Equal(b.Hyperparameters, groups)
}

// arrive takes gradients of a step that was begun before they were there, or hears that there are none.
func (s *heldShard) arrive(b protocol.ReadyBody, arrived shard.Range) error {
	next, step := uint64(s.shard.Steps())+1, b.Step
	switch {
	case s.shard.MissesGradients() && step == next && b.Flags&protocol.NoGradients != 0:
		return s.leaveMissing(b)
	case s.shard.MissesGradients() && step == next:
		s.shard.GradientsArrived(arrived)
	case step >= next:
		return protocol.OutOfOrder.Errorf("ready for step %d: the session has finished step %d, and no step %d waits "+
			"for gradients", step, next-1, step)
	}
	return nil // repeated: the step has had all gradients
}

// giveUp gives up the step that waits for gradients, or for a verdict. One that speculates leaves the state whole.
func (s *heldShard) giveUp() {
	if !s.shard.AwaitsVerdict() {
		s.abandon()
		return
	}
	s.awaitsEnd = false                            // the shard tells of the end
	_ = s.shard.Decide(engine.Verdict{Skip: true}) // others ask for damage
	s.shard.Wait()
	s.begun = s.shard.Steps()
}

// abandon gives up the step that waits, and leaves a torn state if some of it has had the step. It needs no gradients.
func (s *heldShard) abandon() {
	s.header.condition.Store(stateIsTorn) // first: a service that takes over must not go on with the step
	if !s.shard.Abandon() {
		s.header.condition.Store(stateIsWhole) // that of the step before
	}
	s.begun = s.shard.Steps()
	if s.awaitsEnd {
		s.awaitsEnd = false
		s.stepIsOver.Done()
	}
}

// resume goes on with a step that waited for gradients when the service before ended. It gives the step up if that
// service had begun to do so.
func (s *heldShard) resume() {
	torn := s.header.condition.Load() == stateIsTorn
	switch {
	case s.shard.MissesGradients() && torn && !s.shard.AwaitsVerdict():
		s.giveUp()
	case s.shard.MissesGradients():
		s.begun = s.shard.Steps() + 1
	case torn: // that service may have ended before the step no longer counted
		step, _ := s.header.asked()
		s.shard.SetSteps(int64(step) - 1)
	}
}

// openedBy gives up a step that waits for gradients of a process that does not have the session any more.
func (s *heldShard) openedBy(process int) {
	if s.shard.MissesGradients() && s.header.arrivingClient.Load() != uint64(process) {
		step := s.begun
		s.giveUp()
		left := "the state is torn"
		if s.initialized() {
			left = "nothing had changed"
		}
		s.logf("session %v: process %d has ended in the middle of step %d, when not all gradients were there: %s",
			keyOf(s.document), s.header.arrivingClient.Load(), step, left)
	}
}

// notTorn refuses to take a state for complete of which only some has had a step.
func (s *heldShard) notTorn(kind protocol.Kind) error {
	if s.header.condition.Load() != stateIsTorn {
		return nil
	}
	step, _ := s.header.asked()
	return protocol.OutOfOrder.Errorf("%v: the trainer ended in the middle of step %d, and only some of the state has "+
		"had it: load a checkpoint, or give the state back and open it anew", kind, step)
}

// maySpeculate refuses a step that cannot be retracted.
func (s *heldShard) maySpeculate(b protocol.StepBody) error {
	switch {
	case b.Flags&protocol.Speculating == 0:
		return nil
	case b.Flags&protocol.ArrivingStep == 0:
		return protocol.Refused.Errorf("step with flags %#x: a step speculates only if its gradients are still to "+
			"come (%#x)", b.Flags, protocol.ArrivingStep)
	case !s.shard.Config().Retracts:
		return protocol.Refused.Errorf("step with flags %#x: the session has no log to retract it with; open it with "+
			"retracts", b.Flags)
	}
	return nil
}

// decide says what becomes of the step that speculates. A request that was made already has the same result.
func (s *heldShard) decide(b protocol.DecideBody) error {
	skip, last := b.Flags == protocol.SkipStep, uint64(s.shard.Steps())
	switch {
	case b.Flags > protocol.SkipStep:
		return protocol.Refused.Errorf("decide with flags %#x: this version has %#x", b.Flags, protocol.SkipStep)
	case skip && b.GradScale != 0 || math.IsNaN(b.GradScale) || math.IsInf(b.GradScale, 0):
		return protocol.Refused.Errorf("decide with flags %#x and the grad scale %v: expected a finite one, and 0 for "+
			"a step that is skipped", b.Flags, b.GradScale)
	case !s.shard.AwaitsVerdict() && (!skip && b.Step == last || skip && b.Step == last+1):
		return nil // repeated
	case !s.shard.AwaitsVerdict() || b.Step != last+1:
		return protocol.OutOfOrder.Errorf("decide on step %d: the session has finished step %d, and no step %d "+
			"speculates", b.Step, last, b.Step)
	case skip:
		s.giveUp()
		return s.refuseDamaged(protocol.Decide)
	case !s.shard.MayBeNormed():
		return s.notArriving(protocol.Decide)
	}
	groups, _ := s.header.prepared()
	if _, err := s.optimizers(protocol.Decide, b.Step, groups, b.GradScale); err != nil {
		return err
	}
	s.header.ask(b.Step, b.GradScale)
	if err := s.shard.Decide(engine.Verdict{GradScale: b.GradScale}); err != nil {
		return protocol.Refused.Errorf("decide: %v", err)
	}
	return nil
}
