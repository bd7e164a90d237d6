//go:build linux

package service

import (
	"math"
	"testing"

	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// mustSpeculate begins a step that speculates, and says that all of its gradients have come.
func mustSpeculate(t *testing.T, s *servicetest.Session, step int64, gradScale float64) {
	t.Helper()
	putGradients(s, step, 0, s.Welcome.Elements)
	if err := s.BeginSpeculating(step, gradScale, adamw...); err != nil {
		t.Fatal(err)
	}
	if err := s.ReadyFor(step, 0, s.Welcome.Elements); err != nil {
		t.Fatal(err)
	}
}

// TestRequestsWhileAStepSpeculates goes through a step that is made, one that is made again and one that is skipped.
func TestRequestsWhileAStepSpeculates(t *testing.T) {
	server, socket := serveHere(t)
	s := begun(t, socket, testDocument(retracts))
	plain := begun(t, socket, testDocument(func(d *protocol.Document) { d.Part = "plain" }))
	if !s.Welcome.Retracts || plain.Welcome.Retracts {
		t.Errorf("retracts is %v and %v, want true and false", s.Welcome.Retracts, plain.Welcome.Retracts)
	}
	wantError(t, plain.BeginSpeculating(1, 1, adamw...), protocol.Refused,
		"step with flags 0x14: the session has no log to retract it with; open it with retracts")
	wantError(t, s.Decide(1, 1, false), protocol.OutOfOrder,
		"decide on step 1: the session has finished step 0, and no step 1 speculates")
	body := protocol.StepBody{StepHeader: protocol.StepHeader{Step: 1, GradScale: 1, Flags: protocol.Speculating},
		Hyperparameters: adamw}
	wantError(t, s.Do(protocol.Step, body.Encode()), protocol.Refused, "step with flags 0x10: a step speculates only *")
	same := func(what string) {
		t.Helper()
		if got, want := fingerprint(t, s), fingerprint(t, plain); got != want {
			t.Errorf("%s: the state is %s, want %s", what, got, want)
		}
	}
	for step := int64(1); step <= 12; step++ {
		mustSpeculate(t, s, step, 0.5)
		putGradients(plain, step, 0, s.Welcome.Elements)
		_, err := s.Wait(step, 0, 1)
		wantError(t, err, protocol.OutOfOrder, "wait for step *: it speculates; send decide first")
		_, err = s.Save(t.TempDir(), nil)
		wantError(t, err, protocol.OutOfOrder, "save: step * speculates, and all of its gradients are there; *")
		wantError(t, s.Decide(step, math.Inf(1), false), protocol.Refused,
			"decide with flags 0x0 and the grad scale +Inf*")
		wantError(t, s.Decide(step+1, 1, false), protocol.OutOfOrder, "decide on step *")
		sum, err := s.SumSquares()
		want, errPlain := plain.SumSquares()
		if err != nil || errPlain != nil || sum != want {
			t.Errorf("step %d: the sum of squares is %v (%v), want %v (%v)", step, sum, err, want, errPlain)
		}
		if step%3 == 0 {
			for range 2 { // also repeated, as after an answer that was lost
				if err := s.Decide(step, 0, true); err != nil {
					t.Fatal(err)
				}
			}
			same("a step that was skipped")
			mustSpeculate(t, s, step, 0.25)
		}
		scale := []float64{0.5, 0.125}[step%2]
		for range 2 {
			if err := s.Decide(step, scale, false); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Wait(step, 0, s.Welcome.Elements); err != nil {
			t.Fatal(err)
		}
		if err := plain.Step(step, scale, true, adamw...); err != nil {
			t.Fatal(err)
		}
		same("a step")
	}
	for _, x := range server.Overview().Sessions {
		if x.Step != 12 || x.StepsMade != 12 {
			t.Errorf("session %s is at step %d and has made %d", x.Part, x.Step, x.StepsMade)
		}
	}
}

// TestSpeculatingIsRefused: a state whose steps cannot be retracted is refused by name, before anything is allocated.
func TestSpeculatingIsRefused(t *testing.T) {
	_, socket := serveHere(t)
	moments := func(d *protocol.Document) { d.Parameters[1].Moments = "bf16" }
	for reason, change := range map[string]func(*protocol.Document){
		"moments are int8: expected fp32":               func(d *protocol.Document) { d.Moments = "int8" },
		"moments are bf16: expected fp32":               moments,
		"state is split24: expected split or fp32":      func(d *protocol.Document) { d.State = "split24" },
		"the optimizer is Lion: expected AdamW or Adam": func(d *protocol.Document) { d.Optimizer = "lion" },
	} {
		_, err := servicetest.Open(socket, testDocument(retracts, change))
		wantError(t, err, protocol.Refused,
			"open: *retracts is true, but steps of this session cannot be retracted: "+reason)
	}
}

// TestDyingTrainersLeaveWholeStates: the step of a trainer that ends while it speculates is retracted.
func TestDyingTrainersLeaveWholeStates(t *testing.T) {
	server, socket := serveHere(t)
	document := testDocument(retracts)
	s := begun(t, socket, document)
	mustStep(t, s, 10)
	want := fingerprint(t, s)
	for range 2 {
		mustSpeculate(t, s, 11, 0.5)
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
		if s = mustOpen(t, socket, document); s.Welcome.ArrivingStep != 11 || s.Welcome.Initialized {
			t.Errorf("the process that speculates is welcomed with %+v", s.Welcome)
		}
		theSession(server).header.arrivingClient.Store(1) // another process
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
		s = mustOpen(t, socket, document)
		if w := s.Welcome; w.Step != 10 || !w.Initialized || w.TornStep != 0 {
			t.Errorf("another process is welcomed with %+v", w)
		}
		if got := fingerprint(t, s); got != want {
			t.Errorf("the state is %s, want %s", got, want)
		}
	}
}
