//go:build linux

package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/service/protocol"
)

// forCheckpoint returns the shard in the form that package checkpoint uses.
func (s *heldShard) forCheckpoint() checkpoint.Shard {
	d := s.document
	return checkpoint.Shard{Rank: d.Rank, World: d.World, Part: d.Part, Format: s.shard.Config().Format,
		Pieces: piecesOf(d), State: s.shard}
}

// checkDirectory refuses relative paths: client and service have different working
// directories.
func checkDirectory(kind protocol.Kind, directory string) error {
	if !filepath.IsAbs(directory) {
		return protocol.Refused.Errorf("%v: the directory is %q: expected an absolute path, as the service has a "+
			"working directory of its own", kind, directory)
	}
	return nil
}

// checkIdentity refuses an identity that must not be in a manifest.
func checkIdentity(kind protocol.Kind, identity string) error {
	if identity != "" && !protocol.SafeName.MatchString(identity) {
		return protocol.Refused.Errorf("%v: the identity is %q: expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot "+
			"at the beginning", kind, identity)
	}
	return nil
}

// save begins to write the state as it is now.
func (s *session) save(until context.Context, b protocol.SaveBody) ([]byte, error) {
	if err := cmp.Or(checkDirectory(protocol.Save, b.Directory), checkIdentity(protocol.Save, b.Identity)); err != nil {
		return nil, err
	}
	s.settleSave() // one save at a time; the next saved reports a failure
	saving, err := s.contents.save(until, b)
	if err != nil {
		return nil, err
	}
	for _, r := range saving.Removed() {
		s.logf("session %v: save of step %d: %s (%v), left by an interrupted save, was removed to free disk space",
			keyOf(s.document), saving.Step(), r.Path, r.Bytes)
	}
	s.saving, s.inherited = saving, false
	s.written.Store(saving)
	s.saveIsOver.Go(func() {
		_ = saving.Wait() // settleSave reads the error
		s.written.Store(nil)
	})
	return protocol.Encode(saving.Step()), nil
}

func (s *heldShard) save(_ context.Context, b protocol.SaveBody) (*checkpoint.Saving, error) {
	replicas := max(1, b.Replicas)
	if b.Replica < 0 || b.Replica >= replicas || replicas > s.document.World {
		return nil, protocol.Refused.Errorf("save: replica %d of %d in a job of %d ranks: expected the number of this "+
			"one, from 0 on, and how many ranks hold its shard", b.Replica, replicas, s.document.World)
	}
	if err := s.notTorn(protocol.Save); err != nil {
		return nil, err
	}
	if b.Step != nil && *b.Step != s.shard.Steps() {
		return nil, protocol.OutOfOrder.Errorf("save of step %d: the state is of step %d", *b.Step, s.shard.Steps())
	}
	if !s.header.initialized() {
		return nil, protocol.OutOfOrder.Errorf("save: the state is incomplete: write weights and set_step, or load, " +
			"or make a step")
	}
	shard := s.forCheckpoint()
	shard.Replica, shard.Replicas, shard.Identity = b.Replica, replicas, b.Identity
	saving, err := checkpoint.Save(b.Directory, shard, b.Training)
	if err != nil {
		return nil, storage(protocol.Save, err)
	}
	return saving, nil
}

// settleSave waits for the save under way.
func (s *session) settleSave() {
	if s.saving == nil {
		return
	}
	err := s.saving.Wait()
	s.saveIsOver.Wait()
	if err == nil {
		s.savedStep.Store(s.saving.Step())
	}
	if !s.inherited {
		s.saveError = errors.Join(s.saveError, err)
	}
	s.saving = nil
}

// forgetFailures is called when a client attaches. The saves of an earlier client,
// failed or about to fail, say nothing of its own.
func (s *session) forgetFailures() { s.saveError, s.inherited = nil, s.saving != nil }

// saved waits for the save under way and reports its outcome. It stops waiting if the
// client hung up and another one wants the session.
func (c *connection) saved(r request) (reply, error) {
	if _, err := noBody(r.Kind, r.Body); err != nil {
		return reply{}, err
	}
	s := c.session
	if s.saving != nil {
		select {
		case <-s.saving.Done():
		case <-c.abandoned.Done():
			return reply{}, errEnding
		}
	}
	s.settleSave()
	err := s.saveError
	s.saveError = nil
	if err != nil {
		return reply{}, storage(protocol.Save, err)
	}
	return reply{result: protocol.Encode(s.savedStep.Load())}, nil
}

// notInParts refuses requests that would take a partly loaded state for a complete one.
func (s *session) notInParts(kind protocol.Kind) error {
	if s.header.condition.Load() == stateIsInParts {
		return protocol.OutOfOrder.Errorf("%v: a load was interrupted, and only some of the state is the "+
			"checkpoint's: load again, or give the state back and open it anew", kind)
	}
	return nil
}

// notAlone refuses to continue from a loaded state while other shards may not have loaded theirs.
func (s *session) notAlone(kind protocol.Kind) error {
	if s.header.condition.Load() == stateIsLoaded {
		return protocol.OutOfOrder.Errorf("%v: this state was loaded as one of several, and no set_step has "+
			"confirmed that all were: load all again, or give the states back and open them anew", kind)
	}
	return nil
}

// commit makes a checkpoint of what all ranks saved.
func (s *session) commit(b protocol.CommitBody) ([]byte, error) {
	if err := cmp.Or(checkDirectory(protocol.Commit, b.Directory),
		checkIdentity(protocol.Commit, b.Identity)); err != nil {
		return nil, err
	}
	s.settleSave()
	if _, err := checkpoint.Commit(b.Directory, b.Step, b.Identity, b.Without...); err != nil {
		return nil, storage(protocol.Commit, err)
	}
	return protocol.Encode(b.Step), nil
}

// load overwrites the state with that of a checkpoint.
func (s *session) load(until context.Context, b protocol.LoadBody) ([]byte, error) {
	if err := checkDirectory(protocol.Load, b.Directory); err != nil {
		return nil, err
	}
	s.settleSave()
	step, training, err := s.contents.load(until, b)
	switch {
	case err != nil && until.Err() != nil:
		return nil, errEnding
	case err != nil:
		return nil, storage(protocol.Load, err)
	}
	return append(protocol.Encode(step), training...), nil
}

func (s *heldShard) load(until context.Context, b protocol.LoadBody) (int64, jsontext.Value, error) {
	found, err := checkpoint.Open(b.Directory)
	if err != nil {
		return 0, nil, err
	}
	if s.shard.MissesGradients() {
		s.abandon() // the state is replaced, whatever has become of the gradients
	}
	// From here to the end, a restarted service must not take the state for complete, or for new.
	was := s.header.condition.Load()
	s.header.condition.Store(stateIsInParts)
	asked, gradScale := s.header.asked()
	s.header.forgetSteps()
	load := found.LoadNew
	if was == stateIsWhole {
		load = found.Load // keeps the state until all is verified
	}
	step, training, err := load(until, s.forCheckpoint())
	if err != nil {
		if !errors.Is(err, checkpoint.ErrPartial) {
			s.header.ask(asked, gradScale) // a torn state is still torn by that step
			s.header.condition.Store(was)
		}
		return 0, nil, err
	}
	s.begun = step
	if !b.Several {
		if err := s.shard.Commit(); err != nil {
			return 0, nil, err
		}
	}
	s.header.loaded(b.Several)
	return step, training, nil
}

// storage is the answer to a request that failed on files.
func storage(kind protocol.Kind, err error) error {
	return &protocol.Error{Status: protocol.Storage, Message: fmt.Sprintf("%v: %v", kind, err)}
}
