//go:build linux

package launch

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/host"
)

// KeepVerb is the hidden verb with which Guard starts the keeper of a job.
const KeepVerb = "keep-ranks"

// Descriptors of the keeper.
const (
	lifelineDescriptor = 3 // carries the job, and closes when the guard ends
	answerDescriptor   = 4
)

// keptJob is a job as the guard sends it to the keeper.
type keptJob struct {
	Command  words
	Ranks    []keptRank
	Grace    time.Duration
	Restarts int
	Scores   scores
	// These are those of Job.
	CopyOutput, HideErrors bool
	// These describe the optimizer service. Socket is empty if the job has no service
	// of its own.
	Socket, Metrics string
	StateCPUs       []int
}

type keptRank struct {
	Rank
	// These replace the fields of Rank that have the same names.
	CPUs        []int
	Environment words
}

// words are arguments or variables. They may hold any byte but 0; as JSON strings they
// would lose bytes that are not UTF-8.
type words []string

// MarshalText encodes the words as one text.
func (w words) MarshalText() ([]byte, error) {
	return []byte(base64.StdEncoding.EncodeToString([]byte(strings.Join(w, "\x00")))), nil
}

// UnmarshalText decodes them.
func (w *words) UnmarshalText(text []byte) error {
	joined, err := base64.StdEncoding.DecodeString(string(text))
	*w = strings.Split(string(joined), "\x00")
	return err
}

// answer is the outcome of a job as the keeper sends it to the guard.
type answer struct {
	Result     *Result
	NotStarted *NotStarted
	Failed     string // any other error
}

// Guard runs the job in another process, the keeper. Guard and keeper both adopt
// orphans. If one of them is killed, the other ends all processes of the job. The
// kernel alone would end the ranks, but not the processes that they started.
//
// The guard records the job. It is the last process that the kernel kills, and the ranks
// do not wait for it.
func (j *Job) Guard() (*Result, error) {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, heeded()...)
	defer signal.Stop(signals)
	if j.Heeding != nil {
		j.Heeding()
	}
	defer surviveClosedOutput()()
	if err := adoptOrphans(); err != nil {
		return nil, err
	}
	kept := keptJob{Command: j.Command, Grace: j.Grace, Restarts: j.Restarts, Metrics: j.Metrics,
		StateCPUs: j.StateCPUs.List(), Scores: jobScores(lowerScore(scoreRange)), CopyOutput: j.CopyOutput,
		HideErrors: j.HideErrors}
	directory := socketDirectory()
	defer removeSocketDirectory(directory) // even if the keeper was killed
	if !j.hasService() {
		kept.Socket = filepath.Join(directory, "socket")
	}
	marks := j.record(directory)
	for _, rank := range j.Ranks {
		kept.Ranks = append(kept.Ranks, keptRank{rank, rank.CPUs.List(), append(rank.Environment, marks...)})
	}
	result, err := j.startKeeper(kept, signals)
	j.endRecord(result, err)
	return result, err
}

// startKeeper starts the keeper and waits for its end.
func (j *Job) startKeeper(kept keptJob, signals <-chan os.Signal) (*Result, error) {
	document, err := json.Marshal(kept)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	lifeline, end, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer end.Close() // only after the keeper has ended
	messages, reply, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, lifeline.Close())
	}
	defer messages.Close()
	keeper := exec.Command(self, KeepVerb)
	keeper.Args[0] = "plimsoll"
	keeper.Stdin, keeper.Stdout, keeper.Stderr = j.Stdin, j.Stdout, j.Stderr
	keeper.ExtraFiles = []*os.File{lifeline, reply}
	// In a group of its own the keeper gets no signals from the terminal, only those
	// passed on. So every rank gets each signal once.
	keeper.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	defer reclaimTerminal(j.Stdin)
	err = errors.Join(startWithScore(keeper, kept.Scores.Keeper), lifeline.Close(), reply.Close())
	if err != nil {
		return nil, fmt.Errorf("start the keeper of the ranks: %w", err)
	}
	bindThreads(j.StateCPUs) // only the rest of the guard: the keeper has inherited the CPUs of all ranks
	kills := host.LocalMemoryCounters()
	j.recorder.Started(root(keeper.Process.Pid, samples.NoRank, samples.Keeper))
	told := make(chan struct{})
	go func() {
		defer close(told)
		if _, err := end.Write(document); err == nil { // else the keeper is gone; Wait reports that
			j.listenToMarks()
		}
	}()
	ended, heeds := make(chan answer), make(chan struct{})
	go func() {
		a := j.receive(messages, func() { close(heeds) })
		_ = keeper.Wait() // its state tells how it ended
		ended <- a
	}()
	// Before the keeper handles signals, SIGQUIT would make it print the stacks of its goroutines.
	var heeded <-chan os.Signal
	for {
		select {
		case <-heeds:
			heeds, heeded = nil, signals
		case s := <-heeded:
			_ = keeper.Process.Signal(s) // fails if it has ended
		case a := <-ended:
			<-told
			return j.result(a, keeper.ProcessState.Sys().(syscall.WaitStatus), kills)
		}
	}
}

func (j *Job) result(a answer, status syscall.WaitStatus, kills []host.MemoryCounter) (*Result, error) {
	switch {
	case status.Signaled():
		j.recorder.Stop()
		endOrphans(0, 0, j.Logf)
		j.recordKilledRanks()
		j.Logf("signal %d (%v) ended the keeper of the ranks, and plimsoll ended the ranks", status.Signal(),
			status.Signal())
		result := &Result{ExitCode: exitSignal + int(status.Signal()),
			PlacementChecks: make([]PlacementCheck, len(j.Ranks))}
		j.explain(result.ExitCode, true, kills)
		return result, nil
	case a.NotStarted != nil:
		return nil, a.NotStarted
	case a.Result == nil:
		return nil, errors.New("the keeper of the ranks: " + a.Failed)
	}
	return a.Result, nil
}

// Keep is the keeper: it runs the job that the guard sends.
func Keep(stdin *os.File, stdout, stderr io.Writer, logf func(format string, values ...any),
	newService NewService) error {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, heeded()...) // signals that come before the ranks start end them afterwards
	for _, descriptor := range []int{lifelineDescriptor, answerDescriptor} {
		unix.CloseOnExec(descriptor) // ranks must not inherit it
	}
	reply := os.NewFile(answerDescriptor, "answer")
	// It fails if the guard has been killed. The job is read nevertheless: it names the directory to remove.
	_ = json.NewEncoder(reply).Encode(message{Heeds: true})
	lifeline := os.NewFile(lifelineDescriptor, "lifeline")
	kept := keptJob{}
	if err := json.NewDecoder(lifeline).Decode(&kept); err != nil {
		return fmt.Errorf("read the job of the guard: %w", err)
	}
	lost := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, lifeline) // ends when the guard does
		close(lost)
	}()
	j := Job{Command: kept.Command, Grace: kept.Grace, Restarts: kept.Restarts, Stdin: stdin, Stdout: stdout,
		Stderr: stderr, Logf: logf, CopyOutput: kept.CopyOutput, scores: kept.Scores, lost: lost}
	if kept.HideErrors {
		j.Stderr = io.Discard
	}
	if kept.Socket != "" {
		var err error
		if j.state, err = j.startState(kept.Socket, kept.Metrics, cpuset.New(kept.StateCPUs...),
			newService); err != nil {
			return err
		}
	}
	for _, rank := range kept.Ranks {
		rank.Rank.CPUs = cpuset.New(rank.CPUs...)
		rank.Rank.Environment = append(rank.Environment, j.state.variables(rank.Environment)...)
		j.Ranks = append(j.Ranks, rank.Rank)
	}
	j.relay = newRelay(reply, j.state.process)
	result, err := j.run(signals)
	a := answer{Result: result}
	if !errors.As(err, &a.NotStarted) && err != nil {
		a.Failed = err.Error()
	}
	return j.relay.answer(a)
}
