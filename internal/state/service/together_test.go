//go:build linux

package service

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// together is a training with the state of several shards. A step is a two-phase
// commit: all shards make it. When the trainer dies, some shards may have made it and
// others not.
type together struct {
	sessions []*servicetest.Session
	mended   *atomic.Uint32 // counts the steps that a later trainer completed
}

// open opens all sessions, and completes the last step in the sessions that have not
// made it.
func (x *together) open(socket string, documents []*protocol.Document) error {
	for _, d := range documents {
		s, err := openPatiently(socket, d)
		if err != nil {
			return err
		}
		x.sessions = append(x.sessions, s)
	}
	if slices.ContainsFunc(x.sessions, func(s *servicetest.Session) bool { return !s.Welcome.Initialized }) {
		for _, s := range x.sessions {
			if err := begin(s); err != nil {
				return err
			}
			s.Welcome.Step = 0
		}
		return nil
	}
	return x.catchUp()
}

func (x *together) catchUp() error {
	newest := slices.MaxFunc(x.sessions,
		func(a, b *servicetest.Session) int { return int(a.Welcome.Step - b.Welcome.Step) }).Welcome
	for _, s := range x.sessions {
		w := &s.Welcome
		if w.Step == newest.Step {
			continue
		}
		if w.Step != newest.Step-1 || w.PreparedStep != uint64(newest.Step) || newest.AskedStep != uint64(newest.Step) {
			return fmt.Errorf("a shard is at step %d with step %d prepared, and another at step %d after it was "+
				"asked for step %d", w.Step, w.PreparedStep, newest.Step, newest.AskedStep)
		}
		if err := s.StepPrepared(newest.Step, newest.AskedGradScale, true); err != nil {
			return err
		}
		w.Step = newest.Step
		x.mended.Add(1)
	}
	return nil
}

// step makes a step of all shards. No shard can derive the factor from what it knows.
func (x *together) step(step int64, does func(uint32)) error {
	does(writingGradients)
	for _, s := range x.sessions {
		putGradients(s, step, 0, s.Welcome.Elements)
		if err := s.Ready(0, s.Welcome.Elements); err != nil {
			return err
		}
	}
	does(norming)
	for _, s := range x.sessions {
		if err := s.Prepare(step, adamw...); err != nil {
			return err
		}
	}
	does(stepping)
	for _, s := range x.sessions {
		if err := s.StepPrepared(step, 1/float64(1+step%7), false); err != nil {
			return err
		}
	}
	for _, s := range x.sessions {
		if _, err := s.Wait(step, 0, s.Welcome.Elements); err != nil {
			return err
		}
	}
	return nil
}

// trainTogether goes on from the current state.
func (x *trainer) trainTogether(stop func(step int64) bool) (*together, error) {
	if err := x.init(); err != nil {
		return nil, err
	}
	x.does(opening)
	t := &together{mended: x.mended}
	if err := t.open(x.Socket, append([]*protocol.Document{x.Document}, x.Others...)); err != nil {
		return nil, err
	}
	for step := t.sessions[0].Welcome.Step; !stop(step); step++ {
		if err := t.step(step+1, x.does); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// fingerprints returns the fingerprints of all shards.
func (x *together) fingerprints(t *testing.T) []string {
	t.Helper()
	var prints []string
	for _, s := range x.sessions {
		prints = append(prints, fingerprint(t, s))
		if err := s.Detach(); err != nil {
			t.Error(err)
		}
	}
	return prints
}

// TestShardsStepTogether kills the trainer of several shards at random instants, also
// between their steps. The state must end with the bits of an undisturbed training.
func TestShardsStepTogether(t *testing.T) {
	r := startService(t)
	part := func(rank int, part string, change ...func(*protocol.Document)) *protocol.Document {
		return testDocument(append(change, func(d *protocol.Document) {
			d.World, d.LocalWorld, d.Rank, d.Part = 2, 2, rank, part
		})...)
	}
	single := func(d *protocol.Document) { small(d); d.State, d.Parameter, d.Gradient = "fp32", "fp32", "fp32" }
	x := &trainer{
		Socket: r.Socket, Phase: filepath.Join(t.TempDir(), "phase"),
		Document: part(0, "bf16", small), Others: []*protocol.Document{part(0, "fp32", single), part(1, "bf16", small),
			part(1, "fp32", single)},
	}
	hit := killTrainer(t, x, 6, stepping)
	checkHits(t, hit, map[uint32]int{stepping: 10})
	t.Logf("%d shards were a step behind", x.mended.Load())
	if !testing.Short() && x.mended.Load() < uint32(kills()/20) {
		t.Errorf("only %d shards were a step behind, in %d kills", x.mended.Load(), kills())
	}
	last := int64(0)
	calm, err := x.trainTogether(func(step int64) bool { last = step; return true })
	if err != nil {
		t.Fatal(err)
	}
	got := calm.fingerprints(t)
	x.Socket = startService(t).Socket
	calm, err = x.trainTogether(func(step int64) bool { return step == last })
	if err != nil {
		t.Fatal(err)
	}
	if want := calm.fingerprints(t); !slices.Equal(got, want) {
		t.Errorf("after %d kills and %d steps the states are %v, want %v", kills(), last, got, want)
	}
	t.Logf("%d steps", last)
}

// TestPreparedStep makes a step that another client prepared, in a service that has
// died since.
func TestPreparedStep(t *testing.T) {
	r := startService(t)
	one := testDocument(small, func(d *protocol.Document) { d.Part = "one" })
	two := testDocument(small, func(d *protocol.Document) { d.Part = "two" })
	plain, prepared := begun(t, r.Socket, one), begun(t, r.Socket, two)
	mustStep(t, plain, 3)
	mustStep(t, prepared, 3)
	for _, s := range []*servicetest.Session{plain, prepared} {
		putGradients(s, 4, 0, s.Welcome.Elements)
	}
	if err := errors.Join(plain.Step(4, 0.1, true, adamw...), prepared.Prepare(4, adamw...),
		prepared.Detach()); err != nil {
		t.Fatal(err)
	}
	want := fingerprint(t, plain)
	r.killAndWait(t)
	plain, prepared = mustOpen(t, r.Socket, one), mustOpen(t, r.Socket, two)
	if w := plain.Welcome; w.Step != 4 || w.PreparedStep != 0 || w.AskedStep != 4 || w.AskedGradScale != 0.1 {
		t.Errorf("where the step was made: %+v", w)
	}
	if w := prepared.Welcome; w.Step != 3 || w.PreparedStep != 4 || w.AskedStep != 3 {
		t.Errorf("where it was prepared: %+v", w)
	}
	for range 2 { // a client without an answer asks again
		if err := prepared.StepPrepared(4, 0.1, true); err != nil {
			t.Fatal(err)
		}
	}
	if got := fingerprint(t, prepared); got != want {
		t.Errorf("the state is %s, want %s", got, want)
	}
}

// TestPreparedStepIsForgotten checks that changes of gradients or state discard the
// prepared step.
func TestPreparedStepIsForgotten(t *testing.T) {
	r := startService(t)
	s := begun(t, r.Socket, testDocument(small))
	forgotten := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		wantError(t, s.StepPrepared(1, 1, true), protocol.OutOfOrder,
			"step 1 as prepared: the prepared step is 0 (0: none)")
	}
	checkpoints := t.TempDir()
	if _, err := s.Save(checkpoints, nil); err != nil {
		t.Fatal(err)
	}
	saved, err := s.Saved()
	if err := errors.Join(err, s.Commit(checkpoints, saved)); err != nil {
		t.Fatal(err)
	}
	for what, do := range map[string]func() error{
		"ready":      func() error { return s.Ready(0, 10) },
		"clear":      s.ClearGradients,
		"accumulate": func() error { return s.Accumulate(s.Welcome.Accumulated+1, 0, make([]float32, 10)) },
		"write":      func() error { return s.Write(protocol.FirstMoment, 0, make([]float32, 10)) },
		"set_step":   func() error { return s.SetStep(0) },
		"load":       func() error { _, err := s.Load(checkpoints); return err },
	} {
		if err := s.Prepare(1, adamw...); err != nil {
			t.Fatal(err)
		}
		forgotten(what, do())
	}
	if err := errors.Join(s.Prepare(1, adamw...), s.StepPrepared(1, 1, true)); err != nil {
		t.Fatal(err)
	}
	wantError(t, s.StepPrepared(2, 1, true), protocol.OutOfOrder,
		"step 2 as prepared: the prepared step is 1 (0: none)")
}

// TestAskedStepIsForgotten checks that a state that was loaded or fully written
// discards the asked step. The state does not come from that step, so no other shard
// may make it to catch up.
func TestAskedStepIsForgotten(t *testing.T) {
	r := startService(t)
	s := begun(t, r.Socket, testDocument(small))
	mustStep(t, s, 2)
	checkpoints := committed(t, s)
	for what, do := range map[string]func() error{
		"set_step": func() error { return s.SetStep(2) },
		"load":     func() error { _, err := s.Load(checkpoints); return err },
	} {
		if err := errors.Join(do(), s.Detach()); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		s = mustOpen(t, r.Socket, testDocument(small))
		if w := s.Welcome; w.Step != 2 || w.AskedStep != 0 {
			t.Errorf("%s: step %d is said to have been asked for, of a state at step %d", what, w.AskedStep, w.Step)
		}
		mustStep(t, s, 3)
	}
}
