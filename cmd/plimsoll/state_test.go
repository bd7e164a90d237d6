//go:build linux

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/service"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// trainLittle is a trainer for the tests. It makes steps with made-up gradients over the job's optimizer service, and
// a checkpoint every few steps. It continues from the state that it finds, or else from the newest checkpoint. It
// ends after TRAIN_STEPS steps; where that is 0, it ends when TRAIN_DIRECTORY has a file "enough".
func trainLittle() {
	if err := trainSteps(); err != nil {
		fmt.Fprintln(os.Stderr, "train-little:", err)
		os.Exit(1)
	}
}

const (
	littleElements = 150_000
	savedEvery     = 25 // steps
)

func trainSteps() error {
	directory := os.Getenv("TRAIN_DIRECTORY")
	last, err := strconv.ParseInt(os.Getenv("TRAIN_STEPS"), 10, 64)
	if err != nil {
		return err
	}
	for {
		err := trainUntil(directory, last)
		if !errors.Is(err, client.ErrLost) {
			return err
		}
	}
}

// trainUntil trains until the last step is made, or the service is lost.
func trainUntil(directory string, last int64) error {
	s, err := openLittle(littleElements)
	if err != nil {
		return err
	}
	defer s.Detach()
	step := s.Welcome.Step
	if !s.Welcome.Initialized {
		if step, err = begin(s, directory); err != nil {
			return err
		}
	}
	done := func() bool { return step == last }
	if last == 0 {
		done = func() bool { return exists(directory, "enough") }
	}
	for !done() {
		step++
		if err := littleStep(s, step); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(directory, "made"), fmt.Append(nil, step), 0o644); err != nil {
			return err
		}
		if step%savedEvery != 0 {
			continue
		}
		if err := saveLittle(s, directory); err != nil {
			return err
		}
	}
	print, err := littleFingerprint(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(directory, "fingerprint"), fmt.Appendf(nil, "%d %s", step, print),
		0o644); err != nil {
		return err
	}
	return s.Close()
}

func exists(directory, name string) bool {
	_, err := os.Stat(filepath.Join(directory, name))
	return err == nil
}

// openLittle opens a session of one parameter.
func openLittle(elements int64) (*servicetest.Session, error) {
	return servicetest.Open(os.Getenv(service.SocketVariable), &protocol.Document{
		Schema:    protocol.OpenSchema,
		Owner:     protocol.Owner{Job: os.Getenv("PLIMSOLL_JOB"), World: 1, LocalWorld: 1, Part: "bf16"},
		Optimizer: "adamw", State: "split", Moments: "fp32", Parameter: "bf16", Gradient: "bf16", Groups: 1,
		Parameters: []protocol.Piece{{Name: "weight", Shape: []int64{elements}, Count: elements}},
	})
}

func begin(s *servicetest.Session, directory string) (int64, error) {
	if saved, _ := filepath.Glob(filepath.Join(directory, "step-*")); len(saved) > 0 {
		return s.Load(directory)
	}
	weights := make([]float32, littleElements)
	for i := range weights {
		weights[i] = float32(math.Sin(float64(i)))
	}
	if err := s.Write(protocol.MasterWeights, 0, weights); err != nil {
		return 0, err
	}
	return 0, s.SetStep(0)
}

func littleStep(s *servicetest.Session, step int64) error {
	random := rand.New(rand.NewPCG(uint64(step), 2))
	gradients := arena.View[uint16](s.Gradients)
	for i := range gradients {
		gradients[i] = uint16(math.Float32bits(float32(random.NormFloat64())) >> 16)
	}
	sum, err := s.SumSquares()
	if err != nil {
		return err
	}
	return s.Step(step, optim.GradScale(math.Sqrt(sum), 1, 1), true,
		protocol.Hyperparameters{1e-3, 0.9, 0.999, 1e-8, 0.01})
}

// saveLittle makes the next steps wait: the test is whether the checkpoint is complete or absent.
func saveLittle(s *servicetest.Session, directory string) error {
	if _, err := s.Save(directory, nil); err != nil {
		return err
	}
	step, err := s.Saved()
	if err != nil {
		return err
	}
	return s.Commit(directory, step)
}

func littleFingerprint(s *servicetest.Session) (string, error) {
	h := sha256.New()
	values := make([]float32, littleElements)
	for _, stream := range []int{protocol.MasterWeights, protocol.FirstMoment, protocol.SecondMoment} {
		if err := s.Read(stream, 0, values); err != nil {
			return "", err
		}
		if err := binary.Write(h, binary.LittleEndian, values); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

// newTraining returns a job whose ranks are trainers.
func newTraining(t *testing.T, directory string, steps int64, flags ...string) *runningJob {
	t.Helper()
	arguments := append(append([]string{"--grace", "2s"}, flags...), "--", "train-little")
	j := newJob(t, arguments...)
	j.command.Env = append(j.command.Env, "TRAIN_DIRECTORY="+directory, fmt.Sprintf("TRAIN_STEPS=%d", steps),
		"XDG_RUNTIME_DIR="+directory)
	return j
}

// named returns the process of the job whose command line begins with these words.
func (j *runningJob) named(t *testing.T, words string) int {
	t.Helper()
	for _, pid := range j.processes(t) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		program, arguments, _ := strings.Cut(string(line), "\x00")
		if err == nil && strings.HasPrefix(filepath.Base(program)+" "+strings.ReplaceAll(arguments, "\x00", " "),
			words+" ") {
			return pid
		}
	}
	return 0
}

// TestBusyMetrics lets another process listen at the address for Prometheus. Before the start the command refuses the
// address; later the service continues without metrics.
func TestBusyMetrics(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	begun, socket := filepath.Join(t.TempDir(), "begun"), filepath.Join(t.TempDir(), "socket")
	newJob(t, "--metrics", address, "--", "touch", begun).start(t).ends(t, 2, "--metrics: listen tcp "+address, "hint")
	serve := func() *runningJob {
		j := newJob(t)
		j.command.Args = []string{j.command.Path, "serve", "--socket", socket, "--metrics", address}
		return j.start(t)
	}
	if err := os.Chmod(filepath.Dir(socket), 0o700); err != nil {
		t.Fatal(err)
	}
	serve().ends(t, 2, "--metrics: listen tcp "+address, "hint")
	if _, err := os.Stat(begun); err == nil {
		t.Error("a rank was started")
	}

	listener.Close()
	j := serve()
	if !await(func() bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		return err == nil
	}) {
		t.Fatal("the service does not listen")
	}
	keeper := j.command.Process
	_ = keeper.Signal(syscall.SIGSTOP) // until the address is taken
	_ = syscall.Kill(j.childOf(t, keeper.Pid), syscall.SIGKILL)
	if !await(func() bool { listener, err = net.Listen("tcp", address); return err == nil }) {
		t.Fatal(err)
	}
	defer listener.Close()
	_ = keeper.Signal(syscall.SIGCONT)
	client, err := client.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Hangup()
	if overview, err := client.Overview(); err != nil || overview.Restarts != 1 {
		t.Errorf("%+v, %v", overview, err)
	}
	_ = keeper.Signal(syscall.SIGTERM)
	j.ends(t, 0, "goes on without")
}

// TestAnyProcessIsKilled kills the processes of a training at random instants. When the guard or the keeper of
// plimsoll run is killed, the test starts the job again, and it continues from its newest checkpoint. The optimizer
// service is started again and continues. The trainer is started again and finds its state. The training must end
// with the bits of one that was left alone, and nothing may be left over.
func TestAnyProcessIsKilled(t *testing.T) {
	t.Parallel()
	kills := 120
	if testing.Short() {
		kills = 6 // two of each moment
	}
	for name, victims := range map[string][]string{
		"launcher": {"plimsoll run", "plimsoll keep-ranks"},
		"trainer":  {"train-little"},
		"service":  {"plimsoll serve"},
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			random := rand.New(rand.NewPCG(3, uint64(len(name))))
			killed, begun := 0, 0
			for ended := false; !ended; begun++ {
				j := newTraining(t, directory, 0, "--restarts", "1000").start(t)
				fatal := func(what string) {
					j.kill(t)
					t.Fatalf("after %d kills %s: %v\nstderr:\n%s", killed, what, j.command.Wait(), &j.stderr)
				}
				struck := false // the kill has ended the job
				for killed < kills && !struck {
					if !awaitMoment(t, directory, killed) {
						fatal("no step is made, or no checkpoint")
					}
					time.Sleep(time.Duration(random.Int64N(int64(100 * time.Millisecond))))
					pid := j.named(t, victims[random.IntN(len(victims))])
					if pid != 0 && syscall.Kill(pid, syscall.SIGKILL) == nil {
						killed++
						struck = name == "launcher"
					}
				}
				if ended = !struck; ended {
					if !awaitStep(t, directory) {
						fatal("no step is made")
					}
					if err := os.WriteFile(filepath.Join(directory, "enough"), nil, 0o644); err != nil {
						t.Fatal(err)
					}
				}
				err := j.wait(t)
				j.isGone(t)
				if (err == nil) != ended || t.Failed() {
					t.Fatalf("after %d kills the job has ended with %v\nstderr:\n%s", killed, err, &j.stderr)
				}
			}
			checkFingerprint(t, directory)
			folders, _ := filepath.Glob(filepath.Join(directory, "plimsoll-*"))
			contents, _ := filepath.Glob(filepath.Join(directory, "plimsoll-*", "*"))
			if left := append(folders, contents...); len(left) > 0 {
				t.Errorf("%s are left", strings.Join(left, ", "))
			}
			t.Logf("killed %d times; the job was begun %d times", killed, begun)
		})
	}
}

// awaitMoment waits for the moment of the next kill: in turn none, a step and a checkpoint.
func awaitMoment(t *testing.T, directory string, number int) bool {
	switch number % 3 {
	case 1:
		return awaitStep(t, directory)
	case 2:
		saved := func() []string {
			folders, _ := filepath.Glob(filepath.Join(directory, "step-*"))
			return folders
		}
		before := saved()
		return awaitFiles(t, directory, func() bool { return !slices.Equal(saved(), before) })
	}
	return true
}

// awaitStep waits for a step to be made.
func awaitStep(t *testing.T, directory string) bool {
	made := func() string {
		step, _ := os.ReadFile(filepath.Join(directory, "made"))
		return string(step)
	}
	before := made()
	return awaitFiles(t, directory, func() bool { return made() != before })
}

// checkFingerprint compares the state at the end with the state of a training that was left alone.
func checkFingerprint(t *testing.T, directory string) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(directory, "fingerprint"))
	if err != nil {
		t.Fatal(err)
	}
	step, _, _ := strings.Cut(string(got), " ")
	steps, err := strconv.ParseInt(step, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	alone := t.TempDir()
	newTraining(t, alone, steps).start(t).ends(t, 0)
	want, err := os.ReadFile(filepath.Join(alone, "fingerprint"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("step and state are %s (%v), want %s", got, err, want)
	}
}
