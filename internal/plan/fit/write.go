package fit

import (
	"plimsoll/internal/base/files"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
)

// Amend returns the user's own files with the settings of a recipe, and the settings that no file can say.
func (a *Answer) Amend(r *Recipe) (*amend.Result, error) {
	return amend.Apply(nil, a.Base.Files, r.Settings())
}

// Settings returns what the recipe says.
func (r *Recipe) Settings() []amend.Setting {
	if r.megatron != nil {
		return r.megatron.settings
	}
	o := r.Overrides
	list := lever.Batch(o.MicroBatch, o.Accumulation, int(r.Size.DataRanks))
	if d := r.degrees; d.tensor > 0 {
		if d.pipeline > 1 {
			list = nil // the batch of a rank is that of all micro batches of a step
		}
		list = append(list, d.settings(o.MicroBatch, o.Accumulation)...)
	}
	if o.Recompute != "" {
		list = append(list, amend.Setting{Name: recipe.GradientCheckpointing, To: o.Recompute != "none"})
	}
	if o.ZeROStage != nil {
		list = append(list, amend.Setting{Name: recipe.Stage, To: *o.ZeROStage})
	}
	if o.OverlapReduction != nil {
		list = append(list, amend.Setting{Name: recipe.OverlapReduction, To: *o.OverlapReduction})
	}
	for _, device := range []amend.Setting{{Name: recipe.OptimizerDevice, To: o.OffloadOptimizer},
		{Name: recipe.ParameterDevice, To: o.OffloadParameters}} {
		if device.To != "" {
			list = append(list, device)
		}
	}
	if o.FSDPOffload {
		list = append(list, amend.Setting{Name: recipe.FSDPOffload, To: true})
	}
	return list
}

// Request returns the request that plans the recipe without a search. A recipe whose DeepSpeed configuration is new
// names the file that it will be.
func (r *Recipe) Request(q job.Request) job.Request {
	if r.megatron != nil {
		q.GPUs, q.Nodes = r.Overrides.GPUs, r.Overrides.Nodes
		return r.megatron.request(q)
	}
	q = r.Overrides.Request(q)
	if r.Config != "" {
		q.DeepSpeed, q.Precision, q.ZeRO, q.ZeROOffload = ConfigFile, "", "", nil
	}
	return q
}

// NewConfig returns the text of the DeepSpeed configuration that the user does not have yet, or nil.
func (r *Recipe) NewConfig() ([]byte, error) {
	if r.Config == "" {
		return nil, nil
	}
	texts := files.Texts{ConfigFile: []byte(r.Config)}
	made, err := amend.Apply(texts, []string{ConfigFile}, r.Settings())
	if err != nil {
		return nil, err
	}
	if text, edited := made.Texts[ConfigFile]; edited {
		return text, nil
	}
	return texts[ConfigFile], nil
}
