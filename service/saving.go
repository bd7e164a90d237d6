package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/checkpoint"
)

// Bodies of the requests for checkpoints.
type (
	saveBody struct {
		Directory string         `json:"directory"`
		Training  jsontext.Value `json:"training,omitempty"`
		Identity  string         `json:"identity,omitempty"`
		Replica   int            `json:"replica,omitempty"`
		Replicas  int            `json:"replicas,omitempty"`
	}
	commitBody struct {
		Directory string `json:"directory"`
		Step      int64  `json:"step"`
		Identity  string `json:"identity,omitempty"`
		Without   []int  `json:"ranks_without_state,omitempty"`
	}
	loadBody struct {
		Directory string `json:"directory"`
		Several   bool   `json:"several,omitempty"`
	}
)

// forCheckpoint returns the shard in the form that package checkpoint uses.
func (s *session) forCheckpoint() checkpoint.Shard {
	d := s.document
	return checkpoint.Shard{Rank: d.Rank, World: d.World, Part: d.Part, Format: s.shard.Config().Format,
		Pieces: d.pieces(), State: s.shard}
}

// checkDirectory refuses relative paths: client and service have different working
// directories.
func checkDirectory(kind Kind, directory string) error {
	if !filepath.IsAbs(directory) {
		return fail(Refused, "%v: the directory is %q: expected an absolute path, as the service has a working "+
			"directory of its own", kind, directory)
	}
	return nil
}

// checkIdentity refuses an identity that must not be in a manifest.
func checkIdentity(kind Kind, identity string) error {
	if identity != "" && !nameOfJob.MatchString(identity) {
		return fail(Refused, "%v: the identity is %q: expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot "+
			"at the beginning", kind, identity)
	}
	return nil
}

// save begins to write the state as it is now.
func (s *session) save(b saveBody) ([]byte, error) {
	if err := cmp.Or(checkDirectory(Save, b.Directory), checkIdentity(Save, b.Identity)); err != nil {
		return nil, err
	}
	replicas := max(1, b.Replicas)
	if b.Replica < 0 || b.Replica >= replicas || replicas > s.document.World {
		return nil, fail(Refused, "save: replica %d of %d in a job of %d ranks: expected the number of this one, from "+
			"0 on, and how many ranks hold its shard", b.Replica, replicas, s.document.World)
	}
	if !s.record.initialized() {
		return nil, fail(OutOfOrder, "save: the state is not whole: write weights and set_step, or "+
			"load, or make a step")
	}
	s.settleSave() // one save at a time; the next saved reports a failure
	shard := s.forCheckpoint()
	shard.Replica, shard.Replicas, shard.Identity = b.Replica, replicas, b.Identity
	saving, err := checkpoint.Save(b.Directory, shard, b.Training)
	if err != nil {
		return nil, storage(Save, err)
	}
	for _, r := range saving.Removed() {
		s.say("session %v: save of step %d: %s (%v), which a save had left that was broken off, was removed "+
			"for want of room", s.document.key(), saving.Step(), r.Path, r.Bytes)
	}
	s.saving, s.inherited = saving, false
	s.written.Store(saving)
	s.saveIsOver.Go(func() {
		_ = saving.Wait() // settleSave reads the error
		s.written.Store(nil)
	})
	return encodeStep(saving.Step()), nil
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
	if _, err := noBody(r.kind, r.body); err != nil {
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
		return reply{}, storage(Save, err)
	}
	return reply{result: encodeStep(s.savedStep.Load())}, nil
}

// notInParts refuses requests that would take a partly loaded state for a whole one.
func (s *session) notInParts(kind Kind) error {
	if s.record.condition.Load() == stateIsInParts {
		return fail(OutOfOrder, "%v: a load was broken off, and some of the state is the checkpoint's: load again, or "+
			"give the state back and open it anew", kind)
	}
	return nil
}

// notAlone refuses to go on from a loaded state while other shards may not have loaded
// theirs.
func (s *session) notAlone(kind Kind) error {
	if s.record.condition.Load() == stateIsLoaded {
		return fail(OutOfOrder, "%v: the state was loaded as one of several, and set_step has not said that all are: "+
			"load all again, or give the states back and open them anew", kind)
	}
	return nil
}

// commit makes a checkpoint of what all ranks saved.
func (s *session) commit(b commitBody) ([]byte, error) {
	if err := cmp.Or(checkDirectory(Commit, b.Directory), checkIdentity(Commit, b.Identity)); err != nil {
		return nil, err
	}
	s.settleSave()
	if _, err := checkpoint.Commit(b.Directory, b.Step, b.Identity, b.Without...); err != nil {
		return nil, storage(Commit, err)
	}
	return encodeStep(b.Step), nil
}

// load loads a checkpoint. It stops when the service ends, or when another client wants
// the session of a client that hung up.
func (c *connection) load(r request) (reply, error) {
	body, err := decodeText[loadBody](r.kind, r.body)
	if err != nil {
		return reply{}, err
	}
	until, cancel := context.WithCancel(c.server.until)
	defer cancel()
	defer context.AfterFunc(c.abandoned, cancel)()
	result, err := c.session.load(until, body)
	return reply{result: result}, err
}

// load overwrites the state with that of a checkpoint.
func (s *session) load(until context.Context, b loadBody) ([]byte, error) {
	if err := checkDirectory(Load, b.Directory); err != nil {
		return nil, err
	}
	s.settleSave()
	found, err := checkpoint.Open(b.Directory)
	if err != nil {
		return nil, storage(Load, err)
	}
	// From here to the end, a restarted service must not take the state for whole, or
	// for new.
	was := s.record.condition.Swap(stateIsInParts)
	s.record.forgetSteps()
	load := found.LoadNew
	if was == stateIsWhole {
		load = found.Load // keeps the state until all is verified
	}
	step, training, err := load(until, s.forCheckpoint())
	if err != nil {
		if !errors.Is(err, checkpoint.ErrPartial) {
			s.record.condition.Store(was)
		}
		if until.Err() != nil {
			return nil, errEnding
		}
		return nil, storage(Load, err)
	}
	s.begun = step
	if b.Several {
		s.record.condition.Store(stateIsLoaded)
	} else {
		s.record.condition.Store(stateIsWhole)
	}
	return append(encodeStep(step), training...), nil
}

// storage is the answer to a request that failed on files.
func storage(kind Kind, err error) error {
	return &Error{Storage, fmt.Sprintf("%v: %v", kind, err)}
}
