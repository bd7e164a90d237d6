package plan

import (
	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/origin"
	"plimsoll/version"
)

// originsOf returns what decides the origins of a job's components.
func originsOf(j *job.Job, engine string) origin.Job {
	o := origin.Job{Engine: engine, OnCPU: j.OnCPU, Optimizer: j.Optimizer.Name}
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
	if j.OfTransformers() {
		o.Architecture, o.ModelType = j.Model.Architecture, j.Model.Type
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
