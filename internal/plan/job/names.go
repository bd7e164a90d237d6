package job

import (
	"cmp"
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/megatron"
)

// EngineName describes the engine and its ranks: those that do not share a layer or a pipeline.
func (j *Job) EngineName() string {
	n := j.World / int(max(1, j.Parallel.Tensor)*j.Stages())
	ranks := fmt.Sprintf("%d ranks", n)
	if n == 1 {
		ranks = "1 rank"
	}
	switch {
	case j.Megatron != nil:
		return megatron.Program
	case j.FSDP != nil:
		return fmt.Sprintf("FSDP%d over %s", j.FSDP.Version, ranks)
	case j.DeepSpeed != nil:
		return fmt.Sprintf("DeepSpeed ZeRO-%d over %s", j.DeepSpeed.ZeROStage, ranks)
	case n > 1:
		return fmt.Sprintf("DistributedDataParallel over %s", ranks)
	case j.World > 1:
		return fmt.Sprintf("%d GPUs", j.World)
	}
	if j.OnCPU {
		return "on the CPU"
	}
	return "one GPU"
}

// ParallelNames describes the replicas and the kinds of model parallelism.
func (j *Job) ParallelNames() []string {
	if j.Megatron != nil {
		return j.Megatron.ParallelNames()
	}
	var names []string
	if j.FSDP != nil && j.Replicas() > 1 {
		names = append(names, fmt.Sprintf("%d replicas of %d ranks", j.Replicas(), j.Parallel.Shard))
	}
	context := "context"
	if j.Parallel.DeepSpeedUlysses {
		context = "sequence"
	}
	for _, split := range []struct {
		name   string
		degree int64
	}{{"tensor", j.Parallel.Tensor}, {context, j.Parallel.Context}, {"expert", j.Parallel.Expert}} {
		if split.degree > 1 {
			names = append(names, fmt.Sprintf("%s parallel %d", split.name, split.degree))
		}
	}
	if p := j.Pipeline; p != nil {
		names = append(names, fmt.Sprintf("pipeline parallel %d (%s, %d micro batches)", p.Degree, p.Schedule,
			p.Micros))
	}
	return names
}

// OptimizerName returns the optimizer with its variant.
func (j *Job) OptimizerName() string {
	if j.Megatron != nil {
		return j.Megatron.OptimizerName()
	}
	name := j.Optimizer.Name + "/" + string(j.Optimizer.Variant)
	if d := j.DeepSpeed; d != nil && d.OffloadOptimizer.Device != "none" {
		name = j.Optimizer.Name + " on the host" // not a step of torch.optim
	}
	if o := j.Offload; o != nil && o.Rest == InService {
		return o.Name()
	}
	if j.Offload != nil {
		name += ", " + j.Offload.Name()
	}
	return name
}

// AutocastName returns the type of autocast, empty if it is off.
func (j *Job) AutocastName() string {
	if j.AutocastType == dtype.Invalid {
		return ""
	}
	return j.AutocastType.String()
}

// ComputeName returns the type that the engine casts parameters to before their
// use, empty if it does not cast them.
func (j *Job) ComputeName() string {
	if j.CastType == dtype.Invalid {
		return ""
	}
	return j.CastType.String()
}

// adapterNames are the names of PEFT's types where their own is not one to read.
var adapterNames = map[string]string{"LORA": "LoRA", "ADALORA": "AdaLoRA", "LOHA": "LoHa", "LOKR": "LoKr",
	"MISS": "MiSS", "VERA": "VeRA", "LN_TUNING": "LN tuning", "PROMPT_TUNING": "prompt tuning",
	"P_TUNING": "P-tuning", "PREFIX_TUNING": "prefix tuning"}

// AdapterName describes the adapter that is trained, empty for none.
func (j *Job) AdapterName() string {
	if j.Adapter == nil {
		return ""
	}
	name := cmp.Or(adapterNames[j.Adapter.Type], j.Adapter.Type)
	if j.Adapter.DoRA {
		name = "DoRA"
	}
	if j.Adapter.Rank > 0 {
		name += fmt.Sprintf(" of rank %d", j.Adapter.Rank)
	}
	return name
}

// QuantizationName describes how frozen weights are stored, empty where they have a type of torch.
func (j *Job) QuantizationName() string {
	switch q := j.Quantization; {
	case q == nil || q.Bits == 0 || q.Dequantized:
		return ""
	case q.Method != "":
		return fmt.Sprintf("%d bits (%s)", q.Bits, q.Method)
	case q.Bits == 4:
		return q.Kind
	default:
		return fmt.Sprintf("%d bits", q.Bits)
	}
}

// RecomputeName describes what the backward pass recomputes.
func (j *Job) RecomputeName() string {
	switch {
	case j.Megatron != nil:
		return j.Megatron.RecomputeName()
	case j.Recompute == nil && j.Compile:
		return "none but what torch.compile recomputes"
	case j.Recompute == nil:
		return "none"
	case j.Recompute.Selective > 1:
		return "selective"
	case j.Recompute.Reentrant:
		return "reentrant"
	}
	return "full"
}
