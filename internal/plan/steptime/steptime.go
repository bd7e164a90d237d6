// Package steptime predicts how long a training step takes, from operations, bytes, the data sheet of the GPU, and the
// shares of it that programs achieve. docs/step-time.md derives the model.
package steptime

import (
	"fmt"
	"strings"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/roads"
)

// Time is a prediction: what is expected, and the two ends of its interval.
type Time struct{ Expected, Least, Most time.Duration }

// Step is the time of an optimizer step with all of its micro batches. Communication and Optimizer are what the passes
// do not hide. With pipeline stages the parts are those of the stage that has most to do, and Pipeline is how long it
// waits for others.
type Step struct {
	Forward, Backward, Communication, Pipeline, Optimizer Time
	Total                                                 Time
	// HiddenFrom is the number of tokens of a GPU's micro batch from which on the next forward pass hides an exact
	// update by the optimizer service; 0 where it is not known.
	HiddenFrom float64
	// Tokens are those of all ranks.
	Tokens int64
	// Assumed are rates that neither a data sheet nor a flag says.
	Assumed []string
}

// take adds what an end of the interval says. Faster passes hide less, so the best end need not be the least.
func (t *Time) take(d time.Duration, end int) {
	if end == expected {
		*t = Time{d, d, d}
	}
	t.Least, t.Most = min(t.Least, d), max(t.Most, d)
}

// Machine is what is known of the machine beside the data sheet of its GPUs. 0 is unknown.
type Machine struct {
	roads.Rates
	Network float64 // bytes a second that a GPU sends to other nodes
}

// kernelTime is how long Python takes to start an operation of a forward pass. gpt-fast's Llama 2 7B makes 25.5 tokens
// a second on A100 before it is compiled (PyTorch's blog, Accelerating Generative AI 2): 39 ms for some 1,400
// operations. Hosts with faster cores take less. The backward pass has two for each, which C++ starts in half the time.
var kernelTime = share{20e-6, 30e-6, 10e-6}

// collectiveTime is the latency of a collective operation.
const collectiveTime = 25e-6

// Refusal returns why the model has no basis for a job on a machine, as a *fault.Input, or nil.
func Refusal(j *job.Job, m Machine) error {
	if j.OnCPU {
		return fault.Inputf("the model of time knows passes on GPUs only").WithHint("leave --cpu out")
	}
	if what := unmodelled(j); what != "" {
		return fault.Inputf("the time of %s is not modelled", what).WithHint("plan its memory only")
	}
	lacks := m.lacks(j)
	if d := j.DeepSpeed; d != nil && (d.ZenFlow != nil || d.OffloadOptimizer.Device == "nvme" ||
		d.OffloadParameters.Device == "nvme") {
		return fault.File(d.File).Inputf("the time of ZenFlow and of offloading to NVMe is not modelled").
			WithHint("plan it with offloading to the CPU")
	}
	if UsesHost(j) && m.Host == 0 {
		lacks = append(lacks, "the bandwidth of the host's memory (--host-bandwidth, --machine, or plimsoll tune)")
	}
	if UsesHost(j) && m.Link.In == 0 && j.GPU.Speed.Host == 0 {
		lacks = append(lacks, "the rate of the link to the GPU (--link-in, --link-out)")
	}
	if len(lacks) > 0 {
		return fault.Inputf("the time of a step is unknown without %s", strings.Join(lacks, ", ")).
			WithHint("give the flag that it names")
	}
	return nil
}

// assumesNetwork reports whether a step waits for a network whose rate nobody says.
func (m Machine) assumesNetwork(j *job.Job) bool {
	return j.World > j.RanksPerNode && m.Network == 0 && j.GPU.Speed.Network == 0
}

// assumesDisk reports whether a step waits for disks whose rate nobody says.
func (m Machine) assumesDisk(j *job.Job) bool {
	return j.Offload != nil && j.Offload.Tier != nil && m.Disk == 0
}

// assumed returns the rates that a step of a job takes, and that nobody says.
func (m Machine) assumed(j *job.Job) (list []string) {
	const giga = 1e9
	if m.assumesNetwork(j) {
		list = append(list, fmt.Sprintf("%g GB/s from a GPU to other nodes, %g to %g in the interval: give --network",
			assumedNetwork[expected]/giga, assumedNetwork[1]/giga, assumedNetwork[2]/giga))
	}
	if m.assumesDisk(j) {
		each := roads.AssumedDisk
		list = append(list, fmt.Sprintf("%g GB/s that each disk reads and writes, %g to %g in the interval, as SSDs "+
			"for PCIe 4 do: give --disk-bandwidth", each[expected]/giga, each[1]/giga, each[2]/giga))
	}
	return list
}

// lacks returns the rates of GPUs and their links that are not known, and how to give them.
func (m Machine) lacks(j *job.Job) (lacks []string) {
	if m.FLOPS == 0 && j.GPU.Speed.Half == 0 {
		lacks = append(lacks, "the speed of the GPU (--gpu, or --tflops)")
	}
	if m.Device == 0 && j.GPU.Bandwidth == 0 {
		lacks = append(lacks, "the bandwidth of the GPU's memory (--gpu)")
	}
	if j.RanksPerNode > 1 && j.GPU.Speed.Peer == 0 {
		lacks = append(lacks, "the rate of the links between GPUs (--gpu)")
	}
	return lacks
}

// unmodelled returns what a job does whose time has no basis, or "".
func unmodelled(j *job.Job) string {
	if j.Megatron != nil {
		return unmodelledOfMegatron(j.Megatron)
	}
	switch {
	case j.HostExperts != nil:
		return "experts on the host"
	case j.ScalesProducts && j.GPU.Capability > 0 && j.GPU.Capability < 89:
		return "fp8 on a GPU that does not multiply it"
	}
	return ""
}

// UsesHost reports whether states or parameters rest on the host.
func UsesHost(j *job.Job) bool {
	return j.Offload != nil || j.Megatron != nil && j.Megatron.CPUOffload ||
		j.FSDP != nil && j.FSDP.OffloadParameters ||
		j.DeepSpeed != nil && (j.DeepSpeed.OffloadOptimizer.Device == "cpu" ||
			j.DeepSpeed.OffloadParameters.Device == "cpu")
}

// Predict returns the time of a step. Trained is the number of the model's parameters that are trained, and offloaded
// are those of a rank whose states rest on the host. An error is that of Refusal.
func Predict(j *job.Job, m Machine, trained int64, offloaded []roads.Parameter) (*Step, error) {
	if err := Refusal(j, m); err != nil {
		return nil, err
	}
	s := &Step{Tokens: j.Sequences() * sequenceOf(j) * int64(j.Accumulation) * int64(j.World) /
		(j.Parallel.Tensor * j.Parallel.Context)}
	var parts func(rates) (parts, error)
	switch {
	case j.Megatron != nil:
		s.Tokens = j.Megatron.GlobalBatch * j.Megatron.Sequence
		parts = newMegatronStages(j.Megatron).parts
	case j.Pipeline != nil:
		s.Tokens = s.Tokens * int64(j.Pipeline.Micros) / j.Pipeline.Degree
		parts = newStages(j, float64(trained)).parts
	default:
		parts = onOneStage(j, float64(trained), offloaded)
	}
	for end := range 3 {
		found, err := parts(ratesAt(j, m, end))
		if err != nil {
			return nil, err
		}
		s.take(found.times(unmodelledShare[end]), end)
	}
	s.Assumed = m.assumed(j)
	if j.Pipeline == nil && j.Megatron == nil {
		s.HiddenFrom = hiddenFrom(j, m, s.Forward.Expected)
	}
	return s, nil
}

// onOneStage returns what computes the parts of a job without pipeline stages.
func onOneStage(j *job.Job, trained float64, offloaded []roads.Parameter) func(rates) (parts, error) {
	w := workOf(j)
	return func(r rates) (parts, error) {
		p := predictor{job: j, rates: r, trained: trained, offloaded: offloaded}
		p.predict(w)
		return p.total(), nil
	}
}

// parts are those of a Step at one end of the interval, in seconds.
type parts struct{ forward, backward, communication, pipeline, optimizer float64 }

// unmodelledShare widens both ends by what no mechanism here knows: input pipelines, other jobs, clocks and releases.
var unmodelledShare = share{1, 1.04, 0.96}

func (p parts) times(factor float64) parts {
	return parts{p.forward * factor, p.backward * factor, p.communication * factor, p.pipeline * factor,
		p.optimizer * factor}
}

// take adds what an end of the interval says.
func (s *Step) take(p parts, end int) {
	for _, part := range []struct {
		to      *Time
		seconds float64
	}{{&s.Forward, p.forward}, {&s.Backward, p.backward}, {&s.Communication, p.communication},
		{&s.Pipeline, p.pipeline}, {&s.Optimizer, p.optimizer},
		{&s.Total, p.forward + p.backward + p.communication + p.pipeline + p.optimizer}} {
		part.to.take(seconds(part.seconds), end)
	}
}
