package main

import (
	"math"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/plan/job"
)

// none is the estimate of a program that makes none.
var none = math.NaN()

// elementsOf returns the number of elements of the model, and of its largest module.
func elementsOf(j *job.Job) (all, largest float64) {
	modules := map[string]float64{}
	for _, p := range j.Model.Parameters {
		if p.TiedTo != "" {
			continue
		}
		module := p.Name[:max(0, strings.LastIndexByte(p.Name, '.'))]
		modules[module] += float64(p.Elements())
		largest = max(largest, modules[module])
	}
	return float64(j.Model.Elements()), largest
}

// deepSpeedEstimate returns the GPU memory that DeepSpeed's estimators print: estimate_zero2_model_states_mem_needs
// (runtime/zero/stage_1_and_2.py) and estimate_zero3_model_states_mem_needs (runtime/zero/stage3.py). The latter
// applies where the parameters are sharded as in ZeRO-3.
func (o *outcome) deepSpeedEstimate() float64 {
	if o.plan == nil {
		return none
	}
	j := o.plan.Job
	all, largest := elementsOf(j)
	ranks := float64(j.World)
	sharded, offload, parameters := j.FSDP != nil, j.FSDP != nil && j.FSDP.OffloadParameters, true
	if d := j.DeepSpeed; d != nil {
		sharded, offload = d.ZeROStage == 3, d.OffloadOptimizer.Device != "none"
		parameters = d.OffloadParameters.Device != "none"
	}
	switch {
	case sharded && offload && parameters:
		return 4 * largest
	case sharded && offload:
		return 4*largest + 2*all/ranks
	case sharded:
		return 4*largest + 18*all/ranks
	case offload:
		return 2 * all
	}
	return 2*all + 18*all/ranks
}

// accelerateEstimate returns "Training using Adam" as accelerate estimate-memory prints it (commands/estimate.py,
// estimate_training_usage). That is the largest of its four stages, in fp32 or half precision, on one GPU. It has no
// figure for models of 8 and 4 bits.
func (o *outcome) accelerateEstimate() float64 {
	if o.plan == nil || o.plan.Job.Quantization != nil {
		return none
	}
	all, _ := elementsOf(o.plan.Job)
	if j := o.plan.Job; j.ParameterType == dtype.F32 && j.AutocastType == dtype.Invalid {
		return 16 * all
	}
	return 8 * all
}
