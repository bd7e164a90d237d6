package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/show/report"
)

// bindingOptions are the flags of the verb.
type bindingOptions struct {
	request binding.Request
	allowed []string
	fsroot  string
	format  report.Format
}

func bindingCommand() *cobra.Command {
	options := bindingOptions{request: binding.Request{TrainerCores: binding.DefaultTrainerShare}}
	command := &cobra.Command{
		Use:   "binding --ranks N",
		Short: "Divide the usable cores among ranks, trainer and optimizer",
		Long: `Binding divides the usable cores among the ranks of this host, and those of each
rank between the trainer's threads and the optimizer's workers. It assigns whole
physical cores near the rank's GPU, and keeps caches and NUMA nodes together. It
shows the reasons, and changes nothing.`,
		Example: `  plimsoll binding --ranks 2
  plimsoll binding --ranks 2 --trainer-cores 2 \
    --gpus 0000:17:00.0,0000:b1:00.0
  plimsoll binding --ranks 2 --allowed 2-5,8 --allowed 9,12-15 \
    --fsroot machine.txtar --json`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runBinding(c, options) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.IntVar(&options.request.Ranks, "ranks", 1, "ranks on this host")
	flags.Var(&options.request.TrainerCores, "trainer-cores",
		"cores of each rank for the trainer: a number, or a fraction such as 0.25; 0 for none")
	flags.StringSliceVar(&options.request.GPUs, "gpus", nil, "PCI `addresses` of the ranks' GPUs; \"\" for none "+
		"(default: in the order of the bus, if there is one for each rank)")
	flags.StringArrayVar(&options.allowed, "allowed", nil, "`list` of CPUs to divide instead of the affinity mask; "+
		"once for all ranks, or once for each rank")
	memoryPolicyFlag(command, &options.request.MemoryPolicy)
	reserveFlag(command, &options.request.Reserve)
	smtFlag(command, &options.request.OneThreadPerCore)
	fsrootFlag(command, &options.fsroot)
	outputFlags(command, &options.format, "print one JSON document")
	return command
}

func runBinding(c *cobra.Command, o bindingOptions) error {
	h, err := host.Of(o.fsroot)
	if err != nil {
		return err
	}
	notes, err := allow(&h, &o.request, o.allowed)
	if err != nil {
		return err
	}
	if !c.Flags().Changed("gpus") {
		o.request.GPUs = binding.GPUsInOrder(h, o.request.Ranks)
	}
	assignment, err := binding.Split(h, o.request)
	if err != nil {
		return err
	}
	document := report.NewBinding(c.Root().Version, h, o.request, assignment, notes)
	return present(c, document.Page(), o.format)
}

// allow replaces the affinity mask by lists of CPUs: one list for all ranks, or one for each rank. It drops the CPUs
// that the kernel would drop, and returns a note of each.
func allow(h **host.Host, request *binding.Request, lists []string) (notes []string, err error) {
	possible := (*h).Cpuset
	masks := []cpuset.CPUSet{}
	for _, list := range lists {
		mask, err := host.ParseList(list)
		if err != nil {
			return nil, err
		}
		if dropped := mask.Difference(possible); !dropped.IsEmpty() {
			notes = append(notes, fmt.Sprintf("CPUs %s of --allowed %s are left out: not "+
				"online, or not in the cpuset", dropped, list))
		}
		if mask = mask.Intersection(possible); mask.IsEmpty() {
			return nil, fault.Inputf("--allowed %q has no CPU that is online and in the cpuset; those are %s", list,
				possible).WithHint("give CPUs of this machine, or another machine with --fsroot")
		}
		masks = append(masks, mask)
	}
	if len(masks) > 1 {
		request.Peers = masks
	}
	if len(masks) > 0 {
		*h, err = (*h).WithAffinity(masks[0].Union(masks[1:]...))
	}
	return notes, err
}
