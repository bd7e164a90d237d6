package roads

import (
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// Machine is a kind of machine whose rates others have published.
type Machine struct {
	Name    string // of --machine
	Title   string
	GPU     string // of --gpu
	GPUs    int
	Host    ledger.Bytes // memory of a node; 0 is not one size
	Rates   Rates
	Sources []string
}

const gigabyte, teraflops = 1e9, 1e12

var machines = []Machine{
	{Name: "rtx-4090", Title: "1 x RTX 4090, PCIe 4", GPU: "RTX-4090", GPUs: 1,
		Rates: Rates{Link: Link{In: 26.3 * gigabyte, Out: 26.8 * gigabyte, Together: 35 * gigabyte},
			Host: 71 * gigabyte, Device: 918 * gigabyte, FLOPS: 159 * teraflops},
		Sources: []string{
			"26.3 GB/s to the GPU and 26.8 back: nvbandwidth on RTX 4090 (NVIDIA/nvbandwidth issue 15)",
			"35 GB/s in both directions together: nvbandwidth on A100 with PCIe 4 (NVIDIA/nvbandwidth issue 53)",
			"71 GB/s of host memory: 80 % of two channels of DDR5-5600, whose data sheet says 89.6",
			"918 GB/s of GPU memory: p2pBandwidthLatencyTest on RTX 4090 (tinygrad/open-gpu-kernel-modules issue 6)",
			"159 TFLOP/s: products of fp16 matrices on an RTX 4090 (mli/transformers-benchmarks issue 4)"}},
	{Name: "8xh100", Title: "8 x H100, PCIe 5", GPU: "H100-80GB", GPUs: 8, Host: 2 * ledger.TiB,
		Rates: Rates{Link: Link{In: 56.3 * gigabyte, Out: 57.3 * gigabyte, Together: 102 * gigabyte},
			Host: 490 * gigabyte, Device: 2573 * gigabyte, FLOPS: 400 * teraflops},
		Sources: []string{
			"56.3 GB/s to the GPU, 57.3 back, and 102 together: nvbandwidth over PCIe 5 x16, on RTX 5090 " +
				"(tinygrad/open-gpu-kernel-modules issue 29)",
			"490 GB/s of host memory: 80 % of two sockets with 8 channels of DDR5-4800 each, whose data sheet says 614",
			"2573 GB/s of GPU memory: p2pBandwidthLatencyTest on H100 SXM (NVIDIA/nccl issue 1264)",
			"400 TFLOP/s: what training reaches on an H100, of 989 by the data sheet"}},
	{Name: "gh200", Title: "GH200", GPU: "GH200-96GB", GPUs: 1, Host: 480e9,
		Rates: Rates{Link: Link{In: 411 * gigabyte, Out: 170 * gigabyte}, Host: 486 * gigabyte,
			Device: 3400 * gigabyte, FLOPS: 600 * teraflops},
		Sources: []string{
			"411 GB/s to the GPU and 170 back: nvbandwidth on 4 x GH200 (NVIDIA/Megatron-LM issue 6491)",
			"486 GB/s of host memory and 3400 of GPU memory: STREAM (arXiv 2407.07850)",
			"600 TFLOP/s: what SuperOffload reaches on a GH200 (arXiv 2509.21271)"}},
}

// Assumed is a rate of a machine that nothing is known of, and why it is likely.
type Assumed struct {
	Rate float64
	Why  string
}

// AssumedHost is the bandwidth of the memory of a node with so many GPUs: the least of what such nodes have, so that a
// step on the host is not promised to be faster than it is.
func AssumedHost(gpus int) Assumed {
	const workstation = 2 // more GPUs than that need the lanes of a server's processor
	if gpus <= workstation {
		return Assumed{71 * gigabyte, "80 % of two channels of DDR5-5600, as a desktop has"}
	}
	return Assumed{164 * gigabyte, "80 % of 8 channels of DDR4-3200, as one socket of a server has"}
}

// AssumedCores is the number of cores of a node that compute for a step behind the backward pass: that of a desktop,
// the fewest that a GPU for training stands beside.
const AssumedCores = 8

// AssumedDisk is what a disk reads and writes together in a step: expected, at worst and at best. Solidigm's D7-P5520,
// an SSD for PCIe 4, reads 7.1 GB/s and writes 1.9 to 4.2, by its capacity (product brief). A step that reads 10 bytes
// and writes 12 then moves 2.8 to 5.2 GB/s. SSDs for PCIe 5 are twice as fast.
var AssumedDisk = [3]float64{4 * gigabyte, 2.5 * gigabyte, 10 * gigabyte}

// Machines returns the names of the machines with published rates.
func Machines() []string {
	names := make([]string, len(machines))
	for i, m := range machines {
		names[i] = m.Name
	}
	return names
}

// FindMachine returns the machine of a name. An error is a *fault.Input.
func FindMachine(name string) (*Machine, error) {
	for i := range machines {
		if machines[i].Name == name {
			return &machines[i], nil
		}
	}
	return nil, fault.Inputf("--machine is %q, expected %s", name, fault.OneOf(Machines()...))
}
