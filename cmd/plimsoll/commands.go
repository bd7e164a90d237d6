//go:build !page

package main

import "github.com/spf13/cobra"

// commands returns all verbs.
func commands() []*cobra.Command {
	return append([]*cobra.Command{
		bindingCommand(), checkpointCommand(), compareCommand(), deltaCommand(), explainCommand(), exportCommand(),
		fitCommand(), manualCommand(), modelsCommand(), planCommand(), roadsCommand(), topologyCommand(),
		versionCommand(),
	}, linuxCommands()...)
}
