package job

import (
	"cmp"
	"slices"
	"strings"

	"plimsoll/internal/input/model"
)

// convertedTargets lists the module names that PEFT converts to target_parameters once transformers has fused the
// experts, and what it converts them to: _MOE_TARGET_MODULE_MAPPING in peft/utils/transformers_weight_conversion.py.
var convertedTargets = func() map[string][][2]string {
	mixtral := [][2]string{{"gate", "gate.weight"}, {"w1", "gate_up_proj"}, {"w3", "gate_up_proj"}, {"w2", "down_proj"}}
	gated := [][2]string{{"gate", "gate.weight"}, {"gate_proj", "gate_up_proj"}, {"up_proj", "gate_up_proj"},
		{"down_proj", "down_proj"}}
	converted := map[string][][2]string{"mixtral": mixtral, "minimax": mixtral, "minimax_m2": mixtral}
	// _MODEL_TO_CONVERSION_PATTERN in transformers 5.23, in which Qwen2-MoE itself is missing.
	for name := range strings.FieldsSeq(`afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe
		exaone_moe flex_olmo glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum olmoe
		qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker solar_open`) {
		converted[name] = gated
	}
	return converted
}()

// fusedTargets converts target modules as PEFT does for models with fused experts, and refuses those that it refuses.
func (r *resolver) fusedTargets() error {
	a, network := r.job.Adapter, r.job.Model.Network
	fused := func(b model.Block) bool { return b.FeedForward.Mixture != nil && b.FeedForward.Mixture.Fused() }
	at := slices.IndexFunc(network.Blocks(), fused)
	if at < 0 {
		return nil
	}
	x := network.Blocks()[at].FeedForward.Mixture
	names := convertedTargets[r.job.Model.Type]
	if a.Type != "LORA" || names == nil {
		if !a.AllLinear() && a.Targets(x.Router) {
			return a.Place().Inputf("target_modules matches %s, which PEFT refuses: the routers of transformers 5 "+
				"are no linear modules", x.Router).
				WithHint("remove it, or give the job's version of transformers, such as --transformers 4.57")
		}
		return nil
	}
	if !a.NamesTargets() && a.Parameters == nil {
		return a.Place().Inputf("target_modules is not given, but PEFT has no default for %s of transformers 5",
			r.job.Model.Type).WithHint(cmp.Or(a.TargetsHint, `add "target_modules": ["q_proj", "v_proj"]`))
	}
	if a.AllLinear() {
		leaves := lastNames(slices.DeleteFunc(network.Linears(), func(path string) bool { return !a.Targets(path) }))
		for _, pair := range names {
			if !a.ListsLinear {
				leaves = append(leaves, pair[0])
			}
		}
		a = a.Naming(leaves)
	}
	modules := append(network.Linears(), x.Router, x.GateUp, x.Down)
	for _, pair := range names {
		if pair[0] != "gate" { // the parameters of experts have other names, but PEFT tries the old ones, too
			modules = append(modules, x.ExpertsPath()+"."+pair[0])
		}
	}
	for _, p := range r.job.Model.Parameters {
		modules = append(modules, strings.TrimSuffix(p.Name, ".weight"))
	}
	converted, missing := a.ToLeaves(modules).ToParameters(names)
	if missing != "" {
		return a.Place().Inputf("PEFT adapts the experts of transformers 5 through target_parameters, and refuses "+
			"target_modules that lack %s: gate_up_proj holds both halves", missing).
			WithHint("add " + missing + ", or remove the other half")
	}
	if len(converted.Parameters) > len(a.Parameters) {
		r.assume("PEFT converts target_modules of experts to target_parameters: %s",
			strings.Join(converted.Parameters, ", "))
	}
	r.job.Adapter = converted
	return nil
}

// AdaptedParameters returns the names of the parameters that target_parameters matches.
func (j *Job) AdaptedParameters() []string {
	var names []string
	for _, p := range j.Model.Parameters {
		if j.Adapter != nil && j.Adapter.TargetsParameter(p.Name) {
			names = append(names, p.Name)
		}
	}
	return names
}

// targetParameters refuses adapted parameters that are not planned, and says how PEFT adapts the others.
func (r *resolver) targetParameters() error {
	j := r.job
	a := j.Adapter
	if a.Parameters == nil {
		return nil
	}
	names, experts, routers := j.AdaptedParameters(), j.FusedExperts(), map[string]bool{}
	for _, b := range j.Model.Network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil && x.Fused() {
			routers[x.Router+".weight"] = true
		}
	}
	const others = "plimsoll plans target_parameters of fused experts and their routers"
	for _, name := range names {
		if !experts[name] && !routers[name] {
			return a.ParametersPlace().Inputf("target_parameters matches %s, which is not planned yet", name).
				WithHint(others)
		}
	}
	switch {
	case len(names) == 0:
		r.assume("target_parameters matches no parameter: PEFT warns, and adapts none")
		return nil
	case a.Dropout > 0:
		return a.ParametersPlace().Inputf("lora_dropout is %v, which PEFT refuses for parameters such as %s",
			a.Dropout, names[0]).WithHint("set lora_dropout to 0")
	case a.DoRA || a.LoRABias:
		return a.ParametersPlace().Inputf("use_dora or lora_bias is true, which PEFT refuses for parameters such "+
			"as %s", names[0]).WithHint("set both to false")
	}
	f := r.Inputs.framework
	inFull, isKnown := r.addsInFull(f != nil && f.AddsInFull)
	if j.AddsInFull = inFull; !inFull && !isKnown && !j.ScattersExperts {
		r.assume("target_parameters as PEFT adds them since 0.21: before, it makes each product in full first, in " +
			"fp32 without autocast")
	}
	return nil
}

// unplannedTargets refuses engines that adapted parameters are not planned with.
func (r *resolver) unplannedTargets() error {
	j := r.job
	if j.Adapter == nil || len(j.AdaptedParameters()) == 0 {
		return nil
	}
	switch {
	case j.DeepSpeed != nil && j.DeepSpeed.ZeROStage == 3:
		return j.Adapter.ParametersPlace().Inputf("target_parameters is given with ZeRO-3, which does not gather the " +
			"factors that PEFT reads: this is not planned yet").WithHint("use ZeRO-2 or FSDP")
	case j.Parallel.Expert > 1 || j.Parallel.Tensor > 1:
		return j.Adapter.ParametersPlace().Inputf("target_parameters is given with tensor or expert parallelism, " +
			"which is not planned yet").WithHint("divide the job in another way")
	}
	return nil
}
