package job

import (
	"errors"
	"fmt"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/hub"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
)

// named returns the error of a model that a framework's file names, with the place of the name.
func (in *Inputs) named(err error) error {
	var bad *fault.Input
	if in.framework == nil || in.request.Model != "" || !errors.As(err, &bad) || bad.Where != (fault.Position{}) {
		return err
	}
	located := *bad
	located.Where = in.framework.Place()
	if strings.Contains(bad.Hint, "--quantization") { // the name is known, and the flag plans it
		return &located
	}
	located.Hint = "give --model with a name of the catalog or the path of its config.json: the rest of the file holds"
	if hub.IsRepository(in.framework.Model) && !in.request.Online {
		located.Hint += fmt.Sprintf("; or add --online; or fetch the file once with 'hf download %s config.json'",
			in.framework.Model)
	}
	return &located
}

// framework applies what the file of a framework says, where no flag says it.
func (r *resolver) framework() error {
	f := r.Inputs.framework
	if r.OffloadsActivations {
		r.offloadActivations(recipe.NewOffloading())
	}
	if f == nil {
		return nil
	}
	r.note(f.Notes)
	if r.Sequence == 0 {
		r.Sequence = f.Sequence
	}
	if r.Attention == "" {
		r.Attention = f.Attention
	}
	if r.AdapterPrecision == "" && r.Inputs.adapter != nil {
		r.AdapterPrecision = f.AdapterPrecision
	}
	r.FusedLoss = r.FusedLoss || f.FusedLoss
	r.job.Pairs, r.job.KeepsHidden = f.Rewards || f.ValueHead || f.Answers != nil && f.Answers.Pairs, f.ValueHead
	r.job.WeighsEntropy = f.WeighsEntropy
	r.job.LossTwice, r.job.LoadsOnGPU = f.LossTwice, f.LoadsOnGPU
	r.job.LoadsOnFirst = f.LoadsOnFirst && !r.job.Model.TiesEmbeddings()
	if r.Modules == "" {
		r.Modules = f.Modules
	}
	if r.Recompute == "" {
		r.Recompute = f.Recompute
	}
	if q := f.QAT; q != nil {
		r.job.QAT = &forward.FakeQuantization{Group: int64(q.Group), Activations: q.Activations, Learned: q.Learned,
			Packed: q.Packed}
	}
	if err := r.unfrozen(); err != nil {
		return err
	}
	r.job.WidensNorms = f.WidensNorms && !(f.UnlessSharded && r.loadsOnHost())
	r.job.NormsAlone, r.job.ScattersExperts, r.job.TilesMLP = f.NormsAlone, f.ScattersExperts, f.TilesMLP
	r.job.ScalesProducts = f.ScalesProducts
	r.job.StepsInBackward = f.StepsInBackward
	if f.Offloading != nil {
		r.offloadActivations(f.Offloading)
	}
	if f.ReducesIn32 {
		r.job.ReduceType = dtype.F32
	}
	return nil
}

// offloadActivations keeps what operations save for the backward pass on the host.
func (r *resolver) offloadActivations(o *recipe.Offloading) {
	r.job.OffloadActivations = &autograd.Offload{Streams: o.Streams, Stash: o.Stash, Tracks: o.Tracks,
		InputsOnly: o.InputsOnly, BeforeLoss: o.BeforeLoss, Weights: o.Weights}
}

// unfrozen freezes all parameters but those that the patterns of a framework's file match.
func (r *resolver) unfrozen() error {
	u := r.Inputs.framework.Unfrozen
	if u == nil {
		return nil
	}
	j := r.job
	names, trains := "", false
	for _, p := range j.Model.Parameters {
		name := p.Name
		if r.Inputs.adapter != nil { // PEFT's name for the parameter, without the adapter's own
			name = "base_model.model." + name
		}
		names, trains = name, trains || p.TiedTo == "" && u.Has(name)
	}
	switch {
	case !trains:
		return u.Place.Inputf("unfrozen_parameters matches no parameter: all are frozen, and nothing is trained").
			WithHint(fmt.Sprintf("a pattern has to match from the start of a name, such as %s", names))
	case r.Inputs.adapter != nil:
		return u.Place.Inputf("unfrozen_parameters is given beside an adapter, which is not planned yet").
			WithHint("remove one of the two")
	}
	if u.Ranges {
		r.assume("rows outside of the ranges of unfrozen_parameters have gradients and states, too: axolotl sets " +
			"their gradients to zero")
	}
	j.Unfrozen = u
	return nil
}

// single leaves FSDP out where a program shards the model only among several ranks.
func (r *resolver) single() error {
	if f := r.Inputs.framework; f != nil && f.SeveralOnly && r.job.World == f.Stages() {
		r.job.FSDP = nil
	}
	return nil
}

// divided returns how ranks divide the job and the file that says so, or nil.
func (r *resolver) divided() (*recipe.Parallelism, string) {
	if l := r.launch; l != nil && l.Parallelism != nil {
		return l.Parallelism, l.File
	}
	if f := r.Inputs.framework; f != nil && f.Parallelism != nil {
		p := *f.Parallelism
		if p.Shard == 0 {
			p.Shard = max(1, r.job.World/(p.Replicate*p.Tensor*p.Context*int(r.job.Stages())))
		}
		return &p, f.File
	}
	return nil, ""
}

// loadsOnHost reports whether from_pretrained leaves the weights on the host, where FSDP or ZeRO-3 shards them.
func (r *resolver) loadsOnHost() bool {
	f, d := r.job.FSDP, r.job.DeepSpeed
	return f != nil && f.RAMEfficientLoading || f == nil && r.Request.FSDP != "" || d != nil && d.ZeROStage == 3
}

// loadedAs returns the precision of the weights as a framework loads and converts them, a name of Precisions, or "".
func (r *resolver) loadedAs() string {
	f, j := r.Inputs.framework, r.job
	if f == nil || j.DeepSpeed != nil {
		return ""
	}
	sharded := j.FSDP != nil || r.Request.FSDP != ""
	first := r.Request.FSDP == "1" || j.FSDP != nil && j.FSDP.Version == 1
	trained := map[recipe.Upcast]bool{recipe.Always: true, recipe.UnderFSDP: sharded,
		recipe.UnderFSDP1: first}[f.TrainedIn32]
	mixed := f.Training.Precision != recipe.Unmixed && f.Training.Precision != ""
	switch {
	case r.Inputs.adapter == nil && trained && !r.widensTrained() && (f.TrainedIn32 == recipe.Always || mixed):
		return "fp32"
	case f.Weights == "":
		return publishedTypeOf(j.Model)
	}
	return f.Weights
}

// publishedTypeOf returns the precision that a model was published in.
func publishedTypeOf(m *model.Model) string {
	name := fmt.Sprint(m.Parameters[0].DType)
	for _, precision := range Precisions {
		if precisions[precision].weights.String() == name && precisions[precision].autocast == recipe.Unmixed {
			return precision
		}
	}
	return ""
}
