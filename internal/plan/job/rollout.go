package job

import (
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/rollout"
)

// rollout sets the engine that generates answers. The flag goes before files.
func (r *resolver) rollout() (err error) {
	if f := r.Inputs.framework; f != nil && f.Generation != nil {
		e := *f.Generation.Engine
		r.job.Rollout, r.job.LeftOut = &e, slices.Clone(f.Generation.LeftOut)
	}
	if r.Request.Rollout != "" {
		if r.job.Rollout, err = rollout.Parse(r.Request.Rollout, r.job.Rollout); err != nil {
			return err
		}
	}
	return r.job.settleRollout(r.assume)
}

// settleRollout checks the engine of a job, and says what it assumes. A job without one stays as it is.
func (j *Job) settleRollout(assume func(format string, arguments ...any)) error {
	e := j.Rollout
	if e == nil {
		return nil
	}
	switch {
	case j.OnCPU:
		return fault.Inputf("a rollout engine is given, but the CPU trains").WithHint("leave --rollout out")
	case j.Pipeline != nil:
		return fault.Inputf("a rollout engine beside a pipeline of torch or DeepSpeed is not planned").
			WithHint("leave --pipeline-parallel or --rollout out")
	case !e.Server && j.GPU.Memory == 0:
		return fault.Inputf("%s takes a fraction of a GPU's memory, which is unknown", e.Label()).
			WithHint("give --gpu or --gpu-memory")
	case !e.Server && int64(j.World)%e.Tensor != 0:
		return fault.Inputf("the rollout engine shares its weights among %d GPUs (tp), and the job has %d", e.Tensor,
			j.World).WithHint("give a tp that divides the GPUs of the job")
	}
	if f := e.UsualFraction(j.GPU.Memory); e.Fraction == 0 && !e.Server {
		e.Fraction = f
		assume("mem_fraction_static %.3g: SGLang picks it by the GPU", f)
	}
	if j.Quantization != nil && !e.Server {
		assume("%s holds the weights in %v: an engine with quantized weights is not planned", e.Label(),
			j.RolloutType())
	}
	if e.RayThreshold > 0 && j.HostMemory > 0 {
		of := j.HostMemory
		j.HostMemory = ledger.Bytes(e.RayThreshold * float64(of))
		assume("Ray kills processes when a host holds more than %g of its %v (RAY_memory_usage_threshold), so %v "+
			"count as its memory", e.RayThreshold, of, j.HostMemory)
	}
	if e.Server {
		assume("%s has GPUs of its own, which the plan leaves out: the trainer sends its weights there", e.Label())
		j.LeftOut = append(j.LeftOut, "the GPUs of "+e.Label())
	}
	return nil
}

// RolloutType is the type of the engine's weights: the 16-bit type that the model computes in.
func (j *Job) RolloutType() dtype.Type {
	for _, t := range []dtype.Type{j.AutocastType, j.CastType, j.ParameterType} {
		if t == dtype.BF16 || t == dtype.F16 {
			return t
		}
	}
	return dtype.BF16
}

// LongestSample returns the tokens of the longest sample that the engine can make, where nothing else bounds samples;
// else 0. It has no more than the KV cache has room for.
func (j *Job) LongestSample() int64 {
	e := j.Rollout
	if e == nil || e.LongestSample == 0 || j.Megatron == nil {
		return 0
	}
	const unknown = 1 << 18 // the context of most models of 2026, where no cache bounds it either
	longest := e.LongestSample
	if share, err := e.ShareOf(j.Model, j.RolloutType(), j.GPU.Memory, 0); err == nil && share.Tokens() > 0 {
		if longest == rollout.NoContext || share.Tokens() < longest {
			longest = share.Tokens()
		}
	}
	if longest == rollout.NoContext {
		longest = unknown
	}
	return longest
}

// OfSample returns the job with micro batches of one sample of so many tokens.
func (j *Job) OfSample(tokens int64) *Job {
	with, m, e := *j, *j.Megatron, *j.Rollout
	unit := 128 * m.Degrees.Tensor * m.Degrees.Context
	e.LongestSample = 0
	m.Sequence = (tokens + unit - 1) / unit * unit
	with.Megatron, with.Sequence, with.Rollout = &m, m.Sequence, &e
	return &with
}
