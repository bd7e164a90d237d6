package main

import (
	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/report"
)

// compareOptions are the flags of the verb.
type compareOptions struct {
	tolerance float64 // in percent
	format    report.Format
}

const defaultTolerance = 10 // percent

func compareCommand() *cobra.Command {
	var options compareOptions
	command := &cobra.Command{
		Use:   "compare [PLAN] RECORDING",
		Short: "Put a recorded run beside its plan",
		Long: `Compare reads a recording of run --record or watch --record and, if it is
given, a plan of plan --out. It shows for each phase what was planned and what
was measured, which components held the memory, what no component explains, and
what grows from step to step.

Without PLAN, compare uses the plan that the run was started with, if it had one.

It ends with exit code 4 if a measured peak differs from its plan by more than
--tolerance.`,
		Example: `  plimsoll compare plan.json run.jsonl
  plimsoll compare run.jsonl --format markdown`,
		Args: func(_ *cobra.Command, arguments []string) error {
			if len(arguments) == 1 || len(arguments) == 2 {
				return nil
			}
			return fault.Inputf("compare takes a plan and a recording, or a recording alone: found %d arguments",
				len(arguments)).WithHint("plimsoll compare plan.json run.jsonl")
		},
		RunE: func(c *cobra.Command, arguments []string) error { return runCompare(c, options, arguments) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.Float64Var(&options.tolerance, "tolerance", defaultTolerance,
		"largest difference of a peak from its plan, in `percent`")
	outputFlags(command, &options.format, "print one JSON document")
	return command
}

func runCompare(c *cobra.Command, o compareOptions, arguments []string) error {
	if !(o.tolerance >= 0) {
		return fault.Inputf("--tolerance is %v: expected 0 or more", o.tolerance)
	}
	var plan *report.PlanDocument
	planFile, file := "", arguments[len(arguments)-1]
	if len(arguments) == 2 {
		var err error
		planFile = arguments[0]
		if plan, err = report.ReadPlan(planFile); err != nil {
			return err
		}
	}
	recording, err := report.ReadRecording(file)
	if err != nil {
		return err
	}
	document := report.NewComparison(c.Root().Version, recording, planFile, plan, o.tolerance/100)
	if err := document.Page().Write(c.OutOrStdout(), o.format); err != nil {
		return err
	}
	if !document.Within {
		return outcome(exitDiffers)
	}
	return nil
}
