package main

import "github.com/spf13/cobra"

// linuxCommands returns the verbs that need Linux.
func linuxCommands() []*cobra.Command {
	return []*cobra.Command{
		benchCommand(), keepCommand(), rehearseCommand(), restoreCommand(), runCommand(), serveCommand(), statCommand(),
		tuneCommand(), watchCommand(),
	}
}
