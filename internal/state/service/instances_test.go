//go:build linux

package service

import (
	"slices"
	"testing"

	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// TestInstances opens several optimizers of one process: sessions of one rank and one
// part. Each keeps its own state, even if the service is killed.
func TestInstances(t *testing.T) {
	r := startService(t)
	document := func(i int) *protocol.Document {
		return testDocument(small, func(d *protocol.Document) { d.Instance = i })
	}
	sessions, want := make([]*servicetest.Session, 3), make([]string, 3)
	for i := range sessions {
		sessions[i] = begun(t, r.Socket, document(i))
		mustStep(t, sessions[i], int64(1+i))
		want[i] = fingerprint(t, sessions[i])
	}
	parts := []string{}
	for _, s := range r.overview(t).Sessions {
		parts = append(parts, s.Part)
	}
	if expected := []string{"bf16", "bf16@1", "bf16@2"}; !slices.Equal(parts, expected) {
		t.Errorf("the parts are %q: expected %q", parts, expected)
	}
	for _, s := range sessions {
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
	}
	r.Kill()
	for i := range sessions {
		again := mustOpen(t, r.Socket, document(i))
		if got := fingerprint(t, again); got != want[i] || again.Welcome.Step != int64(1+i) {
			t.Errorf("instance %d is at step %d with %s: expected step %d with %s", i, again.Welcome.Step, got,
				1+i, want[i])
		}
	}
}

// TestInstanceIsNoPartOfACheckpoint loads in one instance what another one saved.
func TestInstanceIsNoPartOfACheckpoint(t *testing.T) {
	r := startService(t)
	first := begun(t, r.Socket, testDocument(small, func(d *protocol.Document) { d.Instance = 7 }))
	mustStep(t, first, 1)
	directory := committed(t, first)
	second := mustOpen(t, r.Socket, testDocument(small))
	if step, err := second.Load(directory); err != nil || step != 1 {
		t.Fatalf("step %d: %v", step, err)
	}
	if got, want := fingerprint(t, second), fingerprint(t, first); got != want {
		t.Errorf("the state is %s: expected %s", got, want)
	}
}
