//go:build linux

package service

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/datagram"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
	"plimsoll/internal/state/shard"
)

// rank returns a small document of one of four ranks.
func rank(number int) *protocol.Document {
	return testDocument(small, func(d *protocol.Document) { d.World, d.LocalWorld, d.Rank = 4, 4, number })
}

// saveThatIsStuck lets a client save and hang up while another holds the lock of the
// folder, as on a file system that does not answer. The save goes on when giveWay
// releases the lock.
func saveThatIsStuck(t *testing.T, socket string, overview func() *protocol.Overview,
	document *protocol.Document) (giveWay func()) {
	t.Helper()
	s := begun(t, socket, document)
	directory := t.TempDir()
	folder := filepath.Join(directory, fmt.Sprintf(".saving-step-%08d", s.Welcome.Step))
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(folder)
	if err == nil {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() }) // the test may have done so
	body := fmt.Appendf(nil, `{"directory": %q}`, directory)
	if _, err := s.Send(protocol.Save, body); err != nil {
		t.Fatal(err)
	}
	await(t, "the save to begin", func() bool { return overview().Unanswered > 0 })
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	return func() { _ = file.Close() }
}

// patiently sets a patience for the duration of a test.
func patiently(t *testing.T, variable *time.Duration, value time.Duration) {
	before := *variable
	*variable = value
	t.Cleanup(func() { *variable = before })
}

// TestStuckRequestHoldsUpNobodyElse opens a session whose last client is gone and left
// a request that does not end. Other ranks can open theirs.
func TestStuckRequestHoldsUpNobodyElse(t *testing.T) {
	patiently(t, &claimPatience, time.Hour)
	server, socket := serveHere(t)
	giveWay := saveThatIsStuck(t, socket, server.Overview, rank(1))
	again := make(chan error, 1)
	go func() {
		s, err := servicetest.Open(socket, rank(1))
		if err == nil {
			err = s.Close()
		}
		again <- err
	}()
	await(t, "rank 1 to be opened again", func() bool { return server.Overview().Unanswered == 2 })
	for _, other := range []int{0, 2} { // which takes an hour if they wait for rank 1
		s := mustOpen(t, socket, rank(other))
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-again:
		t.Fatalf("rank 1 was not waiting: %v", err)
	default:
	}
	giveWay()
	if err := <-again; err != nil {
		t.Fatal(err)
	}
}

// TestStuckRequestIsNotAwaitedForEver opens a session whose last client is gone and left a request that does not end.
func TestStuckRequestIsNotAwaitedForEver(t *testing.T) {
	patiently(t, &claimPatience, 200*time.Millisecond)
	server, socket := serveHere(t)
	giveWay := saveThatIsStuck(t, socket, server.Overview, rank(1))
	_, err := servicetest.Open(socket, rank(1))
	wantError(t, err, protocol.Busy,
		"open: session rank1/bf16 of job test is held by process *, which has hung up; its "+
			"request save is still under way after another 200ms. *")
	giveWay()
	await(t, "the end of the save", func() bool { return server.Overview().Unanswered == 0 })
	s, err := openPatiently(socket, rank(1))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Welcome.Attached {
		t.Error("the session is another one")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestWaitingClientGoes lets a client that waits for a session hang up, and the service
// end meanwhile.
func TestWaitingClientGoes(t *testing.T) {
	server, socket := serveHere(t)
	giveWay := saveThatIsStuck(t, socket, server.Overview, rank(1))
	waiting := make(chan error, 1)
	client, err := client.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		s := &servicetest.Session{Client: *client}
		waiting <- s.Open(rank(1))
	}()
	await(t, "a client to wait", func() bool { return server.Overview().Unanswered == 2 })
	if err := unix.Shutdown(descriptorOf(t, client.Conn), unix.SHUT_RDWR); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; err == nil {
		t.Error("a session was opened that another has")
	}
	await(t, "the service to notice", func() bool { return server.Overview().Clients == 1 })
	giveWay()
	await(t, "the end of the save", func() bool {
		o := server.Overview()
		return o.Clients == 0 && !o.Sessions[0].Saving
	})
}

func descriptorOf(t *testing.T, c protocol.Conn) (descriptor int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { descriptor = int(fd) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return descriptor
}

// TestLoadIsBrokenOffForTheNextClient lets a client hang up during a load. The
// session's next client does not wait for the end of the load.
func TestLoadIsBrokenOffForTheNextClient(t *testing.T) {
	server, socket := serveHere(t)
	document := testDocument(small)
	s := begun(t, socket, document)
	directory := committed(t, s)
	held, s := holdLoads(t, server, s, socket, document)
	if _, err := s.Send(protocol.Load, fmt.Appendf(nil, `{"directory": %q}`, directory)); err != nil {
		t.Fatal(err)
	}
	<-held.begun
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, socket, document)
	select {
	case err := <-held.brokenOff:
		if err == nil {
			t.Error("the next client has waited for the load")
		}
	default:
		t.Error("the next client has the session while it is loaded")
	}
	if !s.Welcome.Initialized {
		t.Errorf("the state was lost: %+v", s.Welcome)
	}
}

// TestStopLeavesWhatIsStuck ends a service during a request that does not end.
func TestStopLeavesWhatIsStuck(t *testing.T) {
	r := startService(t, patienceVariable+"=1s")
	saveThatIsStuck(t, r.Socket, func() *protocol.Overview { return r.overview(t) }, rank(1))
	began := time.Now()
	r.end()
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("it took %v", took)
	}
	if want := "a checkpoint is not finished: nothing of it has reached the disk for 1s"; !strings.Contains(
		r.log.String(), want) {
		t.Errorf("the service has said %q, want %q", r.log.String(), want)
	}
}

// TestStoppedServiceEnds asks a stopped service (SIGSTOP) to end.
func TestStoppedServiceEnds(t *testing.T) {
	r := startService(t)
	r.overview(t)
	if err := syscall.Kill(r.Process(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	r.end()
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("it took %v", took)
	}
}

// TestStuckServiceIsStartedAgain stops the service, so that it gives no sign of life. An idle service gives some.
func TestStuckServiceIsStartedAgain(t *testing.T) {
	r := startServiceWith(t, func(k *Keeper) { k.Watchdog = 2 * time.Second })
	s := begun(t, r.Socket, testDocument())
	mustStep(t, s, 3)
	signs := r.signs.Load()
	await(t, "signs of life", func() bool { return r.signs.Load() > signs+1 })
	stuck := r.last.Load()
	if err := errors.Join(s.Detach(), syscall.Kill(stuck.process.Pid, syscall.SIGSTOP)); err != nil {
		t.Fatal(err)
	}
	r.awaitAfter(t, stuck.number)
	if s = mustOpen(t, r.Socket, testDocument()); !s.Welcome.Attached || s.Welcome.Step != 3 {
		t.Errorf("attached %v at step %d: expected the session at step 3", s.Welcome.Attached, s.Welcome.Step)
	}
	if want := "it gave no sign of life for 2s, and was killed"; !strings.Contains(r.log.String(), want) {
		t.Errorf("the keeper has said %q, want %q", r.log.String(), want)
	}
}

// TestServiceThatDoesNotEndIsKilled has a service that ignores SIGTERM.
func TestServiceThatDoesNotEndIsKilled(t *testing.T) {
	var log output
	ignores := filepath.Join(t.TempDir(), "ignores")
	k := &Keeper{
		Socket: filepath.Join(t.TempDir(), "d", "socket"),
		Logf:   func(format string, values ...any) { fmt.Fprintf(&log, format+"\n", values...) },
		Command: func() *exec.Cmd {
			return exec.Command("sh", "-c", `trap "" TERM; : >"$0"; while :; do sleep 0.1; done`, ignores)
		},
		Watchdog: time.Second,
	}
	if err := k.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	await(t, "a service that ignores the signal", func() bool {
		_, err := os.Stat(ignores)
		return k.Process() != 0 && err == nil
	})
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		k.Kill()
		t.Fatal("the keeper waits for ever")
	}
	if want := "does not end: it gave no sign of life for 1s, and is killed"; !strings.Contains(log.String(), want) {
		t.Errorf("the keeper has said %q, want %q", log.String(), want)
	}
}

// TestKeeperThatDoesNotRead checks that a service does not wait for its keeper for
// ever.
func TestKeeperThatDoesNotRead(t *testing.T) {
	patiently(t, &keeperPatience, 200*time.Millisecond)
	address := filepath.Join(t.TempDir(), "n")
	listener, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: address, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	s, err := newStore(address)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(s.socket)
	for range 10_000 {
		s.alive() // dropped if too many are queued
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() { // as Go's scheduler does, and as SIGTERM comes
		for tick := time.NewTicker(10 * time.Millisecond); ; {
			select {
			case <-tick.C:
				threads, _ := os.ReadDir("/proc/self/task")
				for _, thread := range threads {
					id, _ := strconv.Atoi(thread.Name())
					_ = unix.Tgkill(unix.Getpid(), id, unix.SIGURG)
				}
			case <-stop:
				return
			}
		}
	}()
	began := time.Now()
	for range 20 { // the service waits for all of its patience only once
		if err := s.ready(); err == nil || !strings.Contains(err.Error(), "has taken no message for 200ms") {
			t.Errorf("the error is %v", err)
		}
	}
	if took := time.Since(began); took > 100*time.Second {
		t.Errorf("it took %v", took)
	}
}

// TestKeeperThatStandsStill has a keeper read nothing while a session is given up, and go on later. The service waits
// for it once, and the keeper forgets the files in the end.
func TestKeeperThatStandsStill(t *testing.T) {
	patiently(t, &keeperPatience, 200*time.Millisecond)
	address := filepath.Join(t.TempDir(), "n")
	keeper, err := datagram.Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	defer keeper.Close()
	s, err := newStore(address)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(s.socket)
	s.answers = true
	if err := s.confirm("1", 1); !errors.Is(err, errSilent) {
		t.Errorf("the error is %v", err)
	}
	if !s.silent.Load() {
		t.Error("the next message waits again")
	}
	names := keptNames("1", 40) // more than a socket holds
	for _, name := range names {
		_ = s.forget(name) // some fail
	}
	if len(s.owed) == 0 {
		t.Fatal("the keeper took every message, though it reads none")
	}
	if err := keeper.SetReadDeadline(time.Now().Add(time.Minute)); err != nil { // else a fault would hang the test
		t.Fatal(err)
	}
	forgotten := map[string]bool{}
	for read := 1; len(forgotten) < len(names); read++ {
		data, files, _, err := protocol.ReadWithSender(keeper, make([]byte, 4096))
		if err != nil {
			t.Fatal(err)
		}
		protocol.CloseAll(files)
		if fields := parseNotification(string(data)); fields["FDSTOREREMOVE"] == "1" {
			forgotten[fields["FDNAME"]] = true
		}
		if read%3 == 0 { // a sign of life takes a place of its own
			s.alive()
		}
	}
	if len(s.owed) != 0 {
		t.Errorf("%v are still to be forgotten", s.owed)
	}
}

// TestSocketOfABusyService checks that the keeper does not remove it: a service that
// cannot accept a client now is not dead.
func TestSocketOfABusyService(t *testing.T) {
	name := filepath.Join(t.TempDir(), "s")
	listener, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Bind(listener, &unix.SockaddrUnix{Name: name}), unix.Listen(listener, 0)); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if c, err := net.Dial("unixpacket", name); err == nil {
			defer c.Close()
		}
	}
	if err := removeDeadSocket(name); err == nil || !strings.Contains(err.Error(), "is too busy to answer") {
		t.Errorf("the error is %v", err)
	}
	if err := unix.Close(listener); err != nil {
		t.Fatal(err)
	}
	if err := removeDeadSocket(name); err != nil {
		t.Error(err)
	}
}

// TestStuckStep has a step wait for a save that makes no progress.
func TestStuckStep(t *testing.T) {
	patiently(t, &stepPatience, 200*time.Millisecond)
	server, socket := serveHere(t)
	s := begun(t, socket, testDocument(small))
	server.mu.Lock()
	held := server.all[key{0, "bf16"}].contents.(*heldShard).shard
	server.mu.Unlock()
	disk, saved := make(chan struct{}), make(chan error, 1)
	snapshot := held.Snapshot(func(shard.Chunk, kernel.Chunk) error {
		<-disk
		return nil
	})
	go func() { saved <- snapshot.Run(context.Background(), nil) }()
	if err := server.stuckStep(); err != nil {
		t.Error(err)
	}
	stepped := make(chan error, 1)
	go func() { stepped <- stepOnce(s, 1) }()
	await(t, "the step", func() bool {
		number, _ := held.Underway()
		return number != 0
	})
	if err := server.stuckStep(); err != nil {
		t.Errorf("at its beginning: %v", err)
	}
	var err error
	await(t, "the service to take the step for stuck", func() bool {
		err = server.stuckStep()
		return err != nil
	})
	const want = "the step of session rank0/bf16 has made no progress for 200ms"
	if !strings.Contains(err.Error(), want) {
		t.Errorf("the error is %v, want %q", err, want)
	}
	close(disk)
	if err := errors.Join(<-stepped, <-saved); err != nil {
		t.Fatal(err)
	}
	if err := server.stuckStep(); err != nil {
		t.Errorf("in the end: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
