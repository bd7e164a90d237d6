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

	opening sync.Mutex // one session at a time is made
	mu      sync.Mutex // guards what follows
	free    *sync.Cond // a session was released
	job     string
	all     map[key]*session
	held    map[key]*connection // also while a session is being given back
	open    map[*connection]bool
	closing bool
	serving sync.WaitGroup
}

// NewServer is a service with the sessions that an earlier one has left. Steps
// that were under way are finished when it returns.
func NewServer(version string, given *Inherited, findHost func() (*host.Host, error), say func(format string, values ...any)) (*Server, error) {
	set, err := kernel.Select()
	if err != nil {
		return nil, err
	}
	s := &Server{
		version: version, kernel: set, say: say, host: findHost, given: given, began: time.Now(),
		all: map[key]*session{}, held: map[key]*connection{}, open: map[*connection]bool{},
	}
	s.free = sync.NewCond(&s.mu)
	return s, s.restore()
}

// restore attaches to the sessions that were kept.
func (s *Server) restore() error {
	var attaching sync.WaitGroup
	errs := make(chan error, len(s.given.Files))
	for name, file := range s.given.Files {
		if componentOf(name) == recordComponent {
			attaching.Go(func() { errs <- s.attach(sessionOf(name), file) })
		}
	}
	attaching.Wait()
	close(errs)
	var failed error
	for err := range errs {
		failed = errors.Join(failed, err)
	}
	if failed != nil {
		return failed
	}
	for name, file := range s.given.Files {
		// What has no record is of a session whose client was never answered.
		if !s.has(sessionOf(name)) {
			failed = errors.Join(failed, s.given.store.forget(name))
		}
		failed = errors.Join(failed, file.Close())
	}
	s.given.Files = nil
	return failed
}

func (s *Server) has(name string) bool {
	for k := range s.all {
		if k.String() == name {
			return true
		}
	}
	return false
}

func (s *Server) attach(name string, file *os.File) error {
	record, found, err := readRecord(name+"/"+recordComponent, file)
	if err != nil {
		return err
	}
	shard, err := s.attachShard(found, found.Document.CPUs)
	if errors.Is(err, engine.ErrBinding) {
		// Some CPU was taken from this process since, by a cgroup or by switching it off.
		s.say("session %s: %v; its workers are bound to what else this process may use", name, err)
		shard, err = s.attachShard(found, nil)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("session %s: %w", name, err), record.Close())
	}
	session := newSession(found.Document, shard, record)
	if shard.Finish() {
		s.say("session %s: finished step %d, which was under way", name, shard.Steps())
	}
	if added, _, _, half := shard.Additions(); half {
		s.say("session %s: accumulate %d is half done, and goes on when it is repeated", name, added+1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.job = found.Document.Job
	s.all[found.Document.key()] = session
	return nil
}

// attachShard attaches to the shard of a record, with workers on the CPUs that are
// named, or on the rank's part of what this process may use.
func (s *Server) attachShard(found recordedDocument, named []int) (*engine.Shard, error) {
	document := *found.Document
	document.CPUs = named
	cpus, err := s.cpus(&document)
	if err != nil {
		return nil, err
	}
	config, err := document.config(s.kernel, found.Pages, cpus)
	if err != nil {
		return nil, err
	}
	return engine.AttachShard(config, s.given.Files)
}

// Serve answers clients until the context ends. Then it finishes what is under
// way, checkpoints that are written included, and returns.
func (s *Server) Serve(ctx context.Context) error {
	s.until = ctx
	if err := s.given.store.ready(); err != nil {
		return err
	}
	stopped := context.AfterFunc(ctx, func() { _ = s.given.Listener.Close() }) // accept fails, and ends the loop
	defer stopped()
	for {
		c, err := s.given.Listener.AcceptUnix()
		switch {
		case ctx.Err() != nil:
			return s.end()
		case errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE):
			s.say("too many open files: a client waits")
			time.Sleep(100 * time.Millisecond)
		case err != nil:
			return fmt.Errorf("accept: %w", err)
		default:
			s.serve(c)
		}
	}
}

func (s *Server) end() error {
	err := s.given.store.stopping()
	s.mu.Lock()
	s.closing = true
	for c := range s.open {
		_ = c.c.CloseRead() // the answer to the request under way is still sent
		c.hurry()
	}
	s.mu.Unlock()
	s.serving.Wait()
	for _, session := range s.all {
		session.settle()
		session.settleSave()
		s.remove(session)
		err = errors.Join(err, session.saveError, session.close())
	}
	return err
}

func (s *Server) ending() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

func (s *Server) serve(c *net.UnixConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	client := &connection{server: s, c: c}
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
	delete(s.held, free.document.key())
	s.free.Broadcast()
}

// openSession is the request that begins: it makes a session, or attaches to
// one.
func (c *connection) openSession(body []byte, files []*os.File) ([]byte, []*os.File, error) {
	if c.session != nil {
		return nil, nil, fail(OutOfOrder, "open: this connection has a session already")
	}
	d, err := readDocument(body, files)
	if err != nil {
		return nil, nil, err
	}
	s := c.server
	s.opening.Lock()
	defer s.opening.Unlock()
	found, err := s.claim(d, c)
	attached := found != nil
	if err == nil && !attached {
		found, err = s.create(d, c)
	}
	if err != nil {
		return nil, nil, err
	}
	c.session = found
	found.forgetFailures()
	found.holder.Store(int64(c.process))
	return c.welcome(attached)
}

// claim takes the session that is there already; nil is none.
func (s *Server) claim(d *Document, c *connection) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for holder := s.held[d.key()]; holder != nil && holder.gone(); holder = s.held[d.key()] {
		s.free.Wait()
	}
	if len(s.all) > 0 && s.job != d.Job {
		return nil, fail(Busy, "open: this service holds the job %s, and not %s; it takes another when that one's sessions are closed", s.job, d.Job)
	}
	found := s.all[d.key()]
	if found != nil {
		if err := d.same(found.document); err != nil {
			return nil, fail(Refused, "open: session %v of job %s is there and differs: %v; close it, or give the job another name", d.key(), d.Job, err)
		}
	}
	if holder := s.held[d.key()]; holder != nil {
		return nil, fail(Busy, "open: session %v of job %s is held by process %d%s", d.key(), d.Job, holder.process, toItself(holder, c))
	}
	if found != nil {
		s.held[d.key()] = c
	}
	return found, nil
}

// toItself is for a program that opens a session twice.
func toItself(holder, c *connection) string {
	if holder.process != c.process {
		return ""
	}
	return ", which is this one; give each optimizer of a program a name of its own (name= in Python), and so its session a part of its own"
}

// create makes a session, once it is known to fit.
func (s *Server) create(d *Document, c *connection) (*session, error) {
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
	shard, err := engine.NewShard(config)
	if err != nil {
		return nil, fail(Refused, "open: %v", err)
	}
	record, err := newRecord(d, config.Pages)
	if err != nil {
		return nil, errors.Join(err, shard.Close())
	}
	// Every page is there before the answer is, and near the worker whose it is.
	shard.Populate(context.Background(), func(ledger.Bytes) {})
	made := newSession(d, shard, record)
	for _, a := range made.arenas() {
		if err := s.given.store.keep(a.Name(), a.File()); err != nil {
			return nil, errors.Join(err, made.close())
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.job = d.Job
	s.all[d.key()] = made
	s.held[d.key()] = c
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
	var needed ledger.Bytes
	for _, a := range config.Arenas() {
		needed += config.Pages.Round(a.Size)
	}
	available, counter := h.Memory.Headroom()
	if config.Pages == arena.HugetlbPages {
		available += engine.HugetlbFree(h)
	}
	ranks := s.expected(d)
	if whole := needed * ledger.Bytes(ranks); counter != "" && whole > available {
		return fail(DoesNotFit, "open: the state of %d parameters in %v takes %v a rank, %v for the %d ranks of this host that are still to come, and %v are available (%s); use a smaller format (moments \"bf16\" or \"int8\"), more hosts, or fewer ranks on this one",
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
	h, err := s.host()
	if err != nil {
		return nil, err
	}
	plan, err := binding.Split(h, binding.Request{Ranks: d.LocalWorld})
	if err != nil {
		return nil, err
	}
	return plan.Ranks[d.Rank%d.LocalWorld].OptimizerCPUs.List(), nil
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
	arenas := gone.arenas()
	slices.Reverse(arenas) // the record first: without it the others are nobody's
	for _, a := range arenas {
		err = errors.Join(err, s.given.store.forget(a.Name()))
	}
	return errors.Join(err, gone.close())
}
