//go:build linux

package service

import (
	"fmt"
	"time"
)

// stepPatience is how long a step may go on without finishing a chunk. A step waits for
// the disk while a save needs memory that is not free. It waits for as long as the file
// system does not answer.
var stepPatience = 5 * time.Minute

// stepWatch is the progress of a step, and when it was last seen to change.
type stepWatch struct {
	number uint64
	left   int64
	since  time.Time
}

// stuckStep reports a step that no longer makes progress. The service ends with this
// error. Its keeper starts another one, which finishes the step without the save.
func (s *Server) stuckStep() error {
	s.mu.Lock() // while it is held, no session is unmapped
	defer s.mu.Unlock()
	for key, session := range s.all {
		number, left := session.contents.underway()
		w := &session.watched
		if number == 0 || number != w.number || left != w.left {
			*w = stepWatch{number, left, time.Now()}
			continue
		}
		if stuck := time.Since(w.since); stuck >= stepPatience {
			return fmt.Errorf("the step of session %v has made no progress for %v: it waits for memory, or for the "+
				"file system of a checkpoint; the service finishes the step without that checkpoint",
				key, stepPatience)
		}
	}
	return nil
}
