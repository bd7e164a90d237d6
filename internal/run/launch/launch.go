//go:build linux

// Package launch starts the ranks of a job on this host, each on CPUs and NUMA nodes of
// its own, and ends them together. It starts ranks on one host only. On several hosts
// Slurm, torchrun or MPI starts the ranks, and this package takes the place that the
// launcher gave the process.
package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/safe"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/run/watch"
)

// Job is the part of a job that runs on this host.
type Job struct {
	Command []string
	Ranks   []Rank
	// Grace is how long a rank may take to end after it was asked to.
	Grace time.Duration
	// Restarts is how often all ranks are started again after one has failed. The
	// optimizer state is kept meanwhile.
	Restarts int
	// StateCPUs are the CPUs of the optimizer service.
	StateCPUs cpuset.CPUSet
	// Metrics is the address at which the optimizer service answers Prometheus; empty
	// for none.
	Metrics        string
	Stdin          *os.File // given to a single rank
	Stdout, Stderr io.Writer
	// Recording is how the guard records the job.
	Recording watch.Config
	// CopyOutput makes a copy of a single rank's output for the recorder, even where that takes the terminal from it.
	CopyOutput bool
	// HideErrors keeps what the ranks print to stderr from Stderr: only the recorder gets it.
	HideErrors bool
	// Heeding is called once the guard handles signals; nil for nothing.
	Heeding func()
	// Logf tells the user something.
	Logf func(format string, values ...any)

	recorder *watch.Recorder // of the guard
	marks    string          // the socket at which the guard receives marks
	scores   scores
	relay    *relay
	outputs  []*output       // of all ranks, in all attempts
	lost     <-chan struct{} // closed when the guard of the job has ended
	state    *stateService   // nil if the job has none
}

// Rank is one process of the job.
type Rank struct {
	Number       int // its number in the job
	CPUs         cpuset.CPUSet
	NUMANodes    []int
	MemoryPolicy string // one of package binding's policies
	Environment  []string
}

// The exit codes with which shells report how a program failed.
const (
	exitNotExecutable = 126
	exitNotFound      = 127
	exitSignal        = 128 // plus the number of the signal
)

// NotStarted is a rank whose program could not be started.
type NotStarted struct {
	Rank     int
	Cause    string
	ExitCode int // the exit code that a shell would return
}

func (e *NotStarted) Error() string {
	return fmt.Sprintf("rank %d cannot be started: %s", e.Rank, e.Cause)
}

func notStarted(rank int, err error) *NotStarted {
	e := &NotStarted{rank, err.Error(), exitNotExecutable}
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		e.ExitCode = exitNotFound
	}
	var path *fs.PathError
	if errors.As(err, &path) {
		e.Cause = fmt.Sprintf("%s: %v", path.Path, path.Err)
	}
	var missing *exec.Error
	if errors.As(err, &missing) && errors.Is(err, exec.ErrNotFound) {
		e.Cause = fmt.Sprintf("no program %q is in $PATH\n  hint: give its path, such as ./%s", missing.Name,
			safe.Line(missing.Name))
		if strings.HasSuffix(missing.Name, ".py") {
			e.Cause = fmt.Sprintf("%q is a script, and no program in $PATH\n  hint: name the interpreter: python %s",
				missing.Name, safe.Line(missing.Name))
		}
	}
	return e
}

// process is a rank that was started. It leads a process group, which includes the
// processes that it starts.
type process struct {
	rank      Rank
	command   *exec.Cmd
	attempt   int
	outputs   []*output
	ended     bool
	asked     bool      // it has had SIGTERM
	askedAt   time.Time // when it was first asked to end, or killed; zero for never
	placement PlacementCheck
}

// signal sends a signal to the rank's own process: data loaders that end before the
// rank would spoil what it saves. SIGKILL goes to the full group.
func (p *process) signal(s syscall.Signal) {
	if asks := s == syscall.SIGTERM || s == syscall.SIGINT || s == syscall.SIGKILL; asks && p.askedAt.IsZero() {
		p.askedAt = time.Now()
	}
	if s == syscall.SIGKILL {
		p.signalGroup(s)
		return
	}
	_ = syscall.Kill(p.command.Process.Pid, s)
}

func (p *process) signalGroup(s syscall.Signal) { _ = syscall.Kill(-p.command.Process.Pid, s) }

// end is how a rank ended.
type end struct {
	process *process
	at      time.Time
	code    int
	signal  syscall.Signal // 0 for none
	overdue bool           // the rank was killed because it did not end in time
}

func (e end) String() string {
	if e.signal != 0 {
		return fmt.Sprintf("rank %d was ended by signal %d (%v)", e.process.rank.Number, e.signal, e.signal)
	}
	return fmt.Sprintf("rank %d ended with exit code %d", e.process.rank.Number, e.code)
}

// Result is the outcome of a job.
type Result struct {
	ExitCode        int
	ByUser          bool             // the user asked the job to end
	PlacementChecks []PlacementCheck // of each rank
}

// passedOn are the signals that are passed on to the ranks.
var passedOn = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1,
	syscall.SIGUSR2}

// heeded returns the signals that the job handles: those passed on, unless this process
// was started to ignore them (as nohup does with SIGHUP), and SIGCONT, with which a
// shell resumes a job.
func heeded() []os.Signal {
	return append(slices.DeleteFunc(slices.Clone(passedOn), signal.Ignored), syscall.SIGCONT)
}

// surviveClosedOutput makes writes to an output without a reader fail, instead of
// ending this process. It catches the signal, as the ranks would inherit an ignored
// one.
func surviveClosedOutput() (undo func()) {
	closed := make(chan os.Signal, 1)
	signal.Notify(closed, syscall.SIGPIPE)
	return func() { signal.Stop(closed) }
}

// run starts all ranks and returns when the last one has ended. If a rank fails, run
// ends the others, and the job has that rank's exit code. It leaves no process that a
// rank started.
func (j *Job) run(signals <-chan os.Signal) (*Result, error) {
	defer surviveClosedOutput()()
	if err := adoptOrphans(); err != nil {
		return nil, err
	}
	kills := host.LocalMemoryCounters()
	s := newStarter()
	defer s.close()
	defer func() {
		j.stopState(j.state, signals)
		endOrphans(j.patience(), 0, j.Logf)
		j.finishOutputs()
	}()
	for attempt := 0; ; attempt++ {
		a := j.attempt(s, signals, attempt)
		if a.failed != nil {
			return nil, a.failed
		}
		if a.first == nil || a.asked || attempt == j.Restarts || j.isLost() {
			return j.outcome(a, kills), nil
		}
		j.Logf("%v; plimsoll starts all ranks again (restart %d of %d)", a.first, attempt+1, j.Restarts)
		endOrphans(j.patience(), j.state.process(), j.Logf)
	}
}

// attempt is the outcome of starting all ranks once.
type attempt struct {
	processes []*process
	first     *end // the rank that failed first by itself; nil for none
	asked     bool // the user asked the ranks to end
	failed    error
}

// attempt starts all ranks and returns when the last one has ended.
func (j *Job) attempt(s *starter, signals <-chan os.Signal, number int) attempt {
	var a attempt
	ends := make(chan end, len(j.Ranks))
	for _, rank := range j.Ranks {
		rank.Environment = append(slices.Clone(rank.Environment), fmt.Sprintf("%s=%d", attemptVariable, number))
		p, err := j.start(s, rank, number)
		if err != nil {
			a.failed = notStarted(rank.Number, err)
			break
		}
		a.processes = append(a.processes, p)
		j.relay.started(p)
		go func() { ends <- p.wait() }()
	}
	a.first, a.asked = j.watch(a.processes, ends, signals, a.failed != nil)
	for _, p := range a.processes {
		j.returnTerminal(p)
	}
	return a
}

// attemptVariable tells a rank how often the ranks were restarted.
const attemptVariable = "PLIMSOLL_ATTEMPT"

// patience is how long the processes that ranks leave behind may take to end.
func (j *Job) patience() time.Duration {
	if j.isLost() {
		return 0
	}
	return j.Grace
}

func (j *Job) isLost() bool {
	select {
	case <-j.lost:
		return true
	default:
		return false
	}
}

func (j *Job) outcome(a attempt, kills []host.MemoryCounter) *Result {
	result := &Result{ByUser: a.asked}
	for _, p := range a.processes {
		result.PlacementChecks = append(result.PlacementChecks, p.placement)
	}
	if a.first == nil && !a.asked {
		if why := host.KillsBehind(kills, host.LocalMemoryCounters()); why != "" {
			j.Logf("%s", why)
		}
	}
	if a.first != nil {
		result.ExitCode = a.first.code
		if a.first.signal != 0 {
			result.ExitCode = exitSignal + int(a.first.signal)
		}
		if !a.first.overdue {
			j.explain(result.ExitCode, a.first.signal != 0, kills)
		}
	}
	return result
}

// watch waits for all ranks. It returns the first rank that failed by itself, or else
// the first that did not end with 0. It also returns whether the user asked the ranks
// to end.
func (j *Job) watch(processes []*process, ends <-chan end, signals <-chan os.Signal,
	stop bool) (first *end, byUser bool) {
	changes := make(chan os.Signal, 1) // tells that a process ended or stopped
	signal.Notify(changes, syscall.SIGCHLD)
	defer signal.Stop(changes)
	w := &watched{Job: j, processes: processes, running: len(processes),
		wanted: []syscall.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP}}
	if stop {
		w.ask(syscall.SIGTERM)
	}
	w.alone(j.suspend) // if the rank stopped before changes was set up
	pause := time.Second
	proving := time.NewTimer(pause)
	defer proving.Stop()
	lost := j.lost
	for w.running > 0 {
		select {
		case <-lost:
			lost = nil
			j.Logf("plimsoll run was killed, and its ranks with it")
			w.signal(syscall.SIGKILL)
		case s := <-signals:
			if s == syscall.SIGCONT {
				w.alone(j.resume)
				break
			}
			w.pass(s.(syscall.Signal))
		case <-changes:
			w.alone(j.suspend)
		case e := <-ends:
			w.ended(&e)
		case <-w.deadline:
			j.Logf("%s did not end within %v; sending SIGKILL", ledger.Plural(w.running, "rank"), j.Grace)
			w.overdue = true
			w.signal(syscall.SIGKILL)
		case <-proving.C:
			for _, p := range processes {
				if !p.ended {
					p.checkPlacement(j.Logf)
				}
			}
			pause = min(2*pause, rarestCheck)
			proving.Reset(pause)
		}
	}
	return w.first, w.byUser
}

// watched are the ranks of a job that are watched, and what has happened to them.
type watched struct {
	*Job
	processes []*process
	running   int
	asked     bool             // the ranks were asked to end
	deadline  <-chan time.Time // by when those that were asked must have ended
	overdue   bool
	first     *end
	byUser    bool
	// A rank that ends by one of the wanted signals was meant to end. A single rank gets the
	// terminal's signals directly; the others are passed on.
	wanted []syscall.Signal
}

// signal sends a signal to all ranks, and returns to how many. A rank gets SIGTERM once. Programs save at the first
// one; a second one would end most of them while they save.
func (w *watched) signal(s syscall.Signal) (signalled int) {
	for _, p := range w.processes {
		if p.ended || s == syscall.SIGTERM && p.asked {
			continue
		}
		p.asked = p.asked || s == syscall.SIGTERM
		p.signal(s)
		signalled++
	}
	return signalled
}

// ask sends a signal that asks all ranks to end.
func (w *watched) ask(s syscall.Signal) (signalled int) {
	w.asked = true
	if w.deadline == nil {
		w.deadline = time.After(w.Grace)
	}
	return w.signal(s)
}

// alone does something with a rank that may have the terminal.
func (w *watched) alone(do func(*process)) {
	if len(w.processes) == 1 && len(w.Ranks) == 1 && !w.processes[0].ended {
		do(w.processes[0])
	}
}

// pass passes a signal on to the ranks.
func (w *watched) pass(s syscall.Signal) {
	w.wanted = append(w.wanted, s)
	pass := w.signal
	if s == syscall.SIGINT || s == syscall.SIGTERM {
		w.byUser, pass = true, w.ask
	}
	switch signalled := pass(s); {
	case signalled > 0:
		w.Logf("%v: passed on to %s", s, ranks(signalled))
	case w.running > 0:
		w.Logf("%v: not passed on again, as a second signal could end a rank that is saving its state", s)
	}
}

// ended is a rank that has ended. The others are asked to end with the first that failed.
func (w *watched) ended(e *end) {
	e.process.ended, e.overdue = true, w.overdue
	w.relay.rankEnded(*e)
	w.running--
	if e.code == 0 && e.signal == 0 {
		return
	}
	switch {
	case w.asked:
	case w.running > 0:
		w.Logf("%v; sending SIGTERM to the %s", *e, others(w.running))
	default:
		w.Logf("%v", *e)
	}
	if w.first != nil {
		return
	}
	w.first = e
	w.byUser = w.byUser || slices.Contains(w.wanted, e.signal)
	if !w.asked {
		w.ask(syscall.SIGTERM)
	}
}

func ranks(n int) string { return ledger.Plural(n, "rank") }

func others(n int) string {
	if n == 1 {
		return "other rank"
	}
	return fmt.Sprintf("other %d ranks", n)
}

// start starts a rank.
func (j *Job) start(s *starter, rank Rank, attempt int) (*process, error) {
	command := exec.Command(j.Command[0], j.Command[1:]...)
	command.Env = rank.Environment
	// The kernel ends the rank when this process dies, however it dies.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p := &process{rank: rank, command: command, attempt: attempt}
	connected, err := j.connect(p)
	if err == nil {
		if len(j.Ranks) == 1 {
			command.Stdin = j.Stdin
			if j.mayHaveTerminal() {
				command.SysProcAttr.Foreground, command.SysProcAttr.Ctty = true, int(j.Stdin.Fd())
			}
		}
		err = s.start(command, rank, j.scores.Ranks, j.Logf)
	}
	for _, writer := range connected {
		writer.Close() // the rank has its own copy
	}
	return p, err
}

func (p *process) wait() end {
	err := p.command.Wait()
	e := end{process: p, at: time.Now()}
	patience, over := context.WithTimeout(context.Background(), lastOutput)
	defer over()
	for _, out := range p.outputs {
		select {
		case <-out.copied:
		case <-patience.Done(): // processes that it has left behind hold its output open
		}
	}
	switch status := p.command.ProcessState.Sys().(syscall.WaitStatus); {
	case status.Signaled():
		e.signal = status.Signal()
	case status.Exited():
		e.code = status.ExitStatus()
	}
	_ = err // says the same
	return e
}

// starter is a thread that starts processes with its own binding. Their death signal is
// tied to the thread, so the thread lives as long as they do.
type starter struct{ tasks chan func() }

func newStarter() *starter {
	s := &starter{make(chan func())}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends, and its binding with it
		for task := range s.tasks {
			task()
		}
	}()
	return s
}

func (s *starter) close() { close(s.tasks) }

func (s *starter) start(command *exec.Cmd, rank Rank, score int, logf func(string, ...any)) error {
	done := make(chan error)
	s.tasks <- func() {
		err := bindThread(rank.CPUs, rank.MemoryPolicy, rank.NUMANodes)
		var without *noPolicy
		if errors.As(err, &without) {
			logf("rank %d: %v; the kernel places each page near the thread that touches it first", rank.Number, without)
			err = nil
		}
		if err == nil {
			err = startWithScore(command, score)
		}
		done <- err
	}
	return <-done
}
