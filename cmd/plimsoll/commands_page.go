//go:build page

package main

import "github.com/spf13/cobra"

// commands returns the verbs of the planner in a page. The linker leaves out all others, so that the page is small.
func commands() []*cobra.Command { return []*cobra.Command{fitCommand(), planCommand()} }
