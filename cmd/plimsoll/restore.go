//go:build linux

package main

import (
	"os"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/service"
	"plimsoll/internal/state/service/client"
)

func restoreCommand() *cobra.Command {
	var socket string
	var discard bool
	command := &cobra.Command{
		Use:   "restore [--socket PATH] NAME...",
		Short: "Restore optimizer state that a service has set aside, or free it",
		Long: `A service that is started again restores the sessions of the service before it.
If it cannot restore a session, it sets the session aside and keeps its memory;
"plimsoll stat" shows the name and the reason. Restore tries again. With
--discard it frees the memory instead, and the state is gone.`,
		Example: `  plimsoll restore --socket ~/.plimsoll/socket 12
  plimsoll restore --discard 12`,
		Args: func(_ *cobra.Command, names []string) error {
			if len(names) == 0 {
				return fault.Inputf("no session is named: expected the names of sessions that are set aside").
					WithHint("plimsoll stat shows them")
			}
			return nil
		},
		RunE: func(c *cobra.Command, names []string) error { return runRestore(c, socket, names, discard) },
	}
	command.Flags().SortFlags = false
	socketFlag(command, &socket)
	command.Flags().BoolVar(&discard, "discard", false, "free the memory; the state is gone")
	return command
}

func runRestore(c *cobra.Command, socket string, names []string, discard bool) error {
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
		if err := say(c, "session %s is %s", name, done); err != nil {
			return err
		}
	}
	return nil
}

// dialService connects to the service at a socket. Without a socket it uses the one that the environment names.
func dialService(socket string) (*client.Client, error) {
	if socket == "" {
		socket = os.Getenv(service.SocketVariable)
	}
	if socket == "" {
		return nil, fault.Inputf("--socket is missing, and %s is not set", service.SocketVariable).
			WithHint("give the --socket of plimsoll serve")
	}
	client, err := client.Dial(socket)
	if err != nil {
		return nil, &fault.Input{Err: err, Hint: "is plimsoll serve running?"}
	}
	return client, nil
}
