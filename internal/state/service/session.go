//go:build linux

package service

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/service/protocol"
)

// session is what at most one client at a time holds: a shard that this service updates, or states that the trainer
// updates. What the two have in common is here.
type session struct {
	name     string // under which the keeper keeps its files
	logf     func(format string, values ...any)
	version  string // of the service
	document protocol.AnyDocument
	plans    []arena.Plan // of the arenas of the contents
	place    arena.Place
	pages    arena.Pages
	header   *sessionHeader
	contents contents

	saving    *checkpoint.Saving // nil if nothing was saved, or settleSave has seen the result
	inherited bool               // a client that is gone began the save
	saveError error

	// Overview and the metrics read these.
	savedStep atomic.Int64
	written   atomic.Pointer[checkpoint.Saving] // nil if no save is under way
	holder    atomic.Int64                      // process of the client; 0 for none

	saveIsOver sync.WaitGroup

	watched stepWatch // used by Server.stuckStep

	damage atomic.Pointer[error] // what was found damaged
}

// newSession returns a session without its contents.
func (s *Server) newSession(
	name string, planned *design, place arena.Place, pages arena.Pages, header *sessionHeader,
) *session {
	return &session{name: name, logf: s.logf, version: s.version, document: planned.document, plans: planned.arenas,
		place: place, pages: pages, header: header}
}

// contents are what a session holds.
type contents interface {
	// memory returns the arenas, in the order of their plans.
	memory() []*arena.Arena
	// adopt makes the files of attached arenas their own.
	adopt()
	// resume goes on with what the service before has left.
	resume()
	// openedBy is called when a process opens the session.
	openedBy(process int)
	// welcome returns the answer to that, with the arenas in it.
	welcome(attached bool, arenas []protocol.WelcomeArena) any
	// shared returns the arenas that a trainer maps.
	shared() []sharedArena

	// before prepares for a request, or refuses it.
	before(kind protocol.Kind, needs traits) error
	setStep(b protocol.SetStepBody) error
	save(until context.Context, b protocol.SaveBody) (*checkpoint.Saving, error)
	load(until context.Context, b protocol.LoadBody) (step int64, training jsontext.Value, err error)

	// err returns what was found damaged in the contents, or nil.
	err() error
	// named returns the error about a damaged number of the contents.
	named(d *checked.Damage) error

	// steps returns the last finished step.
	steps() int64
	// underway returns the number of a step under way, and what is left of it.
	underway() (number uint64, left int64)
	// settle waits for the work under way.
	settle()
	// letGo ends a client's use.
	letGo()
	// giveBack frees the memory.
	giveBack() error
	// describe fills in what only these contents have.
	describe(status *protocol.SessionStatus)
}

// key names a session in its job.
type key struct {
	rank int
	part string
}

func keyOf(d protocol.AnyDocument) key { return key{d.Of().Rank, d.Of().SessionPart()} }

func (k key) String() string { return fmt.Sprintf("rank%d/%s", k.rank, k.part) }

// arenas returns all arenas of the session, the session header last: a header that was
// kept proves that all arenas were.
func (s *session) arenas() []*arena.Arena {
	return append(append([]*arena.Arena{}, s.contents.memory()...), s.header.Arena)
}

// keptNames returns the names under which the keeper keeps the arenas, in the same
// order.
func (s *session) keptNames() []string { return keptNames(s.name, len(s.plans)) }

// close gives the state back.
func (s *session) close() error {
	s.contents.settle()
	if s.saving != nil {
		s.saving.Cancel()
		_ = s.saving.Wait() // was cancelled
		s.saveIsOver.Wait()
	}
	return errors.Join(s.contents.giveBack(), s.header.Close())
}

// release ends a client's use of the session.
func (s *session) release() {
	s.contents.letGo()
	s.holder.Store(0)
}

type sharedArena struct {
	*arena.Arena
	component ledger.Component
	of        string // type
}
