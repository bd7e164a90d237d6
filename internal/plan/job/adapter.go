package job

import (
	"cmp"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
)

// adapter sets the adapter and the type of its weights.
func (r *resolver) adapter() (err error) {
	j := r.job
	if r.Inputs.adapter == nil {
		return r.noAdapter()
	}
	j.Adapter = r.Inputs.adapter
	r.note(j.Adapter.Notes)
	if r.AnyRank {
		r.assume("a rank of %d, as most recipes have: no rank was given", UsualRank)
	}
	if err := r.fusedTargets(); err != nil {
		return err
	}
	if j.Adapter, err = j.Adapter.ForModel(j.Model.Type); err != nil {
		return err
	}
	if j.Adapter, err = r.adaptedParts(j.Adapter); err != nil {
		return err
	}
	if err := cmp.Or(r.unplannedAdapter(), r.targetParameters()); err != nil {
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
	if blocks := j.Model.Network.Blocks(); r.Modules == litgptModules && len(blocks) > 0 {
		if fused := blocks[0].Attention.Fused; fused != "" {
			modules = append(modules, fused+".query", fused+".key", fused+".value") // lora_query and the like
		}
	}
	if j.Adapter.VirtualTokens == 0 && !slices.ContainsFunc(modules, j.Adapter.Targets) &&
		len(j.AdaptedParameters()) == 0 {
		return fault.File(j.Adapter.File).Inputf("target_modules matches no module of %s", j.Model.Name).
			WithHint("its linear modules are " + strings.Join(lastNames(j.Model.Network.Linears()), ", "))
	}
	return r.separateModules(modules)
}

// separateModules refuses a model that lacks a module that its program adapts: the program makes modules of its own,
// such as Unsloth, which splits those that join projections.
func (r *resolver) separateModules(modules []string) error {
	f := r.Inputs.framework
	if f == nil {
		return nil
	}
	for _, name := range f.Separate {
		if !slices.ContainsFunc(modules, func(module string) bool { return strings.HasSuffix(module, "."+name) }) {
			return fault.File(f.File).Inputf("%s has no module %s: Unsloth makes modules of its own, which are not "+
				"planned yet", r.job.Model.Name, name).WithHint("name the modules of transformers in target_modules")
		}
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
	if err := r.unplannedPrompt(); err != nil {
		return err
	}
	for _, unplanned := range []struct {
		key string
		is  bool
	}{
		{"trainable_token_indices", len(j.Adapter.TrainableTokens) > 0},
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

// unplannedPrompt refuses virtual tokens where they are not planned.
func (r *resolver) unplannedPrompt() error {
	j := r.job
	if j.Adapter.VirtualTokens == 0 {
		return nil
	}
	n := j.Model.Network
	refused := fault.File(j.Adapter.File)
	switch {
	case j.Adapter.Type == "PREFIX_TUNING":
		return refused.Inputf("PREFIX_TUNING is not planned yet: every layer has keys and values of virtual tokens").
			WithHint("plan PROMPT_TUNING with as many tokens for an upper bound")
	case len(n.Stacks) != 1 || len(n.Towers) > 0 || n.Opaque != nil || n.Head.PerSequence:
		return refused.Inputf("%s is planned for language models with a decoder alone, and %s is another",
			j.Adapter.Type, j.Model.Name).WithHint("plan it with LORA, or name another model")
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
