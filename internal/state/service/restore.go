//go:build linux

package service

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/service/protocol"
)

// A service keeps the files of a session under short names: all names go to the next
// service in one variable of its environment. Session 12 has its session header as
// "12", and its arenas, in order, as "12.0", "12.1" and so on.

// keptName returns the name under which an arena of a session is kept.
func keptName(session string, arena int) string { return session + "." + strconv.Itoa(arena) }

// keptSession returns the session of a kept file.
func keptSession(name string) string {
	session, _, _ := strings.Cut(name, ".")
	return session
}

var keptPattern = regexp.MustCompile(`^[0-9]{1,9}(\.[0-9]{1,9})?$`)

// keptNames returns the names under which the arenas of a session are kept. The session
// header comes last: a header that was kept proves that all arenas were.
func keptNames(session string, arenas int) []string {
	names := make([]string, 0, arenas+1)
	for i := range arenas {
		names = append(names, keptName(session, i))
	}
	return append(names, session)
}

// leftSession is a session that an earlier service left.
type leftSession struct {
	name  string
	files map[string]*os.File // by the names under which they are kept
	place arena.Place

	// The session header and the document in it; nil if they could not be read.
	header   *sessionHeader
	document protocol.AnyDocument
	session  *session // as far as it is attached to

	// reason is why the session could not be restored.
	reason error
}

// readHeader reads the session header, unless it was read already.
func (l *leftSession) readHeader() error {
	if l.header != nil {
		return nil
	}
	var err error
	l.header, l.document, err = readHeader(l.name, l.place, l.files[l.name])
	return err
}

// mostAttempts is how many services may die while they restore a session, before it is
// set aside. It allows for services that are killed for other reasons.
const mostAttempts = 5

// errDeadly reports that services died while they restored a session.
var errDeadly = fmt.Errorf("%d services have died while they restored it", mostAttempts)

// restore attaches to the sessions that were kept. It sets aside those that it cannot
// attach to.
func (s *Server) restore() {
	left := s.leftSessions()
	s.divided = map[int]*binding.Assignment{}
	defer func() { s.divided = nil }()
	var attaching sync.WaitGroup
	for _, l := range left {
		if l.readHeader() == nil && l.header.attempts.Load() == 0 {
			attaching.Go(func() { s.attach(l) })
		}
	}
	attaching.Wait()
	// Attach to the others one by one, so that only the deadly one is found to be deadly.
	// A session that failed for want of a resource may succeed without competition.
	for _, l := range left {
		if s.sessionCalled(l.name) == nil {
			s.attach(l)
		}
	}
	for _, l := range left {
		if s.sessionCalled(l.name) == nil {
			s.aside[l.name] = l
			s.logf(`%v is set aside: %v; its memory is kept: "plimsoll restore %s" tries again, and with --discard `+
				"frees the memory", l, l.reason, l.name)
		}
	}
}

// leftSessions groups the files that were kept by session.
func (s *Server) leftSessions() []*leftSession {
	found := map[string]*leftSession{}
	for name, file := range s.given.Files {
		session := keptSession(name)
		if !keptPattern.MatchString(name) {
			session = name
		} else if number, err := strconv.Atoi(session); err == nil {
			s.lastNumber = max(s.lastNumber, number)
		}
		if found[session] == nil {
			found[session] = &leftSession{name: session, files: map[string]*os.File{}, place: s.given.placeOfFile(file)}
		}
		found[session].files[name] = file
	}
	s.given.Files = nil
	var left []*leftSession
	for _, name := range slices.Sorted(maps.Keys(found)) {
		l := found[name]
		if l.files[name] == nil {
			// Files without a session header belong to a session whose open was never
			// answered.
			if err := s.giveBack(l); err != nil {
				s.logf("%v", err)
			}
			continue
		}
		left = append(left, l)
	}
	return left
}

// giveBack has the files of a session forgotten, the session header first.
func (s *Server) giveBack(l *leftSession) error {
	var err error
	if l.header != nil {
		err = l.header.Close()
	}
	for _, name := range slices.Sorted(maps.Keys(l.files)) {
		err = errors.Join(err, s.given.store.forget(name), l.files[name].Close())
	}
	return err
}

// String names the session.
func (l *leftSession) String() string {
	if l.document == nil {
		return "session " + l.name
	}
	return fmt.Sprintf("session %s (job %s, %v)", l.name, l.document.Of().Job, keyOf(l.document))
}

// bytes returns how much memory its files hold.
func (l *leftSession) bytes() ledger.Bytes {
	const block = 512 // the unit of st_blocks
	var bytes ledger.Bytes
	for _, file := range l.files {
		var stat unix.Stat_t
		if unix.Fstat(int(file.Fd()), &stat) == nil {
			bytes += ledger.Bytes(stat.Blocks * block)
		}
	}
	return bytes
}

// attach attaches to a session that was left, or records why it cannot.
func (s *Server) attach(l *leftSession) { l.reason = s.tryAttach(l) }

func (s *Server) tryAttach(l *leftSession) (err error) {
	// A fault or panic in one session must not keep the others from being restored.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if cause := recover(); cause != nil {
			s.logf("%v: restoring it panicked: %v\n%s", l, cause, debug.Stack())
			err = fmt.Errorf("restoring it panicked: %v", cause)
		}
		if err != nil && l.session != nil && l.session.contents != nil {
			err = errors.Join(err, l.session.contents.giveBack()) // the keeper keeps the memory
		}
	}()
	if !keptPattern.MatchString(l.name) {
		return errors.New("this release does not know the names of its files")
	}
	if err := l.readHeader(); err != nil {
		return err
	}
	header, d := l.header, l.document
	if header.attempts.Load() >= mostAttempts {
		return errDeadly
	}
	header.attempts.Add(1)
	err = s.attachContents(l)
	header.attempts.Store(0) // this service did not die
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all[keyOf(d)] != nil || len(s.all)+s.creating > 0 && s.job != d.Of().Job {
		return fmt.Errorf("the service holds the job %s, and it may have a session %v of that job already", s.job,
			keyOf(d))
	}
	session := l.session
	session.contents.resume()
	session.contents.adopt()
	header.Adopt()
	for name, file := range l.files {
		if !slices.Contains(session.keptNames(), name) {
			_ = file.Close() // no arena uses the file
		}
	}
	s.job = d.Of().Job
	s.all[keyOf(d)] = session
	return nil
}

// attachContents attaches to the contents of a session that was left.
func (s *Server) attachContents(l *leftSession) error {
	err := s.attachWith(l, l.document.Of().CPUs)
	if errors.Is(err, engine.ErrBinding) {
		// A cgroup, or switching a CPU off, has taken a CPU from this process since.
		s.logf("session %v: %v; its workers are bound to other CPUs that this process may use", keyOf(l.document), err)
		err = s.attachWith(l, nil)
	}
	return err
}

// attachWith attaches to contents whose workers get the CPUs named, or else the rank's
// share of the CPUs that this process may use.
func (s *Server) attachWith(l *leftSession, named []int) error {
	planned, err := s.design(l.document, named, l.header.options&hasSums != 0, l.header.window())
	if err != nil {
		return err
	}
	files := map[string]*os.File{}
	for i, plan := range planned.arenas {
		files[plan.Name] = l.files[keptName(l.name, i)]
	}
	l.session = s.newSession(l.name, planned, l.place, l.header.kindOfPages(), l.header)
	return planned.attach(l.session, files)
}

// sessionCalled returns the session whose files have a name, or nil.
func (s *Server) sessionCalled(name string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, session := range s.all {
		if session.name == name {
			return session
		}
	}
	return nil
}

// asideNames returns the names of the sessions that were set aside.
func (s *Server) asideNames() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.aside))
}

// restoreAside tries again to restore a session that was set aside, or gives it back.
func (s *Server) restoreAside(b protocol.RestoreBody) error {
	s.restoring.Lock()
	defer s.restoring.Unlock()
	s.mu.Lock()
	l := s.aside[b.Session]
	s.mu.Unlock()
	if l == nil {
		return s.discardDamaged(b)
	}
	if b.Discard {
		s.noLongerAside(l)
		return s.giveBack(l)
	}
	if l.readHeader() == nil {
		l.header.attempts.Store(0) // the user knows that it is deadly
	}
	return prefixed(protocol.Restore, s.tryAgain(l))
}

// tryAgain attaches to a session that was set aside.
func (s *Server) tryAgain(l *leftSession) error {
	if s.attach(l); l.reason != nil {
		return protocol.Refused.Errorf(`%v: %v; its memory is kept, and "plimsoll restore --discard %s" `+
			"frees it", l,
			l.reason, l.name)
	}
	s.noLongerAside(l)
	s.logf("%v is restored", l)
	return nil
}

func (s *Server) noLongerAside(l *leftSession) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.aside, l.name)
}

// checkAside tries again to restore the session that a client opens, if it was set
// aside. A client must not begin anew while its state is kept.
func (s *Server) checkAside(d protocol.AnyDocument) error {
	s.restoring.Lock()
	defer s.restoring.Unlock()
	for _, name := range s.asideNames() {
		s.mu.Lock()
		l := s.aside[name]
		s.mu.Unlock()
		switch {
		case l.document == nil || l.document.Of().Job != d.Of().Job:
			return protocol.Busy.Errorf("%v is set aside and may be of another job (%v); restore it (plimsoll "+
				"restore %s) or free its memory (--discard)", l, l.reason, name)
		case keyOf(l.document) != keyOf(d):
		case errors.Is(l.reason, errDeadly):
			return protocol.Refused.Errorf("%v is set aside: %v; restore it (plimsoll restore %s) or free its "+
				"memory (--discard)", l, l.reason, name)
		default:
			if err := s.tryAgain(l); err != nil {
				return err
			}
		}
	}
	return nil
}

// Descriptors that are needed beside those of the arenas.
const (
	descriptorsOfSession = 2  // for the connection, and a file that is being saved
	descriptorsOfService = 32 // for files that are opened now and then
)

// longestVariable is the kernel's limit on one variable of an environment.
const longestVariable = 128 << 10

// checkKept refuses a session if the next service could not take over all files with
// it.
func (s *Server) checkKept(name string, arenas int) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	kept := keptNames(name, arenas)
	sessions := 1
	s.mu.Lock()
	for _, session := range s.all {
		kept = append(kept, session.keptNames()...)
		sessions++
	}
	for _, l := range s.aside {
		kept = slices.AppendSeq(kept, maps.Keys(l.files))
	}
	s.mu.Unlock()
	store := s.given.store
	if needed := len(kept) + sessions*descriptorsOfSession + descriptorsOfService; uint64(needed) > limit.Cur {
		return protocol.DoesNotFit.Errorf("with this session the service needs %d file descriptors, but may "+
			"have only %d; %s",
			needed, limit.Cur, moreDescriptors)
	}
	if store != nil && store.most > 0 && len(kept) > store.most {
		return protocol.DoesNotFit.Errorf("with this session the service has %d files to keep, but systemd "+
			"keeps only %d; raise FileDescriptorStoreMax=", len(kept), store.most)
	}
	if length := len(inheritedNames + "=" + socketName + ":" + strings.Join(kept, ":")); length >= longestVariable {
		return protocol.DoesNotFit.Errorf("with this session the service has %d files to keep, and their names "+
			"take %d bytes, more than the kernel passes to the next service (%d); use several services",
			len(kept), length,
			longestVariable)
	}
	return nil
}

// newName returns a name that no session with kept files has.
func (s *Server) newName() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastNumber++
	return strconv.Itoa(s.lastNumber)
}

// keepArenas has the keeper keep the arenas of a new session.
func (s *Server) keepArenas(made *session) error {
	return s.keep(made, made.keptNames()[:len(made.arenas())-1]...)
}

// keepHeader has the keeper keep the session header, and with it the session.
func (s *Server) keepHeader(made *session) error { return s.keep(made, made.name) }

// forgetKept has the keeper forget all files of a session that could not be made. Some may not have been kept.
func (s *Server) forgetKept(made *session) {
	for _, name := range slices.Backward(made.keptNames()) {
		_ = s.given.store.forget(name)
	}
}

// keep has the keeper keep some files of a session. If that fails it has all of them
// forgotten.
func (s *Server) keep(made *session, names ...string) error {
	store, all := s.given.store, made.keptNames()
	var err error
	kept := 0
	for i, name := range all {
		if err == nil && slices.Contains(names, name) {
			err = store.keep(name, made.arenas()[i])
			kept = i + 1
		}
	}
	if err == nil {
		err = store.confirm(made.name, kept)
	}
	if err == nil {
		return nil
	}
	s.forgetKept(made)
	return protocol.Refused.Errorf("the state would not outlive the service: %v", err)
}
