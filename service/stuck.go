package service

import (
	"fmt"
	"time"
)

// stepPatience is how long no chunk of a step may be finished. A step waits for the
// disk where a save needs memory that is not there, and then for as long as the file
// system does not answer.
var stepPatience = 5 * time.Minute

// stepWatch is how far a step was, and since when.
type stepWatch struct {
	number uint64
	left   int64
	since  time.Time
}

// stuckStep finds a step that gets on no more. The service ends with this error: the
// one that its keeper starts after it finishes the step, without the save.
func (s *Server) stuckStep() error {
	s.mu.Lock() // until it is given back, nobody unmaps a session
	defer s.mu.Unlock()
	for key, session := range s.all {
		number, left := session.shard.Underway()
		w := &session.watched
		if number == 0 || number != w.number || left != w.left {
			*w = stepWatch{number, left, time.Now()}
			continue
		}
		if stuck := time.Since(w.since); stuck >= stepPatience {
			return fmt.Errorf("the step of session %v has made no progress for %v: "+
				"it waits for memory, or for the file system of a checkpoint, and is finished without that checkpoint",
				key, stepPatience)
		}
	}
	return nil
}
