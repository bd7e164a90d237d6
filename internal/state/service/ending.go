//go:build linux

package service

import (
	"errors"
	"fmt"
	"time"
)

// A service that was asked to end gives up after this long without progress of requests, or of checkpoints being
// written.
var (
	endPatience  = 5 * time.Second
	savePatience = 5 * time.Minute
	endNotice    = 10 * time.Second
)

// end finishes the requests and checkpoints under way. It gives up on a request that
// makes no progress: the process ends without the answer.
func (s *Server) end() error {
	err := s.given.store.stopping()
	s.mu.Lock()
	s.closing = true
	for c := range s.open {
		_ = c.c.CloseRead() // the answer to the request under way can still be sent
		c.hurry()
	}
	s.mu.Unlock()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		s.serving.Wait()
		for _, session := range s.all {
			session.contents.settle()
			session.settleSave()
		}
	}()
	if left := s.await(finished); left != nil {
		return errors.Join(err, left) // unfinished requests still use the memory
	}
	for _, session := range s.all {
		s.remove(session)
		err = errors.Join(err, session.saveError, session.close())
	}
	return err
}

// progress is a snapshot of the work under way. While a service that is asked to end
// makes progress, it changes.
type progress struct {
	clients int
	steps   int64
	left    int64 // chunks of the steps under way
	saved   int64 // as counted by checkpoint.Saving
}

// await waits until all work is finished, or until nothing makes progress any more. Meanwhile it asks the keeper to
// wait, too.
func (s *Server) await(finished <-chan struct{}) error {
	began, noticed := time.Now(), false
	var last progress
	lastChange := began
	tick := time.NewTicker(endPatience / 10)
	defer tick.Stop()
	for {
		select {
		case <-finished:
			return nil
		case <-tick.C:
		}
		now, writing := s.underway()
		if now != last {
			last, lastChange = now, time.Now()
		}
		still := time.Since(lastChange)
		switch {
		case writing && still >= savePatience:
			return fmt.Errorf("a checkpoint is not finished: nothing of it has reached the disk for %v; "+
				"does its file system answer?", savePatience)
		case !writing && still >= endPatience:
			return fmt.Errorf("the service ends without answering some requests, which have made no progress for %v "+
				"(clients: %d)",
				endPatience, now.clients)
		case writing && !noticed && time.Since(began) >= endNotice:
			noticed = true
			s.logf("a checkpoint is being written, and the service ends after it; " +
				"a second Ctrl-C or SIGTERM ends it at once, without that checkpoint")
		}
		s.given.store.extend()
	}
}

// underway returns the progress so far, and whether a checkpoint is being written.
func (s *Server) underway() (now progress, writing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		now.clients++
		writing = writing || requests[c.kind.Load()].is(onDisk)
	}
	for _, session := range s.all {
		_ = session.guard(func() { // a session whose memory has changed makes no progress
			now.steps += session.contents.steps()
			_, left := session.contents.underway()
			now.left += left
		})
		if saving := session.written.Load(); saving != nil {
			writing = true
			now.saved += saving.Progress()
		}
	}
	return now, writing
}
