//go:build linux

// Package service is the optimizer service: a process that owns the optimizer state of
// all ranks of a host in shared memory. It updates the state for trainers that map the
// same pages. The package also holds the keeper, which restarts a service that died.
// State outlives trainer and service. Package protocol has the messages between them.
//
// # Two-phase commit
//
// A step of several shards is a two-phase commit: prepare, then step. First, every
// trainer sends prepare. Its gradients are final, and the session header keeps the
// step's hyperparameters. When all trainers know that all have prepared, each sends
// step. The header keeps this request and its grad scale, too.
//
// The trainers may die after some of them have sent step. Then some sessions are at
// step N, and the others at N-1 with step N prepared. The next trainers ask the latter
// for the prepared step N, with the grad scale of the former. So all shards make a step, or
// none does.
//
// # Caveats
//
// One goroutine serves each connection, one request at a time. At most one connection
// holds a session, and only its goroutine puts the session's workers to work. The
// worker that finishes a step sends the answer to that step; the connection's goroutine
// waits for it before the next answer. The holder of Server.mu must not block: the
// goroutine of [Server.Serve] takes it for every sign of life.
//
// A slice of an arena, or of the window, lives as long as its mapping. The service unmaps
// a session's arenas when it gives the state back. A new window request, or the end of the connection,
// unmaps the old window. Any later access to such a slice ends the process.
package service

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/protocol"
)

// Server is the optimizer service.
type Server struct {
	version  string
	kernel   kernel.Set
	logf     func(format string, values ...any)
	host     func() (*host.Host, error)
	share    func(h *host.Host, ranks int) binding.TrainerShare
	given    *Inherited
	until    context.Context // of Serve
	sums     Sums
	tier     Tier
	began    time.Time
	requests atomic.Int64
	refused  atomic.Int64

	// Only the goroutine of Serve uses these.
	lastSign   time.Time // when the keeper last heard from this service
	outOfFiles bool      // the user was told of it

	allocating sync.Mutex    // held while a session allocates memory
	mu         sync.Mutex    // guards the fields below; its holder never blocks
	released   chan struct{} // closed, and made anew, when a session is released
	job        string
	all        map[key]*session
	creating   int                 // number of sessions being created
	held       map[key]*connection // also while a session is created or given back
	open       map[*connection]bool
	closing    bool
	serving    sync.WaitGroup
	// aside holds the sessions of an earlier service that could not be restored, by the
	// name of their files.
	aside      map[string]*leftSession
	lastNumber int // the last number given to a session as its name

	restoring sync.Mutex // held while a session that was set aside is tried again

	dividing sync.Mutex
	divided  map[int]*binding.Assignment // by number of ranks; nil unless sessions are being restored
}

// NewServer returns a service with the sessions that an earlier one left. It finishes
// the steps that were under way. The function share says which cores of a rank the
// service leaves to the trainer. With a tier, its caller has locked the folders.
func NewServer(version string, given *Inherited, findHost func() (*host.Host, error),
	share func(h *host.Host, ranks int) binding.TrainerShare, tier Tier,
	logf func(format string, values ...any)) (*Server, error) {
	set, err := kernel.Select()
	if err != nil {
		return nil, err
	}
	s := &Server{
		version: version, kernel: set, logf: logf, host: findHost, share: share, tier: tier, given: given,
		began: time.Now(),
		all:   map[key]*session{}, held: map[key]*connection{}, open: map[*connection]bool{},
		released: make(chan struct{}), aside: map[string]*leftSession{},
	}
	s.restore()
	return s, nil
}

// SetSums says which sessions that are opened from now on have sums of their state.
func (s *Server) SetSums(sums Sums) { s.sums = sums }

// Serve answers clients until the context ends. Then it finishes the requests and
// checkpoints under way and returns.
//
// Its loop also sends the signs of life that the keeper waits for. A loop that accepts
// clients and gets the mutex is not stuck.
func (s *Server) Serve(ctx context.Context) error {
	s.until = ctx
	if err := s.given.store.ready(); err != nil {
		return err
	}
	listener := s.given.Listener
	stopped := context.AfterFunc(ctx, func() { _ = listener.Close() }) // accept fails, and ends the loop
	defer stopped()
	for {
		if interval := s.signOfLife(); interval > 0 {
			_ = listener.SetDeadline(time.Now().Add(interval)) // if closed, AcceptClient reports it
			if err := s.stuckStep(); err != nil {
				return err
			}
		}
		c, err := listener.AcceptClient()
		switch {
		case ctx.Err() != nil:
			return s.end()
		case errors.Is(err, os.ErrDeadlineExceeded): // a sign of life is due
		case errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE):
			if !s.hangUpOnIdle(0) && !s.outOfFiles {
				s.logf("too many open files (ulimit -n): clients wait until others go")
				s.outOfFiles = true
			}
			time.Sleep(100 * time.Millisecond)
		case err != nil:
			return fmt.Errorf("accept: %w", err)
		default:
			s.outOfFiles = false
			s.serve(c)
			s.hangUpOnIdle(portion(mostIdle))
		}
	}
}

// signOfLife tells the keeper that this service is not stuck. It returns the time until
// the next sign is due; 0 means never.
func (s *Server) signOfLife() time.Duration {
	interval := s.given.watchdog / 3
	if interval == 0 {
		return 0
	}
	due := s.lastSign.Add(interval)
	if now := time.Now(); !now.Before(due) {
		s.mu.Lock() // a stuck service waits here forever, and sends no sign
		s.lastSign, due = now, now.Add(interval)
		s.mu.Unlock()
		s.given.store.alive()
	}
	return time.Until(due)
}

func (s *Server) ending() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

func (s *Server) serve(c protocol.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	client := newConnection(s, c)
	if s.closing {
		_ = c.Close()
		return
	}
	s.open[client] = true
	s.serving.Go(func() {
		client.run()
		s.mu.Lock()
		delete(s.open, client)
		s.mu.Unlock()
	})
}

// letGo marks a session as held by nobody.
func (s *Server) letGo(free *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.letGoOf(keyOf(free.document))
}

// letGoOf is letGo for a caller that holds the mutex.
func (s *Server) letGoOf(k key) {
	delete(s.held, k)
	close(s.released)
	s.released = make(chan struct{})
}

// remove hides a session from Overview before its memory is unmapped.
func (s *Server) remove(gone *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, keyOf(gone.document))
}

// forget gives the state of a session back. The session stays claimed meanwhile: a new
// one of its name would need the same file names, and the memory. The files of a tier are removed, unless
// they are to be kept.
func (s *Server) forget(gone *session, keepTier bool) error {
	defer s.letGo(gone)
	s.remove(gone)
	var err error
	// The session header goes first: files without one belong to no session.
	for _, name := range slices.Backward(gone.keptNames()) {
		err = errors.Join(err, s.given.store.forget(name))
	}
	keepTier = keepTier || gone.err() != nil // the files may be better than what was found damaged
	if err = errors.Join(err, gone.close()); keepTier {
		return err
	}
	return errors.Join(err, gone.removeTier())
}
