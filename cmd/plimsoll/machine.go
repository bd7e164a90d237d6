package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/fault"
	"plimsoll/host"
	"plimsoll/job"
	"plimsoll/profile"
	"plimsoll/roads"
	"plimsoll/steptime"
)

// machineOptions are the flags that say how fast a machine is. Rates are in GB/s, and 0 is not given.
type machineOptions struct {
	machine           string
	in, out, together float64
	host, teraflops   float64
	network           float64
	hostProfile       string
}

func machineFlags(c *cobra.Command, o *machineOptions) {
	flags := c.Flags()
	choiceFlag(c, &o.machine, "machine", "", "published rates of a `machine`: VALUES", roads.Machines())
	flags.Float64Var(&o.in, "link-in", 0, "`GB/s` of copies to a GPU")
	flags.Float64Var(&o.out, "link-out", 0, "`GB/s` of copies from a GPU")
	flags.Float64Var(&o.together, "link-both", 0, "`GB/s` of both directions at the same time, added up "+
		"(default: neither slows the other down)")
	flags.Float64Var(&o.host, "host-bandwidth", 0, "`GB/s` of the memory of a node that the optimizer gets")
	flags.Float64Var(&o.teraflops, "tflops", 0, "`TFLOP/s` that a GPU reaches in training")
	hostProfileFlag(c, &o.hostProfile)
}

func networkFlag(c *cobra.Command, o *machineOptions) {
	c.Flags().Float64Var(&o.network, "network", 0, "`GB/s` that a GPU sends to other nodes (default: of the vendor's "+
		"own system)")
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

// checkRate refuses what no machine can be.
func checkRate(c *cobra.Command, flag string, value float64) error {
	const least, most = 1e-3, 1e6
	if c.Flags().Changed(flag) && !(value >= least && value <= most) {
		return fault.Inputf("--%s is %v: expected a number from %v to %.0f", flag, value, least, most)
	}
	return nil
}

// read returns what is known of the machine, and where it is known from. It sets what --machine says of the job. The
// flags go before a profile of this host, and that before the data sheet.
func (o *machineOptions) read(c *cobra.Command, q *job.Request) (func(*job.Job) (steptime.Machine, []string, error),
	error) {
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
