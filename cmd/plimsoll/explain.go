package main

import (
	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/report"
)

func explainCommand() *cobra.Command {
	var options snapshotOptions
	command := &cobra.Command{
		Use:   "explain SNAPSHOT",
		Short: "Say who held GPU memory, and what other settings would have reserved",
		Long: `Explain reads a memory snapshot of PyTorch, and says who held how many bytes by
component and by line of the source, how much of the reserved memory was free,
and why an allocation failed. It runs nothing of the file.`,
		Example: `  plimsoll explain oom.pickle --top 20
  plimsoll explain oom.pickle --what-if expandable_segments:True
  plimsoll explain --diff before.pickle after.pickle`,
		RunE: func(c *cobra.Command, arguments []string) error {
			if other, err := firstOther(arguments); err != nil || other != "" {
				return &fault.Input{Where: fault.File(other), What: "expected a memory snapshot", Err: err}
			}
			return runSnapshot(c, options, arguments)
		},
	}
	command.Flags().SortFlags = false
	snapshotFlags(command, &options)
	outputFlags(command, &options.format, "print one JSON document ("+report.SnapshotSchema+")")
	return command
}
