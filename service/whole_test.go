package service

import (
	"errors"
	"sync"
	"testing"
)

// TestStepsAreOfAWholeState looks at sessions whose client has not said set_step:
// at no instant is there a step and no state of it, as would be found after a kill.
func TestStepsAreOfAWholeState(t *testing.T) {
	server, socket := serveHere(t)
	for range 300 {
		s := mustOpen(t, socket, testDocument(small))
		server.mu.Lock()
		session := server.all[testDocument(small).key()]
		server.mu.Unlock()
		var watching sync.WaitGroup
		watching.Go(func() {
			for session.shard.Steps() == 0 {
			}
			if !session.record.initialized() {
				t.Error("the first step is finished, and the state is not initialized")
			}
		})
		err := s.Step(1, 1, true, adamw...)
		watching.Wait()
		if err := errors.Join(err, s.Close()); err != nil || t.Failed() {
			t.Fatal(err)
		}
	}
}
