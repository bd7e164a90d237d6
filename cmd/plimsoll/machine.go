package main

import (
	"cmp"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/plan/steptime"
)

// machineOptions are the flags that say how fast a machine is. Rates are in GB/s, and 0 is not given.
type machineOptions struct {
	machine           string
	in, out, together float64
	host, teraflops   float64
	disk              float64
	network           float64
	hostProfile       string
}

func machineFlags(c *cobra.Command, o *machineOptions) {
	flags := c.Flags()
	choiceFlag(c, &o.machine, "machine", "", "published rates of a `machine`: VALUES", roads.Machines())
	flags.Var(&rateFlag{&o.in, bandwidths}, "link-in", "`GB/s` of copies to a GPU")
	flags.Var(&rateFlag{&o.out, bandwidths}, "link-out", "`GB/s` of copies from a GPU")
	flags.Var(&rateFlag{&o.together, bandwidths}, "link-both", "`GB/s` of both directions at the same time, added up "+
		"(default: neither slows the other down)")
	flags.Var(&rateFlag{&o.host, bandwidths}, "host-bandwidth", "`GB/s` of the memory of a node that the optimizer "+
		"gets (default: assumed by the number of GPUs)")
	flags.Var(&rateFlag{&o.disk, bandwidths}, "disk-bandwidth", "`GB/s` that the disks of a --tier read and write, "+
		"all of a node together (default: assumed by their number)")
	flags.Var(&rateFlag{&o.teraflops, operations}, "tflops", "`TFLOP/s` that a GPU reaches in training")
	hostProfileFlag(c, &o.hostProfile)
}

func networkFlag(c *cobra.Command, o *machineOptions) {
	c.Flags().Var(&rateFlag{&o.network, bandwidths}, "network", "`GB/s` that a GPU sends to other nodes (default: of "+
		"the vendor's own system)")
}

const gigabyte, teraflops = 1e9, 1e12

func milliseconds(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }

// published returns the published rates of the machine that was named. It sets what the machine says of the job.
func (o *machineOptions) published(q *job.Request) (roads.Rates, []string, error) {
	if o.machine == "" {
		return roads.Rates{}, nil, nil
	}
	m, err := roads.FindMachine(o.machine)
	if err != nil {
		return roads.Rates{}, nil, err
	}
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
func (o *machineOptions) stated(c *cobra.Command, rates *roads.Rates, sources []string) ([]string, error) {
	for _, flag := range []struct {
		name, unit string
		value      float64
		to         *float64
		scale      float64
	}{
		{"link-in", "GB/s", o.in, &rates.Link.In, gigabyte}, {"link-out", "GB/s", o.out, &rates.Link.Out, gigabyte},
		{"link-both", "GB/s", o.together, &rates.Link.Together, gigabyte},
		{"host-bandwidth", "GB/s", o.host, &rates.Host, gigabyte},
		{"disk-bandwidth", "GB/s", o.disk, &rates.Disk, gigabyte},
		{"tflops", "TFLOP/s", o.teraflops, &rates.FLOPS, teraflops},
	} {
		if err := checkRate(c, flag.name, flag.value); err != nil {
			return nil, err
		}
		if flag.value > 0 {
			*flag.to = flag.value * flag.scale
			sources = append(sources, fmt.Sprintf("%g %s: --%s", flag.value, flag.unit, flag.name))
		}
	}
	if (o.in > 0 || o.out > 0) && o.together == 0 {
		rates.Link.Together = 0 // what is known of both directions is of another link
	}
	return sources, nil
}

// assume sets rates that are not known, and says so among the sources: a step on the host is compared with others
// rather than left out.
func assume(j *job.Job, rates *roads.Rates, sources []string) []string {
	if rates.Host > 0 {
		return sources
	}
	host := roads.AssumedHost(j.RanksPerNode)
	rates.Host = host.Rate
	return append(sources, fmt.Sprintf("%.3g GB/s of host memory: assumed, %s; set yours with --host-bandwidth",
		host.Rate/gigabyte, host.Why))
}

// assumeDisk sets the rate of the disks of a tier, if there is one and nobody says it.
func assumeDisk(t *job.Tier, rates *roads.Rates, sources []string) []string {
	if t == nil || rates.Disk > 0 {
		return sources
	}
	each := roads.AssumedDisk[0]
	rates.Disk = each * float64(t.Disks)
	return append(sources, fmt.Sprintf("%.3g GB/s that each disk reads and writes: assumed, as SSDs for PCIe 4 do; "+
		"set yours with --disk-bandwidth", each/gigabyte))
}

// assumeGPU sets the rates of a GPU and its link that are not known by the GPU's data sheet.
func assumeGPU(j *job.Job, rates *roads.Rates, passes time.Duration, sources []string) []string {
	sheet := func(format, flag string, values ...any) {
		sources = append(sources, fmt.Sprintf(format, values...)+" of the data sheet of "+j.GPU.Name+flag)
	}
	if rates.Device == 0 && j.GPU.Bandwidth > 0 {
		rates.Device = j.GPU.Bandwidth * gigabyte
		sources = append(sources, fmt.Sprintf("%.0f GB/s of GPU memory: the data sheet of %s", j.GPU.Bandwidth,
			j.GPU.Name))
	}
	if (rates.Link.In == 0 || rates.Link.Out == 0) && j.GPU.Speed.Host > 0 {
		const share = 0.85 // what copies reach of PCIe and of NVLink-C2C, as the model of time has it
		each := j.GPU.Speed.Host * gigabyte * share
		rates.Link.In, rates.Link.Out = cmp.Or(rates.Link.In, each), cmp.Or(rates.Link.Out, each)
		sheet("%.3g GB/s in each direction between host and GPU: assumed, 85 %%", "; set yours with --link-in and "+
			"--link-out", each/gigabyte)
	}
	if rates.FLOPS == 0 && passes == 0 && j.GPU.Speed.Half > 0 {
		const share = 0.5 // between what training reaches of the data sheets of H100 and of RTX 4090
		rates.FLOPS = j.GPU.Speed.Half * teraflops * share
		sheet("%.3g TFLOP/s in the passes: assumed, half", "; set yours with --tflops", rates.FLOPS/teraflops)
	}
	return sources
}

// checkRate refuses what no machine can be.
func checkRate(c *cobra.Command, flag string, value float64) error {
	const least, most = 1e-3, 1e6
	if c.Flags().Changed(flag) && !(value >= least && value <= most) {
		return fault.Inputf("--%s is %v: expected a number from %v to %.0f", flag, value, least, most)
	}
	return nil
}

// machineOf returns what is known of the machine that runs a job, and where it is known from.
type machineOf func(*job.Job) (steptime.Machine, []string, error)

// timed also assumes the rate of host memory that a step of the job takes.
func (of machineOf) timed(j *job.Job) (steptime.Machine, []string, error) {
	m, sources, err := of(j)
	if err == nil && steptime.UsesHost(j) {
		sources = assume(j, &m.Rates, sources)
	}
	return m, sources, err
}

// read returns what is known of the machine, and where it is known from. It sets what --machine says of the job. The
// flags go before a profile of this host, and that before the data sheet.
func (o *machineOptions) read(c *cobra.Command, q *job.Request) (machineOf, error) {
	published, from, err := o.published(q)
	if err != nil {
		return nil, err
	}
	return func(j *job.Job) (steptime.Machine, []string, error) {
		m, sources := steptime.Machine{Rates: published}, from
		if here, err := host.Local(); err == nil && o.machine == "" {
			if found, file := (hostProfile{o.hostProfile, 0, logTo(c)}).of(here); found != nil {
				sources = append(sources, measuredRates(&m.Rates, found, file, j.RanksPerNode)...)
			}
		}
		if err := checkRate(c, "network", o.network); err != nil {
			return m, nil, err
		}
		m.Network = o.network * gigabyte
		sources, err := o.stated(c, &m.Rates, sources)
		return m, sources, err
	}, nil
}
