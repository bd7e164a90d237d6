package main

import (
	"math"
	"strings"
)

// none is the estimate of a program that makes none.
var none = math.NaN()

// elements returns the number of elements of the model, and of its largest module.
func (e *expression) elements() (all, largest float64) {
	modules := map[string]float64{}
	for _, p := range e.model.Parameters {
		if p.TiedTo != "" {
			continue
		}
		module := p.Name[:max(0, strings.LastIndexByte(p.Name, '.'))]
		modules[module] += float64(p.Elements())
		largest = max(largest, modules[module])
	}
	return float64(e.model.Elements()), largest
}

// deepSpeedEstimate returns the GPU memory that DeepSpeed's estimators print: estimate_zero2_model_states_mem_needs
// (runtime/zero/stage_1_and_2.py) and estimate_zero3_model_states_mem_needs (runtime/zero/stage3.py). The latter
// applies where the parameters are sharded as in ZeRO-3.
func deepSpeedEstimate(e *expression) float64 {
	if e.kernel() != nil {
		return none
	}
	all, largest := e.elements()
	ranks := float64(e.request.GPUs * e.request.Nodes)
	sharded := e.stage() == 3 || e.request.FSDP != ""
	offload := e.request.OffloadParameters || e.request.DeepSpeed != "" &&
		e.Offload.has("offload_optimizer|optimizer.*offload") && e.only(e.Offload, "offload")
	switch {
	case sharded && offload && (e.request.OffloadParameters || e.Offload.has("param")):
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
func accelerateEstimate(e *expression) float64 {
	all, _ := e.elements()
	switch {
	case e.kernel() != nil:
		return none
	case e.request.Quantization != "":
		return none
	case e.request.Precision == "fp32":
		return 16 * all
	}
	return 8 * all
}
