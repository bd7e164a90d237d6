//go:build linux

package service

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"plimsoll/internal/state/service/protocol"
)

// TestWhatIsBeingWrittenIsNotWhole checks that a trainer that dies while it writes
// another state leaves a state that is not whole.
func TestWhatIsBeingWrittenIsNotWhole(t *testing.T) {
	r := startService(t)
	for stream := range protocol.Streams {
		document := testDocument(small, func(d *protocol.Document) { d.Part = fmt.Sprint("part", stream) })
		s := begun(t, r.Socket, document)
		mustStep(t, s, 3)
		if err := errors.Join(s.Write(stream, 7, make([]float32, 10)), s.Detach()); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			s = mustOpen(t, r.Socket, document)
			if s.Welcome.Initialized {
				t.Errorf("stream %d was written in part, and the state passes for that of step %d", stream,
					s.Welcome.Step)
			}
			if err := s.Detach(); err != nil {
				t.Fatal(err)
			}
			r.killAndWait(t) // the next service must know it, too
		}
		s = mustOpen(t, r.Socket, document)
		_, err := s.Save(t.TempDir(), nil)
		wantError(t, err, protocol.OutOfOrder, "save: the state is incomplete*")
		if err := errors.Join(s.SetStep(5), s.Detach()); err != nil {
			t.Fatal(err)
		}
		s = mustOpen(t, r.Socket, document)
		if !s.Welcome.Initialized || s.Welcome.Step != 5 {
			t.Errorf("set_step 5 has left %+v", s.Welcome)
		}
		// A client that makes a step vouches for the state.
		if err := errors.Join(s.Write(stream, 7, make([]float32, 10)), stepOnce(s, 6), s.Detach()); err != nil {
			t.Fatal(err)
		}
		s = mustOpen(t, r.Socket, document)
		if !s.Welcome.Initialized || s.Welcome.Step != 6 {
			t.Errorf("step 6 has left %+v", s.Welcome)
		}
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestStepsAreOfAWholeState watches sessions whose client never sent set_step. At no
// instant, and so after no kill, is there a step without a whole state.
func TestStepsAreOfAWholeState(t *testing.T) {
	server, socket := serveHere(t)
	for i := range 30 {
		document := testDocument(small, func(d *protocol.Document) { d.Part = fmt.Sprint("part", i) })
		s := mustOpen(t, socket, document)
		server.mu.Lock()
		session := server.all[keyOf(document)]
		server.mu.Unlock()
		var watching sync.WaitGroup
		watching.Go(func() {
			for session.contents.(*heldShard).shard.Steps() == 0 {
			}
			if !session.header.initialized() {
				t.Error("the first step is finished, and the state is not initialized")
			}
		})
		err := s.Step(1, 1, true, adamw...)
		watching.Wait()
		if err := errors.Join(err, s.Detach()); err != nil || t.Failed() {
			t.Fatal(err)
		}
	}
}
