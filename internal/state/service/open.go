//go:build linux

package service

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/service/protocol"
)

// openSession answers open and hold: it creates a session, or attaches to one that exists.
func (c *connection) openSession(r request) (reply, error) {
	if c.session != nil {
		return reply{}, protocol.OutOfOrder.Errorf("%v: this connection has a session already", r.Kind)
	}
	d, text, err := readDocument(r)
	if err != nil {
		return reply{}, err
	}
	found, attached, err := c.find(d, text)
	if err != nil {
		return reply{}, prefixed(r.Kind, err)
	}
	out, err := found.answer(r.Kind, func() (reply, error) {
		found.contents.openedBy(c.process)
		return found.welcome(attached)
	})
	if err != nil {
		c.server.letGo(found)
		return reply{}, err
	}
	c.session = found
	found.forgetFailures()
	found.holder.Store(int64(c.process))
	return out, nil
}

// prefixed names the request in an answer that refuses it.
func prefixed(kind protocol.Kind, err error) error {
	var refused *protocol.Error
	if errors.As(err, &refused) {
		return &protocol.Error{Status: refused.Status, Message: fmt.Sprintf("%v: %s", kind, refused.Message)}
	}
	return err
}

// find returns the session that a client opens: one that is there, or a new one.
func (c *connection) find(d protocol.AnyDocument, text []byte) (found *session, attached bool, err error) {
	if err := c.server.checkAside(d); err != nil {
		return nil, false, err
	}
	found, err = c.server.claim(d, c)
	if err != nil || found != nil {
		return found, true, err
	}
	found, err = c.server.create(d, text)
	return found, err == nil && found.wasOnTier(), err
}

// readDocument reads the document of open or hold from its memfd. It returns the text, too.
func readDocument(r request) (protocol.AnyDocument, []byte, error) {
	b, err := protocol.Decode[protocol.OpenBody](r.Kind, r.Body)
	if err != nil {
		return nil, nil, err
	}
	if err := protocol.CheckDocumentLength(b.Length); err != nil {
		return nil, nil, protocol.Refused.Errorf("%v: %v", r.Kind, err)
	}
	if err := r.checkFile(int64(b.Length), unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
		return nil, nil, protocol.Refused.Errorf("%v: the document: %v", r.Kind, err)
	}
	text := make([]byte, b.Length)
	if _, err := r.files[0].ReadAt(text, 0); err != nil {
		return nil, nil, protocol.Refused.Errorf("%v: the document: %v", r.Kind, err)
	}
	d, err := protocol.ParseDocument(r.Kind, text)
	return d, text, err
}

// welcome is the answer to open or hold.
func (s *session) welcome(attached bool) (reply, error) {
	var files []*os.File
	var arenas []protocol.WelcomeArena
	for _, a := range s.contents.shared() {
		arenas = append(arenas, protocol.WelcomeArena{Name: a.Name(), Component: a.component, Type: a.of,
			Bytes: a.Size(), Mapped: a.Mapped()})
		files = append(files, a.File())
	}
	text, err := json.Marshal(s.contents.welcome(attached, arenas))
	if err == nil && len(text) > protocol.MaximumPacket/2 {
		err = fmt.Errorf("an answer of %d bytes", len(text))
	}
	return reply{result: text, files: files}, err
}

// claim reserves the name of a session for a connection. It returns the session if it
// exists, or nil if the caller must create it.
func (s *Server) claim(d protocol.AnyDocument, c *connection) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.awaitRelease(d, c); err != nil {
		return nil, err
	}
	if len(s.all)+s.creating > 0 && s.job != d.Of().Job {
		return nil, protocol.Busy.Errorf("this service holds the job %s, not %s; it takes another job when the "+
			"sessions of its own are closed", s.job, d.Of().Job)
	}
	found := s.all[keyOf(d)]
	if found != nil {
		if err := d.Difference(found.document); err != nil {
			return nil, protocol.Refused.Errorf("session %v of job %s exists and differs: %v; close it, or "+
				"give the job another name", keyOf(d), d.Of().Job, err)
		}
	}
	if holder := s.held[keyOf(d)]; holder != nil {
		return nil, protocol.Busy.Errorf("session %v of job %s is held by process %d%s", keyOf(d),
			d.Of().Job, holder.process,
			toItself(holder, c))
	}
	s.held[keyOf(d)] = c
	if found == nil {
		s.job = d.Of().Job
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
func (s *Server) awaitRelease(d protocol.AnyDocument, c *connection) error {
	began, noticed := time.Now(), false
	for holder := s.held[keyOf(d)]; holder != nil && holder.gone(); holder = s.held[keyOf(d)] {
		holder.abandon()
		waited := time.Since(began)
		switch {
		case s.closing:
			return errEnding
		case c.gone():
			return protocol.Busy.Errorf("the client has hung up while it waited for session %v",
				keyOf(d))
		case waited >= claimPatience:
			return protocol.Busy.Errorf("session %v of job %s is held by process %d, which has hung up; its %v "+
				"is still under way after another %v. "+
				"The files that it works on may be on a file system that does not answer; when that answers, open "+
				"the session again",
				keyOf(d), d.Of().Job, holder.process, holder.doing(), claimPatience)
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
func (s *Server) create(d protocol.AnyDocument, text []byte) (*session, error) {
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
func (s *Server) make(d protocol.AnyDocument, text []byte) (*session, error) {
	s.allocating.Lock()
	defer s.allocating.Unlock()
	h, err := s.host()
	if err != nil {
		return nil, err
	}
	sums := s.wantsSums(d)
	planned, err := s.design(d, d.Of().CPUs, sums, newWindow)
	if err != nil {
		return nil, err
	}
	pages := engine.ChoosePages(h, slices.Repeat(planned.arenas, s.expected(d.Of())))
	if err := cmp.Or(s.checkRoom(h, planned, pages), s.checkTier(planned)); err != nil {
		return nil, err
	}
	place, pages, err := s.given.placeOf(planned.arenas, pages)
	if err != nil {
		return nil, err
	}
	name := s.newName()
	if err := s.checkKept(name, len(planned.arenas)); err != nil {
		return nil, err
	}
	header, err := newHeader(d, text, place, pages, optionsOf(sums, planned.window()))
	if err != nil {
		return nil, protocol.Refused.Errorf("%v", err)
	}
	made := s.newSession(name, planned, place, pages, header)
	populate, err := planned.make(made)
	if err != nil {
		return nil, errors.Join(protocol.Refused.Errorf("%v", err), header.Close())
	}
	err = s.keepArenas(made)
	if err == nil {
		// Every page, before open is answered, near the worker that uses it.
		if err = populate(); err != nil {
			s.forgetKept(made)
			err = protocol.Storage.Errorf("%v", err)
		}
	}
	if err == nil {
		err = s.keepHeader(made)
	}
	if err != nil {
		return nil, errors.Join(err, made.close())
	}
	s.tellOfDisk(made)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[keyOf(d)] = made
	return made, nil
}

// design is a session that is still to be made, or to be attached to.
type design struct {
	document protocol.AnyDocument
	arenas   []arena.Plan
	tier     *engine.ShardConfig // nil: all of the state is in memory
	workers  int
	what     string // it holds, for messages
	smaller  string // how it becomes smaller
	// make makes the contents, with arenas that hold nothing. The function that it returns allocates every page.
	make func(s *session) (populate func() error, err error)
	// attach makes the contents of arenas that an earlier service has left, by name, and finishes its work.
	attach func(s *session, files map[string]*os.File) error
}

// newWindow stands for a window that is still to be decided.
var newWindow = engine.Window{Lanes: -1}

// window returns the window of a tier; none without one.
func (d *design) window() engine.Window {
	if d.tier == nil {
		return engine.Window{}
	}
	return d.tier.Tier.Window
}

// wasOnTier reports whether the state was found in the files of a tier.
func (s *session) wasOnTier() bool {
	held, ok := s.contents.(*heldShard)
	return ok && held.wasOnTier
}

// design returns the design of a session whose workers have the CPUs that are named, or else the rank's share of the
// CPUs that this process may use. It has a window, if the state is on a tier.
func (s *Server) design(d protocol.AnyDocument, named []int, sums bool, window engine.Window) (*design, error) {
	cpus, err := s.cpus(d.Of(), named)
	if err != nil {
		return nil, err
	}
	if held, ok := d.(*protocol.HoldDocument); ok {
		if s.tier.isOn() {
			return nil, protocol.Refused.Errorf("this service has a tier (--tier), which cannot have states that the " +
				"trainer updates (StateOffload and Muon in Python): use a service without a tier")
		}
		return designStates(held, cpus), nil
	}
	return s.designShard(d.(*protocol.Document), cpus, sums, window)
}

// expected returns how many sessions like this one are still to be opened on this host,
// this one included.
func (s *Server) expected(of *protocol.Owner) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := of.LocalWorld
	for k := range s.all {
		if k.part == of.SessionPart() {
			left--
		}
	}
	return max(1, left)
}

// checkRoom refuses a job that does not fit, before the first byte is allocated. It counts the other ranks of this
// host, each of which needs as much.
func (s *Server) checkRoom(h *host.Host, planned *design, pages arena.Pages) error {
	var needed, largest, pool ledger.Bytes
	for _, a := range planned.arenas {
		needed += pages.Round(a.Size)
		largest = max(largest, pages.Round(a.Size))
	}
	if pages == arena.HugetlbPages {
		pool = engine.HugetlbFree(h)
	}
	if short := h.Shortage(planned.workers+planned.window().Lanes+threadsBeside, largest); short != "" {
		return protocol.DoesNotFit.Errorf("%s; raise that limit where the service is started", short)
	}
	available, counter := h.Memory.HeadroomWith(pool)
	ranks := s.expected(planned.document.Of())
	if whole := needed * ledger.Bytes(ranks); counter != "" && whole > available {
		return protocol.DoesNotFit.Errorf("%s takes %v a rank, %v for the %d ranks that this host still expects, "+
			"but only %v are available (%s); use %s, more hosts, or fewer ranks on this one",
			planned.what, needed, whole, ranks, available, counter, planned.smaller)
	}
	return nil
}

// cpus returns the CPUs that are named, or else the rank's share of the CPUs that this process may use.
func (s *Server) cpus(of *protocol.Owner, named []int) ([]int, error) {
	if len(named) > 0 {
		return named, nil
	}
	plan, err := s.divide(of.LocalWorld)
	if err != nil {
		return nil, err
	}
	return plan.Ranks[of.Rank%of.LocalWorld].OptimizerCPUs.List(), nil
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
