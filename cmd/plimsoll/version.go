package main

import (
	"cmp"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/internal/show/report"
	"plimsoll/internal/state/optim/kernel"
)

// released is the version of a release. The linker sets it: -ldflags "-X main.released=1.2.3".
var released string

// development is what Go says of a build that it knows no version of.
const development = "(devel)"

func versionCommand() *cobra.Command {
	var format report.Format
	command := &cobra.Command{
		Use:   "version",
		Short: "Show the version, the commit, and the kernel that updates use here",
		Long: `Version shows what this program was built from, and the kernel that updates use
on this processor. PLIMSOLL_KERNEL names another kernel.`,
		Example: "  plimsoll version\n  plimsoll version --json",
		Args:    noArguments,
		RunE:    func(c *cobra.Command, _ []string) error { return runVersion(c, format) },
	}
	outputFlags(command, &format, "print one JSON document")
	return command
}

func runVersion(c *cobra.Command, format report.Format) error {
	set, err := kernel.Select()
	if err != nil {
		return err
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	document := build(released, info)
	document.Kernel = set.String()
	return document.Page().Write(c.OutOrStdout(), format)
}

// build describes a build by what the linker and Go have noted of it.
func build(release string, info *debug.BuildInfo) *report.Build {
	d := &report.Build{
		Schema: report.VersionSchema, Version: versionOf(release, info),
		Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	d.Commit = setting(info, "vcs.revision")
	d.Modified = setting(info, "vcs.modified") == "true"
	d.Time, _ = time.Parse(time.RFC3339, setting(info, "vcs.time")) // zero if it is not known
	return d
}

// version returns the version of this program.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return versionOf(released, info)
}

// versionOf returns the version of a release. Otherwise it is that of the module, which Go makes of the tag and the
// commit, or the commit alone.
func versionOf(release string, info *debug.BuildInfo) string {
	module := strings.TrimPrefix(info.Main.Version, development)
	return cmp.Or(strings.TrimPrefix(release, "v"), strings.TrimPrefix(module, "v"), setting(info, "vcs.revision"),
		"unknown")
}

func setting(info *debug.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
