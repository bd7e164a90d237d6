//go:build linux

package service

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/states"
)

// positionPatience is how long a save waits for a step that makes no progress.
var positionPatience = 10 * time.Second

// save begins to write the states of a step, as soon as they rest at it. The service reads the regions in the order in
// which the next step overwrites them, and that step waits for it.
func (s *heldStates) save(until context.Context, b protocol.SaveBody) (*checkpoint.Saving, error) {
	if err := cmp.Or(s.notInParts(protocol.Save), s.notAlone(protocol.Save)); err != nil {
		return nil, err
	}
	switch {
	case b.Step == nil || *b.Step < 1 || *b.Step > states.MaximumSteps:
		return nil, protocol.Refused.Errorf("save of states that the trainer updates: expected the step that they " +
			"are of, 1 or more")
	case b.Replica != 0 || b.Replicas > 1:
		return nil, protocol.Refused.Errorf("save: replica %d of %d: states that the trainer updates are saved by "+
			"each rank as a whole", b.Replica, b.Replicas)
	}
	step := *b.Step
	if err := s.awaitRest(until, step); err != nil {
		return nil, err
	}
	at := s.layout.Position(states.Moment{Steps: step})
	s.control.Read.Store(at)
	if s.control.Position.Load() != at {
		s.control.Read.Store(states.NothingIsRead)
		return nil, protocol.OutOfOrder.Errorf("save of step %d: the next step began meanwhile", step)
	}
	resting := s.resting(step)
	resting.Identity = b.Identity
	saving, err := checkpoint.SaveStates(b.Directory, resting, b.Training)
	if err != nil {
		s.control.Read.Store(states.NothingIsRead)
		return nil, storage(protocol.Save, err)
	}
	s.saveIsOver.Go(func() {
		_ = saving.Wait() // settleSave reads the error
		s.control.Read.Store(states.NothingIsRead)
	})
	return saving, nil
}

// resting returns the states as they rest after a step.
func (s *heldStates) resting(step int64) checkpoint.Resting {
	at := s.layout.Position(states.Moment{Steps: step})
	d := s.document
	r := checkpoint.Resting{
		Rank: d.Rank, World: d.World, Part: d.Part, Step: step, Chunks: d.Chunks,
		Region:  func(chunk int) []byte { return s.region(chunk, step) },
		Scalars: slices.Clone(s.control.Scalars(step)),
		Read:    func(chunks int) { s.control.Read.Store(at + uint64(chunks)) },
		Awaited: func() bool { return s.control.Wanted.Load() > s.control.Read.Load() },
	}
	for i := range s.layout.Chunks() {
		r.Order = append(r.Order, s.layout.Next(states.Moment{Steps: step, Committed: i}))
	}
	return r
}

// region returns the region of a chunk in the state after so many steps.
func (s *heldStates) region(chunk int, steps int64) []byte {
	begin := s.layout.Offset(chunk, steps)
	return s.arenas[0].Bytes()[begin : begin+s.document.Chunks[chunk].Bytes]
}

// awaitRest waits until the states rest after a step: its last copies may be under way.
func (s *heldStates) awaitRest(until context.Context, step int64) error {
	want, last, since := s.layout.Position(states.Moment{Steps: step}), uint64(0), time.Now()
	for {
		now := s.control.Position.Load()
		at := s.layout.At(now)
		if now != last {
			last, since = now, time.Now()
		}
		switch {
		case now == want:
			return nil
		case now > want || at.Steps < step-1:
			return protocol.OutOfOrder.Errorf("save of step %d: the states have had step %d, and %d of %d chunks the "+
				"next", step, at.Steps, at.Committed, s.layout.Chunks())
		case time.Since(since) > positionPatience:
			return protocol.OutOfOrder.Errorf("save of step %d: %d of %d chunks have had it, and no other for %v: "+
				"finish the step, or load a checkpoint", step, at.Committed, s.layout.Chunks(), positionPatience)
		}
		select {
		case <-until.Done():
			return errEnding
		case <-time.After(time.Millisecond):
		}
	}
}

// load overwrites the states with those of a checkpoint. From the first byte to the last they are no states: the
// position is 0 and the header says so.
func (s *heldStates) load(until context.Context, b protocol.LoadBody) (int64, jsontext.Value, error) {
	found, err := checkpoint.OpenStates(b.Directory)
	if err != nil {
		return 0, nil, err
	}
	d := s.document
	step, training, err := found.Load(until, checkpoint.Filling{
		Rank: d.Rank, World: d.World, Part: d.Part, Chunks: d.Chunks, Keeps: s.isKept(),
		Begin: func(steps int64) ([][]byte, []uint64) {
			s.header.condition.Store(stateIsInParts)
			s.control.Position.Store(0)
			s.control.GradientsOf.Store(0)
			regions := make([][]byte, len(d.Chunks))
			for i := range regions {
				regions[i] = s.region(i, steps)
			}
			return regions, s.control.Scalars(steps)
		},
	})
	if err != nil {
		return 0, nil, err
	}
	s.control.Position.Store(s.layout.Position(states.Moment{Steps: step}))
	s.header.loaded(b.Several)
	return step, training, nil
}

// isKept reports whether the states are worth keeping until all of a checkpoint is verified.
func (s *heldStates) isKept() bool {
	now := s.condition()
	return now == states.Whole || now == states.Redo
}

// setStep confirms that all ranks have loaded the states of a step.
func (s *heldStates) setStep(b protocol.SetStepBody) error {
	if err := s.notInParts(protocol.SetStep); err != nil {
		return err
	}
	if b.Flags != 0 {
		return protocol.Refused.Errorf("set_step with flags %#x: the states count the steps of their parameters "+
			"themselves", b.Flags)
	}
	if steps := s.steps(); b.Step != uint64(steps) {
		return protocol.OutOfOrder.Errorf("set_step %d: the states have had step %d, and only a load changes that",
			b.Step, steps)
	}
	s.header.condition.CompareAndSwap(stateIsLoaded, stateIsWhole)
	return nil
}
