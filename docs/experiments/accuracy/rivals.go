package main

import (
	"math"
	"strings"
)

// none is the estimate of a program that has none.
var none = math.NaN()

// elements are the model's, and those of its largest module.
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

// deepSpeedEstimate is what DeepSpeed's estimators print for a GPU:
// estimate_zero2_model_states_mem_needs (runtime/zero/stage_1_and_2.py) and
// estimate_zero3_model_states_mem_needs (runtime/zero/stage3.py). Where the
// model is sharded as ZeRO-3 does it is the latter.
func deepSpeedEstimate(e *expression) float64 {
	all, largest := e.elements()
	ranks := float64(e.request.GPUs * e.request.Nodes)
	sharded := e.stage() == 3 || e.request.FSDP != ""
	offload := e.request.OffloadParameters || e.request.DeepSpeed != "" && e.Offload.has("offload_optimizer|optimizer.*offload") && e.only(e.Offload, "offload")
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

// accelerateEstimate is "Training using Adam" as accelerate estimate-memory
// prints it (commands/estimate.py, estimate_training_usage): the largest of
// its four stages, of fp32 or half precision, on one GPU. It has no figure for
// models of 8 and 4 bits.
func accelerateEstimate(e *expression) float64 {
	all, _ := e.elements()
	switch {
	case e.request.Quantization != "":
		return none
	case e.request.Precision == "fp32":
		return 16 * all
	}
	return 8 * all
}
