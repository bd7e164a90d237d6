//go:build !page

package main

import (
	"cmp"
	"fmt"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/show/report"
	"plimsoll/internal/state/delta"
)

func deltaCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "delta",
		Short: "Apply what optimizer steps have changed to copies of a model",
		Long: `Delta works on the messages of optimizer.delta() of plimsoll.torch: what a step
has changed of the parameters.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	command.AddCommand(applyCommand())
	return command
}

func applyCommand() *cobra.Command {
	var a delta.Application
	c := &cobra.Command{
		Use:   "apply MESSAGE... MODEL",
		Short: "Apply messages to safetensors files",
		Long: `Apply changes the tensors of MODEL, a safetensors file, as messages say. MESSAGE
is a file, or a folder of files whose names end in .delta. Apply puts messages
in the order of their steps, and passes over those that the file has had. It
compares the checksum of the parameters with the one that each message begins
with, and refuses a file that lacks an earlier message.

Apply writes another file beside MODEL and renames it. So the file is the old
one or the new one, whatever happens. With --out the new one goes elsewhere, and
MODEL may be a folder of safetensors files.`,
		Example: `  plimsoll delta apply 00000042.delta model.safetensors
  plimsoll delta apply deltas model --step 1000 --out model-1000`,
		Args: func(c *cobra.Command, arguments []string) error {
			if len(arguments) < 2 {
				return fault.Inputf("%s takes messages and the model, and %d arguments are given", c.CommandPath(),
					len(arguments)).WithHint("see " + c.CommandPath() + " --help")
			}
			return nil
		},
		RunE: func(c *cobra.Command, arguments []string) error { return runApply(c, a, arguments) },
	}
	c.Flags().Uint64Var(&a.Step, "step", 0, "the `STEP` whose parameters are wanted (default the last complete one)")
	c.Flags().StringVar(&a.Out, "out", "", "write the changed model to `PATH`")
	c.Flags().BoolVar(&a.Delete, "delete", false, "delete the messages that the changed model has then")
	return c
}

func runApply(c *cobra.Command, a delta.Application, arguments []string) error {
	last := len(arguments) - 1
	a.Messages, a.Model = arguments[:last], arguments[last]
	r, err := delta.Apply(a)
	if err != nil {
		return err
	}
	did := fmt.Sprintf("%d messages lead to step %d", r.Applied, r.Step)
	switch r.Applied {
	case 0:
		did = fmt.Sprintf("at step %d already", r.Step)
	case 1:
		did = fmt.Sprintf("a message leads to step %d", r.Step)
	}
	said := fmt.Sprintf("%s: %s, %d tensors, %v: their checksum is %#016x, as the trainer's",
		cmp.Or(a.Out, a.Model), did, r.Tensors, ledger.Bytes(r.Bytes), r.Checksum)
	if a.Step == 0 && r.Newest > r.Step {
		said += fmt.Sprintf("; some messages of step %d are missing", r.Newest)
	}
	if r.Deleted > 0 {
		said += fmt.Sprintf("; %d messages are deleted", r.Deleted)
	}
	return present(c, report.Sentence(said), report.Text)
}
