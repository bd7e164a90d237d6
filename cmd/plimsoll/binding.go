package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/utils/cpuset"

	"plimsoll/binding"
	"plimsoll/fault"
	"plimsoll/host"
	"plimsoll/report"
)

func bindingCommand() *cobra.Command {
	request := binding.Request{TrainerCores: binding.DefaultTrainerShare}
	var fsroot string
	var allowed []string
	var format report.Format
	command := &cobra.Command{
		Use:   "binding --ranks N",
		Short: "Divide the usable cores among ranks, trainer and optimizer",
		Long: `Binding divides the cores that may be used among the ranks of this host, and
those of each rank between the trainer's threads and the optimizer's workers:
whole physical cores, near the GPU, caches and NUMA nodes kept together. It says
why, and changes nothing.`,
		Example: `  plimsoll binding --ranks 2
  plimsoll binding --ranks 2 --trainer-cores 2 --gpus 0000:17:00.0,0000:b1:00.0
  plimsoll binding --ranks 2 --allowed 2-5,8 --allowed 9,12-15 --fsroot machine.txtar --json`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			h, err := host.Of(fsroot)
			if err != nil {
				return err
			}
			notes, err := allow(&h, &request, allowed)
			if err != nil {
				return err
			}
			if !c.Flags().Changed("gpus") {
				request.GPUs = binding.GPUsInOrder(h, request.Ranks)
			}
			plan, err := binding.Split(h, request)
			if err != nil {
				return err
			}
			document := report.NewBinding(c.Root().Version, h, request, plan, notes)
			return document.Page().Write(c.OutOrStdout(), format)
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.IntVar(&request.Ranks, "ranks", 1, "ranks on this host")
	flags.Var(&request.TrainerCores, "trainer-cores",
		"cores of each rank for the trainer: a number, or a fraction such as 0.25; 0 for none")
	flags.StringSliceVar(&request.GPUs, "gpus", nil,
		"PCI `addresses` of the ranks' GPUs (default: in the order of the bus, if there is one "+
			"for each rank; \"\" for none)")
	flags.StringArrayVar(&allowed, "allowed", nil,
		"CPU `list` to divide instead of the affinity mask; once for each rank where each has its own")
	flags.StringVar(&request.MemoryPolicy, "memory-policy", "",
		"`policy`: default, preferred, interleave or bind (default: preferred for one NUMA "+
			"node, interleave for several)")
	reserveFlag(command, &request.Reserve)
	smtFlag(command, &request.OneThreadPerCore)
	fsrootFlag(command, &fsroot)
	outputFlags(command, &format, "print one JSON document")
	mustRegister(command, "memory-policy", cobra.FixedCompletions(binding.MemoryPolicies,
		cobra.ShellCompDirectiveNoFileComp))
	return command
}

func reserveFlag(c *cobra.Command, cores *int) {
	c.Flags().IntVar(cores, "reserve", 0, "`cores` to leave to the system and to other programs: the slowest, and "+
		"of each NUMA node the first")
}

// smtFlag adds a flag that is "on" or "off", as in /sys/devices/system/cpu/smt/control.
func smtFlag(c *cobra.Command, off *bool) {
	c.Flags().Var((*smt)(off), "smt", "on, or off to use one hardware thread of each core")
	mustRegister(c, "smt", cobra.FixedCompletions([]string{"on", "off"}, cobra.ShellCompDirectiveNoFileComp))
}

// smt is the value of the flag: true for off.
type smt bool

func (s *smt) Set(text string) error {
	if text != "on" && text != "off" {
		return &fault.Input{What: fmt.Sprintf("%q is neither on nor off", text),
			Hint: "give on, or off for one hardware thread of each core"}
	}
	*s = text == "off"
	return nil
}

func (s *smt) String() string {
	if *s {
		return "off"
	}
	return "on"
}

// Type returns the name of the type for help texts.
func (*smt) Type() string { return "on|off" }

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
			return nil, &fault.Input{
				What: fmt.Sprintf("--allowed %q has no CPU that is online and in the cpuset; those are %s", list,
					possible),
				Hint: "give CPUs of this machine, or another machine with --fsroot",
			}
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
