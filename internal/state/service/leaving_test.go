//go:build linux

package service

import (
	"math"
	"slices"
	"testing"

	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// leavesNorm has the bit of the parameter norm of testDocument.
var leavesNorm = []byte{1 << 1}

// parameterState returns master weights and moments of a parameter of testDocument.
func parameterState(t *testing.T, s *servicetest.Session, number int) []float32 {
	t.Helper()
	parameters := testDocument().Parameters
	first := int64(0)
	for _, p := range parameters[:number] {
		first += p.Count
	}
	values := make([]float32, parameters[number].Count)
	var all []float32
	for stream := range int(protocol.Streams) {
		if err := s.Read(stream, first, values); err != nil {
			t.Fatal(err)
		}
		all = append(all, values...)
	}
	return all
}

func wantOwnSteps(t *testing.T, s *servicetest.Session, want ...uint64) {
	t.Helper()
	if got, err := s.OwnSteps(len(want)); err != nil || !slices.Equal(got, want) {
		t.Errorf("the parameters have had %v steps (%v), want %v", got, err, want)
	}
}

// changes reports which parameters of testDocument something changes, which may open the session again.
func changes(t *testing.T, s **servicetest.Session, what func()) (changed [3]bool) {
	t.Helper()
	var before [3][]float32
	for i := range before {
		before[i] = parameterState(t, *s, i)
	}
	what()
	for i := range before {
		changed[i] = !slices.Equal(before[i], parameterState(t, *s, i))
	}
	return changed
}

// TestParametersAreLeftAlone leaves one of three parameters alone: in a step, in one that was prepared and outlives two
// services, and in one whose gradients arrive.
func TestParametersAreLeftAlone(t *testing.T) {
	r := startService(t)
	s := begun(t, r.Socket, testDocument())
	mustStep(t, s, 1)
	again := func(kill bool) {
		t.Helper()
		if kill {
			r.killAndWait(t)
		} else if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
		s = mustOpen(t, r.Socket, testDocument())
	}
	for name, step := range map[string]func(number int64){
		"alone": func(number int64) {
			if err := s.StepLeaving(leavesNorm, number, 1, adamw...); err != nil {
				t.Fatal(err)
			}
		},
		"prepared": func(number int64) {
			if err := s.PrepareLeaving(leavesNorm, number, adamw...); err != nil {
				t.Fatal(err)
			}
			again(true)
			if err := s.StepPrepared(number, 1, true); err != nil {
				t.Fatal(err)
			}
		},
		"arriving": func(number int64) {
			if err := s.BeginArriving(number, 1, adamw...); err != nil {
				t.Fatal(err)
			}
			wantError(t, s.NoneFor(number, 100_000, 776), protocol.Refused, "ready: 776 elements from 100000 on have "+
				"no gradients: expected full parameters, but norm has the elements 100000 to 100776")
			all := s.Welcome.Elements
			for range 2 { // the second time as after an answer that was lost
				if err := s.NoneFor(number, 100_000, 777); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.ReadyFor(number, 0, 100_000); err != nil {
				t.Fatal(err)
			}
			wantError(t, s.NoneFor(number, 0, 100_000), protocol.OutOfOrder, "ready without gradients: *have arrived")
			if err := s.ReadyFor(number, 100_777, all-100_777); err != nil {
				t.Fatal(err)
			}
			if seconds, err := s.Wait(number, 0, all); err != nil || seconds <= 0 {
				t.Fatalf("the step took %v s (%v)", seconds, err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			had, err := s.OwnSteps(3)
			if err != nil {
				t.Fatal(err)
			}
			number := s.Welcome.Step + 1
			if got := changes(t, &s, func() { putGradients(s, number, 0, s.Welcome.Elements); step(number) }); got !=
				[3]bool{true, false, true} {
				t.Errorf("changed are %v, want all but the second", got)
			}
			again(true)
			wantOwnSteps(t, s, had[0]+1, had[1], had[2]+1)
			again(false)
			wantOwnSteps(t, s, had[0]+1, had[1], had[2]+1)
		})
	}
	last := s.Welcome.Step
	if got := changes(t, &s, func() { mustStep(t, s, last+1) }); got != [3]bool{true, true, true} {
		t.Errorf("changed are %v, want all", got)
	}
	wantOwnSteps(t, s, uint64(last)+1, uint64(last)-2, uint64(last)+1)
}

// TestOwnStepsAreSet writes a state whose parameters have had different numbers of steps: only with set_step is it
// whole.
func TestOwnStepsAreSet(t *testing.T) {
	r := startService(t)
	s := begun(t, r.Socket, testDocument())
	mustStep(t, s, 1)
	if err := s.Do(protocol.SetOwnSteps, protocol.OwnStepsBody{First: 1, Had: []uint64{7}}.Encode()); err != nil {
		t.Fatal(err)
	}
	r.killAndWait(t)
	if s = mustOpen(t, r.Socket, testDocument()); s.Welcome.Initialized {
		t.Error("the state is complete before set_step")
	}
	keep := func(step uint64) error {
		return s.Do(protocol.SetStep, protocol.SetStepBody{Step: step, Flags: protocol.KeepOwnSteps}.Encode())
	}
	wantError(t, keep(6), protocol.Refused, "set_step: section 1 has had 7 steps: expected at most 6, *")
	if err := keep(9); err != nil {
		t.Fatal(err)
	}
	r.killAndWait(t)
	s = mustOpen(t, r.Socket, testDocument())
	if wantOwnSteps(t, s, 1, 7, 1); s.Welcome.Step != 9 || !s.Welcome.Initialized {
		t.Errorf("welcomed with %+v", s.Welcome)
	}
	if err := s.SetSteps(4, []uint64{0, 4, 2}); err != nil {
		t.Fatal(err)
	}
	wantOwnSteps(t, s, 0, 4, 2)
	if err := s.SetStep(4); err != nil {
		t.Fatal(err)
	}
	wantOwnSteps(t, s, 4, 4, 4)
	leave := func(bits ...byte) error { return s.StepLeaving(bits, 5, 1, adamw...) }
	for _, c := range []struct {
		err    error
		status protocol.Status
		want   string
	}{
		{leave(1, 0), protocol.Refused, "step with 2 bytes of parameters that it leaves alone: expected a bit for " +
			"each of 3, *"},
		{leave(1 << 3), protocol.Refused, "step leaves parameter 3 alone: the session has 3"},
		{s.PrepareLeaving([]byte{1 << 7}, 5, adamw...), protocol.Refused, "prepare leaves parameter 7 alone: *"},
		{s.SetSteps(4, []uint64{0, 4, 2, 1}), protocol.Refused, "set_own_steps: the steps of 4 sections from 0 on: *"},
		{s.SetSteps(4, []uint64{math.MaxUint64}), protocol.Refused, "set_own_steps: parameter 0 has had *"},
		{s.Do(protocol.OwnSteps, protocol.Encode(protocol.RangeBody{First: 3, Count: 1})), protocol.Refused,
			"own_steps of *"},
		{s.NoneFor(5, 0, 10), protocol.OutOfOrder, "ready for step 5: *"},
	} {
		wantError(t, c.err, c.status, c.want)
	}
	wantOwnSteps(t, s, 4, 4, 4)
}
