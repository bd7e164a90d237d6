package service

import (
	"errors"
	"fmt"
	"time"
)

// A service that is asked to end waits this long without progress: for requests,
// and for checkpoints that are being written.
var (
	endPatience  = 5 * time.Second
	savePatience = 5 * time.Minute
	endNotice    = 10 * time.Second
)

// end finishes what is under way. A request that makes no progress is left: the
// process ends without its answer.
func (s *Server) end() error {
	err := s.given.store.stopping()
	s.mu.Lock()
	s.closing = true
	for c := range s.open {
		_ = c.c.CloseRead() // the answer to the request under way is still sent
		c.hurry()
	}
	s.mu.Unlock()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		s.serving.Wait()
		for _, session := range s.all {
			session.settle()
			session.settleSave()
		}
	}()
	if left := s.await(finished); left != nil {
		return errors.Join(err, left) // requests that are left use the memory until the process ends
	}
	for _, session := range s.all {
		s.remove(session)
		err = errors.Join(err, session.saveError, session.close())
	}
	return err
}

// progress differs from one moment to the next while a service that is asked to
// end gets on.
type progress struct {
	clients int
	steps   int64
	saved   int64 // as checkpoint.Saving counts it
}

// await waits until all is finished, or nothing gets on any more. Meanwhile it
// tells the keeper to wait, too.
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
			return fmt.Errorf("requests are left without an answer: they have made no progress for %v (clients: %d)",
				endPatience, now.clients)
		case writing && !noticed && time.Since(began) >= endNotice:
			noticed = true
			s.say("a checkpoint is being written, and the service ends after it; " +
				"a second Ctrl-C or SIGTERM ends it at once, without that checkpoint")
		}
		s.given.store.extend()
	}
}

// underway is how far the service is, and whether a checkpoint is being written.
func (s *Server) underway() (now progress, writing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		now.clients++
		switch Kind(c.kind.Load()) {
		case Save, Saved, Commit:
			writing = true
		}
	}
	for _, session := range s.all {
		now.steps += session.shard.Steps()
		if saving := session.written.Load(); saving != nil {
			writing = true
			now.saved += saving.Progress()
		}
	}
	return now, writing
}
