//go:build linux

package service

import (
	"slices"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
	"plimsoll/internal/state/shard"
)

// mustBeginArriving begins a step of a new session, and says that the gradients of its first half have come.
func mustBeginArriving(t *testing.T, s *servicetest.Session, step int64) {
	t.Helper()
	putGradients(s, step, 0, s.Welcome.Elements)
	if err := s.BeginArriving(step, 0.5, adamw...); err != nil {
		t.Fatal(err)
	}
	if err := s.ReadyFor(step, 0, s.Welcome.Elements/2); err != nil {
		t.Fatal(err)
	}
}

// mustFinish says that the gradients of the second half have come.
func mustFinish(t *testing.T, s *servicetest.Session, step int64) {
	t.Helper()
	half := s.Welcome.Elements / 2
	if err := s.ReadyFor(step, half, s.Welcome.Elements-half); err != nil {
		t.Fatal(err)
	}
	if seconds, err := s.Wait(step, 0, s.Welcome.Elements); err != nil || seconds <= 0 {
		t.Fatalf("a step whose gradients are there took %v s (%v)", seconds, err)
	}
}

// theSession returns the only session of a service in this process.
func theSession(s *Server) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[key{0, "bf16"}]
}

// TestRequestsWhileGradientsArrive refuses what would wait for gradients that come after it.
func TestRequestsWhileGradientsArrive(t *testing.T) {
	_, socket := serveHere(t)
	s := begun(t, socket, testDocument())
	end := s.Welcome.Elements
	mustBeginArriving(t, s, 1)
	for name, ask := range map[string]func() error{
		"norm":       func() error { _, err := s.SumSquares(); return err },
		"save":       func() error { _, err := s.Save(t.TempDir(), nil); return err },
		"clear":      s.ClearGradients,
		"set_step":   func() error { return s.SetStep(5) },
		"prepare":    func() error { return s.Prepare(2, adamw...) },
		"accumulate": func() error { return s.Accumulate(1, 0, []float32{1}) },
		"write":      func() error { return s.Write(protocol.FirstMoment, 0, []float32{1}) },
		"read":       func() error { return s.Read(protocol.FirstMoment, 0, []float32{1}) },
		"step":       func() error { return s.Step(1, 0.5, true, adamw...) },
	} {
		wantError(t, ask(), protocol.OutOfOrder, name+": step 1 is under way and waits for gradients; send ready for "+
			"all of them first, or give the step up with load")
	}
	wantError(t, s.BeginArriving(1, 0.25, adamw...), protocol.OutOfOrder, "step: step 1 is under way*")
	if err := s.BeginArriving(1, 0.5, adamw...); err != nil {
		t.Errorf("the same request again, as after an answer that was lost: %v", err)
	}
	wantError(t, s.Ready(0, end), protocol.OutOfOrder,
		"ready without a step: step 1 is under way and waits for gradients; name it if they are of that step")
	wantError(t, s.ReadyFor(2, 0, end), protocol.OutOfOrder,
		"ready for step 2: the session has finished step 0, and no step 2 waits for gradients")
	_, err := s.Wait(1, 0, end)
	wantError(t, err, protocol.OutOfOrder,
		"wait for step 1: the gradients of 100000 elements from 100000 on are missing; send ready for them first")
	if seconds, err := s.Wait(1, 0, 50_000); err != nil || seconds != 0 {
		t.Errorf("a part of the step whose gradients are there: %v s, %v", seconds, err)
	}
	if _, err := s.Saved(); err != nil {
		t.Errorf("saved: %v", err)
	}
	mustFinish(t, s, 1)
	if err := s.BeginArriving(2, 0.5, adamw...); err != nil {
		t.Fatal(err)
	}
	if seconds, err := s.Wait(1, 0, end); err != nil || seconds <= 0 {
		t.Errorf("the step before the one that waits for gradients took %v s (%v)", seconds, err)
	}
	if err := s.ReadyFor(2, 0, end); err != nil {
		t.Fatal(err)
	}
	mustFinish(t, s, 2)
	if err := s.ReadyFor(1, 0, end); err != nil {
		t.Errorf("gradients of a step that is finished, as after an answer that was lost: %v", err)
	}
	wantError(t, s.ReadyFor(3, 0, end), protocol.OutOfOrder,
		"ready for step 3: the session has finished step 2, and no step 3 waits for gradients")
	for _, flags := range []uint32{protocol.WaitForStep, protocol.PreparedStep} {
		body := protocol.StepBody{StepHeader: protocol.StepHeader{Step: 3, GradScale: 1,
			Flags: protocol.ArrivingStep | flags}, Hyperparameters: adamw}
		wantError(t, s.Do(protocol.Step, body.Encode()), protocol.Refused, "step with flags 0x*: a step that begins *")
	}
	if sum, err := s.SumSquares(); err != nil || sum == 0 {
		t.Errorf("norm after the step: %v, %v", sum, err)
	}
}

// TestStatusWhileGradientsArrive looks at a step that waits for gradients from outside: it is not stuck, and its time
// is that of the updates.
func TestStatusWhileGradientsArrive(t *testing.T) {
	patiently(t, &stepPatience, 10*time.Millisecond)
	server, socket := serveHere(t)
	s := begun(t, socket, testDocument())
	all := time.Now()
	mustBeginArriving(t, s, 1)
	if _, err := s.Wait(1, 0, 1); err != nil {
		t.Fatal(err)
	}
	await(t, "gradients to miss", func() bool {
		number, _ := theSession(server).contents.underway()
		return number == 0
	})
	waits := time.Now()
	for time.Since(waits) < 300*time.Millisecond {
		time.Sleep(time.Millisecond)
		if err := server.stuckStep(); err != nil {
			t.Fatal(err)
		}
	}
	if x := server.Overview().Sessions[0]; !x.MissesGradients || x.Initialized || x.Step != 0 || x.StepsMade != 0 {
		t.Errorf("the status of a session whose step waits for gradients is %+v", x)
	}
	waited := time.Since(waits)
	mustFinish(t, s, 1)
	most := time.Since(all) - waited
	x := server.Overview().Sessions[0]
	if x.MissesGradients || !x.Initialized || x.Step != 1 || x.StepsMade != 1 {
		t.Errorf("the status after the step is %+v", x)
	}
	if took := x.LastStepSeconds; took <= 0 || took > most.Seconds() || x.StepSeconds != took {
		t.Errorf("the step took %v s, and %v beside a pause of %v", took, most, waited)
	}
}

// checkpointOfOther returns a folder with a checkpoint of a session with another shard.
func checkpointOfOther(t *testing.T, socket string) string {
	t.Helper()
	s := begun(t, socket, testDocument(small, func(d *protocol.Document) { d.Part = "other" }))
	directory := t.TempDir()
	if _, err := s.Save(directory, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(directory, 0); err != nil {
		t.Fatal(err)
	}
	return directory
}

// TestClientComesBackWhileGradientsArrive: the process that writes the gradients may go on over another connection. Any
// other process finds a torn state, and takes nothing of it for complete.
func TestClientComesBackWhileGradientsArrive(t *testing.T) {
	server, socket := serveHere(t)
	document := testDocument()
	again := func(s *servicetest.Session) *servicetest.Session {
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
		return mustOpen(t, socket, document)
	}
	s := begun(t, socket, document)
	mustStep(t, s, 1)
	mustBeginArriving(t, s, 2)
	s = again(s)
	if w := s.Welcome; w.ArrivingStep != 2 || w.TornStep != 0 || w.Initialized || w.Step != 1 {
		t.Errorf("the process that writes the gradients is welcomed with %+v", w)
	}
	if err := s.ReadyFor(2, 0, 10); err != nil {
		t.Error(err)
	}
	mustFinish(t, s, 2)

	mustBeginArriving(t, s, 3)
	theSession(server).header.arrivingClient.Store(1) // another process
	s = again(s)
	if w := s.Welcome; w.ArrivingStep != 0 || w.TornStep != 3 || w.Initialized || w.Step != 2 {
		t.Errorf("another process is welcomed with %+v", w)
	}
	for name, ask := range map[string]func() error{
		"save":     func() error { _, err := s.Save(t.TempDir(), nil); return err },
		"set_step": func() error { return s.SetStep(5) },
		"prepare":  func() error { return s.Prepare(3, adamw...) },
		"step":     func() error { return s.Step(3, 0.5, true, adamw...) },
	} {
		wantError(t, ask(), protocol.OutOfOrder, name+": the trainer ended in the middle of step 3, and only some of "+
			"the state has had it: load a checkpoint, or give the state back and open it anew")
	}
	_, err := s.Wait(3, 0, 10)
	wantError(t, err, protocol.OutOfOrder, "wait for step 3: the last step begun is 2")
	wantError(t, s.ReadyFor(3, 0, 10), protocol.OutOfOrder, "ready for step 3: *")
	if _, err := s.Load(checkpointOfOther(t, socket)); err == nil {
		t.Error("a checkpoint of another shard was loaded")
	}
	// As a service leaves it that is killed while it gives the step up.
	theSession(server).contents.(*heldShard).shard.SetSteps(3)
	theSession(server).contents.resume()
	if s = again(s); s.Welcome.TornStep != 3 || s.Welcome.Step != 2 || s.Welcome.Initialized {
		t.Errorf("the next process is welcomed with %+v", s.Welcome)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s = mustOpen(t, socket, document); s.Welcome.Attached || s.Welcome.TornStep != 0 {
		t.Errorf("a new session is welcomed with %+v", s.Welcome)
	}
}

// TestStepsAreGivenUpWhileGradientsArrive gives steps up by load, which mends the state, and before anything has
// changed.
func TestStepsAreGivenUpWhileGradientsArrive(t *testing.T) {
	server, socket := serveHere(t)
	s := begun(t, socket, testDocument(full))
	mustStep(t, s, 2)
	directory := t.TempDir()
	if _, err := s.Save(directory, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Saved(); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(directory, 2); err != nil {
		t.Fatal(err)
	}
	want := fingerprint(t, s)
	mustBeginArriving(t, s, 3)
	if _, err := s.Load(t.TempDir()); err == nil || !strings.Contains(err.Error(), "no complete checkpoint") {
		t.Errorf("a load of nothing: %v", err)
	}
	if !theSession(server).contents.(*heldShard).shard.MissesGradients() {
		t.Error("a load of nothing has given up the step")
	}
	if step, err := s.Load(directory); err != nil || step != 2 {
		t.Fatalf("loaded step %d: %v", step, err)
	}
	if got := fingerprint(t, s); got != want {
		t.Errorf("the state is %s after the load, want %s", got, want)
	}
	if err := s.BeginArriving(3, 0.5, adamw...); err != nil { // and no gradients come
		t.Fatal(err)
	}
	theSession(server).header.arrivingClient.Store(1)
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, socket, testDocument(full))
	if w := s.Welcome; !w.Initialized || w.TornStep != 0 || w.Step != 2 || fingerprint(t, s) != want {
		t.Errorf("after a step without any gradients, the next process is welcomed with %+v", w)
	}
	mustBeginArriving(t, s, 3)
	if err := s.Close(); err != nil { // gives the state back
		t.Fatal(err)
	}
}

// orderOf returns the order that a client has given. The service locks for each answer, and so it does for the one
// before this look and for the one after it.
func orderOf(t *testing.T, server *Server, s *servicetest.Session) []shard.Range {
	t.Helper()
	server.mu.Lock()
	order := slices.Clone(server.all[key{0, "bf16"}].contents.(*heldShard).order)
	server.mu.Unlock()
	if _, err := s.SumSquares(); err != nil {
		t.Fatal(err)
	}
	return order
}

// TestOrderEndsWithTheConnection: the next client of a session begins without an order.
func TestOrderEndsWithTheConnection(t *testing.T) {
	server, socket := serveHere(t)
	s := begun(t, socket, testDocument())
	for range 2 {
		if err := s.Order(protocol.RangeBody{First: 100, Count: 10}, protocol.RangeBody{Count: 5}); err != nil {
			t.Fatal(err)
		}
	}
	order := orderOf(t, server, s)
	if len(order) != 2 || order[0] != (shard.Range{First: 100, Count: 10}) {
		t.Errorf("an order that was begun anew is %v", order)
	}
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, socket, testDocument())
	if order := orderOf(t, server, s); len(order) != 0 {
		t.Errorf("the order of the client before is %v", order)
	}
}
