// Package service is the optimizer service: a process that owns the optimizer
// state of all ranks of a host in shared memory, and updates it for trainers
// that have the same pages mapped. It holds the protocol (docs/protocol.md),
// both of its sides, and the keeper, which starts the service again when it
// dies. State outlives trainer and service.
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

// Server is the service.
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

	// Of Serve alone.
	lastSign   time.Time // of life, to the keeper
	outOfFiles bool      // this was said

	allocating sync.Mutex    // one session at a time takes memory
	mu         sync.Mutex    // guards what follows; nobody waits while he has it
	released   chan struct{} // closed, and made anew, when a session is released
	job        string
	all        map[key]*session
	creating   int                 // sessions that are being made
	held       map[key]*connection // also while a session is being made or given back
	open       map[*connection]bool
	closing    bool
	serving    sync.WaitGroup
	// aside are sessions of an earlier service that could not be restored, by the
	// name that their files are kept as.
	aside      map[string]*leftSession
	lastNumber int // of a name of a session

	restoring sync.Mutex // one session that was set aside is tried at a time

	dividing sync.Mutex
	divided  map[int]*binding.Plan // by number of ranks; nil when nothing is being restored
}

// NewServer is a service with the sessions that an earlier one has left. Steps
// that were under way are finished when it returns.
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

// Serve answers clients until the context ends. Then it finishes what is under
// way, checkpoints that are written included, and returns.
//
// This loop also sends the signs of life that the keeper waits for: who accepts
// clients and finds the mutex free is not stuck.
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
			_ = listener.SetDeadline(time.Now().Add(interval)) // fails where it is closed, which accept tells
			if err := s.stuckStep(); err != nil {
				return err
			}
		}
		c, err := listener.AcceptUnix()
		switch {
		case ctx.Err() != nil:
			return s.end()
		case errors.Is(err, os.ErrDeadlineExceeded): // it is time for a sign of life
		case errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE):
			if !s.hangUpOnIdle(0) && !s.outOfFiles {
				s.say("too many open files (ulimit -n): clients wait until others go")
				s.outOfFiles = true // said once
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

// signOfLife tells the keeper that this service is not stuck. It returns when the
// next sign is due, 0 for never.
func (s *Server) signOfLife() time.Duration {
	interval := s.given.watchdog / 3
	if interval == 0 {
		return 0
	}
	due := s.lastSign.Add(interval)
	if now := time.Now(); !now.Before(due) {
		s.mu.Lock() // a service in which this waits forever is stuck
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

// letGo says that nobody holds a session any more.
func (s *Server) letGo(free *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.letGoOf(free.document.key())
}

// letGoOf says the same with the mutex held.
func (s *Server) letGoOf(k key) {
	delete(s.held, k)
	close(s.released)
	s.released = make(chan struct{})
}

// openSession is the request that begins: it makes a session, or attaches to
// one.
func (c *connection) openSession(body []byte, files []*os.File) ([]byte, []*os.File, error) {
	if c.session != nil {
		return nil, nil, fail(OutOfOrder, "open: this connection has a session already")
	}
	d, text, err := readDocument(body, files)
	if err != nil {
		return nil, nil, err
	}
	s := c.server
	if err := s.checkAside(d); err != nil {
		return nil, nil, err
	}
	found, err := s.claim(d, c)
	attached := found != nil
	if err == nil && !attached {
		found, err = s.create(d, text)
	}
	if err != nil {
		return nil, nil, err
	}
	c.session = found
	found.forgetFailures()
	found.holder.Store(int64(c.process))
	return c.welcome(attached)
}

// claim takes the name of a session for a connection, and the session itself if
// it is there already; nil is none, and the caller makes it.
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

// How long open waits for a client that has hung up while its last request is
// still under way, and when the service says so.
var (
	claimPatience = 5 * time.Minute
	claimNotice   = 10 * time.Second
)

// awaitRelease waits, without the mutex, until a former holder that has hung up
// has let go of a session.
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
			case <-time.After(200 * time.Millisecond): // to see whether the client is still there
			}
		})
	}
	return nil
}

// withoutMutex does what may wait for somebody.
func (s *Server) withoutMutex(body func()) {
	s.mu.Unlock()
	defer s.mu.Lock()
	body()
}

// toItself is for a program that opens a session twice.
func toItself(holder, c *connection) string {
	if holder.process != c.process {
		return ""
	}
	return ", which is this one; give each optimizer of a program a name of its own (name= in Python), and so its " +
		"session a part of its own"
}

// create makes a session that was claimed, of a document that was read from a text, or
// gives the claim back.
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

// make makes a session, once it is known to fit. What one session takes must be
// taken before the next looks at what there is.
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
	made := newSession(name, d, shard, record)
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

// expected is how many sessions like this one are still to be opened here: this
// one, and those of the other ranks.
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

// checkRoom refuses a job that does not fit before the first byte of it is
// allocated: the other ranks of this host need as much.
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

// cpus are those that the document names, or the rank's part of what this
// process may use.
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

// divide divides what this process may use among the ranks of this host. While many
// sessions are restored at once that is done once: for hundreds of ranks it takes long.
func (s *Server) divide(ranks int) (*binding.Plan, error) {
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

// remove hides a session whose memory is about to be unmapped from those who ask
// how things are.
func (s *Server) remove(gone *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, gone.document.key())
}

// forget gives the state of a session back. It is held until that is done: one
// that is made anew has the same names, and needs the memory.
func (s *Server) forget(gone *session) error {
	defer s.letGo(gone)
	s.remove(gone)
	var err error
	for _, name := range slices.Backward(gone.keptNames()) { // the record first: without it the others are nobody's
		err = errors.Join(err, s.given.store.forget(name))
	}
	return errors.Join(err, gone.close())
}
