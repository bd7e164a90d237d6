//go:build linux

package tune

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/measure/profile"
)

// commands runs the user's program, each time with other cores, for a short time.
type commands struct {
	*Tuning
	cores    int // of each rank
	ranks    int
	deadline time.Time
	longest  time.Duration // of the runs so far
	// times says what the time of a run is; empty before the first run.
	times string
	// service says that the runs have used the optimizer service: their steps hold the update.
	service bool
}

// A run of the program ends when it has marked enough steps. The first steps allocate and compile.
const (
	warmUpSteps   = 2
	measuredSteps = 8

	leastRun = 2 * time.Second // that a run has in any case
)

// late reports whether no further run would end in time.
func (c *commands) late() bool { return time.Until(c.deadline) < c.longest }

// measure runs the program once, with so many cores of each rank for the trainer.
func (c *commands) measure(ctx context.Context, cores int) ([]float64, error) {
	limit := max(leastRun, c.longest*3/2, time.Until(c.deadline))
	folder, err := os.MkdirTemp("", "plimsoll-tune-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	recording := filepath.Join(folder, "run.jsonl")
	arguments := []string{"run", "--nproc", strconv.Itoa(c.ranks), "--host-profile", "none", "--record", recording,
		"--interval", "200ms", "--grace", "3s"}
	if cores < c.cores {
		arguments = append(arguments, "--trainer-cores", strconv.Itoa(cores))
	}
	run := exec.Command(c.Program, append(append(arguments, "--"), c.Command...)...)
	run.Args[0] = "plimsoll"
	var stderr bytes.Buffer
	run.Stderr = &stderr
	begin := time.Now()
	if err := run.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- run.Wait() }()
	alone, failed := c.follow(ctx, run.Process, recording, limit, ended)
	wall := time.Since(begin)
	c.longest = max(c.longest, wall)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if alone && failed != nil {
		return nil, fault.Inputf("%s: %v: %s", commandLine(c.Command), failed, lastLine(stderr.String())).
			WithHint("try it with plimsoll run, and tune it when it runs")
	}
	return c.judge(recording, alone, wall, limit)
}

// follow waits until the run ends, or has marked enough steps, or has had its time. It reports whether the run ended
// by itself.
func (c *commands) follow(ctx context.Context, run *os.Process, recording string, limit time.Duration,
	ended <-chan error) (alone bool, failed error) {
	timeout, look := time.After(limit), time.NewTicker(250*time.Millisecond)
	defer look.Stop()
	for enough := false; !enough; {
		select {
		case failed := <-ended:
			return true, failed
		case <-timeout:
			enough = true
		case <-ctx.Done():
			enough = true
		case <-look.C:
			found, _ := readSteps(recording)
			enough = len(found.steps) >= warmUpSteps+measuredSteps
		}
	}
	_ = run.Signal(syscall.SIGTERM) // it may have ended since
	return false, <-ended
}

// judge returns the times of a run: those of its steps, or else that of the whole run. All runs must have the same.
func (c *commands) judge(recording string, alone bool, wall, limit time.Duration) ([]float64, error) {
	found, err := readSteps(recording)
	if err != nil {
		return nil, err
	}
	times, seconds := profile.TimeOfRun, []float64{wall.Seconds()}
	if len(found.steps) > warmUpSteps {
		times, seconds = profile.TimeOfSteps, found.steps[warmUpSteps:]
	}
	if times == profile.TimeOfRun && !alone {
		return nil, fault.Inputf("%s marked %s in %v and did not end: expected %d, or its end", commandLine(c.Command),
			ledger.Plural(len(found.steps), "step"), limit.Round(100*time.Millisecond), warmUpSteps+1).
			WithHint("give a larger --budget, let the program end after a few steps, or mark its steps " +
				"(plimsoll.torch.watch)")
	}
	if c.times != "" && c.times != times {
		return nil, fault.Inputf("%s marked steps in one run and none in another", commandLine(c.Command)).
			WithHint("give a larger --budget")
	}
	c.times, c.service = times, c.service || found.service
	return seconds, nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// runFound is what a recording says of a run.
type runFound struct {
	steps   []float64 // seconds of each step of the lowest rank
	service bool
}

// longestRecording is far more than a short run writes.
const longestRecording = 256 << 20

// readSteps reads a recording, which may still grow. A step lasts from its first mark to the next step's.
func readSteps(recording string) (found runFound, err error) {
	text, err := files.Read(recording, longestRecording)
	if err != nil {
		return found, fmt.Errorf("the recording of the run: %w", err)
	}
	if !bytes.Contains(text, []byte("\n")) { // it has just begun
		return found, nil
	}
	began := map[int][]mark{}
	_, err = samples.Read(recording, bytes.NewReader(text), func(r *samples.Record) error {
		if r.Sample != nil {
			found.service = found.service || slices.ContainsFunc(r.Sample.Processes, func(p samples.Process) bool {
				return p.Role == samples.Service
			})
		}
		if m := r.Mark; m != nil && m.Source != samples.FromBehavior && m.Rank >= 0 {
			began[m.Rank] = withMark(began[m.Rank], mark{m.Step, r.Time})
		}
		return nil
	})
	if err != nil {
		return found, err
	}
	for _, rank := range slices.Sorted(maps.Keys(began)) {
		marks := began[rank]
		for i := 1; i < len(marks); i++ {
			found.steps = append(found.steps,
				(marks[i].at-marks[i-1].at).Seconds()/float64(marks[i].step-marks[i-1].step))
		}
		if found.steps != nil {
			break
		}
	}
	return found, nil
}

// mark is the first mark of a step.
type mark struct {
	step int64
	at   time.Duration
}

// together is the time within which marks are taken for one: those of lines that a program has printed at once.
const together = time.Millisecond

// withMark adds a mark if its step is new.
func withMark(marks []mark, m mark) []mark {
	last := len(marks) - 1
	switch {
	case last >= 0 && m.step <= marks[last].step:
		return marks
	case last >= 0 && m.at-marks[last].at < together:
		marks[last].step = m.step
		return marks
	}
	return append(marks, m)
}
