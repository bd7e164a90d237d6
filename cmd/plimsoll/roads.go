package main

import (
	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/show/report"
)

// roadsOptions are the flags of the verb. Rates are in GB/s, passes in milliseconds, and 0 is not given.
type roadsOptions struct {
	request job.Request
	clip    float64
	machineOptions
	forward, backward float64
	format            report.Format
}

// roadsCommand returns the command that compares where the states of a job can be updated.
func roadsCommand() *cobra.Command {
	var options roadsOptions
	command := &cobra.Command{
		Use:   "roads [--model MODEL] [CONFIG...]",
		Short: "Compare where a job's optimizer states can rest and be updated",
		Long: `Roads compares, for one job, the ways to keep optimizer states off the GPU: an
update by the CPU, and states that rest on the host and come to the GPU for the
update, in chunks or as a whole. Beside them stand states that stay on the GPU.

For each road it says what host and GPU hold, and how long the trainer waits in
a step. Times need rates: of flags, of this host's profile (plimsoll tune), or
of a machine whose rates are published (--machine). What is not known is assumed
by the data sheet of the GPU, and named. Without a --gpu times are left out.

A job is described as to plimsoll plan.`,
		Example: `  plimsoll roads --model llama-3-8b --machine gh200 --precision bf16 \
    --seq-len 4096 --gradient-checkpointing --master split
  plimsoll roads --model llama-3.2-1b --gpu RTX-4090 --precision bf16 \
    --seq-len 1024 --link-in 25 --link-out 26 --host-bandwidth 60 --tflops 120`,
		RunE: func(c *cobra.Command, _ []string) error {
			return reported(func() error { return runRoads(c, options) })
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	jobFlags(command, &options.request, &options.clip)
	jobArguments(command, &options.request, &options.request.Configs)
	group(command, statesOnHost, func() {
		restFlags(command, &options.request.Offload)
		tierOnPaperFlags(command, &options.request.Offload.Tier, "also the roads with the service's states")
	})
	group(command, megatron.Program, func() { megatronFlags(command, &options.request.MegatronArguments) })
	group(command, machineSpeed, func() {
		machineFlags(command, &options.machineOptions)
		flags.Float64Var(&options.forward, "forward-ms", 0, "`milliseconds` of the forward pass (default: by --tflops)")
		flags.Float64Var(&options.backward, "backward-ms", 0, "`milliseconds` of the backward pass (default: twice as "+
			"many)")
	})
	group(command, "Result", func() {
		longFlag(command)
		outputFlags(command, &options.format, "print one JSON document")
	})
	return command
}

func runRoads(c *cobra.Command, o roadsOptions) error {
	if err := checkMegatron(c, &o.request); err != nil {
		return err
	}
	if o.request.Megatron != "" {
		return runMegatronRoads(c, o)
	}
	o.request.Clip = given(c, "clip", &o.clip)
	for flag, value := range map[string]float64{"forward-ms": o.forward, "backward-ms": o.backward} {
		if err := checkRate(c, flag, value); err != nil {
			return err
		}
	}
	if o.backward > 0 && o.forward == 0 {
		return fault.Inputf("--backward-ms is given without --forward-ms").WithHint("give both")
	}
	of, err := o.machineOptions.read(c, &o.request)
	if err != nil {
		return err
	}
	offload := o.request.Offload
	o.request.Offload = job.Offload{}
	j, err := o.request.Resolve()
	if err != nil {
		return err
	}
	states, err := offload.Decide(j)
	if err != nil {
		return err
	}
	machine, sources, err := of(j)
	if err != nil {
		return err
	}
	rates := machine.Rates
	sources = assumeDisk(states.Tier, &rates, assume(j, &rates, sources))
	sources = assumeGPU(j, &rates, milliseconds(o.forward), sources)
	compared, err := plan.NewRoads(j, states, rates, roads.Job{Forward: milliseconds(o.forward),
		Backward: milliseconds(o.backward)})
	if err != nil {
		return err
	}
	p, err := plan.New(j)
	if err != nil {
		return err
	}
	described, err := report.NewPlanDocument(c.Root().Version, o.request, p)
	if err != nil {
		return err
	}
	return present(c, report.NewRoads(described, states.Name(), compared, sources).Page(), o.format)
}

// runMegatronRoads compares Megatron-LM's own roads.
func runMegatronRoads(c *cobra.Command, o roadsOptions) error {
	compared, err := plan.NewMegatronRoads(o.request)
	if err != nil {
		return err
	}
	p, err := plan.New(compared.Job)
	if err != nil {
		return err
	}
	described, err := report.NewPlanDocument(c.Root().Version, o.request, p)
	if err != nil {
		return err
	}
	return present(c, report.NewRoads(described, "Megatron-LM's own", compared, nil).Page(), o.format)
}
