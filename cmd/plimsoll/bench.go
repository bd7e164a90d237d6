//go:build linux

package main

import (
	"os"

	"github.com/spf13/cobra"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/show/report"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
)

func benchCommand() *cobra.Command {
	var request bench.Request
	var format report.Format
	command := &cobra.Command{
		Use:   "bench",
		Short: "Measure optimizer updates against the speed of memory",
		Long: `Bench takes turns of a millisecond, in random order: an update, and a pass that
moves the same bytes of the same memory without arithmetic. It shows how near
updates come to these passes: the median of the ratios. One worker comes first,
and a line of several says at which speeds memory served them. Bench repeats
rounds in which other processes used the CPUs. With --ranks it shows how long a
step takes in which every rank updates its part, and with --world-size how long
this host would take for all parts.`,
		Example: `  plimsoll bench
  plimsoll bench --optimizer all --state all --moments all --parameters 64Mi \
    --json
  plimsoll bench --parameters 16Mi --norm --peer torch
  plimsoll bench --parameters 3085938688 --ranks 2 --world-size 16`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runBench(c, request, format) },
	}
	benchFlags(command, &request)
	htmlFlag(command)
	outputFlags(command, &format, "print one JSON document with every sample")
	return command
}

func benchFlags(c *cobra.Command, q *bench.Request) {
	flags := c.Flags()
	flags.SortFlags = false
	choiceFlag(c, &q.Optimizer, "optimizer", "adamw", "optimizer `name`: VALUES", append(optim.RuleNames(), bench.All))
	choiceFlag(c, &q.State, "state", kernel.Split.String(), "`format` of the master weights: VALUES",
		append(kernel.StateNames(), bench.All))
	choiceFlag(c, &q.Moments, "moments", kernel.MomentsFP32.String(),
		"`dtype` of the moments: VALUES; int8 for adam and adamw only", append(kernel.MomentNames(), bench.All))
	choiceFlag(c, &q.GradientType, "grad-dtype", "bf16", "`dtype` of the gradients: VALUES", kernel.NumberTypeNames())
	flags.StringSliceVar(&q.Parameters, "parameters", nil, "numbers of parameters (default: as many as a core's cache "+
		"holds, 16Mi and, where they fit, 256Mi)")
	flags.IntSliceVar(&q.Workers, "workers", nil,
		"numbers of workers of each rank (default: one, and one for each usable core)")
	flags.IntVar(&q.Ranks, "ranks", 0, "divide the parameters among that many ranks, and show the time of a step")
	flags.IntVar(&q.WorldSize, "world-size", 0, "ranks of the whole job: measure the parts of --ranks of them, and "+
		"multiply (default: --ranks)")
	flags.IntVar(&q.Rounds, "rounds", 9, "rounds of each case that count")
	flags.BoolVar(&q.Norm, "norm", false, "also measure the norm of the gradients")
	flags.BoolVar(&q.Journal, "journal", false,
		"also measure the journal, from which another process can finish an update")
	flags.BoolVar(&q.Checks, "checks", true, "look for long stop-the-world pauses of Go and for slow denormal "+
		"numbers, at the largest size of the first format")
	choiceFlag(c, &q.Peer, "peer", "", "`library` whose AdamW is measured in the same rounds: VALUES (torch.optim or "+
		"DeepSpeedCPUAdam)", bench.Peers())
}

func runBench(c *cobra.Command, request bench.Request, format report.Format) error {
	here, err := host.Local()
	if err != nil {
		return err
	}
	suite, err := bench.NewSuite(request, here)
	if err != nil {
		return unlessTooLarge[*bench.DoesNotFit](c, err)
	}
	results, err := suite.Run(interruptible(c), newProgress(os.Stderr, c.ErrOrStderr()))
	if err != nil {
		return err
	}
	return present(c, report.NewBenchmark(c.Root().Version, suite, results).Page(), format)
}
