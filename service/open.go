package service

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"plimsoll/arena"
	"plimsoll/binding"
	"plimsoll/engine"
	"plimsoll/host"
	"plimsoll/ledger"
	"plimsoll/service/protocol"
)

// openSession answers open: it creates a session, or attaches to one that exists.
func (c *connection) openSession(r request) (reply, error) {
	if c.session != nil {
		return reply{}, protocol.OutOfOrder.Errorf("open: this connection has a session already")
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
	found.openedBy(c.process)
	found.holder.Store(int64(c.process))
	return c.welcome(attached)
}

// readDocument reads the document of open from its memfd. It returns the text, too.
func readDocument(r request) (*protocol.Document, []byte, error) {
	b, err := protocol.Decode[protocol.OpenBody](r.Kind, r.Body)
	if err != nil {
		return nil, nil, err
	}
	if err := protocol.CheckDocumentLength(b.Length); err != nil {
		return nil, nil, protocol.Refused.Errorf("open: %v", err)
	}
	if err := protocol.CheckSeals(r.files[0], int64(b.Length),
		unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
		return nil, nil, protocol.Refused.Errorf("open: the document: %v", err)
	}
	text := make([]byte, b.Length)
	if _, err := r.files[0].ReadAt(text, 0); err != nil {
		return nil, nil, protocol.Refused.Errorf("open: the document: %v", err)
	}
	d, err := protocol.ParseDocument(text)
	return d, text, err
}

// welcome is the answer to open.
func (c *connection) welcome(attached bool) (reply, error) {
	s := c.session
	w := protocol.Welcome{
		Schema: protocol.SessionSchema, Attached: attached, Step: s.shard.Steps(), Initialized: s.initialized(),
		Elements: s.shard.Config().Elements, Service: c.server.version, Kernel: c.server.kernel.String(),
	}
	w.PreparedStep = s.header.preparedStep.Load()
	w.AskedStep, w.AskedGradScale = s.header.asked()
	added, cleared, _, half := s.shard.Accumulations()
	if w.Accumulated, w.ClearedStep = added, cleared; half {
		w.Accumulating = added + 1
	}
	switch {
	case s.shard.MissesGradients():
		w.ArrivingStep = uint64(w.Step) + 1
	case s.header.condition.Load() == stateIsTorn:
		w.TornStep = w.AskedStep
	}
	var files []*os.File
	for _, a := range s.shared() {
		w.Arenas = append(w.Arenas, protocol.WelcomeArena{Name: a.Name(), Component: a.component, Type: a.of,
			Bytes: a.Size(), Mapped: a.Mapped()})
		files = append(files, a.File())
	}
	text, err := json.Marshal(w)
	if err == nil && len(text) > protocol.MaximumPacket/2 {
		err = fmt.Errorf("an answer of %d bytes", len(text))
	}
	return reply{result: text, files: files}, err
}

// claim reserves the name of a session for a connection. It returns the session if it
// exists, or nil if the caller must create it.
func (s *Server) claim(d *protocol.Document, c *connection) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.awaitRelease(d, c); err != nil {
		return nil, err
	}
	if len(s.all)+s.creating > 0 && s.job != d.Job {
		return nil, protocol.Busy.Errorf("open: this service holds the job %s, not %s; it takes another job when the "+
			"sessions of its own are closed", s.job, d.Job)
	}
	found := s.all[keyOf(d)]
	if found != nil {
		if err := d.Difference(found.document); err != nil {
			return nil, protocol.Refused.Errorf("open: session %v of job %s exists and differs: %v; close it, or "+
				"give the job another name", keyOf(d), d.Job, err)
		}
	}
	if holder := s.held[keyOf(d)]; holder != nil {
		return nil, protocol.Busy.Errorf("open: session %v of job %s is held by process %d%s", keyOf(d),
			d.Job, holder.process,
			toItself(holder, c))
	}
	s.held[keyOf(d)] = c
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
func (s *Server) awaitRelease(d *protocol.Document, c *connection) error {
	began, noticed := time.Now(), false
	for holder := s.held[keyOf(d)]; holder != nil && holder.gone(); holder = s.held[keyOf(d)] {
		holder.abandon()
		waited := time.Since(began)
		switch {
		case s.closing:
			return errEnding
		case c.gone():
			return protocol.Busy.Errorf("open: the client has hung up while it waited for session %v",
				keyOf(d))
		case waited >= claimPatience:
			return protocol.Busy.Errorf("open: session %v of job %s is held by process %d, which has hung up; its %v "+
				"is still under way after another %v. "+
				"The files that it works on may be on a file system that does not answer; when that answers, open "+
				"the session again",
				keyOf(d), d.Job, holder.process, holder.doing(), claimPatience)
		case waited >= claimNotice && !noticed:
			noticed = true
			s.withoutMutex(func() {
				s.logf("process %d waits for session %v: process %d has hung up, and its %v is still under way",
					c.process, keyOf(d), holder.process, holder.doing())
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
	return ", this process itself; give each optimizer of a program a name of its own (name= in Python, part in the " +
		"protocol)"
}

// create makes the session that was claimed. If that fails it gives the claim back. The
// text is the one that the document was parsed from.
func (s *Server) create(d *protocol.Document, text []byte) (*session, error) {
	made, err := s.make(d, text)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creating--
	if err != nil {
		s.letGoOf(keyOf(d))
	}
	return made, err
}

// make makes a session after checking that it fits. Sessions allocate one after the other, because each check must
// see the memory of the session before it.
func (s *Server) make(d *protocol.Document, text []byte) (*session, error) {
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
	config, err := shardConfig(d, s.kernel, arena.BasePages, cpus)
	if err != nil {
		return nil, protocol.Refused.Errorf("open: %v", err)
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
		return nil, protocol.Refused.Errorf("open: %v", err)
	}
	header, err := newHeader(d, text, config.Pages)
	if err != nil {
		return nil, errors.Join(protocol.Refused.Errorf("open: %v", err), shard.Close())
	}
	made := s.newSession(name, d, shard, header)
	err = s.keepArenas(made)
	if err == nil {
		populate(shard)
		err = s.keepHeader(made)
	}
	if err != nil {
		return nil, errors.Join(err, made.close())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[keyOf(d)] = made
	return made, nil
}

// expected returns how many sessions like this one are still to be opened on this host,
// this one included.
func (s *Server) expected(d *protocol.Document) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := d.LocalWorld
	for k := range s.all {
		if k.part == d.SessionPart() {
			left--
		}
	}
	return max(1, left)
}

// checkRoom refuses a job that does not fit, before the first byte is allocated. It counts the other ranks of this
// host, each of which needs as much.
func (s *Server) checkRoom(h *host.Host, d *protocol.Document, config engine.ShardConfig) error {
	var needed, largest, pool ledger.Bytes
	for _, a := range config.Arenas() {
		needed += config.Pages.Round(a.Size)
		largest = max(largest, config.Pages.Round(a.Size))
	}
	if config.Pages == arena.HugetlbPages {
		pool = engine.HugetlbFree(h)
	}
	if short := h.Shortage(len(config.CPUs)+threadsBeside, largest); short != "" {
		return protocol.DoesNotFit.Errorf("open: %s; raise that limit where the service is started", short)
	}
	available, counter := h.Memory.HeadroomWith(pool)
	ranks := s.expected(d)
	if whole := needed * ledger.Bytes(ranks); counter != "" && whole > available {
		return protocol.DoesNotFit.Errorf("open: the state of %d parameters in %v takes %v a rank, %v for the %d "+
			"ranks that this host still expects, but only %v are available (%s); use a smaller format (moments "+
			`"bf16" or "int8"), more hosts, or fewer ranks on this one`,
			config.Elements, config.Format, needed, whole, ranks, available, counter)
	}
	return nil
}

// cpus returns the CPUs that the document names, or else the rank's share of the CPUs
// that this process may use.
func (s *Server) cpus(d *protocol.Document) ([]int, error) {
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
	plan, err := binding.Split(h, binding.Request{Ranks: ranks, TrainerCores: s.share(h, ranks)})
	if err == nil && s.divided != nil {
		s.divided[ranks] = plan
	}
	return plan, err
}
