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
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"plimsoll/arena"
	"plimsoll/host"
	"plimsoll/optim"
)

// serveVariable makes this test binary the service.
const serveVariable = "PLIMSOLL_TEST_SERVE"

func TestMain(m *testing.M) {
	if os.Getenv(serveVariable) == "" && os.Getenv(trainVariable) == "" {
		os.Exit(m.Run())
	}
	err := trainOrServe()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func trainOrServe() error {
	if os.Getenv(trainVariable) != "" {
		return trainToTheEnd()
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	given, err := Inherit()
	if err != nil || given == nil {
		return errors.Join(err, errors.New("nothing was inherited"))
	}
	server, err := NewServer("test", given, testHost, func(format string, values ...any) {
		if os.Getenv(serveVariable) == "loud" {
			fmt.Fprintf(os.Stderr, format+"\n", values...)
		}
	})
	if err != nil {
		return err
	}
	return server.Serve(ctx)
}

// testHost is this host, of which some tests say that it has less memory.
func testHost() (*host.Host, error) {
	h, err := host.Local()
	if err == nil && os.Getenv("PLIMSOLL_TEST_AVAILABLE") != "" {
		_, err = fmt.Sscan(os.Getenv("PLIMSOLL_TEST_AVAILABLE"), (*int64)(&h.Memory.Available))
		h.Memory.Limits = nil
	}
	return h, err
}

// running is a service with its keeper.
type running struct {
	*Keeper
	mu      sync.Mutex
	command *exec.Cmd
	end     func()
	started int
}

// startService starts a keeper in this process, and a service in another.
func startService(t testing.TB, variables ...string) *running {
	t.Helper()
	r := &running{}
	r.Keeper = &Keeper{
		Socket: filepath.Join(t.TempDir(), "private", "socket"),
		Say:    func(format string, values ...any) { t.Logf(format, values...) },
		Command: func() *exec.Cmd {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.started++
			r.command = exec.Command(os.Args[0])
			r.command.Env = append(append(os.Environ(), serveVariable+"=quiet"), variables...)
			r.command.Stdout, r.command.Stderr = os.Stderr, os.Stderr
			return r.command
		},
	}
	if err := r.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.end = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the service did not end within 20 s of being asked to")
		}
	})
	t.Cleanup(r.end)
	return r
}

// kill kills the service, if it runs.
func (r *running) kill() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.command != nil && r.command.Process != nil && r.command.Process.Kill() == nil
}

const testElements = 200_000

// testDocument is a shard of three parameters in two groups.
func testDocument(change ...func(*Document)) *Document {
	d := &Document{
		Schema: OpenSchema, Job: "test", World: 1, LocalWorld: 1, Part: "bf16", Optimizer: "adamw",
		State: "split", Moments: "fp32", Parameter: "bf16", Gradient: "bf16", Groups: 2,
		Parameters: []Piece{
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

func mustOpen(t testing.TB, socket string, d *Document) *Session {
	t.Helper()
	s, err := openPatiently(socket, d)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// openPatiently tries again while the service is being started again.
func openPatiently(socket string, d *Document) (*Session, error) {
	for deadline := time.Now().Add(30 * time.Second); ; {
		s, err := OpenSession(socket, d)
		if err == nil || !errors.Is(err, ErrLost) || time.Now().After(deadline) {
			return s, err
		}
	}
}

// weights are those that a training begins with.
func weights() []float32 {
	w := make([]float32, testElements)
	for i := range w {
		w[i] = float32(math.Sin(float64(i))) * 0.1
	}
	return w
}

// putGradients writes the gradients of a step, in the type of the arena.
func putGradients(s *Session, step int64) {
	random := rand.New(rand.NewPCG(uint64(step), 1))
	bits := arena.View[uint16](s.Gradients)
	for i := range bits {
		bits[i] = uint16(math.Float32bits(float32(random.NormFloat64())*0.01) >> 16)
	}
}

var adamw = Hyperparameters{1e-3, 0.9, 0.999, 1e-8, 0.01}

// stepOnce makes a step as a trainer does.
func stepOnce(s *Session, step int64) error {
	putGradients(s, step)
	if err := s.Ready(0, testElements); err != nil {
		return err
	}
	sum, err := s.SumSquares()
	if err != nil {
		return err
	}
	return s.Step(step, optim.GradientScale(math.Sqrt(sum), 1, 1), true, adamw, Hyperparameters{1e-4, 0.9, 0.95, 1e-8, 0})
}

// train makes the steps up to the last, whatever happens to the service.
func train(socket string, d *Document, last int64, after func(s *Session, step int64) error) (*Session, error) {
	s, err := openPatiently(socket, d)
	if err != nil {
		return nil, err
	}
	reopen := func() error {
		if err := s.Detach(); err != nil {
			return err
		}
		s, err = openPatiently(socket, d)
		return err
	}
	for s.Welcome.Step < last {
		if !s.Welcome.Initialized {
			if err = s.Write(MasterWeights, 0, weights()); err == nil {
				err = s.SetStep(0)
			}
		}
		for step := s.Welcome.Step + 1; err == nil && step <= last; step++ {
			if err = stepOnce(s, step); err == nil {
				s.Welcome.Step = step
				err = after(s, step)
			}
		}
		for errors.Is(err, ErrLost) {
			err = reopen()
		}
		if err != nil {
			return s, err
		}
	}
	return s, nil
}

func nothing(*Session, int64) error { return nil }

// fingerprint hashes all of a session's state.
func fingerprint(s *Session) (string, error) {
	h := sha256.New()
	for stream := range 3 {
		values := make([]float32, testElements)
		if err := s.Read(stream, 0, values); err != nil {
			return "", err
		}
		if err := binary.Write(h, binary.LittleEndian, values); err != nil {
			return "", err
		}
	}
	h.Write(s.Parameters.Bytes())
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

func mustFingerprint(t testing.TB, s *Session) string {
	t.Helper()
	print, err := fingerprint(s)
	if err != nil {
		t.Fatal(err)
	}
	return print
}

// undisturbed is the state after so many steps.
func undisturbed(t testing.TB, steps int64, change ...func(*Document)) string {
	t.Helper()
	r := startService(t)
	s, err := train(r.Socket, testDocument(change...), steps, nothing)
	if err != nil {
		t.Fatal(err)
	}
	print := mustFingerprint(t, s)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	return print
}

// TestServiceIsKilled kills the service at random instants of a training: it
// is started again, and the training ends with the bits that it would have had.
func TestServiceIsKilled(t *testing.T) {
	const kills = 200
	steps := int64(3000)
	want := undisturbed(t, steps)
	r := startService(t)
	random := rand.New(rand.NewPCG(7, 7))
	stop, stopped := make(chan struct{}), make(chan int)
	go func() {
		killed := 0
		defer func() { stopped <- killed }()
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(random.ExpFloat64() * float64(40*time.Millisecond))):
				if killed < kills && r.kill() {
					killed++
				}
			}
		}
	}()
	s, err := train(r.Socket, testDocument(), steps, nothing)
	close(stop)
	killed := <-stopped
	if err != nil {
		t.Fatal(err)
	}
	if got := mustFingerprint(t, s); got != want {
		t.Errorf("after %d kills the state is %s, want %s", killed, got, want)
	}
	t.Logf("killed %d times, started %d times", killed, r.started)
}

const trainVariable = "PLIMSOLL_TEST_TRAIN"

func trainToTheEnd() error { return nil }

var _ = slices.Contains[[]int]
var _ = strings.Contains
