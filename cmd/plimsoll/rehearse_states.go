//go:build linux

package main

import (
	"os"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/cycle"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/show/report"
)

// stateOptions are the flags of a rehearsal whose states go to the device and back.
type stateOptions struct {
	what            string
	mode            string
	linkIn, linkOut float64
	update          float64
	chunk           ledger.Bytes
	noRecovery      bool
}

// offloadStates is the value of --offload.
const offloadStates = "states"

// stateFlagNames are the flags that need --offload states.
var stateFlagNames = []string{"offload-mode", "offload-chunk", "no-recovery", "link-in", "link-out", "update-ms"}

func stateFlags(c *cobra.Command, o *stateOptions) {
	flags := c.Flags()
	choiceFlag(c, &o.what, "offload", "", "`what` rests on the host, and goes to a device that updates it: VALUES",
		[]string{offloadStates})
	choiceFlag(c, &o.mode, "offload-mode", "", "--offload states: `how` they come to the device: VALUES "+
		"(default: chunked)", cycle.Modes())
	flags.Var((*bytesFlag)(&o.chunk), "offload-chunk", "--offload states: what comes at a time (default: 64MiB)")
	flags.BoolVar(&o.noRecovery, "no-recovery", false, "--offload states: hold neither gradients nor parameters on "+
		"the host, which finish an interrupted step")
	flags.Float64Var(&o.linkIn, "link-in", 0, "--offload states: `GB/s` of copies to the device of a rank "+
		"(default: the speed of this host's memory)")
	flags.Float64Var(&o.linkOut, "link-out", 0, "--offload states: `GB/s` of copies back")
	flags.Float64Var(&o.update, "update-ms", 0, "--offload states: `milliseconds` of the device's update of all "+
		"states of a rank (default: the law, for an H100)")
}

// refuse refuses flags that mean nothing without --offload states.
func (o stateOptions) refuse(c *cobra.Command, r rehearse.Request) error {
	for _, flag := range stateFlagNames {
		if c.Flags().Changed(flag) {
			return fault.Inputf("--%s is about states that go to a device, but the CPU updates them", flag).
				WithHint("add --offload states")
		}
	}
	if r.Optimizer == cycle.Muon {
		return fault.Inputf("--optimizer muon has no update by the CPU: its matrix products need a GPU").
			WithHint("add --offload states")
	}
	return nil
}

// runRehearseStates rehearses the update by the CPU, and then the way of the states to a device and back.
func runRehearseStates(c *cobra.Command, o rehearseOptions) error {
	request := cycle.Request{Request: o.request, Mode: o.states.mode, LinkIn: o.states.linkIn,
		LinkOut: o.states.linkOut, UpdateMilliseconds: o.states.update, ChunkBytes: o.states.chunk,
		NoRecovery: o.states.noRecovery}
	if o.states.what != offloadStates {
		return fault.Inputf("--offload is %v", fault.Unknown(o.states.what, []string{offloadStates}))
	}
	for flag, value := range map[string]float64{"link-in": o.states.linkIn, "link-out": o.states.linkOut,
		"update-ms": o.states.update} {
		if c.Flags().Changed(flag) && value == 0 {
			return fault.Inputf("--%s is 0: expected more", flag).WithHint("leave --" + flag + " out for the default")
		}
	}
	job, err := request.Resolve()
	if err != nil {
		return err
	}
	here, err := host.Local()
	if err != nil {
		return err
	}
	placement, err := cycle.NewPlacement(job, here)
	if err != nil {
		return err
	}
	verdict := placement.Verdict()
	var cpu report.CPURoad
	if !job.Muon {
		if cpu.Placement, err = o.place(c, job.Job, here); err != nil {
			return err
		}
		cpu.Verdict = cpu.Placement.Verdict()
	}
	var measurement *cycle.Measurement
	if verdict.Fits && job.Steps > 0 {
		progress := newProgress(os.Stderr, c.ErrOrStderr())
		if measurement, err = placement.Run(interruptible(c), progress); err != nil {
			return err
		}
		if cpu.Placement != nil && cpu.Verdict.Fits {
			if cpu.Measurement, err = cpu.Placement.Run(interruptible(c), progress); err != nil {
				return err
			}
		}
	}
	document, err := report.NewStatesRehearsal(c.Root().Version, placement, verdict, measurement, cpu)
	if err != nil {
		return err
	}
	var timeline *rehearse.Timeline
	if measurement != nil {
		timeline = measurement.Timeline
	}
	return o.write(c, document.Page(), rehearsed{verdict.Fits, document.WithinTolerance(), timeline})
}
