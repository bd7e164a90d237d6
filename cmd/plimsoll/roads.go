package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/host"
	"plimsoll/job"
	"plimsoll/plan"
	"plimsoll/profile"
	"plimsoll/report"
	"plimsoll/roads"
)

// roadsOptions are the flags of the verb. Rates are in GB/s, passes in milliseconds, and 0 is not given.
type roadsOptions struct {
	request           job.Request
	clip              float64
	machine           string
	in, out, together float64
	host, teraflops   float64
	forward, backward float64
	hostProfile       string
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
a step. Times need rates: of a machine whose rates are published (--machine), of
this host's profile (plimsoll tune), or of flags. Flags go first. Without rates
nothing is said of time.

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
	restFlags(command, &options.request.Offload)
	choiceFlag(command, &options.machine, "machine", "", "published rates of a `machine`: VALUES", roads.Machines())
	flags.Float64Var(&options.in, "link-in", 0, "`GB/s` of copies to a GPU")
	flags.Float64Var(&options.out, "link-out", 0, "`GB/s` of copies from a GPU")
	flags.Float64Var(&options.together, "link-both", 0, "`GB/s` of both directions at the same time, added up "+
		"(default: neither slows the other down)")
	flags.Float64Var(&options.host, "host-bandwidth", 0, "`GB/s` of the memory of a node that the optimizer gets")
	flags.Float64Var(&options.teraflops, "tflops", 0, "`TFLOP/s` that a GPU reaches in training")
	flags.Float64Var(&options.forward, "forward-ms", 0, "`milliseconds` of the forward pass (default: by --tflops)")
	flags.Float64Var(&options.backward, "backward-ms", 0, "`milliseconds` of the backward pass (default: twice as "+
		"many)")
	hostProfileFlag(command, &options.hostProfile)
	outputFlags(command, &options.format, "print one JSON document")
	return command
}

func runRoads(c *cobra.Command, o roadsOptions) error {
	o.request.Clip = given(c, "clip", &o.clip)
	rates, sources, err := o.machineRates()
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
	if rates.Device == 0 && j.GPU.Bandwidth > 0 {
		rates.Device = j.GPU.Bandwidth * gigabyte
		sources = append(sources, fmt.Sprintf("%.0f GB/s of GPU memory: the data sheet of %s", j.GPU.Bandwidth,
			j.GPU.Name))
	}
	if here, err := host.Local(); err == nil && o.machine == "" {
		if found, file := (hostProfile{o.hostProfile, 0, logTo(c)}).of(here); found != nil {
			sources = append(sources, measuredRates(&rates, found, file, j.RanksPerNode)...)
		}
	}
	if sources, err = o.stated(&rates, sources); err != nil {
		return err
	}
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
	return report.NewRoads(described, states.Name(), compared, sources).Page().Write(c.OutOrStdout(), o.format)
}

const gigabyte, teraflops = 1e9, 1e12

func milliseconds(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }

// machineRates returns the published rates of the machine that was named. It sets what the machine says of the job.
func (o *roadsOptions) machineRates() (roads.Rates, []string, error) {
	if o.machine == "" {
		return roads.Rates{}, nil, nil
	}
	m, err := roads.FindMachine(o.machine)
	if err != nil {
		return roads.Rates{}, nil, err
	}
	q := &o.request
	if q.GPU == "" && q.GPUMemory == 0 {
		q.GPU = m.GPU
	}
	if q.GPUs == 0 {
		q.GPUs = m.GPUs
	}
	if q.HostMemory == 0 {
		q.HostMemory = m.Host
	}
	return m.Rates, m.Sources, nil
}

// measuredRates takes the rates of this host's profile, and says which.
func measuredRates(rates *roads.Rates, p *profile.Profile, file string, ranks int) (sources []string) {
	for i, l := range p.Links {
		if i == 0 || l.ToGPU < rates.Link.In { // the slowest link is waited for
			rates.Link = roads.Link{In: l.ToGPU, Out: l.FromGPU, Together: l.Together}
		}
	}
	if len(p.Links) > 0 {
		sources = append(sources, fmt.Sprintf("%.3g GB/s to the GPU, %.3g back, and %.3g together: measured (%s)",
			rates.Link.In/gigabyte, rates.Link.Out/gigabyte, rates.Link.Together/gigabyte, file))
	}
	if split := p.Split(ranks, "", ""); split != nil {
		rates.Host = split.BytesPerSecond
		sources = append(sources, fmt.Sprintf("%.3g GB/s of host memory for an update by %d ranks: measured (%s)",
			rates.Host/gigabyte, ranks, file))
	}
	return sources
}

// stated takes the rates that flags say.
func (o *roadsOptions) stated(rates *roads.Rates, sources []string) ([]string, error) {
	for _, flag := range []struct {
		name, unit string
		value      float64
		to         *float64
		scale      float64
	}{
		{"link-in", "GB/s", o.in, &rates.Link.In, gigabyte}, {"link-out", "GB/s", o.out, &rates.Link.Out, gigabyte},
		{"link-both", "GB/s", o.together, &rates.Link.Together, gigabyte},
		{"host-bandwidth", "GB/s", o.host, &rates.Host, gigabyte},
		{"tflops", "TFLOP/s", o.teraflops, &rates.FLOPS, teraflops},
		{"forward-ms", "ms", o.forward, nil, 0}, {"backward-ms", "ms", o.backward, nil, 0},
	} {
		const most = 1e6
		if !(flag.value >= 0 && flag.value <= most) {
			return nil, fault.Inputf("--%s is %v: expected a number above 0 and up to %.0f", flag.name, flag.value,
				most)
		}
		if flag.value > 0 && flag.to != nil {
			*flag.to = flag.value * flag.scale
			sources = append(sources, fmt.Sprintf("%g %s: --%s", flag.value, flag.unit, flag.name))
		}
	}
	if (o.in > 0 || o.out > 0) && o.together == 0 {
		rates.Link.Together = 0 // what is known of both directions is of another link
	}
	if o.backward > 0 && o.forward == 0 {
		return nil, fault.Inputf("--backward-ms is given without --forward-ms").WithHint("give both")
	}
	return sources, nil
}
