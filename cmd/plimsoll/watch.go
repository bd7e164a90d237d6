//go:build linux

package main

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/run/watch"
	"plimsoll/internal/show/report"
)

// watchOptions are the flags of the verb.
type watchOptions struct {
	recordFile string
	replayFile string
	interval   time.Duration
	once       bool
	format     report.Format
}

func watchCommand() *cobra.Command {
	var options watchOptions
	command := &cobra.Command{
		Use:   "watch PID|JOB | --replay FILE",
		Short: "Watch the memory of a job that is running",
		Long: `Watch samples the processes of a job that is running: the process with a PID and
all processes below it, or those that have a name in PLIMSOLL_JOB. It stops no
process and attaches to none. The job need not have been started by run.

On a terminal watch draws a view until all processes have ended, or until q or
Ctrl-C. Where stdout is no terminal, it prints a table each interval. With
--record, watch writes a recording, and prints no tables. With --once, it prints
one table and ends. With --replay, it shows a recording, as it grows.`,
		Example: `  plimsoll watch 4711
  plimsoll watch 4711 --once
  plimsoll watch 4711 --record samples.jsonl
  plimsoll watch --replay samples.jsonl`,
		Args: func(c *cobra.Command, arguments []string) error {
			return oneJob(c, arguments, options.replayFile != "")
		},
		RunE: func(c *cobra.Command, arguments []string) error { return runWatch(c, options, arguments) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&options.recordFile, "record", "", "record the memory of the processes in a `file` of JSON lines")
	flags.StringVar(&options.replayFile, "replay", "", "show a recording: a `file` of --record, also while it grows")
	intervalFlag(command, &options.interval)
	flags.BoolVar(&options.once, "once", false, "print what the processes hold now")
	outputFlags(command, &options.format, "with --once, print one JSON document (plimsoll.watch/1)")
	return command
}

func oneJob(c *cobra.Command, arguments []string, replay bool) error {
	hint := "see " + c.CommandPath() + " --help"
	switch {
	case replay && len(arguments) > 0:
		return fault.Inputf("%s takes either a job or --replay: found %q beside it", c.CommandPath(), arguments[0]).
			WithHint(hint)
	case !replay && len(arguments) != 1:
		return fault.Inputf("%s takes one PID or one job: found %d arguments", c.CommandPath(), len(arguments)).
			WithHint(hint)
	}
	return nil
}

func runWatch(c *cobra.Command, o watchOptions, arguments []string) error {
	switch {
	case o.interval < leastInterval:
		return fault.Inputf("--interval is %v: expected %v or more", o.interval, leastInterval)
	case o.once && o.recordFile != "":
		return fault.Inputf("--once and --record are both given")
	case o.replayFile != "" && o.recordFile != "":
		return fault.Inputf("--replay and --record are both given")
	case o.format != "" && (!o.once || o.replayFile != ""):
		return fault.Inputf("--json and --format are for --once and a job that is running").WithHint("give --once")
	case o.replayFile != "":
		return replay(c, o)
	}
	target, err := watch.Find(arguments[0])
	if err != nil {
		return err
	}
	start := samples.Start{Version: c.Root().Version, Job: target.Name, Command: target.Command,
		WorkingDirectory: target.WorkingDirectory}
	if o.once {
		return watchOnce(c, o.format, start, target)
	}
	config := watch.Config{Start: start, Interval: o.interval, Logf: logTo(c)}
	if o.recordFile != "" {
		file, err := createLog("--record", o.recordFile)
		if err != nil {
			return err
		}
		defer file.Close()
		config.File = file
	}
	return follow(c, config, target)
}

// follow shows or records a job until it ends, or until the user interrupts it.
func follow(c *cobra.Command, config watch.Config, target *watch.Target) error {
	shown, ctx, err := display(c, config.Interval, config.File == nil)
	if err != nil {
		return err
	}
	config.Observe, config.Sampler = shown.Add, probe.NewSampler(probe.WatchGPUs())
	err = watch.Begin(config).Follow(ctx, target)
	shown.Close()
	return leftOr(c, err)
}

// leftOr returns how a command ends whose user may have left the view, which is no error, or has interrupted it.
func leftOr(c *cobra.Command, err error) error {
	switch {
	case !errors.Is(err, context.Canceled):
		return err
	case c.Context().Err() != nil:
		return outcome(exitInterrupt)
	}
	return nil
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
	return present(c, report.NewWatched(start, &sample).Page(), format)
}
