package job

import (
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
)

// freeze freezes the parameters that a framework's file does not train. Those that it trains may be wider.
func (r *resolver) freeze() error {
	f, j := r.Inputs.framework, r.job
	if r.widensTrained() && r.Precision == "" && j.ParameterType != dtype.F32 {
		partly := j.Model.Clone()
		for i := range partly.Parameters {
			p := &partly.Parameters[i]
			p.Wide = p.Wide || !p.Frozen
		}
		j.Model = partly
	}
	if name, _, _ := r.optimizerName(); optimizerNames[name].Name == badam {
		return r.trainOneBlock()
	}
	if f == nil || f.Freeze == nil {
		return nil
	}
	widens := f.Freeze.Widens && j.ParameterType != dtype.F32
	if (j.FSDP != nil || r.Request.FSDP != "") && widens && !f.Freeze.BeforeSharding {
		return fault.File(f.File).Inputf("a part of the layers is trained in fp32 beside frozen ones in %v, which is "+
			"not planned with FSDP", j.ParameterType).WithHint("plan it with DeepSpeed or on one GPU")
	}
	partly := j.Model.Clone()
	names := make([]string, len(partly.Parameters))
	for i, p := range partly.Parameters {
		names[i] = p.Name
	}
	trained, err := f.Freeze.Trained(names, len(partly.Network.Blocks()))
	if err != nil {
		return err
	}
	projector := f.Freezes.Holds(j.Model.Type) && !f.Freezes.Projector
	for i := range partly.Parameters {
		p := &partly.Parameters[i]
		trained[i] = trained[i] || projector && j.Model.Network.PartOf(p.Name) == model.Projector
		p.Frozen = p.Frozen || !trained[i]
		p.Wide = p.Wide || trained[i] && widens
	}
	j.Model = partly
	return nil
}

// widensTrained reports whether a framework converts only the trained parts of a multimodal model to fp32: the frozen
// ones stay as they were loaded (_setup_full_tuning in LLaMA-Factory's model/adapter.py). FSDP would not flatten them
// together, so a job with it is planned in fp32.
func (r *resolver) widensTrained() bool {
	f, j := r.Inputs.framework, r.job
	return f != nil && f.TrainedIn32 == recipe.Always && f.Freeze == nil && r.Inputs.adapter == nil &&
		j.DeepSpeed == nil && j.FSDP == nil && r.Request.FSDP == "" &&
		slices.ContainsFunc(j.Model.Parameters, func(p model.Parameter) bool { return p.Frozen })
}
