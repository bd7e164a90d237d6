package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/service"
	"plimsoll/service/client"
)

func restoreCommand() *cobra.Command {
	var socket string
	var discard bool
	command := &cobra.Command{
		Use:   "restore [--socket PATH] NAME...",
		Short: "Restore optimizer state that a service has set aside, or give it back",
		Long: `A service that is started again restores the sessions of the one before it. A session
that it cannot restore is set aside: its memory is kept, and "plimsoll stat" shows its
name and the reason. Restore tries again. With --discard it gives the memory back, and
the state is gone.`,
		Example: `  plimsoll restore --socket ~/.plimsoll/socket 12
  plimsoll restore --discard 12`,
		Args: func(_ *cobra.Command, names []string) error {
			if len(names) == 0 {
				return &fault.Input{What: "no session is named: expected the names of sessions that are set aside",
					Hint: "plimsoll stat shows them"}
			}
			return nil
		},
		RunE: func(c *cobra.Command, names []string) error {
			client, err := dialService(socket)
			if err != nil {
				return err
			}
			defer client.Hangup()
			done := map[bool]string{false: "restored", true: "given back"}[discard]
			for _, name := range names {
				if err := client.Restore(name, discard); err != nil {
					return &fault.Input{Err: err}
				}
				fmt.Fprintf(c.OutOrStdout(), "session %s is %s\n", name, done)
			}
			return nil
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&socket, "socket", "", "`path` of the service's socket (default: $"+service.SocketVariable+")")
	flags.BoolVar(&discard, "discard", false, "give the memory back; the state is gone")
	return command
}

// dialService connects to the service at a socket. Without a socket it uses the one that the environment names.
func dialService(socket string) (*client.Client, error) {
	if socket == "" {
		socket = os.Getenv(service.SocketVariable)
	}
	if socket == "" {
		return nil, &fault.Input{What: "--socket is missing, and " + service.SocketVariable + " is not set",
			Hint: "give the --socket of plimsoll serve"}
	}
	client, err := client.Dial(socket)
	if err != nil {
		return nil, &fault.Input{Err: err, Hint: "is plimsoll serve running?"}
	}
	return client, nil
}
