//go:build linux

package service

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// setLimit gives this process a limit: "7=64" is a limit of 64 on resource 7. A number
// that begins with + is added to what the process uses now.
func setLimit(text string) error {
	if text == "" {
		return nil
	}
	var resource int
	var most uint64
	if _, err := fmt.Sscanf(text, "%d=%d", &resource, &most); err != nil {
		return err
	}
	return unix.Setrlimit(resource, &unix.Rlimit{Cur: most, Max: most})
}

// limited gives a limit to services that are started from now on.
func (r *running) limited(resource int, most uint64) {
	r.more.Store(new(fmt.Sprintf("%s=%d=%d", limitVariable, resource, most)))
}

// tiny returns the document of a session of few elements.
func tiny(rank, world int) *protocol.Document {
	return testDocument(func(d *protocol.Document) {
		d.Rank, d.World, d.LocalWorld, d.CPUs = rank, world, world, usableCPU()
		d.Parameters = []protocol.Piece{{Name: "w", Shape: []int64{3000}, Count: 2000},
			{Name: "b", Shape: []int64{100}, Count: 100, Group: 1}}
	})
}

// usableCPU returns one CPU that this process may use.
var usableCPU = sync.OnceValue(func() []int {
	h, err := testHost()
	if err != nil {
		panic(err)
	}
	return h.CPUs.List()[:1]
})

// isSoak reports whether tests may take long: make soak.
func isSoak() bool { return os.Getenv("PLIMSOLL_SOAK") != "" }

// openMany opens sessions, makes a step in each and detaches. It returns their state by
// rank.
func openMany(t *testing.T, r *running, count int) []string {
	t.Helper()
	prints := make([]string, count)
	for rank := range count {
		s := begun(t, r.Socket, tiny(rank, count))
		mustStep(t, s, int64(1+rank%3))
		prints[rank] = fingerprint(t, s)
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
	}
	return prints
}

// checkMany opens the sessions again, and compares their state.
func checkMany(t *testing.T, r *running, prints []string) {
	t.Helper()
	for rank, want := range prints {
		s := mustOpen(t, r.Socket, tiny(rank, len(prints)))
		if !s.Welcome.Attached || !s.Welcome.Initialized || s.Welcome.Step != int64(1+rank%3) {
			t.Fatalf("rank %d found %+v", rank, s.Welcome)
		}
		if got := fingerprint(t, s); got != want {
			t.Errorf("rank %d holds %s, and held %s", rank, got, want)
		}
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
	}
}

// killAndWait kills the service, running or starting, and waits until the next one is
// started.
func (r *running) killAndWait(t *testing.T) {
	t.Helper()
	last := r.awaitAfter(t, 0)
	_ = last.process.Kill() // fails if it has ended
	r.awaitAfter(t, last.number)
}

// awaitAfter waits until more than so many services were started, and returns the last one.
func (r *running) awaitAfter(t *testing.T, number int64) *launched {
	t.Helper()
	r.launches.await(t, "a service", func() bool { l := r.last.Load(); return l != nil && l.number > number })
	return r.last.Load()
}

// TestWhatIsOpenCanBeRestored limits descriptors: a service takes as many sessions as
// the next one can take over, and refuses the others with a clear error.
func TestWhatIsOpenCanBeRestored(t *testing.T) {
	r := startService(t)
	r.limited(unix.RLIMIT_NOFILE, 128)
	r.overview(t)
	r.killAndWait(t) // that service had no limit
	const world = 50
	prints := make([]string, 0, world)
	for rank := range world {
		s, err := openPatiently(r.Socket, tiny(rank, world))
		if err != nil {
			wantError(t, err, protocol.DoesNotFit,
				"open: with this session the service needs * file descriptors, but may have "+
					"only 128; raise the hard limit on open files*")
			break
		}
		t.Cleanup(func() { _ = s.Detach() })
		if err := begin(s); err != nil {
			t.Fatal(err)
		}
		mustStep(t, s, 1)
		prints = append(prints, fingerprint(t, s))
	}
	if len(prints) < 5 || len(prints) == world {
		t.Fatalf("%d sessions were opened", len(prints))
	}
	r.killAndWait(t)
	for rank, want := range prints {
		s := mustOpen(t, r.Socket, tiny(rank, world)) // all are held at the same time
		if got := fingerprint(t, s); !s.Welcome.Attached || got != want {
			t.Errorf("rank %d holds %s, and held %s: %+v", rank, got, want, s.Welcome)
		}
	}
}

// TestKeeperWithoutDescriptors checks a keeper that runs out of descriptors. The
// service does not claim to keep the state, and nothing of it is left.
func TestKeeperWithoutDescriptors(t *testing.T) {
	r := startService(t)
	prints := openMany(t, r, 2)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	used := highestDescriptor(t)
	for room := range 12 {
		s, err := func() (*servicetest.Session, error) {
			// The client is in this process, too: it connects before.
			client, err := client.Dial(r.Socket)
			if err != nil {
				t.Fatal(err)
			}
			s := &servicetest.Session{Client: *client}
			low := unix.Rlimit{Cur: uint64(used + 2 + descriptorsToStart + room), Max: was.Max}
			if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
					t.Fatal(err)
				}
			}()
			return s, s.Open(testDocument(small, func(d *protocol.Document) { d.Part = fmt.Sprint("part", room) }))
		}()
		if err == nil {
			err = s.Close()
		} else if wrong := new(protocol.Error); errors.As(err, &wrong) {
			wantError(t, err, protocol.Refused,
				"open: the state would not outlive the service: the keeper at * has *; raise "+
					"the hard limit on open files*")
			err = s.Detach()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if o := r.overview(t); len(o.Sessions) != len(prints) {
		t.Errorf("there are %d sessions: expected %d", len(o.Sessions), len(prints))
	}
	files := 0
	for _, file := range memfds(t, os.Getpid()) {
		if file != nil {
			files++
		}
	}
	if want := 8 * len(prints); files != want {
		t.Errorf("the keeper has %d files: expected %d", files, want)
	}
	r.killAndWait(t)
	checkMany(t, r, prints)
}

func highestDescriptor(t *testing.T) int {
	t.Helper()
	files, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	highest := 0
	for _, file := range files {
		var number int
		if _, err := fmt.Sscan(filepath.Base(file), &number); err == nil {
			highest = max(highest, number)
		}
	}
	return highest
}

// TestNamesOfManySessions checks that the names of the most sessions of a host fit into
// one variable, however long the names of their parts are.
func TestNamesOfManySessions(t *testing.T) {
	var kept []string
	for session := range 2 * protocol.MaximumLocal {
		kept = append(kept, keptNames(fmt.Sprint(session), 8)...)
	}
	if length := len(strings.Join(kept, ":")); length >= longestVariable {
		t.Errorf("%d bytes of names", length)
	}
	server, _ := serveHere(t)
	server.aside["1"] = &leftSession{name: "1", files: map[string]*os.File{}}
	for i := range longestVariable / 8 {
		server.aside["1"].files[fmt.Sprintf("1.%08d", i)] = nil
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if limit.Cur < longestVariable/8 {
		t.Skipf("a process may have %d descriptors", limit.Cur)
	}
	wantError(t, server.checkKept("2", 8), protocol.DoesNotFit,
		"with this session * bytes, more than the "+
			"kernel passes to the next service (131072); use several services")
	delete(server.aside, "1")
}

// TestSystemdKeepsTheFiles checks the rules of systemd: it takes files without an
// answer, and announces the limit on their number.
func TestSystemdKeepsTheFiles(t *testing.T) {
	r := startService(t)
	start := func(command *exec.Cmd) error {
		keeper := func(v string) bool { return strings.HasPrefix(v, restartCount+"=") }
		command.Env = append(slices.DeleteFunc(command.Env, keeper), mostKept+"=20")
		return command.Start()
	}
	r.startAs.Store(&start)
	r.overview(t)
	r.killAndWait(t) // that service was started otherwise
	prints := openMany(t, r, 2)
	_, err := servicetest.Open(r.Socket, testDocument(small,
		func(d *protocol.Document) { d.Part, d.World = "more", 2 }))
	wantError(t, err, protocol.DoesNotFit,
		"open: with this session the service has 24 files to keep, but systemd keeps "+
			"only 20; raise FileDescriptorStoreMax=")
	r.killAndWait(t)
	checkMany(t, r, prints)
}

// TestRecordHasTheDocumentAsItCame checks that the session header keeps the text that
// open accepted, which may be shorter than a new encoding.
func TestRecordHasTheDocumentAsItCame(t *testing.T) {
	whole, err := json.Marshal(testDocument())
	if err != nil {
		t.Fatal(err)
	}
	text := []byte(strings.ReplaceAll(string(whole), `"group":0,`, "")) // a default may be left out
	d, err := protocol.ReadDocument(text)
	if err != nil || len(text) == len(whole) {
		t.Fatal(err, len(text))
	}
	header, err := newHeader(d, text, arena.Memory, arena.BasePages, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer header.Close()
	if header.document != uint64(len(text)) {
		t.Errorf("the header has a document of %d bytes, and %d were sent", header.document, len(text))
	}
	_, again, err := readHeader("record", arena.Memory, header.File())
	if err != nil || d.Difference(again) != nil {
		t.Errorf("it is read as %v (%v)", again, err)
	}
	for _, length := range []uint64{0, protocol.MaximumDocument + 1} {
		header.document = length
		if _, _, err := readHeader("record", arena.Memory, header.File()); err == nil ||
			!strings.Contains(err.Error(), protocol.CheckDocumentLength(length).Error()) {
			t.Errorf("a document of %d bytes: %v", length, err)
		}
	}
}

// keptArena opens an arena's file, which the keeper in this process holds.
func (r *running) keptArena(t *testing.T, name string) *os.File {
	t.Helper()
	file := memfds(t, os.Getpid())[name]
	if file == nil {
		t.Fatalf("the keeper has no file %s", name)
	}
	return file
}

// spoil overwrites a part of a file. The function that it returns restores it.
func spoil(t *testing.T, file *os.File, offset int64, data []byte) (mend func()) {
	t.Helper()
	was := make([]byte, len(data))
	_, err := file.ReadAt(was, offset)
	if err == nil {
		_, err = file.WriteAt(data, offset)
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if _, err := file.WriteAt(was, offset); err != nil {
			t.Fatal(err)
		}
	}
}

func spoilBegin(t *testing.T, file *os.File) (mend func()) {
	return spoil(t, file, 0, []byte("spoiled."))
}

// flipRank flips the lowest bit of the rank in the document of a session header.
func flipRank(t *testing.T, file *os.File) (mend func()) {
	t.Helper()
	text, err := io.ReadAll(io.NewSectionReader(file, 0, 1<<20))
	field := []byte(`"rank":`)
	at := bytes.Index(text, field) + len(field)
	if err != nil || at < len(field) {
		t.Fatal("the header has no rank: ", err)
	}
	return spoil(t, file, int64(at), []byte{text[at] ^ 1})
}

// TestBrokenSessionIsSetAside breaks one session. The others are restored. The broken
// one is kept, reported and not begun anew, until it can be restored or is given back.
func TestBrokenSessionIsSetAside(t *testing.T) {
	for name, broken := range map[string]struct {
		arena  string
		spoil  func(*testing.T, *os.File) (mend func())
		want   string          // the reason for setting it aside
		status protocol.Status // status of an open
		opened string
	}{
		"record": {"session", spoilBegin, "this release did not write it", protocol.Busy,
			"open: session 2 is set aside and may be of another job*"},
		// One bit makes it the session of rank 0, which would begin anew.
		"rank": {"session", flipRank, "its checksum is another", protocol.Busy,
			"open: session 2 is set aside and may be of another job*"},
		"journal": {"step_journal", spoilBegin, "it is no journal", protocol.Refused,
			"open: session 2 (job test, rank1/bf16): *its " +
				`memory is kept, and "plimsoll restore --discard 2" frees it`},
	} {
		t.Run(name, func(t *testing.T) {
			r := startService(t)
			prints := openMany(t, r, 3)
			file := r.keptArena(t, "rank1/bf16/"+broken.arena)
			mend := broken.spoil(t, file)
			r.killAndWait(t)
			o := r.overview(t)
			if len(o.Sessions) != 2 || len(o.SetAside) != 1 || o.SetAside[0].Name != "2" ||
				!strings.Contains(o.SetAside[0].Reason, broken.want) || o.SetAside[0].Bytes < 8*4096 {
				t.Fatalf("%d sessions are there, set aside are %+v", len(o.Sessions), o.SetAside)
			}
			await(t, "what the service says", func() bool {
				log := r.log.String()
				return strings.Contains(log, "is set aside: ") && strings.Contains(log, broken.want)
			})
			for rank := range prints {
				s, err := servicetest.Open(r.Socket, tiny(rank, 3))
				switch {
				case rank == 1 || broken.arena == "session": // it may be any job's
					wantError(t, err, broken.status, broken.opened)
				case err != nil || !s.Welcome.Attached || fingerprint(t, s) != prints[rank]:
					t.Errorf("rank %d: %v", rank, err)
				}
				if err == nil {
					err = s.Detach()
				}
				if e := (*protocol.Error)(nil); err != nil && !errors.As(err, &e) {
					t.Fatal(err)
				}
			}
			client := dial(t, r)
			wantError(t, client.Restore("7", false), protocol.Refused,
				`restore: no session is set aside as "7": there are ["2"]`)
			wantError(t, client.Restore("2", false), protocol.Refused, "restore: session 2*"+broken.want+"*")
			mend()
			if err := client.Restore("2", false); err != nil {
				t.Fatal(err)
			}
			checkMany(t, r, prints)
			// Once more, and this time for good.
			broken.spoil(t, file)
			r.killAndWait(t)
			await(t, "a service", func() bool { return len(r.overview(t).SetAside) == 1 })
			if err := dial(t, r).Restore("2", true); err != nil {
				t.Fatal(err)
			}
			if o := r.overview(t); len(o.SetAside) != 0 || len(o.Sessions) != 2 {
				t.Errorf("%+v", o)
			}
			s := mustOpen(t, r.Socket, tiny(1, 3))
			if s.Welcome.Attached {
				t.Error("what was given back is there")
			}
		})
	}
}

// TestPanicSetsASessionAside writes a journal of a step with chunks that do not exist.
func TestPanicSetsASessionAside(t *testing.T) {
	r := startService(t)
	prints := openMany(t, r, 4)
	file := r.keptArena(t, "rank2/bf16/step_journal")
	config, err := shardConfig(tiny(2, 4), 0, arena.BasePages, usableCPU())
	if err != nil {
		t.Fatal(err)
	}
	set, err := kernel.Select()
	if err != nil {
		t.Fatal(err)
	}
	config.Sums = set.SumsAreFree(config.Format)
	arenas := config.Arenas()
	const chunks = 2
	slots := chunks * (64 + config.Format.UndoBytes())    // size of the end of the journal
	beyond := protocol.Encode(checked.Seal(checked.Most)) // no flip writes the checksum of another number
	mendSlots := spoil(t, file, int64(arenas[len(arenas)-1].Size)-int64(slots), beyond)
	const begun = 48 // offset of the number of updates in the journal
	mend := spoil(t, file, begun, protocol.Encode(checked.Seal(4)))
	r.killAndWait(t)
	o := r.overview(t)
	if len(o.Sessions) != 3 || len(o.SetAside) != 1 || o.SetAside[0].Rank != 2 ||
		!strings.HasPrefix(o.SetAside[0].Reason, "restoring it panicked: runtime error: index out of range") {
		t.Fatalf("%d sessions are there, set aside are %+v", len(o.Sessions), o.SetAside)
	}
	process := r.Process()
	_, err = servicetest.Open(r.Socket, tiny(2, 4))
	wantError(t, err, protocol.Refused, "open: session 3 (job test, rank2/bf16): restoring it panicked: *")
	if r.Process() != process {
		t.Error("the service has ended")
	}
	mend()
	mendSlots()
	checkMany(t, r, prints) // opening the session restores it
}

// TestDeadlySessionIsSetAside has one session end every service that restores it. The
// others survive.
func TestDeadlySessionIsSetAside(t *testing.T) {
	r := startService(t)
	const deadly = 2
	document := func(rank int) *protocol.Document {
		d := tiny(rank, 4)
		if rank == deadly {
			d.CPUs = nil // so that the service reads the host
		}
		return d
	}
	var prints []string
	for rank := range 4 {
		s := begun(t, r.Socket, document(rank))
		mustStep(t, s, int64(1+rank%3))
		prints = append(prints, fingerprint(t, s))
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
	}
	r.more.Store(new(deadlyVariable + "=1"))
	r.killAndWait(t)
	o := r.overview(t)
	if len(o.Sessions) != 3 || len(o.SetAside) != 1 || o.SetAside[0].Rank != deadly ||
		o.SetAside[0].Reason != errDeadly.Error() {
		t.Fatalf("%d sessions are there, set aside are %+v", len(o.Sessions), o.SetAside)
	}
	if o.Restarts != 1+mostAttempts {
		t.Errorf("%d services were started after the first", o.Restarts)
	}
	_, err := servicetest.Open(r.Socket, document(deadly))
	wantError(t, err, protocol.Refused,
		"open: session 3 (job test, rank2/bf16) is set aside: 5 services have died while they "+
			"restored it; restore it (plimsoll restore 3) or free its memory (--discard)")
	// The next one does not try it either, unless it is asked to.
	r.killAndWait(t)
	if o := r.overview(t); len(o.SetAside) != 1 {
		t.Errorf("set aside are %+v", o.SetAside)
	}
	r.more.Store(nil)
	if err := dial(t, r).Restore("3", false); !errors.Is(err, client.ErrLost) { // the service dies once more
		t.Error(err)
	}
	checkMany(t, r, prints)
}

// TestStateIsKeptHoweverOftenAStartFails fails starts in several ways: no process, no
// memory, no program.
func TestStateIsKeptHoweverOftenAStartFails(t *testing.T) {
	r := startService(t)
	prints := openMany(t, r, 2)
	var failing atomic.Int64
	failing.Store(3 * failedStarts)
	start := func(command *exec.Cmd) error {
		switch failing.Add(-1) % 3 {
		case 0:
			return syscall.EAGAIN // no process can be started
		case 1:
			command.Path = "/nowhere/plimsoll"
		case 2:
			command.Env = append(command.Env, limitVariable+"=nonsense") // the service ends at once
		}
		if failing.Load() < 0 {
			command.Path = os.Args[0]
			command.Env = slices.DeleteFunc(command.Env,
				func(v string) bool { return strings.HasPrefix(v, limitVariable) })
		}
		return command.Start()
	}
	r.startAs.Store(&start)
	r.killAndWait(t)
	checkMany(t, r, prints)
	if log := r.log.String(); !strings.Contains(log, "keeps its state in 16 files") {
		t.Errorf("the keeper has said %.1000s", log)
	}
}

// TestEverythingFailsInTurn lowers the limits of a service step by step. Under each
// limit the service starts, opens and saves. Whatever fails, no state is lost.
func TestEverythingFailsInTurn(t *testing.T) {
	const count = 4
	steps := 6
	if isSoak() {
		steps = 40
	}
	for name, c := range map[string]struct {
		resource int
		least    func(process int) uint64 // what an idle service needs
		start    func(process int) uint64 // a start may need less
		step     uint64
	}{
		"descriptors": {
			unix.RLIMIT_NOFILE, func(process int) uint64 { return uint64(descriptors(t, process)) },
			func(int) uint64 { return 8*count + 2 }, 1,
		},
		"address space": {unix.RLIMIT_AS, addressSpace,
			func(process int) uint64 { return addressSpace(process) / 2 }, 64 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			r := startService(t)
			prints := openMany(t, r, count)
			refused := 0
			for i := range steps {
				// While it runs.
				process := r.overview(t).Process
				most, start := c.least(process)+uint64(i)*c.step, c.start(process)+uint64(i)*c.step
				var was unix.Rlimit
				if err := unix.Prlimit(process, c.resource, &unix.Rlimit{Cur: most, Max: most}, &was); err != nil {
					t.Fatal(err)
				}
				s, err := servicetest.Open(r.Socket, testDocument(small,
					func(d *protocol.Document) { d.Part, d.World, d.LocalWorld = fmt.Sprint("part", i), count, count }))
				if err == nil {
					_, saved := s.Save(t.TempDir(), nil)
					if e := (*protocol.Error)(nil); saved != nil && !errors.As(saved, &e) &&
						!errors.Is(saved, client.ErrLost) {
						t.Error(saved)
					}
					err = s.Close()
				}
				if e := (*protocol.Error)(nil); errors.As(err, &e) {
					refused++
				} else if err != nil && !errors.Is(err, client.ErrLost) {
					t.Errorf("limit %d: %v", most, err)
				}
				// When it is started.
				r.limited(c.resource, start)
				before := r.started.Load()
				r.killAndWait(t)
				// The service fails, or serves, or has no descriptor left for a client.
				for deadline := time.Now().Add(time.Second); r.started.Load() < before+2 && !r.isReady() &&
					time.Now().Before(deadline); {
					time.Sleep(time.Millisecond)
				}
				r.more.Store(nil)
				r.killAndWait(t)
				for r.last.Load().limited { // the keeper had begun to start it before
					r.killAndWait(t)
				}
				if o := r.overview(t); len(o.SetAside) != 0 {
					t.Fatalf("limit %d: set aside are %+v", most, o.SetAside)
				}
				checkMany(t, r, prints)
			}
			t.Logf("%d of %d sessions were refused, and %d services started", refused, steps, r.started.Load())
		})
	}
}

// isReady reports whether a service answers.
func (r *running) isReady() bool {
	client, err := client.Dial(r.Socket)
	if err != nil {
		return false
	}
	defer client.Hangup()
	if client.Conn.SetDeadline(time.Now().Add(100*time.Millisecond)) != nil {
		return false
	}
	_, err = client.Overview()
	return err == nil
}

// addressSpace returns the size of a process's address space in bytes.
func addressSpace(process int) uint64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", process))
	var pages uint64
	if err == nil {
		_, err = fmt.Sscan(string(text), &pages)
	}
	if err != nil {
		panic(err)
	}
	return pages * uint64(os.Getpagesize())
}
