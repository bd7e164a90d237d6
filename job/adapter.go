package job

import (
	"slices"
	"strings"

	"plimsoll/dtype"
	"plimsoll/fault"
	"plimsoll/model"
)

// adapter sets the adapter and the type of its weights.
func (r *resolver) adapter() (err error) {
	j := r.job
	if r.Inputs.adapter == nil {
		return r.noAdapter()
	}
	j.Adapter = r.Inputs.adapter
	r.note(j.Adapter.Notes)
	if err := r.fusedTargets(); err != nil {
		return err
	}
	if j.Adapter, err = j.Adapter.ForModel(j.Model.Type); err != nil {
		return err
	}
	if j.Adapter, err = r.adaptedParts(j.Adapter); err != nil {
		return err
	}
	if err := r.unplannedAdapter(); err != nil {
		return err
	}
	// PEFT keeps adapters of 16-bit models in fp32 (autocast_adapter_dtype).
	j.AdapterType = dtype.F32
	switch {
	case r.AdapterPrecision == "":
		r.assume("adapters in fp32, PEFT's default: --adapter-precision was not given")
	case slices.Contains(AdapterPrecisions, r.AdapterPrecision):
		j.AdapterType, _ = dtype.Parse(r.AdapterPrecision)
	default:
		return fault.Inputf("unknown precision of adapters %q", r.AdapterPrecision).
			WithHint("expected " + fault.OneOf(AdapterPrecisions...))
	}
	modules := append(j.Model.Network.Linears(), j.Model.Network.Head.Projection)
	for _, p := range j.Model.Parameters {
		modules = append(modules, strings.TrimSuffix(p.Name, ".weight"))
	}
	if fused := j.Model.Network.Blocks()[0].Attention.Fused; r.Modules == litgptModules && fused != "" {
		modules = append(modules, fused+".query", fused+".key", fused+".value") // lora_query and the like
	}
	if !slices.ContainsFunc(modules, j.Adapter.Targets) {
		return fault.File(j.Adapter.File).Inputf("target_modules matches no module of %s", j.Model.Name).
			WithHint("its linear modules are " + strings.Join(lastNames(j.Model.Network.Linears()), ", "))
	}
	return nil
}

// noAdapter refuses settings that need an adapter.
func (r *resolver) noAdapter() error {
	if r.AdapterPrecision != "" {
		return fault.Inputf("--adapter-precision is given without --adapter").
			WithHint("add --adapter, or leave --adapter-precision out")
	}
	if r.job.Quantization != nil && r.job.Quantization.Bits > 0 {
		return fault.Inputf("transformers refuses to train a model quantized to %d bits without an adapter",
			r.job.Quantization.Bits).WithHint("add --adapter with the adapter_config.json of PEFT")
	}
	return nil
}

// unplannedAdapter refuses settings of an adapter that are not planned.
func (r *resolver) unplannedAdapter() error {
	j := r.job
	switch j.Adapter.Type {
	case "LORA", "ADALORA", "IA3", "VERA", "OFT", "LN_TUNING":
	default:
		return fault.File(j.Adapter.File).Inputf("%s is not planned: virtual tokens change the length of every "+
			"sequence", j.Adapter.Type).WithHint("plimsoll plans LORA, ADALORA, IA3, VERA, OFT and LN_TUNING")
	}
	for _, unplanned := range []struct {
		key string
		is  bool
	}{
		{"trainable_token_indices", len(j.Adapter.TrainableTokens) > 0},
		{"target_parameters", j.Adapter.Parameters != nil},
		{"layer_replication", j.Adapter.ReplicatesLayers},
		{"ensure_weight_tying", j.tiesAdapted()},
	} {
		if unplanned.is {
			return fault.File(j.Adapter.File).Inputf("%s changes the memory of the job, and is not planned yet",
				unplanned.key).
				WithHint("remove it, and expect the job to take more memory than the plan says")
		}
	}
	for _, t := range j.Model.Network.Towers {
		for _, step := range t.Before {
			if step.Kind == model.Convolve && !j.Adapter.AllLinear() && j.Adapter.Targets(step.Path) {
				return j.Adapter.Place().Inputf("target_modules matches %s, a convolution, which is not planned yet",
					step.Path).WithHint("name the modules with more of their path, such as attn.proj")
			}
		}
	}
	if j.Adapter.Type == "OFT" && (j.Model.Network.InputFirst || j.adaptsEmbedding() != "") {
		return j.Adapter.Place().Inputf("target_modules matches modules of %s that are no torch.nn.Linear: OFT is "+
			"planned for those only", j.Model.Name).WithHint("name linear modules in target_modules, or use LORA")
	}
	if embedding := j.adaptsEmbedding(); embedding != "" && j.Adapter.Type == "LORA" && j.Adapter.LoRABias {
		return j.Adapter.Place().Inputf(
			`target_modules matches %s: PEFT says "lora_bias=True is not supported for Embedding"`, embedding).
			WithHint("remove that module from target_modules, or remove lora_bias")
	}
	return nil
}

// tiesAdapted reports whether PEFT keeps an embedding and the head tied while
// the adapter adapts or trains at least one of them.
func (j *Job) tiesAdapted() bool {
	return j.Adapter.TiesWeights && slices.ContainsFunc(j.Model.Parameters, func(p model.Parameter) bool {
		return p.TiedTo != "" && slices.ContainsFunc([]string{p.Name, p.TiedTo}, func(name string) bool {
			module := strings.TrimSuffix(name, ".weight")
			return j.Adapter.Targets(module) || j.Adapter.Copies(module) != ""
		})
	})
}

// adaptsEmbedding returns an embedding that the adapter adapts, or "" if there is none.
func (j *Job) adaptsEmbedding() string {
	for _, p := range j.Model.Parameters {
		if module := strings.TrimSuffix(p.Name, ".weight"); p.IsEmbedding() && !j.Adapter.AllLinear() &&
			j.Adapter.Targets(module) {
			return module
		}
	}
	return ""
}

// convertedTargets lists, by model_type, the module names that PEFT converts to
// target_parameters once transformers has fused the experts
// (_MOE_TARGET_MODULE_MAPPING in peft/utils/transformers_weight_conversion.py).
// Qwen2-MoE is not in the mapping.
var convertedTargets = func() map[string][]string {
	gated := strings.Fields("gate gate_proj up_proj down_proj")
	return map[string][]string{
		"mixtral":     strings.Fields("gate w1 w2 w3"),
		"qwen3_moe":   gated,
		"qwen3_next":  gated,
		"deepseek_v2": gated,
		"deepseek_v3": gated,
	}
}()

// fusedTargets refuses target modules that PEFT converts or rejects for models
// with fused experts.
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
	if !a.NamesTargets() {
		return a.Place().Inputf("target_modules is not given, but PEFT has no default for %s of transformers 5",
			r.job.Model.Type).WithHint(`add "target_modules": ["q_proj", "v_proj"]`)
	}
	modules := append(network.Linears(), x.Router, x.GateUp, x.Down)
	for _, name := range names {
		modules = append(modules, x.ExpertsPath()+"."+name)
	}
	for _, module := range modules {
		name := module[strings.LastIndexByte(module, '.')+1:]
		if converts := slices.Contains(names, name) || name == "gate_up_proj"; converts &&
			(a.Lists(name) || a.Targets(module)) {
			return a.Place().Inputf("target_modules matches %q: transformers 5 keeps all experts of a layer in one "+
				"parameter, which PEFT adapts through target_parameters; this is not planned yet", name).
				WithHint("name only modules of the attention, or give the job's version of transformers, such as " +
					"--transformers 4.57")
		}
	}
	for _, p := range r.job.Model.Parameters {
		modules = append(modules, strings.TrimSuffix(p.Name, ".weight"))
	}
	r.job.Adapter = a.ToLeaves(modules)
	return nil
}

// lastNames returns the distinct last names of paths.
func lastNames(paths []string) []string {
	var names []string
	for _, path := range paths {
		name := path[strings.LastIndexByte(path, '.')+1:]
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}
