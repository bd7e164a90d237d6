// Package service is the optimizer service: a process that owns the optimizer state of
// all ranks of a host in shared memory. It updates the state for trainers that map the
// same pages. The package holds the protocol (docs/protocol.md), its two sides, and the
// keeper, which restarts a service that died. State outlives trainer and service.
//
// # Two-phase commit
//
// A step of several shards is a two-phase commit: prepare, then step. First, every
// trainer sends prepare. Its gradients are final, and the session header keeps the
// step's hyperparameters. When all trainers know that all have prepared, each sends
// step. The header keeps this request and its factor, too.
//
// The trainers may die after some of them have sent step. Then some sessions are at
// step N, and the others at N-1 with step N prepared. The next trainers ask the latter
// for the prepared step N, with the factor of the former. So all shards make a step, or
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
// A slice of an arena, or of the window, lives as long as its mapping. [Session.Detach]
// and [Session.Close] unmap a trainer's arenas; the service unmaps a session's arenas
// when it gives the state back. A new window request, or the end of the connection,
// unmaps the old window. Any later access to such a slice ends the process.
package service

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/arena"
	"plimsoll/binding"
	"plimsoll/engine"
	"plimsoll/host"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// Server is the optimizer service.
type Server struct {
	version  string
	kernel   kernel.Set
	say      func(format string, values ...any)
	host     func() (*host.Host, error)
	given    *Inherited
	until    context.Context // of Serve
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
// the steps that were under way.
func NewServer(version string, given *Inherited, findHost func() (*host.Host, error),
	say func(format string, values ...any)) (*Server, error) {
	set, err := kernel.Select()
	if err != nil {
		return nil, err
	}
	s := &Server{
		version: version, kernel: set, say: say, host: findHost, given: given, began: time.Now(),
		all: map[key]*session{}, held: map[key]*connection{}, open: map[*connection]bool{},
		released: make(chan struct{}), aside: map[string]*leftSession{},
	}
	s.restore()
	return s, nil
}

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
			_ = listener.SetDeadline(time.Now().Add(interval)) // if closed, AcceptUnix reports it
			if err := s.stuckStep(); err != nil {
				return err
			}
		}
		c, err := listener.AcceptUnix()
		switch {
		case ctx.Err() != nil:
			return s.end()
		case errors.Is(err, os.ErrDeadlineExceeded): // a sign of life is due
		case errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE):
			if !s.hangUpOnIdle(0) && !s.outOfFiles {
				s.say("too many open files (ulimit -n): clients wait until others go")
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

func (s *Server) serve(c *net.UnixConn) {
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
	s.letGoOf(free.document.key())
}

// letGoOf is letGo for a caller that holds the mutex.
func (s *Server) letGoOf(k key) {
	delete(s.held, k)
	close(s.released)
	s.released = make(chan struct{})
}

// openSession answers open: it creates a session, or attaches to one that exists.
func (c *connection) openSession(r request) (reply, error) {
	if c.session != nil {
		return reply{}, fail(OutOfOrder, "open: this connection has a session already")
	}
	d, text, err := readDocument(r)
	if err != nil {
		return reply{}, err
	}
	s := c.server
	if err := s.checkAside(d); err != nil {
		return reply{}, err
	}
	found, err := s.claim(d, c)
	attached := found != nil
	if err == nil && !attached {
		found, err = s.create(d, text)
	}
	if err != nil {
		return reply{}, err
	}
	c.session = found
	found.forgetFailures()
	found.holder.Store(int64(c.process))
	return c.welcome(attached)
}

// claim reserves the name of a session for a connection. It returns the session if it
// exists, or nil if the caller must create it.
func (s *Server) claim(d *Document, c *connection) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.awaitRelease(d, c); err != nil {
		return nil, err
	}
	if len(s.all)+s.creating > 0 && s.job != d.Job {
		return nil, fail(Busy, "open: this service holds the job %s, and not %s; it takes another when that one's "+
			"sessions are closed", s.job, d.Job)
	}
	found := s.all[d.key()]
	if found != nil {
		if err := d.same(found.document); err != nil {
			return nil, fail(Refused, "open: session %v of job %s is there and differs: %v; close it, or give the "+
				"job another name", d.key(), d.Job, err)
		}
	}
	if holder := s.held[d.key()]; holder != nil {
		return nil, fail(Busy, "open: session %v of job %s is held by process %d%s", d.key(), d.Job, holder.process,
			toItself(holder, c))
	}
	s.held[d.key()] = c
	if found == nil {
		s.job = d.Job
		s.creating++
	}
	return found, nil
}

var (
	// claimPatience is how long open waits for a holder that hung up while its last
	// request is still under way.
	claimPatience = 5 * time.Minute
	// claimNotice is when the service tells the user that open waits.
	claimNotice = 10 * time.Second
)

// awaitRelease waits, without the mutex, until a holder that hung up has released the
// session.
func (s *Server) awaitRelease(d *Document, c *connection) error {
	began, noticed := time.Now(), false
	for holder := s.held[d.key()]; holder != nil && holder.gone(); holder = s.held[d.key()] {
		holder.abandon()
		waited := time.Since(began)
		switch {
		case s.closing:
			return errEnding
		case c.gone():
			return fail(Busy, "open: the client has hung up while it waited for session %v", d.key())
		case waited >= claimPatience:
			return fail(Busy, "open: session %v of job %s is held by process %d, which has hung up; its %v is still "+
				"under way after another %v. "+
				"The files that it works on may be on a file system that does not answer; when that answers, open "+
				"the session again",
				d.key(), d.Job, holder.process, holder.doing(), claimPatience)
		case waited >= claimNotice && !noticed:
			noticed = true
			s.withoutMutex(func() {
				s.say("process %d waits for session %v: process %d has hung up, and its %v is still under way",
					c.process, d.key(), holder.process, holder.doing())
			})
		}
		released := s.released
		s.withoutMutex(func() {
			select {
			case <-released:
			case <-time.After(200 * time.Millisecond): // look again whether the client is still there
			}
		})
	}
	return nil
}

// withoutMutex runs a function that may block.
func (s *Server) withoutMutex(body func()) {
	s.mu.Unlock()
	defer s.mu.Lock()
	body()
}

// toItself adds a hint for a program that opens the same session twice.
func toItself(holder, c *connection) string {
	if holder.process != c.process {
		return ""
	}
	return ", which is this one; give each optimizer of a program a name of its own (name= in Python), and so its " +
		"session a part of its own"
}

// create makes the session that was claimed. If that fails it gives the claim back. The
// text is the one that the document was parsed from.
func (s *Server) create(d *Document, text []byte) (*session, error) {
	made, err := s.make(d, text)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creating--
	if err != nil {
		s.letGoOf(d.key())
	}
	return made, err
}

// make makes a session after checking that it fits. Sessions allocate one after the
// other: each check must see what the session before it took.
func (s *Server) make(d *Document, text []byte) (*session, error) {
	s.allocating.Lock()
	defer s.allocating.Unlock()
	h, err := s.host()
	if err != nil {
		return nil, err
	}
	cpus, err := s.cpus(d)
	if err != nil {
		return nil, err
	}
	config, err := d.config(s.kernel, arena.BasePages, cpus)
	if err != nil {
		return nil, fail(Refused, "open: %v", err)
	}
	config.Pages = engine.ChoosePages(h, slices.Repeat([]engine.ShardConfig{config}, s.expected(d)))
	if err := s.checkRoom(h, d, config); err != nil {
		return nil, err
	}
	name := s.newName()
	if err := s.checkKept(name, len(config.Arenas())); err != nil {
		return nil, err
	}
	shard, err := engine.NewShard(config)
	if err != nil {
		return nil, fail(Refused, "open: %v", err)
	}
	record, err := newRecord(d, text, config.Pages)
	if err != nil {
		return nil, errors.Join(fail(Refused, "open: %v", err), shard.Close())
	}
	made := s.newSession(name, d, shard, record)
	err = s.keepArenas(made)
	if err == nil {
		populate(shard)
		err = s.keepRecord(made)
	}
	if err != nil {
		return nil, errors.Join(err, made.close())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[d.key()] = made
	return made, nil
}

// expected returns how many sessions like this one are still to be opened on this host,
// this one included.
func (s *Server) expected(d *Document) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := d.LocalWorld
	for k := range s.all {
		if k.part == d.partOfSession() {
			left--
		}
	}
	return max(1, left)
}

// checkRoom refuses a job that does not fit, before the first byte is allocated. It
// counts the other ranks of this host, which need as much each.
func (s *Server) checkRoom(h *host.Host, d *Document, config engine.ShardConfig) error {
	var needed, largest, pool ledger.Bytes
	for _, a := range config.Arenas() {
		needed += config.Pages.Round(a.Size)
		largest = max(largest, config.Pages.Round(a.Size))
	}
	if config.Pages == arena.HugetlbPages {
		pool = engine.HugetlbFree(h)
	}
	if short := h.Shortage(len(config.CPUs)+threadsBeside, largest); short != "" {
		return fail(DoesNotFit, "open: %s; raise that limit where the service is started", short)
	}
	available, counter := h.Memory.HeadroomWith(pool)
	ranks := s.expected(d)
	if whole := needed * ledger.Bytes(ranks); counter != "" && whole > available {
		return fail(DoesNotFit, "open: the state of %d parameters in %v takes %v a rank, %v for the %d ranks of this "+
			"host that are still to come, and %v are available (%s); use a smaller format (moments \"bf16\" or "+
			"\"int8\"), more hosts, or fewer ranks on this one",
			config.Elements, config.Format, needed, whole, ranks, available, counter)
	}
	return nil
}

// cpus returns the CPUs that the document names, or else the rank's share of the CPUs
// that this process may use.
func (s *Server) cpus(d *Document) ([]int, error) {
	if len(d.CPUs) > 0 {
		return d.CPUs, nil
	}
	plan, err := s.divide(d.LocalWorld)
	if err != nil {
		return nil, err
	}
	return plan.Ranks[d.Rank%d.LocalWorld].OptimizerCPUs.List(), nil
}

// divide splits the CPUs that this process may use among the ranks of this host. For
// hundreds of ranks this takes long, so restore computes it once for all sessions.
func (s *Server) divide(ranks int) (*binding.Assignment, error) {
	s.dividing.Lock()
	defer s.dividing.Unlock()
	if plan := s.divided[ranks]; plan != nil {
		return plan, nil
	}
	h, err := s.host()
	if err != nil {
		return nil, err
	}
	plan, err := binding.Split(h, binding.Request{Ranks: ranks})
	if err == nil && s.divided != nil {
		s.divided[ranks] = plan
	}
	return plan, err
}

// remove hides a session from Overview before its memory is unmapped.
func (s *Server) remove(gone *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, gone.document.key())
}

// forget gives the state of a session back. The session stays claimed meanwhile: a new
// one of its name would need the same file names, and the memory.
func (s *Server) forget(gone *session) error {
	defer s.letGo(gone)
	s.remove(gone)
	var err error
	// The session header goes first: files without one belong to no session.
	for _, name := range slices.Backward(gone.keptNames()) {
		err = errors.Join(err, s.given.store.forget(name))
	}
	return errors.Join(err, gone.close())
}
