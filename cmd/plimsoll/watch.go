package main

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/probe"
	"plimsoll/report"
	"plimsoll/samples"
	"plimsoll/watch"
)

// watchOptions are the flags of the verb.
type watchOptions struct {
	recordFile string
	interval   time.Duration
	once       bool
	format     report.Format
}

func watchCommand() *cobra.Command {
	var options watchOptions
	command := &cobra.Command{
		Use:   "watch PID|JOB [--record FILE] [--once]",
		Short: "Watch the memory of a job that is running",
		Long: `Watch samples the processes of a job that is running: the process with a PID and
all processes below it, or those that have a name in PLIMSOLL_JOB. It stops no
process and attaches to none. The job need not have been started by run.

With --record, watch writes a recording until all processes have ended, or
until Ctrl-C. With --once, it prints one table and ends.`,
		Example: `  plimsoll watch 4711 --once
  plimsoll watch 4711 --record samples.jsonl`,
		Args: oneJob,
		RunE: func(c *cobra.Command, arguments []string) error { return runWatch(c, options, arguments[0]) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&options.recordFile, "record", "", "record the memory of the processes in a `file` of JSON lines")
	intervalFlag(command, &options.interval)
	flags.BoolVar(&options.once, "once", false, "print what the processes hold now")
	outputFlags(command, &options.format, "with --once, print one JSON document (plimsoll.watch/1)")
	return command
}

func oneJob(c *cobra.Command, arguments []string) error {
	if len(arguments) == 1 {
		return nil
	}
	return fault.Inputf("%s takes one PID or one job: found %d arguments", c.CommandPath(), len(arguments)).
		WithHint("see " + c.CommandPath() + " --help")
}

func runWatch(c *cobra.Command, o watchOptions, job string) error {
	switch {
	case o.interval < leastInterval:
		return fault.Inputf("--interval is %v: expected %v or more", o.interval, leastInterval)
	case o.once == (o.recordFile != ""):
		return fault.Inputf("expected either --record FILE or --once")
	case o.format != "" && !o.once:
		return fault.Inputf("--json and --format are for --once").WithHint("give --once")
	}
	target, err := watch.Find(job)
	if err != nil {
		return err
	}
	start := samples.Start{Version: c.Root().Version, Job: target.Name, Command: target.Command,
		WorkingDirectory: target.WorkingDirectory}
	if o.once {
		return watchOnce(c, o.format, start, target)
	}
	file, err := createLog("--record", o.recordFile)
	if err != nil {
		return err
	}
	defer file.Close()
	return follow(c, o.interval, start, target, file)
}

// follow records a job until it ends, or until the user interrupts it.
func follow(c *cobra.Command, interval time.Duration, start samples.Start, target *watch.Target, file io.Writer) error {
	ctx := interruptible(c)
	recorder := watch.Begin(watch.Config{Start: start, Interval: interval,
		Sampler: probe.NewSampler(probe.WatchGPUs()), File: file, Logf: logTo(c)})
	err := recorder.Follow(ctx, target)
	if errors.Is(err, context.Canceled) {
		return outcome(exitInterrupt)
	}
	return err
}

// walkTime is what the sampler takes to read what the kernel has to walk pages for.
const walkTime = 300 * time.Millisecond

// watchOnce prints one sample.
func watchOnce(c *cobra.Command, format report.Format, start samples.Start, target *watch.Target) error {
	sampler := probe.NewSampler(probe.WatchGPUs())
	defer sampler.Close()
	sampler.Sample(target.Roots)
	time.Sleep(walkTime)
	sample := sampler.Sample(target.Roots)
	return report.NewWatched(start, &sample).Page().Write(c.OutOrStdout(), format)
}
