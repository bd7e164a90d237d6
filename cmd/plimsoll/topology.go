package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"plimsoll/binding"
	"plimsoll/fault"
	"plimsoll/host"
	"plimsoll/report"
)

func topologyCommand() *cobra.Command {
	var fsroot, record string
	var oneThread bool
	var format report.Format
	var reserve int
	command := &cobra.Command{
		Use:   "topology",
		Short: "Show what this process may use of the machine, and why not more",
		Long: `Topology draws the machine as a tree: packages, dies, NUMA nodes, caches, cores,
GPUs, network adapters; and says what of it this process may use, and what
forbids the rest: affinity mask, cpuset, CPU quota, memory limits.

--record writes what it has read to a text file, for a bug report: no names of
hosts and no serial numbers. --fsroot reads such a file, or a directory that
holds proc and sys of another machine.`,
		Example: `  plimsoll topology
  plimsoll topology --json
  plimsoll topology --record machine.txtar
  plimsoll topology --fsroot machine.txtar`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if record != "" && format != "" {
				return &fault.Input{What: "--record and --json or --format are both given", Hint: "give one of the two"}
			}
			if record != "" {
				return recordTopology(c, fsroot, record)
			}
			h, err := host.Of(fsroot)
			if err != nil {
				return err
			}
			document, err := restricted(c.Root().Version, h, reserve, oneThread)
			if err != nil {
				return err
			}
			return document.Page().Write(c.OutOrStdout(), format)
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	reserveFlag(command, &reserve)
	smtFlag(command, &oneThread)
	fsrootFlag(command, &fsroot)
	flags.StringVar(&record, "record", "", "write the machine to this `file` instead of showing it")
	outputFlags(command, &format, "print one JSON document")
	return command
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

func fsrootFlag(c *cobra.Command, fsroot *string) {
	c.Flags().StringVar(fsroot, "fsroot", "",
		"read another machine: a `directory` with proc and sys, or a file of topology --record")
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
	fmt.Fprintf(c.ErrOrStderr(), "plimsoll: %s describes this machine in %d bytes; read it before you give it away\n",
		file, len(data))
	return nil
}
