package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/binding"
	"plimsoll/fault"
	"plimsoll/host"
	"plimsoll/launch"
	"plimsoll/plan"
	"plimsoll/report"
)

func runCommand() *cobra.Command {
	request := launch.Request{Binding: binding.Request{TrainerCores: binding.WholeTrainerShare}, Peers: launch.Peers,
		LauncherVariable: launch.LauncherVariable}
	job := launch.Job{Stdin: os.Stdin}
	var dryRun bool
	var format report.Format
	var reportFile, planFile string
	command := &cobra.Command{
		Use:   "run [--nproc N] [flags] -- COMMAND...",
		Short: "Start the ranks of a job on this host, each bound to cores and memory of its own",
		Long: `Run starts a program once for each rank, bound to whole cores and near memory
from its first instruction on, with the variables that torch.distributed reads
(those that are not set already). It passes signals on, ends all ranks when one
fails, leaves no process behind, and ends with the program's exit code.

Started by srun, torchrun or mpirun, it is one of their ranks, and binds within
what they gave it. The command may be torchrun itself.

While ranks run it reads back where their threads and their memory are, and says
so when that differs from the plan.

An optimizer service waits for the ranks at the socket that PLIMSOLL_SOCKET names,
and is started when the first connects. It keeps their optimizer state when one of
them dies; with --restarts they are started again and find it.`,
		Example: `  plimsoll run --nproc 2 -- python train.py
  srun -n 8 plimsoll run -- python train.py
  plimsoll run -- torchrun --nproc-per-node 2 train.py
  plimsoll run --nproc 2 --plan plan.json -- python train.py
  plimsoll run --nproc 2 --dry-run -- python train.py`,
		RunE: func(c *cobra.Command, arguments []string) error {
			request.Command, job.Command = arguments, arguments
			if c.Flags().Changed("nproc") && request.Ranks < 1 {
				return &fault.Input{What: fmt.Sprintf("--nproc is %d: expected 1 or more", request.Ranks)}
			}
			if job.Restarts < 0 {
				return &fault.Input{What: fmt.Sprintf("--restarts is %d: expected 0 or more", job.Restarts)}
			}
			if job.Grace < 0 {
				return &fault.Input{What: fmt.Sprintf("--grace is %v: expected 0s or more", job.Grace)}
			}
			var planned *report.PlannedRun
			if planFile != "" {
				var err error
				if planned, err = report.NewPlannedRun(planFile); err != nil {
					return err
				}
				if planned.Verdict == plan.DoesNotFit {
					sayTo(c)("%s: the job %s", planFile, planned.Text)
					return outcome(exitDoesNotFit)
				}
			}
			h, err := host.Local()
			if err != nil {
				return err
			}
			bound, err := launch.NewLaunch(h, request, os.Environ())
			if err != nil {
				return err
			}
			document := func(result *launch.Result) *report.Run {
				return report.NewRun(c.Root().Version, h, arguments, planned, bound, result)
			}
			if dryRun {
				return document(nil).Page().Write(c.OutOrStdout(), format)
			}
			if format != "" {
				return &fault.Input{What: "--json and --format are for --dry-run: what the ranks print is theirs",
					Hint: "give --report FILE"}
			}
			if short := h.Shortage(threadsOfRun+len(bound.Ranks), 0); short != "" {
				sayTo(c)("the job does not fit: %s; nothing was started", short)
				return outcome(exitDoesNotFit)
			}
			job.Ranks, job.Stdout, job.Stderr = bound.Ranks, c.OutOrStdout(), c.ErrOrStderr()
			job.Say, job.StateCPUs = sayTo(c), bound.StateCPUs()
			for _, note := range bound.Notes {
				job.Say("%s", note)
			}
			if err := checkMetrics(job.Metrics, job.Say); err != nil {
				return err
			}
			var found io.WriteCloser
			if reportFile != "" {
				if found, err = create("--report", reportFile); err != nil {
					return err
				}
				defer found.Close()
			}
			result, err := job.Guard()
			var notStarted *launch.NotStarted
			if errors.As(err, &notStarted) {
				job.Say("%v", err)
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
				job.Say("%v", err)
			}
			return outcome(result.ExitCode)
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.IntVar(&request.Ranks, "nproc", 0,
		"`ranks` to start on this host (default 1, or the one that another launcher has started)")
	flags.Var(&request.Binding.TrainerCores, "trainer-cores",
		"cores of each rank for the trainer: a number, or a fraction such as 0.5; the rest is "+
			"named in PLIMSOLL_OPTIMIZER_CPUS")
	flags.StringSliceVar(&request.Binding.GPUs, "gpus", nil,
		"PCI `addresses` of the ranks' GPUs (default: in the order of the bus, if there is one for each rank)")
	flags.StringVar(&request.Binding.MemoryPolicy, "memory-policy", "",
		"`policy`: default, preferred, interleave or bind (default: preferred for one NUMA "+
			"node, interleave for several)")
	reserveFlag(command, &request.Binding.Reserve)
	smtFlag(command, &request.Binding.OneThreadPerCore)
	flags.DurationVar(&job.Grace, "grace", 30*time.Second,
		"how long ranks may take to end when they are asked to, before they are killed")
	flags.IntVar(&job.Restarts, "restarts", 0,
		"how `often` all ranks are started again after one has failed; the optimizer state is kept meanwhile")
	flags.StringVar(&job.Metrics, "metrics", "",
		"`address`, such as :9464 (for this host alone) or 10.0.0.5:9464, at which the "+
			"optimizer service answers Prometheus")
	flags.StringVar(&planFile, "plan", "", "`file` that plan --out has written: nothing is started if the job does "+
		"not fit, or if what it was planned from has changed")
	flags.StringVar(&reportFile, "report", "", "write what was planned and found to a JSON `file`")
	flags.BoolVar(&dryRun, "dry-run", false, "show what would be started")
	outputFlags(command, &format, "with --dry-run, print one JSON document")
	mustRegister(command, "memory-policy", cobra.FixedCompletions(binding.MemoryPolicies,
		cobra.ShellCompDirectiveNoFileComp))
	return command
}

// threadsOfRun is the number of threads of the keeper and the optimizer service, beside the ranks. The Go runtime
// ends a process that cannot start a thread.
const threadsOfRun = 2 * 16

// sayTo returns a function that writes a message to the user while ranks run.
func sayTo(c *cobra.Command) func(format string, values ...any) {
	return func(format string, values ...any) {
		fmt.Fprintf(c.ErrOrStderr(), "plimsoll: %s\n", fault.Printable(fmt.Sprintf(format, values...)))
	}
}

// keepCommand returns the hidden command that run starts to watch over the ranks.
func keepCommand() *cobra.Command {
	return &cobra.Command{
		Use:    launch.KeepVerb,
		Hidden: true,
		Args:   noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			return launch.Keep(os.Stdin, os.Stdout, os.Stderr, sayTo(c), keeperOf)
		},
	}
}
