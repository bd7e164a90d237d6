//go:build linux

package service

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// What this test binary does where one of these variables is set.
const (
	serveVariable  = "PLIMSOLL_TEST_SERVE"     // run as the service
	trainVariable  = "PLIMSOLL_TEST_TRAIN"     // run as a trainer; see trainer
	holdVariable   = "PLIMSOLL_TEST_HOLD"      // run as a trainer that updates states; see holder
	visitVariable  = "PLIMSOLL_TEST_VISIT"     // run as a client of another user; the value is the socket
	echoVariable   = "PLIMSOLL_TEST_ECHO"      // send messages back; see startEcho
	memoryVariable = "PLIMSOLL_TEST_AVAILABLE" // bytes that the service takes for available
	deadlyVariable = "PLIMSOLL_TEST_DEADLY"    // end when reading the host
	limitVariable  = "PLIMSOLL_TEST_LIMIT"     // a limit of the service; see setLimit
	// threadsVariable is how many threads the service believes it may start.
	threadsVariable = "PLIMSOLL_TEST_THREADS"
	notifyVariable  = "PLIMSOLL_TEST_NOTIFY" // write to the keeper's socket, which is the value

	impersonateVariable = "PLIMSOLL_TEST_IMPERSONATE" // listen as another user; the value is the socket

	patienceVariable = "PLIMSOLL_TEST_PATIENCE" // the patience with saves when the service ends
)

func TestMain(m *testing.M) {
	var err error
	switch {
	case os.Getenv(serveVariable) != "":
		err = serve()
	case os.Getenv(trainVariable) != "":
		err = trainInThisProcess(os.Getenv(trainVariable))
	case os.Getenv(holdVariable) != "":
		err = holdInThisProcess(os.Getenv(holdVariable))
	case os.Getenv(visitVariable) != "":
		err = visit(os.Getenv(visitVariable))
	case os.Getenv(impersonateVariable) != "":
		err = impersonate(os.Getenv(impersonateVariable))
	case os.Getenv(notifyVariable) != "":
		err = notifyKeeper(os.Getenv(notifyVariable))
	case os.Getenv(echoVariable) != "":
		err = echo()
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serve() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := setLimit(os.Getenv(limitVariable)); err != nil {
		return err
	}
	if patience, err := time.ParseDuration(os.Getenv(patienceVariable)); err == nil {
		savePatience = patience
	}
	given, err := Inherit()
	if err != nil || given == nil {
		return errors.Join(err, errors.New("nothing was inherited"))
	}
	server, err := NewServer("test", given, testHost, allForUpdates, testTier(), func(format string, values ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", values...)
	})
	if err != nil {
		return err
	}
	return server.Serve(ctx)
}

// tierVariable has the folders of a tier for the service, with commas between them, and the window in MiB.
const tierVariable = "PLIMSOLL_TEST_TIER"

func testTier() (of Tier) {
	folders, window, ok := strings.Cut(os.Getenv(tierVariable), " ")
	if ok {
		size, _ := strconv.Atoi(window)
		of = Tier{Folders: strings.Split(folders, ","), Memory: ledger.Bytes(size) * ledger.MiB}
	}
	return of
}

// allForUpdates leaves no core to the trainer.
func allForUpdates(*host.Host, int) binding.TrainerShare { return binding.TrainerShare{} }

// testHost returns this host. Some tests make it appear to have less memory.
func testHost() (*host.Host, error) {
	if os.Getenv(deadlyVariable) != "" {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	h, err := host.Local()
	if err == nil && os.Getenv(memoryVariable) != "" {
		_, err = fmt.Sscan(os.Getenv(memoryVariable), (*int64)(&h.Memory.Available))
		h.Memory.Limits = nil
	}
	if err == nil && os.Getenv(threadsVariable) != "" {
		limit := host.ThreadLimit{Name: "pids.max"}
		_, err = fmt.Sscan(os.Getenv(threadsVariable), &limit.Limit)
		h.ThreadLimits = []host.ThreadLimit{limit}
	}
	return h, err
}

// running is a service with its keeper.
type running struct {
	*Keeper
	log     output
	started atomic.Int64
	more    atomic.Pointer[string] // a variable for services started from now on; nil for none
	startAs atomic.Pointer[func(*exec.Cmd) error]
	end     func()

	last     atomic.Pointer[launched]
	launches events
}

// launched is a process that was started as the service.
type launched struct {
	number  int64 // from 1
	process *os.Process
	limited bool // whether it was given a limit
}

// output is what processes printed.
type output struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *output) Write(data []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(data)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// startService starts a keeper in this process, and a service in another. At the end of
// the test nothing of them may be left.
func startService(t testing.TB, variables ...string) *running {
	t.Helper()
	return startServiceWith(t, func(*Keeper) {}, variables...)
}

// startServiceWith is startService with changes to the keeper.
func startServiceWith(t testing.TB, differ func(*Keeper), variables ...string) *running {
	t.Helper()
	directory, err := os.MkdirTemp("", "plimsoll-test-") // a short path: a socket's may have 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	r := &running{}
	r.Keeper = &Keeper{
		Socket: filepath.Join(directory, "private", "socket"),
		Logf:   func(format string, values ...any) { fmt.Fprintf(&r.log, format+"\n", values...) },
		Command: func() *exec.Cmd {
			r.started.Add(1)
			command := exec.Command(os.Args[0])
			command.Env = append(append(os.Environ(), serveVariable+"=1"), variables...)
			if variable := r.more.Load(); variable != nil {
				command.Env = append(command.Env, *variable)
			}
			command.Stderr = &r.log
			return command
		},
		Start: func(command *exec.Cmd) error {
			start := command.Start
			if as := r.startAs.Load(); as != nil {
				start = func() error { return (*as)(command) }
			}
			if err := start(); err != nil {
				return err
			}
			isLimit := func(variable string) bool { return strings.HasPrefix(variable, limitVariable+"=") }
			next := &launched{1, command.Process, slices.ContainsFunc(command.Env, isLimit)}
			if last := r.last.Load(); last != nil {
				next.number += last.number
			}
			r.last.Store(next)
			r.launches.tell()
			return nil
		},
		pause: 5 * time.Millisecond,
	}
	differ(r.Keeper)
	if err := r.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.end = sync.OnceFunc(func() {
		held := memoryOf(r.Process())
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			r.checkNothingLeft(t, held, true)
		case <-time.After(time.Minute):
			t.Error("the service did not end within a minute of being asked to")
		}
		if t.Failed() {
			t.Logf("the service has said:\n%.2000s", r.log.String())
		}
		if err := os.RemoveAll(directory); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(r.end)
	return r
}

// overview waits for the service's answer.
func (r *running) overview(t testing.TB) *protocol.Overview {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		dialed, err := client.Dial(r.Socket)
		if err == nil {
			var o *protocol.Overview
			o, err = dialed.Overview()
			err = errors.Join(err, dialed.Hangup())
			if err == nil {
				return o
			}
		}
		if !errors.Is(err, client.ErrLost) || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// TestKillIsExplained kills the service as a user would.
func TestKillIsExplained(t *testing.T) {
	r := startService(t)
	r.overview(t)
	r.Kill()
	r.overview(t)
	const want = "(killed by SIGKILL, and the kernel's OOM killer counted no kill"
	if !strings.Contains(r.log.String(), want) {
		t.Errorf("the keeper has said %q, want %q", r.log.String(), want)
	}
}

// TestDirectoryOfTheSocket checks that the keeper removes a directory that it created,
// and leaves one that existed.
func TestDirectoryOfTheSocket(t *testing.T) {
	there := t.TempDir()
	if err := os.Chmod(there, 0o700); err != nil {
		t.Fatal(err)
	}
	made := filepath.Join(there, "made")
	for _, directory := range []string{there, made} {
		k := Keeper{Socket: filepath.Join(directory, "socket"), Lazy: true}
		if err := k.Listen(); err != nil {
			t.Fatal(err)
		}
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		if err := k.Run(ended); err != nil {
			t.Fatal(err)
		}
		if left, err := os.ReadDir(there); err != nil || len(left) > 0 {
			t.Errorf("a keeper at %s has left %v (%v)", k.Socket, left, err)
		}
	}
}

// TestSocketWithALongPath checks that a path that is too long is refused, with the
// limit, before anything is created.
func TestSocketWithALongPath(t *testing.T) {
	parent, err := os.MkdirTemp("", "plimsoll-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(parent)
	directory := filepath.Join(parent, "made") + "/"
	of := func(length int) *Keeper {
		return &Keeper{Socket: directory + strings.Repeat("s", length-len(directory))}
	}
	for _, length := range []int{101, 107, 108, 200} {
		err := of(length).Listen()
		if want := fmt.Sprintf("has a path of %d bytes: expected at most 100", length); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
			t.Errorf("a keeper that did not listen has left %v (%v)", left, err)
		}
	}
	longest := of(100)
	if err := longest.Listen(); err != nil {
		t.Fatal(err)
	}
	longest.Close()
}

// sharedMapping matches a line of /proc/PID/maps for shared memory of this project.
var sharedMapping = regexp.MustCompile(`(?m)^\S+ \S+ \S+ \S+ (\d+) +(/memfd:plimsoll/.*)$`)

// memoryOf returns the memfds of this project that a process has mapped: names by
// inodes, which are unique.
func memoryOf(process int) map[string]string {
	held := map[string]string{}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", process))
	if err != nil {
		return held // the process has ended
	}
	for _, m := range sharedMapping.FindAllStringSubmatch(string(text), -1) {
		held[m[1]] = m[2]
	}
	return held
}

// checkNothingLeft looks for processes that still map the memory or have its files
// open. If the keeper has ended, it also looks for services of that keeper.
func (r *running) checkNothingLeft(t testing.TB, held map[string]string, ended bool) {
	t.Helper()
	var found []string
	// The keeper closes files some time after it is told to.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if found = r.whatIsLeft(t, held, ended); len(found) == 0 {
			return
		}
		if time.Now().After(deadline) {
			break
		}
	}
	for _, what := range found {
		t.Error(what)
	}
}

func (r *running) whatIsLeft(t testing.TB, held map[string]string, ended bool) (found []string) {
	t.Helper()
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	note := func(format string, values ...any) { found = append(found, fmt.Sprintf(format, values...)) }
	for _, process := range processes {
		number, _ := strconv.Atoi(filepath.Base(process))
		if environment, _ := os.ReadFile(process + "/environ"); ended &&
			strings.Contains(string(environment), notifySocket+"="+r.notifyPath()) {
			note("process %d, a service, is left", number)
		}
		for inode := range memoryOf(number) {
			if name := held[inode]; name != "" {
				note("process %d has %s mapped, which was the service's", number, name)
			}
		}
		files, _ := filepath.Glob(process + "/fd/*")
		for _, file := range files {
			if info, err := os.Stat(file); err == nil {
				if name := held[strconv.FormatUint(info.Sys().(*syscall.Stat_t).Ino, 10)]; strings.HasPrefix(
					readLink(file), "/memfd:") && name != "" {
					note("process %d has the file %s, which was the service's", number, name)
				}
			}
		}
	}
	return found
}

func readLink(name string) string {
	target, _ := os.Readlink(name)
	return target
}

const testElements = 200_000

// testDocument returns a shard of three parameters in two groups.
func testDocument(change ...func(*protocol.Document)) *protocol.Document {
	d := &protocol.Document{
		Schema:    protocol.OpenSchema,
		Owner:     protocol.Owner{Job: "test", World: 1, LocalWorld: 1, Part: "bf16"},
		Optimizer: "adamw",
		State:     "split", Moments: "fp32", Parameter: "bf16", Gradient: "bf16", Groups: 2,
		Parameters: []protocol.Piece{
			{Name: "embed", Shape: []int64{1000, 100}, Count: 100_000},
			{Name: "norm", Shape: []int64{777}, Group: 1, Count: 777},
			{Name: "mlp", Shape: []int64{100_000}, First: 777, Count: testElements - 100_000 - 777},
		},
	}
	for _, c := range change {
		c(d)
	}
	return d
}

// mustOpen opens a session until the end of the test.
func mustOpen(t testing.TB, socket string, d *protocol.Document) *servicetest.Session {
	t.Helper()
	s, err := openPatiently(socket, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Detach() }) // the test may have done so
	return s
}

// onceItIsBack opens a session, and tries again while the service restarts.
func onceItIsBack[D, S any](open func(string, D) (S, error), socket string, document D) (S, error) {
	for deadline := time.Now().Add(time.Minute); ; {
		s, err := open(socket, document)
		if err == nil || !errors.Is(err, client.ErrLost) || time.Now().After(deadline) {
			return s, err
		}
	}
}

func openPatiently(socket string, d *protocol.Document) (*servicetest.Session, error) {
	return onceItIsBack(servicetest.Open, socket, d)
}

// weights returns the first weights of a training.
func weights(elements int64) []float32 {
	w := make([]float32, elements)
	for i := range w {
		w[i] = float32(math.Sin(float64(i))) * 0.1
	}
	return w
}

// gradientPattern returns numbers of a type that gradients are cut from.
func gradientPattern(name string) kernel.Array {
	t, err := kernel.ParseNumberType(name)
	if err != nil {
		panic(err)
	}
	of := kernel.Array{Type: t}
	const numbers = 1 << 16
	of.Data = make([]byte, numbers*of.Type.Size())
	random := rand.New(rand.NewPCG(1, 1))
	for i := range numbers {
		of.Put(i, (random.Float32()-0.5)*0.03)
	}
	return of
}

var gradientPatterns = map[string]func() kernel.Array{
	"bf16": sync.OnceValue(func() kernel.Array { return gradientPattern("bf16") }),
	"fp16": sync.OnceValue(func() kernel.Array { return gradientPattern("fp16") }),
	"fp32": sync.OnceValue(func() kernel.Array { return gradientPattern("fp32") }),
}

// putGradients writes the gradients of a step, from element first to end.
func putGradients(s *servicetest.Session, step, first, end int64) {
	of := gradientPatterns[s.Welcome.Arenas[1].Type]()
	size := of.Type.Size()
	at := (step*7919 + first) % int64(of.Len())
	for left := s.Gradients.Bytes()[first*size : end*size]; len(left) > 0; at = 0 {
		left = left[copy(left, of.Data[at*size:]):]
	}
}

// adamw are the hyperparameters of the groups of testDocument.
var adamw = []protocol.Hyperparameters{{1e-3, 0.9, 0.999, 1e-8, 0.01}, {1e-4, 0.9, 0.95, 1e-8, 0}}

// stepOnce makes a step as a trainer does.
func stepOnce(s *servicetest.Session, step int64) error {
	putGradients(s, step, 0, s.Welcome.Elements)
	if err := s.Ready(0, s.Welcome.Elements); err != nil {
		return err
	}
	sum, err := s.SumSquares()
	if err != nil {
		return err
	}
	return s.Step(step, optim.GradScale(math.Sqrt(sum), 1, 1), true, adamw...)
}

// begin writes the first weights to a session.
func begin(s *servicetest.Session) error {
	return errors.Join(s.Write(protocol.MasterWeights, 0, weights(s.Welcome.Elements)), s.SetStep(0))
}

// begun returns a session with weights.
func begun(t testing.TB, socket string, d *protocol.Document) *servicetest.Session {
	t.Helper()
	s := mustOpen(t, socket, d)
	if err := begin(s); err != nil {
		t.Fatal(err)
	}
	return s
}

// mustStep makes the steps up to last.
func mustStep(t testing.TB, s *servicetest.Session, last int64) {
	t.Helper()
	for ; s.Welcome.Step < last; s.Welcome.Step++ {
		if err := stepOnce(s, s.Welcome.Step+1); err != nil {
			t.Fatal(err)
		}
	}
}

// fingerprint hashes all of a session's state.
func fingerprint(t testing.TB, s *servicetest.Session) string {
	t.Helper()
	h := sha256.New()
	for stream := range 3 {
		values := make([]float32, s.Welcome.Elements)
		if err := s.Read(stream, 0, values); err != nil {
			t.Fatal(err)
		}
		if err := binary.Write(h, binary.LittleEndian, values); err != nil {
			t.Fatal(err)
		}
	}
	h.Write(s.Parameters.Bytes())
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

// undisturbed returns the state after a number of undisturbed steps.
func undisturbed(t testing.TB, d *protocol.Document, steps int64) string {
	t.Helper()
	s := begun(t, startService(t).Socket, d)
	mustStep(t, s, steps)
	print := fingerprint(t, s)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	return print
}
