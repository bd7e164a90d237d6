package plan

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/state/optim/kernel"
)

// StateFormat is the memory of a node that Plimsoll takes for the optimizer state in
// one of its formats.
type StateFormat struct {
	State   string `json:"state"`
	Moments string `json:"moments"`
	// Overlap is the client's overlap where that takes other memory than a step that is awaited: "async" or "zenflow",
	// and "backward" where steps are clipped.
	Overlap           string       `json:"overlap,omitempty"`
	Bytes             ledger.Bytes `json:"bytes"`
	BytesPerParameter float64      `json:"bytes_per_parameter"`
	Why               string       `json:"why"`
}

// stateFormats returns the size of the state in Plimsoll's formats, nil for optimizers
// that they do not hold. It is the size of all arenas that a shard maps, those of
// gradients and 16-bit parameters included.
func stateFormats(j *job.Job, trained int64) []StateFormat {
	var list []StateFormat
	each := (trained + int64(j.World) - 1) / int64(j.World)
	if each == 0 || !kernelAdam(j.Optimizer.Name) || j.HostExperts != nil {
		return nil
	}
	for _, f := range []kernel.Format{
		{State: kernel.Split, Moments: kernel.MomentsFP32, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.Split, Moments: kernel.MomentsBF16, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.Split, Moments: kernel.MomentsInt8, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.Split24, Moments: kernel.MomentsInt8, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.FP32, Moments: kernel.MomentsFP32, Parameter: dtype.BF16, Gradient: dtype.F32},
	} {
		wide, why := int64(0), ""
		if f.Moments == kernel.MomentsInt8 {
			wide = min(each, (j.WideMoments(trained)+int64(j.World)-1)/int64(j.World))
			why = fmt.Sprintf(", %s of them with fp32 moments: embeddings and small tensors", ledger.Count(wide))
		}
		bytes, err := job.ServiceBytes(f, each, wide)
		if err != nil {
			return nil // more than one shard can have
		}
		list = append(list, StateFormat{
			State: f.State.String(), Moments: f.Moments.String(), Bytes: bytes * ledger.Bytes(j.RanksPerNode),
			BytesPerParameter: float64(bytes) / float64(each),
			Why: fmt.Sprintf("%d ranks x %s parameters%s, everything included; plimsoll rehearse measures it",
				j.RanksPerNode, ledger.Count(each), why),
		})
	}
	if j.World == 1 && trained == j.Model.Elements() {
		list = append(list, overlaps(j, list[0])...)
	}
	return list
}

// overlaps returns the client's overlaps that take other memory than steps that are awaited. In those that are not
// exact, the model has parameters of its own. On a GPU it always has them, and they are no host memory.
func overlaps(j *job.Job, split StateFormat) []StateFormat {
	var own ledger.Bytes
	models := "the model's parameters are on the GPU"
	if j.OnCPU {
		own, models = ledger.Bytes(j.Model.Elements()*dtype.BF16.Size()), "the model's own 2 bytes a parameter included"
	}
	late := split
	late.Overlap, late.Bytes, late.Why = "async", split.Bytes+own, "each update ends in the next step; "+models
	ratio := 0.1
	if d := j.DeepSpeed; d != nil && d.ZenFlow != nil {
		ratio = d.ZenFlow.TopKRatio
	}
	f := kernel.Format{State: kernel.Split, Moments: kernel.MomentsFP32, Parameter: dtype.BF16, Gradient: dtype.BF16}
	important := importantElements(j, ratio)
	beside, err := job.ServiceBytes(f, important, 0)
	if err != nil {
		return nil
	}
	selective := split
	selective.Overlap, selective.Bytes = "zenflow", split.Bytes+beside+own
	selective.Why = fmt.Sprintf("split, and the same for the %s elements of important columns (topk_ratio %v); %s",
		ledger.Count(important), ratio, models)
	list := []StateFormat{late, selective}
	if log, err := job.LogBytes(f, j.Model.Elements()); err == nil && j.Clip > 0 {
		early := split
		early.Overlap, early.Bytes = string(overlap.Backward), split.Bytes+log
		early.Why = fmt.Sprintf("split, and a log of %v: a step begins before it is known whether it is clipped, and "+
			"is retracted if it is", log)
		list = append(list, early)
	}
	for i := range list {
		list[i].BytesPerParameter = float64(list[i].Bytes) / float64(j.Model.Elements())
	}
	return list
}

// importantElements returns the elements of important columns: a share of each matrix, and all of the other parameters.
// The client rounds as DeepSpeed does (_num_selected_columns in zenflow_stage_1_and_2.py).
func importantElements(j *job.Job, ratio float64) int64 {
	var sum int64
	for _, p := range j.Model.Parameters {
		switch {
		case p.TiedTo != "":
		case len(p.Shape) < 2:
			sum += p.Elements()
		default:
			columns := p.Elements() / p.Shape[0]
			sum += p.Shape[0] * max(1, int64(float64(columns)*ratio))
		}
	}
	return sum
}

// kernelAdam reports whether the optimizer is a variant of Adam, whose states the
// formats hold.
func kernelAdam(name string) bool { return name == "adamw" || name == "adam" || name == "adamw-apex" }
