package main

import (
	"github.com/spf13/cobra"

	"plimsoll/report"
	"plimsoll/service"
)

func statCommand() *cobra.Command {
	var socket string
	var format report.Format
	command := &cobra.Command{
		Use:   "stat [--socket PATH]",
		Short: "Show the optimizer state that a service holds, and where its bytes are",
		Long: `Stat asks an optimizer service for its sessions: the step that each is at, how long
the last step took and what it moved, who holds it, and every arena with its
planned and its resident bytes.`,
		Example: `  plimsoll stat --socket ~/.plimsoll/socket
  plimsoll stat --json`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := dialService(socket)
			if err != nil {
				return err
			}
			defer client.Hangup()
			overview, err := client.Overview()
			if err != nil {
				return err
			}
			return report.Stat{Overview: overview}.Page().Write(c.OutOrStdout(), format)
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&socket, "socket", "", "`path` of the service's socket (default: $"+service.SocketVariable+")")
	outputFlags(command, &format, "print one JSON document (plimsoll.stat/2)")
	return command
}
