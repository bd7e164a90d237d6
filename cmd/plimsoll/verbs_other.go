//go:build !linux

package main

import (
	"runtime"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
)

// linuxVerbs are the verbs that need Linux, and what they need it for.
var linuxVerbs = []struct{ name, need string }{
	{"bench", "memory with a name and a size (memfd), and threads bound to cores"},
	{"keep-ranks", "memory of a service that outlives it (memfd)"},
	{"rehearse", "memory with a name and a size (memfd), and what /proc says of it"},
	{"restore", "the service"},
	{"run", "what /proc and control groups say of the ranks"},
	{"serve", "memory that processes share by file descriptors (memfd)"},
	{"stat", "the service"},
	{"tune", "threads bound to cores"},
	{"watch", "what /proc and control groups say of a job"},
}

// linuxCommands returns verbs that say why they cannot run here.
func linuxCommands() []*cobra.Command {
	var all []*cobra.Command
	for _, verb := range linuxVerbs {
		c := &cobra.Command{
			Use: verb.name, Short: "Needs Linux, and says what for", Hidden: verb.name == "keep-ranks",
			FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true}, Args: cobra.ArbitraryArgs,
		}
		c.RunE = func(*cobra.Command, []string) error { return needsLinux(verb.name, verb.need) }
		all = append(all, c)
	}
	return all
}

func needsLinux(verb, need string) error {
	return fault.Inputf("plimsoll %s needs Linux for %s, and this is %s", verb, need, runtime.GOOS).
		WithHint("run it on a Linux host; plan, fit, explain and checkpoint inspect work here")
}

// lastRecording is "": nothing was recorded here.
func lastRecording() string { return "" }
