//go:build linux

package service

import (
	"errors"
	"fmt"
	"os"
	"path"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/states"
)

// heldStates are states that the trainer updates. This service holds them between steps, and saves and loads them.
type heldStates struct {
	*session
	document *protocol.HoldDocument
	layout   *states.Layout
	arenas   []*arena.Arena // states, control and, with recovery, gradients
	control  *states.Control
}

// designStates returns the design of states. Each page lies near the CPUs of the rank.
func designStates(d *protocol.HoldDocument, cpus []int) *design {
	plans := arenasOfStates(d)
	return &design{
		document: d, arenas: plans, workers: len(cpus),
		what:    fmt.Sprintf("holding the states of %d chunks", len(d.Chunks)),
		smaller: "a smaller format (master split, moments bf16), no recovery",
		make: func(of *session) (func() error, error) {
			held := &heldStates{session: of, document: d, layout: states.NewLayout(d.Chunks)}
			for _, plan := range plans {
				a, err := of.place.New(plan.Name, plan.Size, of.pages)
				if err != nil {
					return nil, errors.Join(err, held.giveBack())
				}
				held.arenas = append(held.arenas, a)
			}
			workers, err := engine.NewWorkers(d.Rank, cpus)
			if err != nil {
				return nil, errors.Join(err, held.giveBack())
			}
			of.contents = held
			return func() error {
				populate(workers, held.arenas)
				workers.Close()
				held.control = states.NewControl(held.arenas[1].Bytes(), &d.Description)
				return nil
			}, nil
		},
		attach: func(of *session, files map[string]*os.File) (err error) {
			held := &heldStates{session: of, document: d, layout: states.NewLayout(d.Chunks)}
			of.contents = held
			for _, plan := range plans {
				a, err := of.place.Attach(plan.Name, plan.Size, of.pages, files[plan.Name])
				if err != nil {
					return err
				}
				held.arenas = append(held.arenas, a)
			}
			held.control, err = states.AttachControl(held.arenas[1].Bytes(), &d.Description)
			return err
		},
	}
}

// arenasOfStates returns the arenas of a session that holds states.
func arenasOfStates(d *protocol.HoldDocument) []arena.Plan {
	plans := d.Arenas()
	for i := range plans {
		plans[i].Name = path.Join(fmt.Sprintf("rank%d", d.Rank), d.SessionPart(), string(plans[i].Component))
	}
	return plans
}

// populate has each worker allocate a share of the pages.
func populate(workers *engine.Workers, arenas []*arena.Arena) {
	workers.Start(func(worker int) {
		for _, a := range arenas {
			units := shard.Range{Count: int64((a.Mapped() + arena.PopulateUnit - 1) / arena.PopulateUnit)}
			own := units.Share(worker, workers.Count())
			if own.Count > 0 {
				a.Populate(ledger.Bytes(own.First)*arena.PopulateUnit, ledger.Bytes(own.End())*arena.PopulateUnit)
			}
		}
	})
	workers.Wait()
}

func (s *heldStates) memory() []*arena.Arena { return s.arenas }

func (s *heldStates) adopt() {
	for _, a := range s.arenas {
		a.Adopt()
	}
}

func (s *heldStates) resume() {}

func (s *heldStates) openedBy(int) {}

func (s *heldStates) err() error { return nil } // the session has it

func (s *heldStates) named(d *checked.Damage) error {
	return fmt.Errorf("arena %s: %w", s.arenas[1].Name(), s.control.Named(d))
}

func (s *heldStates) steps() int64 { return s.layout.At(s.control.Position.Load()).Steps }

func (s *heldStates) underway() (uint64, int64) { return 0, 0 }

func (s *heldStates) settle() {}

func (s *heldStates) letGo() {}

func (s *heldStates) giveBack() error {
	var err error
	for _, a := range s.arenas {
		err = errors.Join(err, a.Close())
	}
	return err
}

// before refuses the requests that only shards have.
func (s *heldStates) before(kind protocol.Kind, needs traits) error {
	if needs&ofStates == 0 {
		return protocol.Refused.Errorf("%v: this session holds states that the trainer itself updates (hold): it has "+
			"no such request", kind)
	}
	return nil
}

// condition returns the condition of the states. A load that was broken off, or of which nobody has said that all ranks
// made it, leaves them torn.
func (s *heldStates) condition() states.Condition {
	switch s.header.condition.Load() {
	case stateIsInParts, stateIsLoaded:
		return states.Torn
	}
	return s.layout.Condition(s.control.Position.Load(), s.control.GradientsOf.Load(), s.document.Recovery)
}

func (s *heldStates) welcome(attached bool, arenas []protocol.WelcomeArena) any {
	return protocol.Held{Schema: protocol.HeldSchema, Attached: attached, Service: s.version, Condition: s.condition(),
		Step: s.steps(), Arenas: arenas}
}

func (s *heldStates) shared() []sharedArena {
	var shared []sharedArena
	for i, plan := range s.plans {
		shared = append(shared, sharedArena{s.arenas[i], plan.Component, dtype.U8.String()})
	}
	return shared
}

func (s *heldStates) describe(status *protocol.SessionStatus) {
	status.Holds = string(s.condition())
	status.StateBytes = ledger.Bytes(s.layout.Bytes() - s.layout.Gap())
	status.Initialized = s.condition() == states.Whole
}
