package llamafactory

import (
	"fmt"

	"plimsoll/internal/input/recipe"
)

// lowRank reads the keys of GaLore or of APOLLO, which begin with their names: _create_galore_optimizer and
// _create_apollo_optimizer in LLaMA-Factory's train/trainer_utils.py.
func (r *reader) lowRank(name string) error {
	l := &recipe.LowRank{Rank: int(r.Integer(name + "_rank")), Projection: r.Word(name + "_proj_type"),
		Place: r.Place("use_" + name)}
	if name == "apollo" {
		l.Random, l.ByChannel = r.Word("apollo_proj") == "random", r.Word("apollo_scale_type") == "channel"
	}
	targets := recipe.Separated(r.Value(name + "_target")).Texts()
	if l.All = len(targets) == 1 && targets[0] == "all"; !l.All {
		l.Targets, l.Head = targets, true
	}
	base := r.baseOptimizer()
	kinds := map[string]string{"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}
	if name == "galore" {
		kinds["adafactor"] = "adafactor"
		for _, eight := range []string{"adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"} {
			kinds[eight] = "adamw-8bit"
		}
	}
	kind := kinds[base]
	if kind == "" {
		return r.Fault("use_"+name, fmt.Sprintf("is true, but LLaMA-Factory has no such optimizer for optim %q", base),
			"set optim to adamw_torch")
	}
	r.To.LowRank, r.To.Optimizer = l, name+"-"+kind
	r.To.StepsInBackward = r.Truth(name + "_layerwise")
	return nil
}

// baseOptimizer returns optim of TrainingArguments, or its default.
func (r *reader) baseOptimizer() string {
	if m := r.Arguments.Member("optim"); m != nil && m.Value.Kind == '"' {
		return m.Value.Text
	}
	return "adamw_torch_fused"
}

// optimizer reads the optimizers that LLaMA-Factory makes itself: create_custom_optimizer in
// train/trainer_utils.py, in its order.
func (r *reader) optimizer() error {
	switch {
	case r.Truth("use_galore"):
		return r.lowRank("galore")
	case r.Truth("use_apollo"):
		return r.lowRank("apollo")
	case recipe.On(r.Find("loraplus_lr_ratio")): // the Trainer's, with a learning rate for each matrix
	case r.Truth("use_badam") && r.Word("badam_mode") == "ratio":
		return r.Fault("badam_mode", "is ratio: BAdam has sparse gradients of a part of each tensor, which is not "+
			"planned yet", "plimsoll plans badam_mode: layer")
	case r.Truth("use_badam"):
		base := r.baseOptimizer()
		names := map[string]string{"adamw_torch": "badam", "adamw_torch_fused": "badam_fused"}
		if r.To.Optimizer = names[base]; r.To.Optimizer == "" {
			return r.Fault("use_badam", fmt.Sprintf("is true with optim %q, which is not planned yet", base),
				"plimsoll plans BAdam over adamw_torch and adamw_torch_fused")
		}
	case r.Truth("use_adam_mini"):
		r.To.Optimizer = "adam-mini"
	case r.Truth("use_muon"):
		r.To.Optimizer = "muon-moonlight"
	}
	return nil
}
