//go:build linux

package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/measure/tune"
	"plimsoll/internal/show/report"
	"plimsoll/internal/state/optim/kernel"
)

// tuneOptions are the flags of the verb.
type tuneOptions struct {
	request tune.Request
	reserve int
	output  string
	format  report.Format
}

func tuneCommand() *cobra.Command {
	var options tuneOptions
	command := &cobra.Command{
		Use:   "tune [flags] [-- COMMAND...]",
		Short: "Measure how this host's cores are best divided, and write it down",
		Long: `Tune measures the speed of updates against the number of cores, for every format
of the optimizer's state, and the time of a trainer against the cores that are
left to it. It finds the split of each rank's cores with the shortest step, and
writes it to the host profile. Run, serve, rehearse and plan use that profile.

The trainer is COMMAND: tune runs it a few times, for a short time each, bound
to different cores. Without a command, the trainer is one thread of each rank
that computes as if it launched kernels on a GPU.`,
		Example: `  plimsoll tune
  plimsoll tune --ranks 2 --overlap forward
  plimsoll tune --ranks 2 -- python train.py`,
		RunE: func(c *cobra.Command, arguments []string) error { return runTune(c, options, arguments) },
	}
	tuneFlags(command, &options)
	return command
}

func tuneFlags(c *cobra.Command, o *tuneOptions) {
	q, flags := &o.request, c.Flags()
	flags.SortFlags = false
	flags.IntSliceVar(&q.Ranks, "ranks", nil, "numbers of ranks on this host (default: 1, and without a command also "+
		"one for each NUMA node and one for each GPU)")
	choiceFlag(c, &q.State, "state", kernel.Split.String(),
		"`format` of the master weights that run and serve split the cores for: VALUES", kernel.StateNames())
	choiceFlag(c, &q.Moments, "moments", kernel.MomentsFP32.String(),
		"`dtype` of the moments that run and serve split the cores for: VALUES", kernel.MomentNames())
	choiceFlag(c, &q.Overlap, "overlap", profile.NoOverlap, "`pass` of the trainer beside which the optimizer "+
		"updates: VALUES", profile.Overlaps)
	flags.Float64Var(&q.ShareOfBest, "share", 0.95, "`share` of the best speed that the knee reaches")
	flags.StringVar(&q.Parameters, "parameters", "", "`number` of parameters to update, such as 64Mi (default: twice "+
		"as many as the caches hold)")
	flags.DurationVar(&q.Budget, "budget", 90*time.Second, "`time` for all measurements")
	reserveFlag(c, &o.reserve)
	flags.StringVar(&o.output, "output", "", "`file` to write the profile to (default: plimsoll/host.json in the "+
		"folder of your configuration)")
	htmlFlag(c)
	longFlag(c)
	outputFlags(c, &o.format, "print one JSON document")
}

func runTune(c *cobra.Command, o tuneOptions, command []string) error {
	here, err := host.Local()
	if err != nil {
		return err
	}
	if here, err = binding.Reserve(here, o.reserve); err != nil {
		return err
	}
	path := o.output
	if path == "" {
		if path, err = profile.Path(); err != nil {
			return err
		}
	}
	file, err := profile.LoadOrNew(path) // before measuring, which takes a minute
	if err != nil && o.output != "" {
		return err // it may be another file
	}
	if err != nil {
		logTo(c)("%v\n  tune replaces the file", err)
		file = &profile.File{}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o.request.Command, o.request.Program = command, running(self)
	tuning, err := tune.New(o.request, here)
	if err != nil {
		return unlessTooLarge[*bench.DoesNotFit](c, err)
	}
	found, err := tuning.Run(interruptible(c), c.Root().Version, newProgress(os.Stderr, c.ErrOrStderr()))
	if err != nil {
		return err
	}
	file.Put(*found)
	if err := file.Save(path); err != nil {
		return err
	}
	ascii := c.OutOrStdout() != os.Stdout || !term.IsTerminal(int(os.Stdout.Fd()))
	return present(c, report.NewTuning(c.Root().Version, here, path, found, ascii).Page(), o.format)
}
