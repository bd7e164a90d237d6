package plan

import (
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/origin"
)

// losses are the implementations of a loss that are not the model's, as package origin names them.
var losses = map[forward.LossKind]string{
	forward.ChunkedLoss: "of chunks", forward.NativeLoss: "of a training loop", forward.FusedLoss: "of fused products",
	forward.InPlaceLoss: "in place", forward.NarrowInPlaceLoss: "of Unsloth", forward.LogProbabilities: "of answers",
	forward.SelectedLogProbabilities: "of selected answers", forward.DivergentLoss: "of divergence",
	forward.TiledLoss: "of tiles", forward.RecomputedLoss: "of checkpoints",
	forward.ChunkedOutputsLoss: "of torchtune", forward.LinearLoss: "of torchtune",
	forward.ShiftNarrow: "of the class of the model",
}

// originsOf returns what decides the origins of a job's components.
func originsOf(j *job.Job, engine string) origin.Job {
	if j.Megatron != nil {
		return originsOfMegatron(j.Megatron)
	}
	o := origin.Job{Engine: engine, OnCPU: j.OnCPU, Pipelined: j.Pipeline != nil, Optimizer: j.Optimizer.Name,
		Variant: string(j.Optimizer.Variant), Modules: j.Modules, Loss: losses[j.Loss]}
	o.Releases = map[origin.Project]version.Version{
		origin.PyTorch: j.Versions.Torch, origin.DeepSpeed: j.Versions.DeepSpeed,
		origin.Transformers: j.Versions.Transformers, origin.BitsAndBytes: j.Versions.BitsAndBytes}
	if d := j.DeepSpeed; d != nil && (o.Optimizer == "adam" || o.Optimizer == "adamw") {
		switch {
		case d.OffloadOptimizer.Device != "none":
			o.Optimizer = origin.CPUAdam
		case d.Optimizer.IsFusedAdam():
			o.Optimizer = origin.FusedAdam
		}
	}
	if j.Adapter != nil {
		o.Adapter = j.Adapter.Type
	}
	if !j.OfTransformers() {
		return o
	}
	o.Modules, o.Architecture, o.ModelType = "transformers", j.Model.Architecture, j.Model.Type
	if o.Architecture == "" || o.ModelType == "" {
		o.Modules = origin.UnknownModules
	}
	if o.Loss == "" && strings.HasSuffix(o.Architecture, "ForCausalLM") {
		o.Loss = "of transformers"
	}
	return o
}

// originsOfMegatron returns what decides the origins of the components of a job of Megatron-LM.
func originsOfMegatron(j *megatron.Job) origin.Job {
	o := origin.Job{Engine: origin.Megatron, Optimizer: origin.MixedPrecision,
		Releases: map[origin.Project]version.Version{origin.PyTorch: j.Torch}}
	switch {
	case j.CPUOffload:
		o.Optimizer = origin.Hybrid
	case j.Distributed:
		o.Optimizer = origin.Distributed
	}
	return o
}

// setOrigins sets the origin of every component of the devices.
func setOrigins(devices []ledger.Device, of origin.Job) {
	known := map[ledger.Component]*ledger.Origin{}
	for _, d := range devices {
		lists := [][]ledger.Holding{d.Outside}
		for _, p := range d.Phases {
			lists = append(lists, p.Components)
		}
		for _, list := range lists {
			for i := range list {
				c := list[i].Component
				if _, done := known[c]; !done {
					known[c] = origin.Of(of, c)
				}
				list[i].Origin = known[c]
			}
		}
	}
}
