package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"plimsoll/bench"
	"plimsoll/host"
	"plimsoll/optim"
	"plimsoll/optim/kernel"
	"plimsoll/report"
)

func benchCommand() *cobra.Command {
	var request bench.Request
	var format report.Format
	command := &cobra.Command{
		Use:   "bench",
		Short: "Measure how near an update comes to what this memory allows",
		Long: `Bench alternates updates with passes that move the same bytes without
arithmetic, over the same memory, and shows how near the one comes to the other:
the median of the ratios of all rounds. Rounds in which other processes used the
CPUs are repeated.`,
		Example: `  plimsoll bench
  plimsoll bench --optimizer all --state all --moments all --parameters 64Mi --json
  plimsoll bench --parameters 16Mi --norm --peer torch`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchmark(c, request, format) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&request.Optimizer, "optimizer", "adamw", "`name`: adamw, adam, lion, adagrad, sgd or all")
	flags.StringVar(&request.State, "state", "split", "state `format`: split, fp32 or all")
	flags.StringVar(&request.Moments, "moments", "fp32", "`type` of the moments: fp32, bf16, int8 (Adam only) or all")
	flags.StringVar(&request.GradientType, "grad-dtype", "bf16", "gradient `type`: bf16, fp16 or fp32")
	flags.StringSliceVar(&request.Parameters, "parameters", nil,
		"numbers of parameters (default: the cache of a core, 16Mi and, where they fit, 256Mi)")
	flags.IntSliceVar(&request.Workers, "workers", nil,
		"numbers of workers (default: one, and one for each usable core)")
	flags.IntVar(&request.Rounds, "rounds", 9, "rounds that are kept of each case")
	flags.BoolVar(&request.Norm, "norm", false, "show what the norm of the gradients costs")
	flags.BoolVar(&request.Journal, "journal", false, "show what it costs that another process could finish an update")
	flags.BoolVar(&request.Checks, "checks", true,
		"look for stops of the world and slow denormal numbers, at the largest size of the first format")
	flags.StringVar(&request.Peer, "peer", "",
		"measure AdamW of others in the same rounds: torch (torch.optim) or deepspeed (DeepSpeedCPUAdam)")
	outputFlags(command, &format, "print one JSON document with every sample")
	for flag, values := range map[string][]string{
		"optimizer":  append(optim.RuleNames(), bench.All),
		"state":      {"split", "fp32", bench.All},
		"moments":    append(kernel.MomentNames(), bench.All),
		"grad-dtype": {"bf16", "fp16", "fp32"},
		"peer":       bench.Peers(),
	} {
		mustRegister(command, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	return command
}

func runBenchmark(c *cobra.Command, request bench.Request, format report.Format) error {
	here, err := host.Local()
	if err != nil {
		return err
	}
	plan, err := bench.NewSuite(request, here)
	var tooLarge *bench.DoesNotFit
	if errors.As(err, &tooLarge) {
		sayTo(c)("%v", err)
		return outcome(exitDoesNotFit)
	}
	if err != nil {
		return err
	}
	results, err := plan.Run(interruptible(c), newProgress(os.Stderr, c.ErrOrStderr()))
	if err != nil {
		return err
	}
	return report.NewBenchmark(c.Root().Version, plan, results).Page().Write(c.OutOrStdout(), format)
}
