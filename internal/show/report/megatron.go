package report

import (
	"cmp"
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// NewMegatronDocument makes the document of a plan of Megatron-LM.
func NewMegatronDocument(version, arguments string, request job.Request, j *megatron.Job, devices []ledger.Device,
	v plan.Verdict) (*PlanDocument, error) {
	elements := j.Elements()
	d := &PlanDocument{
		Schema: PlanSchema, Version: version, Verdict: v.Result, Devices: devices, Request: request,
		Megatron: arguments, Limit: newPlanLimit(v), StateFormats: []plan.StateFormat{},
		Assumptions: append([]string{}, j.Assumptions...), Nearest: nearestOf(devices, "Megatron-LM", elements),
		Model: PlannedModel{string(j.Kind), "Megatron-LM", "arguments", elements, elements},
		Job: PlannedJob{Engine: "Megatron-LM", Ranks: int(j.Degrees.World()), Nodes: max(1, request.Nodes),
			MicroBatch: j.MicroBatch, Sequence: j.Sequence, Accumulation: j.Micros, Weights: j.ParameterType.String(),
			Attention: j.Attention, Optimizer: optimizerOf(j), Recompute: cmp.Or(j.Recompute, "none"),
			Torch: j.Torch.String(), TensorParallel: j.Degrees.Tensor, ContextParallel: j.Degrees.Context,
			ExpertParallel: j.Degrees.Expert, Replicas: int(j.Degrees.Data), Parallel: degreesOf(j)},
	}
	var err error
	d.Inputs, err = inputsOf(j.Megatron.Files)
	return d, err
}

func optimizerOf(j *megatron.Job) string {
	if j.Distributed {
		return "adam, distributed"
	}
	return "adam"
}

// degreesOf returns the degrees of parallelism in words, without those of 1.
func degreesOf(j *megatron.Job) []string {
	var words []string
	for _, d := range []struct {
		name string
		is   int64
	}{{"data parallel", j.Degrees.Data}, {"tensor parallel", j.Degrees.Tensor},
		{"pipeline parallel", j.Degrees.Pipeline}, {"chunks of a stage", j.Degrees.Virtual},
		{"context parallel", j.Degrees.Context},
		{"expert parallel", j.Degrees.Expert}} {
		if d.is > 1 {
			words = append(words, fmt.Sprintf("%s %d", d.name, d.is))
		}
	}
	return words
}
