//go:build linux

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/internal/after/explain"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/run/launch"
	"plimsoll/internal/run/watch"
	"plimsoll/internal/show/report"
)

// runOptions are the flags of the verb.
type runOptions struct {
	request              launch.Request
	job                  launch.Job
	planFile, reportFile string
	recordFile           string
	forgets              bool // keeps no recording of a job that fails
	hostProfile          string
	interval             time.Duration
	watch                bool
	dryRun               bool
	format               report.Format
}

func runCommand() *cobra.Command {
	options := runOptions{
		request: launch.Request{Binding: binding.Request{TrainerCores: binding.WholeTrainerShare}, Peers: launch.Peers,
			LauncherVariable: launch.LauncherVariable},
		job: launch.Job{Stdin: os.Stdin},
	}
	command := &cobra.Command{
		Use:   "run [--nproc N] [flags] [--] COMMAND...",
		Short: "Start the ranks of a job, each bound to its cores and memory",
		Long: `Run starts a program once for each rank of this host. Before its first
instruction each rank is bound to whole cores and near memory. It gets the
variables that torch.distributed reads, unless they are set. Run passes signals
on, ends all ranks when one fails, and leaves no process behind. It ends with
the program's exit code. Flags after the first word of the command are the
command's own, and so is all that follows --.

Started by srun, torchrun or mpirun, run is one of their ranks, and binds within
the CPUs and the memory that they gave it. The command may be torchrun itself.

While ranks run, run checks where their threads and their memory are, and prints
where they differ from the binding.

An optimizer service listens at the socket that PLIMSOLL_SOCKET names. It starts
when the first rank connects, and keeps the optimizer state when a rank dies.
With --restarts, run starts the ranks again, and they find their state.`,
		Example: `  plimsoll run --nproc 2 -- python train.py
  srun -n 8 plimsoll run -- python train.py
  plimsoll run torchrun --nproc-per-node 2 train.py --epochs 3
  plimsoll run --nproc 2 --plan plan.json -- python train.py
  plimsoll run --nproc 2 --dry-run -- python train.py`,
		RunE: func(c *cobra.Command, arguments []string) error { return runJob(c, options, arguments) },
	}
	runFlags(command, &options)
	return command
}

func runFlags(c *cobra.Command, o *runOptions) {
	flags := c.Flags()
	flags.SortFlags = false
	flags.SetInterspersed(false) // the flags of the command are not ours
	flags.IntVar(&o.request.Ranks, "nproc", 0,
		"`ranks` to start on this host (default 1, or the one that another launcher has started)")
	flags.Var(&o.request.Binding.TrainerCores, "trainer-cores", "cores of each rank for the trainer: a number, or a "+
		"fraction such as 0.5; PLIMSOLL_OPTIMIZER_CPUS names the others (default: as --host-profile says, or all)")
	hostProfileFlag(c, &o.hostProfile)
	flags.StringSliceVar(&o.request.Binding.GPUs, "gpus", nil, "PCI `addresses` of the ranks' GPUs "+
		"(default: in the order of the bus, if there is one for each rank)")
	memoryPolicyFlag(c, &o.request.Binding.MemoryPolicy)
	reserveFlag(c, &o.request.Binding.Reserve)
	smtFlag(c, &o.request.Binding.OneThreadPerCore)
	flags.DurationVar(&o.job.Grace, "grace", 30*time.Second,
		"time for ranks to end by themselves before run kills them")
	flags.IntVar(&o.job.Restarts, "restarts", 0,
		"`times` to start all ranks again after one has failed; the service keeps the optimizer state")
	flags.StringVar(&o.job.Metrics, "metrics", "", "`address` at which the optimizer service answers Prometheus, such "+
		"as :9464 (for this host alone) or 10.0.0.5:9464")
	flags.StringVar(&o.planFile, "plan", "", "`file` of plan --out; run starts nothing if the job does not fit, or if "+
		"a file that the plan was made from has changed")
	flags.StringVar(&o.reportFile, "report", "", "write the binding, and what run found, to a JSON `file`")
	flags.StringVar(&o.recordFile, "record", "", "record the memory of the ranks, their phases and their end, in a "+
		"`file` of JSON lines (default: plimsoll/runs in the folder of your state keeps the last of a job that fails; "+
		"none keeps nothing)")
	intervalFlag(c, &o.interval)
	flags.BoolVar(&o.watch, "watch", false, "show what the ranks hold while they run; a terminal then shows their "+
		"output only in part, and is not their stdin")
	flags.BoolVar(&o.dryRun, "dry-run", false, "show what run would start")
	outputFlags(c, &o.format, "with --dry-run, print one JSON document")
}

func runJob(c *cobra.Command, o runOptions, command []string) error {
	o.job.Heeding = letQuit
	o.request.Command, o.job.Command = command, command
	if o.recordFile == noRecord {
		o.recordFile, o.forgets = "", true
	}
	copied := o.recordFile != "" || o.watch
	o.request.CopyOutput, o.job.CopyOutput = copied, copied
	if err := o.checkNumbers(c); err != nil {
		return err
	}
	planned, err := readPlan(c, o.planFile)
	if err != nil {
		return err
	}
	h, err := host.Local()
	if err != nil {
		return err
	}
	if !c.Flags().Changed("trainer-cores") {
		profile := hostProfile{o.hostProfile, o.request.Binding.Reserve, logTo(c)}
		o.request.TrainerCores = profile.trainerCores(binding.WholeTrainerShare)
	}
	bound, err := launch.NewLaunch(h, o.request, os.Environ())
	if err != nil {
		return err
	}
	document := func(result *launch.Result) *report.Run {
		return report.NewRun(c.Root().Version, h, command, planned, bound, result)
	}
	if o.dryRun {
		return present(c, document(nil).Page(), o.format)
	}
	if o.format != "" {
		return fault.Inputf("--json and --format are for --dry-run: what the ranks print is theirs").
			WithHint("give --report FILE")
	}
	if short := h.Shortage(threadsOfRun+len(bound.Ranks), 0); short != "" {
		logTo(c)("the job does not fit: %s; nothing was started", short)
		return outcome(exitDoesNotFit)
	}
	o.job.Ranks, o.job.Stdout, o.job.Stderr = bound.Ranks, c.OutOrStdout(), c.ErrOrStderr()
	o.job.Logf, o.job.StateCPUs = logTo(c), bound.StateCPUs()
	for _, note := range bound.Notes {
		o.job.Logf("%s", note)
	}
	if err := checkMetrics(o.job.Metrics, o.job.Logf); err != nil {
		return err
	}
	recording, err := o.record(c, planned)
	if err != nil {
		return err
	}
	shown := func() {}
	if o.watch {
		if shown, err = o.show(c); err != nil {
			o.finish(c, recording, err)
			return err
		}
	}
	err = guard(&o.job, o.reportFile, document, shown)
	o.finish(c, recording, err)
	return err
}

// finish ends the recording of a job that has ended so.
func (o *runOptions) finish(c *cobra.Command, recording io.Closer, err error) {
	if ring, is := recording.(*watch.Ring); is {
		o.keep(c, ring, err)
		return
	}
	recording.Close()
	if o.recordFile != "" {
		o.reconcile(c, o.recordFile)
	}
}

// keep leaves the recording of a job that has failed where explain finds it. It is of no use after another job.
func (o *runOptions) keep(c *cobra.Command, ring *watch.Ring, err error) {
	var end *samples.End
	for _, record := range o.job.Recorded() {
		end = record.End
	}
	if err == nil || end == nil || end.ByUser || len(end.Ranks) == 0 {
		if err := ring.Remove(); err != nil {
			logTo(c)("%s stays, the recording of the job: %v", ring.Path(), err)
		}
		return
	}
	if ring.Close() != nil {
		return // what is there may lack the end
	}
	if o.planFile != "" {
		o.reconcile(c, ring.Path())
	}
	logTo(c)("recorded in %s: give it to plimsoll explain, with the job's own log", ring.Path())
}

// ringFolder is where recordings are kept that nobody has asked for; empty where the user has no folder for them.
func ringFolder() string {
	if state := os.Getenv("XDG_STATE_HOME"); state != "" {
		return filepath.Join(state, "plimsoll", "runs")
	}
	home, err := os.UserHomeDir()
	if err != nil || !isThere(home) {
		return ""
	}
	return filepath.Join(home, ".local", "state", "plimsoll", "runs")
}

// lastRecording returns the newest recording that was kept, or "".
func lastRecording() string {
	for _, path := range watch.Rings(ringFolder()) {
		return path
	}
	return ""
}

// noRecord is the value of --record for no recording at all.
const noRecord = "none"

// rarely is the time between two samples of a job that is not recorded in a file. Run explains with them why it has
// failed.
const rarely = 5 * time.Second

// record prepares to record the job, and returns the file: that of --record, or a ring. Where no ring can be made, the
// recording is in memory alone.
func (o *runOptions) record(c *cobra.Command, planned *report.PlannedRun) (io.Closer, error) {
	start := samples.Start{Version: c.Root().Version}
	if planned != nil {
		start.Plan = &samples.Plan{File: planned.File, SHA256: planned.SHA256, Devices: planned.Devices}
	}
	if o.recordFile == "" && !o.watch {
		o.job.Recording = watch.Config{Start: start, Interval: rarely, Brief: true, Sampler: probe.NewSampler(nil)}
	} else {
		o.job.Recording = watch.Config{Start: start, Interval: o.interval, Sampler: probe.NewSampler(probe.WatchGPUs())}
	}
	if o.recordFile != "" {
		file, err := createLog("--record", o.recordFile)
		if err != nil {
			return nil, err
		}
		o.job.Recording.File = file
		o.job.Recording.Snapshots, err = filepath.Abs(o.recordFile)
		return file, err
	}
	if folder := ringFolder(); folder != "" && !o.forgets {
		if ring, err := watch.NewRing(folder); err == nil {
			o.job.Recording.File, o.job.Recording.Snapshots = ring, ring.Path()
			return ring, nil
		}
	}
	return io.NopCloser(nil), nil
}

func (o runOptions) checkNumbers(c *cobra.Command) error {
	switch {
	case c.Flags().Changed("nproc") && o.request.Ranks < 1:
		return fault.Inputf("--nproc is %d: expected 1 or more", o.request.Ranks)
	case o.job.Restarts < 0:
		return fault.Inputf("--restarts is %d: expected 0 or more", o.job.Restarts)
	case o.interval < leastInterval:
		return fault.Inputf("--interval is %v: expected %v or more", o.interval, leastInterval)
	case o.job.Grace < 0:
		return fault.Inputf("--grace is %v: expected 0s or more", o.job.Grace)
	}
	return nil
}

// readPlan reads a plan, if the user gave one. A job that does not fit ends with its exit code.
func readPlan(c *cobra.Command, file string) (*report.PlannedRun, error) {
	if file == "" {
		return nil, nil
	}
	planned, err := report.NewPlannedRun(file)
	if err != nil {
		return nil, err
	}
	if planned.Verdict == plan.DoesNotFit {
		logTo(c)("%s: the job %s", file, planned.Text)
		return nil, outcome(exitDoesNotFit)
	}
	return planned, nil
}

// guard runs the job to its end, and writes the report if the user gave a file for it. It calls ended when nothing more
// happens in the job.
func guard(job *launch.Job, reportFile string, document func(*launch.Result) *report.Run, ended func()) error {
	var found io.WriteCloser
	if reportFile != "" {
		var err error
		if found, err = create("--report", reportFile); err != nil {
			return err
		}
		defer found.Close()
	}
	result, err := func() (*launch.Result, error) {
		defer ended()
		return job.Guard()
	}()
	var notStarted *launch.NotStarted
	if errors.As(err, &notStarted) {
		job.Logf("%v", err)
		return outcome(notStarted.ExitCode)
	}
	if err != nil {
		return err
	}
	if found != nil {
		if err = errors.Join(report.WriteJSON(found, document(result)), found.Close()); err != nil {
			err = fmt.Errorf("--report: %w", err)
		}
	}
	if result.ExitCode == 0 {
		return err
	}
	if err != nil {
		job.Logf("%v", err)
	}
	if !result.ByUser {
		explainRun(job)
	}
	return outcome(result.ExitCode)
}

// reconcile says in short how the recorded run compares with its plan, and what leaks. The exit code stays the job's.
func (o *runOptions) reconcile(c *cobra.Command, recorded string) {
	if !report.IsFile(recorded) {
		return
	}
	logf := logTo(c)
	var plan *report.PlanDocument
	recording, err := report.ReadRecording(recorded)
	if err == nil && o.planFile != "" {
		plan, err = report.ReadPlan(o.planFile)
	}
	if err != nil {
		logf("the recording cannot be compared: %v", err)
		return
	}
	d := report.NewComparison(c.Root().Version, recording, o.planFile, plan, defaultTolerance/100.)
	lines := d.Leaks()
	if d.Farthest != nil {
		lines = append(lines, d.VerdictLine())
	}
	for _, line := range lines {
		logf("%s", line)
	}
	if len(lines) > 0 {
		logf("%s shows all", strings.Join(strings.Fields("plimsoll compare "+o.planFile+" "+recorded), " "))
	}
}

// explainRun tells the user why the job has failed, if the recording tells which resource ran out.
func explainRun(job *launch.Job) {
	recording := explain.NewRecording("the recording", job.Recorded()...)
	in := explain.Inputs{Recordings: []*explain.Recording{recording}}
	for _, s := range samples.SnapshotsOf(job.Recording.Snapshots) { // which may be large: plimsoll explain reads them
		if !s.Written.Before(recording.Began()) {
			in.Snapshots = append(in.Snapshots, explain.Snapshot{File: s.Path, Rank: s.Rank, Device: -1})
		}
	}
	e := explain.Explain(in)
	switch e.Cause.Resource {
	case explain.None, explain.NotMemory, explain.Undetermined:
		return
	}
	for _, line := range e.Brief() {
		job.Logf("%s", line)
	}
}

// threadsOfRun is the number of threads of guard, keeper and optimizer service, beside the ranks. The Go runtime
// ends a process that cannot start a thread.
const threadsOfRun = 3 * 16

// keepCommand returns the hidden command that run starts to watch over the ranks.
func keepCommand() *cobra.Command {
	return &cobra.Command{
		Use:    launch.KeepVerb,
		Hidden: true,
		Args:   noArguments,
		RunE:   func(c *cobra.Command, _ []string) error { return runKeep(c) },
	}
}

func runKeep(c *cobra.Command) error {
	letQuit() // the guard sends no signal before the keeper handles it
	return launch.Keep(os.Stdin, os.Stdout, os.Stderr, logTo(c), keeperOf)
}
