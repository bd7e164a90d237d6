//go:build linux

package service

import (
	"fmt"

	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/service/protocol"
)

// A session whose memory has changed by itself answers no request but close. Nothing of it is published any more. It
// stays with the keeper until the user gives it back, so that nobody takes a new session for it.

// err returns what was found damaged, or nil.
func (s *session) err() error {
	if err := s.damage.Load(); err != nil {
		return *err
	}
	if s.contents == nil {
		return nil
	}
	return s.contents.err()
}

// fail records damage. The first error stays.
func (s *session) fail(err error) {
	if s.damage.CompareAndSwap(nil, &err) {
		s.logf("session %v: %v", keyOf(s.document), err)
	}
}

// guard calls a function that reads the header or the contents, and records the damage that it panics with. It returns
// what is damaged.
func (s *session) guard(use func()) error {
	func() {
		defer s.catch()
		use()
	}()
	return s.err()
}

// catch records damage that the caller panics with. It is deferred.
func (s *session) catch() {
	switch cause := recover().(type) {
	case nil:
	case *checked.Damage:
		if err := s.header.named(cause); err != nil {
			s.fail(err)
		} else {
			s.fail(s.contents.named(cause))
		}
	default:
		panic(cause)
	}
}

// refuseDamaged refuses a request to a damaged session.
func (s *session) refuseDamaged(kind protocol.Kind) error {
	err := s.err()
	if err == nil {
		return nil
	}
	return protocol.Refused.Errorf(`%v: session %v: %v; its memory is kept, and "plimsoll restore --discard %s" frees `+
		"it", kind, keyOf(s.document), err, s.name)
}

// damagedSession returns the damaged session of a name that no client has, or nil.
func (s *Server) damagedSession(name string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, session := range s.all {
		if session.name == name && session.err() != nil && s.held[key] == nil {
			return session
		}
	}
	return nil
}

// discardDamaged gives a damaged session back.
func (s *Server) discardDamaged(b protocol.RestoreBody) error {
	damaged := s.damagedSession(b.Session)
	switch {
	case damaged == nil:
		return protocol.Refused.Errorf("restore: no session is set aside as %q: there are %q", b.Session,
			s.asideNames())
	case !b.Discard:
		return damaged.refuseDamaged(protocol.Restore)
	}
	return s.forget(damaged, true)
}

// setAside is the status of a damaged session.
func (s *session) setAside() protocol.SetAside {
	of := s.document.Of()
	status := protocol.SetAside{Name: s.name, Reason: fmt.Sprint(s.err()), Job: of.Job, Rank: of.Rank, Part: of.Part}
	for _, a := range s.arenas() {
		if bytes, err := a.Resident(); err == nil {
			status.Bytes += bytes
		}
	}
	return status
}
