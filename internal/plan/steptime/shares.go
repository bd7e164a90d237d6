package steptime

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/roads"
)

// share is what programs achieve of a data sheet at each end: expected, worst and best.
type share [3]float64

// expected is the first end.
const expected = 0

// around returns a share with both ends in the same proportion to it.
func around(middle, worst, best float64) share { return share{middle, middle * worst, middle * best} }

// products are the shares of the data sheet that the best product of 16-bit matrices reaches. Those of modules and of
// AMD's GPUs are the maximum achievable matmul FLOPS of stas00/ml-engineering (compute/accelerator), those of V100,
// A6000, RTX 3090 Ti and RTX 4090 are of mli/transformers-benchmarks.
var products = map[string]float64{
	"A100-80GB": 0.869, "A100-40GB": 0.869, "A800-80GB": 0.869, "GH200-96GB": 0.838,
	"H100-80GB": 0.803, "H100-96GB": 0.803, "H800-80GB": 0.803, "H200": 0.803,
	"B200": 0.776, "B300": 0.786, "GB200": 0.729, "GB300": 0.729,
	"MI355X": 0.680, "MI350X": 0.680, "MI325X": 0.604, "MI300X": 0.514, "MI300A": 0.514,
	"V100-32GB": 0.76, "V100-16GB": 0.76, "A6000": 0.614, "RTX-3090-Ti": 1.01, "RTX-3090": 1.01, "RTX-4090": 1.04,
}

// Products of GPUs that nobody has measured in public. A professional card holds the clock of its data sheet as little
// as A6000 does, and a GeForce exceeds it as RTX 3090 Ti and RTX 4090 do.
const (
	productsOfCards   = 0.614
	productsOfGeForce = 1.02
	productsOfOthers  = 0.75
)

// productsOf returns the share of the data sheet that the best product reaches on a GPU.
func productsOf(m gpu.Model) float64 {
	if s, ok := products[m.Name]; ok {
		return s
	}
	switch {
	case m.IsGeForce():
		return productsOfGeForce
	case m.Capability == 75 || m.Capability == 86 || m.Capability == 89 || m.Capability == 120:
		return productsOfCards
	}
	return productsOfOthers
}

// shares are stated, and not fitted to step times of single jobs.
var shares = struct {
	dense, denseOnHopper, denseOnBlackwell, denseOnAMD, fp8, experts, memory, link, peer, bus, network, host share
}{
	// Of the best product: matrices of a model are not all of the best shape, and a GPU that is busy for minutes lowers
	// its clock. llm-foundry's 139 runs on A100.
	dense: around(0.88, 0.82, 1.14),
	// A training step of Llama 3.1 8B spends on H200 and on B200 what is left of 463 and 771 TFLOP/s without other
	// operations: 68 % and 53 % (stas00/ml-engineering, insights/when-to-upgrade-gpus). That is with torch 2.13, and
	// before torch 2.12 the same step took 16 % longer. Clouds limit the power of B200.
	denseOnHopper:    around(0.64, 0.85, 1.22),
	denseOnBlackwell: around(0.48, 0.72, 1.40),
	// Llama 3 8B makes 5,377 tokens a second on each of eight MI300X (pytorch/ao, docs/source/workflows/training.md).
	denseOnAMD: around(0.48, 0.75, 1.40),
	// Transformer Engine's, of the best product in fp8, which reaches 71 % of H100's data sheet and 76 % of B200's
	// (stas00/ml-engineering).
	fp8:     around(0.80, 0.80, 1.20),
	experts: around(0.75, 0.75, 1.25), // of dense products: those of an expert are small
	memory:  share{0.80, 0.70, 0.92},
	link:    share{0.87, 0.80, 0.90},
	peer:    share{0.80, 0.65, 0.88},
	bus:     share{0.45, 0.15, 0.78}, // of PCIe, where GPUs have no other link between them
	network: share{0.80, 0.60, 0.95},
	host:    share{1, 0.80, 1.10}, // of the bandwidth that is given or measured
}

// denseOf returns the share of the best product that products of a model reach.
func denseOf(m gpu.Model) share {
	switch {
	case m.Capability == 0:
		return shares.denseOnAMD
	case m.Capability >= 90 && m.Capability < 100:
		return shares.denseOnHopper
	case m.Capability >= 100 && m.Capability < 120:
		return shares.denseOnBlackwell
	}
	return shares.dense
}

// flash are the shares of the data sheet that fused attention reaches with long sequences, forward and backward
// together. A100 and H100 with FlashAttention-2: 203 and 335 TFLOP/s with heads of 128 (arXiv 2307.08691). Version 1
// reaches 110 on A100. Version 3 on H200 reaches 630 in a training step of 256k tokens, and version 4 on B200 1,350
// (stas00/ml-engineering, insights/when-to-upgrade-gpus, without what products take there). Transformer Engine has
// kernels of cuDNN as fast.
var flash = struct {
	ampere, hopper, blackwell, cuDNN, first, either, firstOnHopper, eitherOnHopper, efficient, third, fourth, amd share
}{
	ampere:         around(0.64, 0.75, 1.12),
	hopper:         share{0.37, 0.29, 0.55},
	blackwell:      share{0.37, 0.27, 0.55},
	cuDNN:          around(0.50, 0.75, 1.25),
	first:          around(0.37, 0.80, 1.20),
	either:         share{0.49, 0.35, 0.66},
	firstOnHopper:  around(0.20, 0.80, 1.60),
	eitherOnHopper: share{0.27, 0.18, 0.38},
	efficient:      around(0.35, 0.70, 1.30),
	third:          around(0.63, 0.85, 1.12),
	fourth:         around(0.60, 0.85, 1.15),
	amd:            around(0.30, 0.60, 1.40),
}

// fp8Gain is how much faster products of torchao are in fp8. The best ones gain 1.77 on H100 (stas00/ml-engineering).
var fp8Gain = share{1.6, 1.45, 1.77}

// expertsInFP8 is how much faster products of experts are in fp8: casts run beside small products.
const expertsInFP8 = 1.3

// flashStart returns the length of a sequence with which fused attention reaches half of that: it computes blocks of
// scores, and those on the diagonal in full. With FlashAttention-2 on A100 it is 500 (arXiv 2307.08691). Versions 3 and
// 4 reach 447 and 834 TFLOP/s with 8k tokens (stas00/ml-engineering).
func flashStart(j *job.Job) float64 {
	switch {
	case j.FlashVersion == 3:
		return 3000
	case j.FlashVersion == 4:
		return 4500
	}
	return 500
}

// rings is what attention keeps of its rate if more than two ranks pass keys and values around: torchtitan's Llama 3.1
// 8B reaches 281 TFLOP/s in it over one and two ranks, and 190 over four and eight
// (benchmarks/llama3_h100_202412_torchtitan.md).
var rings = share{0.68, 0.60, 0.90}

// assumedNetwork is what a GPU sends to other nodes, in bytes a second, where neither its data sheet nor a flag says
// it: 50 Gb/s, as in AWS's g6e.48xlarge, and no more than 12.5 as in g5.48xlarge or 200.
var assumedNetwork = share{6.25e9, 1.5e9, 25e9}

// attentionOf returns the shares of attention of a job.
func attentionOf(j *job.Job) share {
	hopper := j.GPU.Capability >= 90 && j.GPU.Capability < 100
	torch := j.Versions.Torch
	// SDPA has version 2 since torch 2.2. The package had version 1 until July 2023, in the months of torch 2.0.
	isFirst := j.Attention == forward.SDPA && !torch.AtLeast(2, 2, 0) || !torch.AtLeast(2, 0, 0)
	isEither := !isFirst && !torch.AtLeast(2, 1, 0)
	switch {
	case j.Attention == forward.Eager:
		dense := denseOf(j.GPU)
		for end := range dense {
			dense[end] *= productsOf(j.GPU)
		}
		return dense
	case j.FlashVersion == 3 && hopper:
		return flash.third
	case j.FlashVersion == 4 && j.GPU.Capability >= 100:
		return flash.fourth
	case j.Megatron != nil && j.GPU.Capability >= 90:
		return flash.cuDNN
	case j.GPU.Capability == 0:
		return flash.amd
	case j.GPU.Capability < 80:
		return flash.efficient
	case isFirst && hopper:
		return flash.firstOnHopper
	case isFirst:
		return flash.first
	case isEither && hopper:
		return flash.eitherOnHopper
	case isEither:
		return flash.either
	case hopper:
		return flash.hopper
	case j.GPU.Capability >= 100 && j.GPU.Capability < 120: // GeForce multiplies as Ampere does
		return flash.blackwell
	}
	return flash.ampere
}

// rates are what a rank achieves at one end of the interval, in operations and bytes a second.
type rates struct {
	roads.Rates
	dense, experts, attention float64
	head                      float64 // products outside of all blocks, which are not in fp8
	peer, network             float64
	kernel                    float64 // seconds in which Python starts an operation of a forward pass
	given                     bool    // FLOPS was: it holds for the passes with all that they do
}

// ratesAt returns the rates at an end of the interval: expected, worst, best.
func ratesAt(j *job.Job, m Machine, end int) rates {
	const giga = 1e9
	r := rates{Rates: m.Rates, given: m.FLOPS > 0, kernel: kernelTime[end]}
	type16 := j.ComputeType()
	if j.AutocastType != dtype.Invalid {
		type16 = j.AutocastType
	}
	peak := j.GPU.FLOPS(type16.Size(), type16 == dtype.BF16)
	best := peak * productsOf(j.GPU)
	dense := denseOf(j.GPU)
	r.dense, r.experts = best*dense[end], best*dense[expected]*shares.experts[end]
	r.attention = peak * attentionOf(j)[end]
	r.head = r.dense
	if j.FP8() {
		r.dense *= fp8Gain[end]
		if j.Megatron != nil {
			r.dense = 2 * best * 0.92 * shares.fp8[end]
		}
		r.experts *= expertsInFP8
	}
	if r.Device == 0 {
		r.Device = j.GPU.Bandwidth * giga * shares.memory[end]
	}
	if r.Link.In == 0 || r.Link.Out == 0 {
		each := j.GPU.Speed.Host * giga * shares.link[end]
		r.Link = roads.Link{In: each, Out: each}
	}
	r.Host *= shares.host[end]
	if m.assumesDisk(j) {
		r.Disk = float64(j.Offload.Tier.Disks) * roads.AssumedDisk[end]
	} else {
		r.Disk *= shares.host[end]
	}
	peer := shares.peer
	if j.GPU.Speed.Peer <= j.GPU.Speed.Host && j.GPU.Capability < 100 { // PCIe is all that there is
		peer = shares.bus
	}
	r.peer = j.GPU.Speed.Peer * giga * peer[end]
	r.network = j.GPU.Speed.Network * giga * shares.network[end]
	switch {
	case m.Network > 0:
		r.network = m.Network * shares.network[end]
	case r.network == 0:
		r.network = assumedNetwork[end]
	}
	if p := j.Parallel; j.Megatron == nil && p.Context > 2 && !p.Ulysses && !p.DeepSpeedUlysses {
		r.attention *= rings[end]
	}
	return r
}
