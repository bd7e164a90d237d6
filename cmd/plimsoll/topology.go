package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/show/report"
)

// topologyOptions are the flags of the verb.
type topologyOptions struct {
	fsroot, record string
	reserve        int
	oneThread      bool
	format         report.Format
}

func topologyCommand() *cobra.Command {
	var options topologyOptions
	command := &cobra.Command{
		Use:   "topology",
		Short: "Show what this process may use of the machine, and why not more",
		Long: `Topology draws the machine as a tree: packages, dies, NUMA nodes, caches, cores,
GPUs and network adapters. It shows what this process may use of them, and what
forbids the rest: affinity mask, cpuset, CPU quota, memory limits.

--record writes what topology reads to a text file, for a bug report, without
host names and serial numbers. --fsroot reads such a file, or a directory with
proc and sys of another machine.`,
		Example: `  plimsoll topology
  plimsoll topology --json
  plimsoll topology --record machine.txtar
  plimsoll topology --fsroot machine.txtar`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runTopology(c, options) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	reserveFlag(command, &options.reserve)
	smtFlag(command, &options.oneThread)
	fsrootFlag(command, &options.fsroot)
	flags.StringVar(&options.record, "record", "", "write the machine to this `file` instead of showing it")
	htmlFlag(command)
	outputFlags(command, &options.format, "print one JSON document")
	return command
}

func runTopology(c *cobra.Command, o topologyOptions) error {
	if o.record != "" && o.format != "" {
		return fault.Inputf("--record and --json or --format are both given").WithHint("give one of the two")
	}
	if o.record != "" && c.Flags().Changed(htmlFormat) {
		return fault.Inputf("--record and --%s are both given", htmlFormat).WithHint("give one of the two")
	}
	if o.record != "" {
		return recordTopology(c, o.fsroot, o.record)
	}
	h, err := host.Of(o.fsroot)
	if err != nil {
		return err
	}
	document, err := restricted(c.Root().Version, h, o.reserve, o.oneThread)
	if err != nil {
		return err
	}
	return present(c, document.Page(), o.format)
}

// restricted describes the host without the cores that are left to the system. Where asked to, it keeps one hardware
// thread of each remaining core.
func restricted(version string, h *host.Host, reserve int, oneThread bool) (*report.Topology, error) {
	excluded := h.Excluded()
	exclude := func(to *host.Host, reason string) {
		if cpus := h.CPUs.Difference(to.CPUs); !cpus.IsEmpty() {
			excluded = append(excluded, host.Exclusion{CPUs: cpus, Reason: reason})
		}
		h = to
	}
	left, err := binding.Reserve(h, reserve)
	if err != nil {
		return nil, err
	}
	exclude(left, "left to the system (--reserve)")
	if oneThread {
		if left, err = h.WithAffinity(h.OneThreadPerCore()); err != nil {
			return nil, err
		}
		exclude(left, "further hardware threads of cores (--smt off)")
	}
	document := report.NewTopology(version, h)
	document.Excluded = excluded
	return document, nil
}

func recordTopology(c *cobra.Command, fsroot, file string) error {
	root, affinity, err := host.Root(fsroot)
	if err != nil {
		return err
	}
	data, err := host.Record(root, affinity)
	if err != nil {
		return err
	}
	out, err := create("--record", file)
	if err != nil {
		return err
	}
	_, err = out.Write(data)
	if err := errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("--record: %w", err)
	}
	logTo(c)("%s describes this machine in %d bytes; read it before you give it away", fault.File(file), len(data))
	return nil
}
