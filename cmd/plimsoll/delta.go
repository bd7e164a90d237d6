//go:build !page

package main

import (
	"fmt"

	"github.com/spf13/cobra"

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
	return &cobra.Command{
		Use:   "apply MESSAGE FILE",
		Short: "Apply a message to a safetensors file",
		Long: `Apply changes the tensors of a safetensors file as a message says. It compares
the checksum of the parameters in the file with the one that the message begins
with, and refuses a file that lacks an earlier message. Then it writes another
file beside FILE and renames it. So FILE is the old one or the new one, whatever
happens.`,
		Example: `  plimsoll delta apply 00000042.delta model.safetensors`,
		Args:    paths("MESSAGE", "FILE"),
		RunE:    func(c *cobra.Command, arguments []string) error { return runApply(c, arguments[0], arguments[1]) },
	}
}

func runApply(c *cobra.Command, message, path string) error {
	r, err := delta.ApplyToFile(message, path)
	if err != nil {
		return err
	}
	from := fmt.Sprintf("from step %d to step %d", r.From, r.To)
	switch {
	case r.Had:
		from = fmt.Sprintf("at step %d already", r.To)
	case r.Whole:
		from = fmt.Sprintf("to step %d", r.To)
	}
	return present(c, report.Sentence(fmt.Sprintf("%s: %s, %d tensors, %v: their checksum is %#016x, as the trainer's",
		path, from, r.Tensors, ledger.Bytes(r.Bytes), r.After)), report.Text)
}
