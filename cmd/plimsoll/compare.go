//go:build !page

package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"runtime/debug"

	"github.com/spf13/cobra"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/show/report"
)

// compareOptions are the flags of the verb.
type compareOptions struct {
	tolerance float64 // in percent
	learn     string
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

Without PLAN, compare uses the plan that the run was started with, if it had
one.

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
	command.Flags().SortFlags = false
	toleranceFlag(command, &options.tolerance)
	command.Flags().StringVar(&options.learn, "learn", "",
		"write what the run has taught about memory beside the model to a `file` for plan --factors")
	longFlag(command)
	outputFlags(command, &options.format, "print one JSON document")
	htmlFlag(command)
	return command
}

func toleranceFlag(c *cobra.Command, tolerance *float64) {
	c.Flags().Float64Var(tolerance, "tolerance", defaultTolerance,
		"largest difference of a peak from its plan, in `percent`")
}

func runCompare(c *cobra.Command, o compareOptions, arguments []string) error {
	if !(o.tolerance >= 0) {
		return fault.Inputf("--tolerance is %v: expected 0 or more", o.tolerance)
	}
	planFile, plan, recording, err := readCompared(arguments)
	var input *fault.Input
	if errors.As(err, &input) && len(arguments) == 1 {
		input.Hint = "give a plan and a recording: plimsoll compare plan.json run.jsonl"
	}
	if err != nil {
		return err
	}
	if recording == nil {
		return fault.File(planFile).Inputf("this is a plan, and there is no recording to compare it with").
			WithHint("plimsoll compare " + planFile + " run.jsonl")
	}
	if o.learn != "" && plan == nil {
		return fault.Inputf("--learn needs a plan: it says which versions and which GPU the run had").
			WithHint("plimsoll compare plan.json " + recording.File + " --learn " + o.learn)
	}
	document := report.NewComparison(c.Root().Version, recording, planFile, plan, o.tolerance/100)
	err = presentRecorded(c, document.Page(), o.format, recording.Timeline(), document.Peaks)
	if err != nil {
		return err
	}
	if o.learn != "" {
		if err := writeDocument("--learn", o.learn, document.Learn(plan)); err != nil {
			return err
		}
	}
	if !document.Within {
		return outcome(exitDiffers)
	}
	return nil
}

// readCompared reads a plan and a recording in any order, or the one of them that there is.
func readCompared(arguments []string) (planFile string, plan *report.PlanDocument, recording *reconcile.Recording,
	err error) {
	first, last := arguments[0], arguments[len(arguments)-1]
	for _, file := range arguments {
		if _, err := os.Stat(file); len(arguments) == 2 && errors.Is(err, fs.ErrNotExist) {
			return "", nil, nil, fault.File(file).Inputf("no such file or directory: expected a plan or a recording").
				WithHint("plimsoll plan --out writes plans, and plimsoll run --record writes recordings")
		}
	}
	if len(arguments) == 2 && isRecorded(first) && isRecorded(last) {
		return "", nil, nil, fault.File(first).Inputf("this is a recording, and %s is one, too: expected a plan and a "+
			"recording", last).WithHint("name the plan that plimsoll plan --out has written, or one recording alone")
	}
	if len(arguments) == 2 && !report.IsRecording(last) && report.IsRecording(first) {
		first, last = last, first
	}
	if len(arguments) == 2 || !report.IsRecording(first) {
		if plan, err = report.ReadPlan(first); err != nil || len(arguments) == 1 {
			return first, plan, nil, err
		}
		planFile = first
	}
	if os.Getenv("GOGC") == "" { // what is kept of a recording stays until the end, so memory counts more than time
		debug.SetGCPercent(20)
	}
	recording, err = report.ReadRecording(last)
	return planFile, plan, recording, err
}

// isRecorded reports whether a file begins as a recording does.
func isRecorded(file string) bool {
	opened, _, err := files.Open(file)
	if err != nil {
		return false
	}
	defer opened.Close()
	head := make([]byte, 4<<10)
	n, _ := io.ReadFull(opened, head)
	return schemaOf(head[:n]) == samples.Schema
}
