package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"plimsoll/arena"
	"plimsoll/optim"
	"plimsoll/service"
)

// trainLittle is a trainer for the tests: steps with made-up gradients over the
// job's optimizer service, and a checkpoint every few steps. It goes on from
// the state that it finds, or else from the newest checkpoint.
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
		if !errors.Is(err, service.ErrLost) {
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
	for step < last {
		step++
		if err := littleStep(s, step); err != nil {
			return err
		}
		if step%savedEvery != 0 && step != last {
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
	if err := os.WriteFile(filepath.Join(directory, "fingerprint"), []byte(print), 0o644); err != nil {
		return err
	}
	return s.Close()
}

// openLittle opens a session of one parameter.
func openLittle(elements int64) (*service.Session, error) {
	return service.OpenSession(os.Getenv(service.SocketVariable), &service.Document{
		Schema: service.OpenSchema, Job: os.Getenv("PLIMSOLL_JOB"), World: 1, LocalWorld: 1, Part: "bf16",
		Optimizer: "adamw", State: "split", Moments: "fp32", Parameter: "bf16", Gradient: "bf16", Groups: 1,
		Parameters: []service.Piece{{Name: "weight", Shape: []int64{elements}, Count: elements}},
	})
}

func begin(s *service.Session, directory string) (int64, error) {
	if saved, _ := filepath.Glob(filepath.Join(directory, "step-*")); len(saved) > 0 {
		return s.Load(directory)
	}
	weights := make([]float32, littleElements)
	for i := range weights {
		weights[i] = float32(math.Sin(float64(i)))
	}
	if err := s.Write(service.MasterWeights, 0, weights); err != nil {
		return 0, err
	}
	return 0, s.SetStep(0)
}

func littleStep(s *service.Session, step int64) error {
	random := rand.New(rand.NewPCG(uint64(step), 2))
	gradients := arena.View[uint16](s.Gradients)
	for i := range gradients {
		gradients[i] = uint16(math.Float32bits(float32(random.NormFloat64())) >> 16)
	}
	sum, err := s.SumSquares()
	if err != nil {
		return err
	}
	return s.Step(step, optim.GradientScale(math.Sqrt(sum), 1, 1), true, service.Hyperparameters{1e-3, 0.9, 0.999, 1e-8, 0.01})
}

// saveLittle lets the next steps wait: what is tested is that the checkpoint is
// whole or not there.
func saveLittle(s *service.Session, directory string) error {
	if _, err := s.Save(directory, nil); err != nil {
		return err
	}
	step, err := s.Saved()
	if err != nil {
		return err
	}
	return s.Commit(directory, step)
}

func littleFingerprint(s *service.Session) (string, error) {
	h := sha256.New()
	values := make([]float32, littleElements)
	for _, stream := range []int{service.MasterWeights, service.FirstMoment, service.SecondMoment} {
		if err := s.Read(stream, 0, values); err != nil {
			return "", err
		}
		if err := binary.Write(h, binary.LittleEndian, values); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

// newTraining is a job whose ranks are trainers.
func newTraining(t *testing.T, directory string, steps int64, flags ...string) *job {
	t.Helper()
	arguments := append(append([]string{"--grace", "2s"}, flags...), "--", "train-little")
	j := newJob(t, arguments...)
	j.command.Env = append(j.command.Env, "TRAIN_DIRECTORY="+directory, fmt.Sprintf("TRAIN_STEPS=%d", steps), "XDG_RUNTIME_DIR="+directory)
	return j
}

// named is the process of the job whose command line begins like that.
func (j *job) named(t *testing.T, words string) int {
	t.Helper()
	for _, pid := range j.processes(t) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		program, arguments, _ := strings.Cut(string(line), "\x00")
		if err == nil && strings.HasPrefix(filepath.Base(program)+" "+strings.ReplaceAll(arguments, "\x00", " "), words+" ") {
			return pid
		}
	}
	return 0
}

// TestAnyProcessIsKilled kills the processes of a training at random instants:
// the guard and the keeper of plimsoll run, after which the job is started
// again and goes on from its newest checkpoint; the optimizer service, which is
// started again and goes on; and the trainer, which is started again and finds
// its state. It ends with the bits of a training that was left alone, and
// nothing is left over.
func TestAnyProcessIsKilled(t *testing.T) {
	kills := 200
	if testing.Short() {
		kills = 12
	}
	for name, c := range map[string]struct {
		victims []string
		steps   int64 // for each kill
	}{
		"launcher": {[]string{"plimsoll run", "plimsoll keep-ranks"}, 5}, // and what has to be done again
		"trainer":  {[]string{"train-little"}, 25},
		"service":  {[]string{"plimsoll serve"}, 25},
	} {
		t.Run(name, func(t *testing.T) {
			victims, steps := c.victims, c.steps*int64(kills)
			alone := t.TempDir()
			newTraining(t, alone, steps).start(t).ends(t, 0, time.Minute)
			want, err := os.ReadFile(filepath.Join(alone, "fingerprint"))
			if err != nil {
				t.Fatal(err)
			}
			directory := t.TempDir()
			random := rand.New(rand.NewPCG(3, uint64(len(name))))
			killed, begun := 0, 0
			for ended := false; !ended; {
				begun++
				if begun > 3*kills {
					t.Fatalf("the job was begun %d times and has not ended", begun)
				}
				j := newTraining(t, directory, steps, "--restarts", "1000").start(t)
				over := make(chan error, 1)
				go func() { over <- j.command.Wait() }()
				for running := true; running; {
					if name == "launcher" && j.struck {
						running, ended = false, <-over == nil
						break
					}
					select {
					case err := <-over:
						running, ended = false, err == nil
					case <-time.After(time.Duration(random.Float64() * float64(150*time.Millisecond))):
						victim := victims[random.IntN(len(victims))]
						if pid := j.named(t, victim); pid != 0 && killed < kills && syscall.Kill(pid, syscall.SIGKILL) == nil {
							killed++
							j.struck = true
						}
					}
				}
				j.isGone(t)
				if t.Failed() {
					t.Fatalf("stderr:\n%s", &j.stderr)
				}
			}
			got, err := os.ReadFile(filepath.Join(directory, "fingerprint"))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("after %d kills the state is %s (%v), want %s", killed, got, err, want)
			}
			left, _ := filepath.Glob(filepath.Join(directory, "plimsoll-*"))
			if len(left) > 0 {
				t.Errorf("%s are left", strings.Join(left, ", "))
			}
			if killed < kills/3 || name == "launcher" && killed < kills {
				t.Errorf("only %d of %d kills came before the end", killed, kills)
			}
			t.Logf("killed %d times; the job was begun %d times", killed, begun)
		})
	}
}
