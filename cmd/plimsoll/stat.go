//go:build linux

package main

import (
	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/show/report"
)

func statCommand() *cobra.Command {
	var socket string
	var format report.Format
	command := &cobra.Command{
		Use:   "stat [--socket PATH]",
		Short: "Show the optimizer state that a service holds",
		Long: `Stat lists the sessions of an optimizer service: the step of each, how long the
last step took and how many bytes it moved, the trainer that is connected, and
every arena with its planned and its resident bytes.`,
		Example: `  plimsoll stat --socket ~/.plimsoll/socket
  plimsoll stat --json`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runStat(c, socket, format) },
	}
	command.Flags().SortFlags = false
	socketFlag(command, &socket)
	outputFlags(command, &format, "print one JSON document (plimsoll.stat/2)")
	return command
}

func runStat(c *cobra.Command, socket string, format report.Format) error {
	client, err := dialService(socket)
	if err != nil {
		return err
	}
	defer client.Hangup()
	overview, err := client.Overview()
	if err != nil { // such as that of a service of another release
		return &fault.Input{What: "stat", Err: err}
	}
	return present(c, report.Stat{Overview: overview}.Page(), format)
}
