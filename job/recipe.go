package job

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"plimsoll/dtype"
	"plimsoll/fault"
	"plimsoll/ledger"
	"plimsoll/model"
	"plimsoll/recipe"
	"plimsoll/version"
)

// readAdapter reads the adapter and the quantization.
func (r *resolver) readAdapter() (err error) {
	j := r.job
	if err := r.quantization(); err != nil {
		return err
	}
	if q := j.Quantization; q != nil && q.Bits > 0 && len(j.FusedExperts()) > 0 {
		r.assume("the weights of experts in %v: bitsandbytes quantizes linear modules, and transformers 5 has the "+
			"experts of a layer in one parameter", j.ParameterType)
	}
	if r.Request.Adapter == "" {
		if r.AdapterPrecision != "" {
			return &fault.Input{What: "--adapter-precision is given without --adapter",
				Hint: "add --adapter, or leave it out"}
		}
		if j.Quantization != nil && j.Quantization.Bits > 0 {
			return &fault.Input{What: fmt.Sprintf("a model quantized to %d bits cannot be trained by itself: "+
				"transformers refuses it", j.Quantization.Bits),
				Hint: "add --adapter with the adapter_config.json of PEFT"}
		}
		return nil
	}
	if j.Adapter, err = recipe.LoadAdapter(r.Request.Adapter); err != nil {
		return err
	}
	r.note(j.Adapter.Notes)
	if err := r.fusedTargets(); err != nil {
		return err
	}
	if err := j.Adapter.ForModel(j.Model.Type); err != nil {
		return err
	}
	switch j.Adapter.Type {
	case "LORA", "ADALORA", "IA3", "VERA", "LN_TUNING":
	default:
		return &fault.Input{Where: fault.Position{File: j.Adapter.File},
			What: j.Adapter.Type + " is not planned: virtual tokens change the length of every sequence",
			Hint: "planned are LORA, ADALORA, IA3, VERA and LN_TUNING"}
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
			return &fault.Input{Where: fault.Position{File: j.Adapter.File},
				What: unplanned.key + " changes what is held, and is not planned yet",
				Hint: "remove it, and expect the job to take more than the plan"}
		}
	}
	if embedding := j.adaptsEmbedding(); embedding != "" && j.Adapter.Type == "LORA" && j.Adapter.LoRABias {
		return &fault.Input{Where: j.Adapter.Place(),
			What: "target_modules adapts " + embedding +
				": PEFT says \"lora_bias=True is not supported for Embedding\"",
			Hint: "remove it, or lora_bias"}
	}
	// PEFT keeps adapters of 16-bit models in fp32 (autocast_adapter_dtype).
	j.AdapterType = dtype.F32
	switch {
	case r.AdapterPrecision == "":
		r.assume("adapters in fp32, as PEFT has them: --adapter-precision was not given")
	case slices.Contains(AdapterPrecisions, r.AdapterPrecision):
		j.AdapterType, _ = dtype.Parse(r.AdapterPrecision)
	default:
		return &fault.Input{What: fmt.Sprintf("unknown precision of adapters %q", r.AdapterPrecision),
			Hint: "expected " + fault.OneOf(AdapterPrecisions...)}
	}
	matched := false
	modules := append(j.Model.Network.Linears(), j.Model.Network.Head.Projection)
	for _, p := range j.Model.Parameters {
		modules = append(modules, strings.TrimSuffix(p.Name, ".weight"))
	}
	matched = slices.ContainsFunc(modules, j.Adapter.Targets)
	if !matched {
		return &fault.Input{Where: fault.Position{File: j.Adapter.File},
			What: fmt.Sprintf("target_modules matches no module of %s", j.Model.Name),
			Hint: "its linear modules are " + strings.Join(lastNames(j.Model.Network.Linears()), ", ")}
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

// adaptsEmbedding returns an embedding that the adapter adapts, "" without.
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
			return &fault.Input{Where: a.Place(),
				What: "target_modules adapts " + x.Router +
					", which PEFT refuses: transformers 5 has routers that are no linear modules",
				Hint: "remove it, or give the version that the job runs with, such as --transformers 4.57"}
		}
		return nil
	}
	if !a.NamesTargets() {
		return &fault.Input{Where: a.Place(),
			What: fmt.Sprintf("target_modules is not given, and PEFT has no default for %s of transformers 5",
				r.job.Model.Type),
			Hint: `add "target_modules": ["q_proj", "v_proj"]`}
	}
	modules := append(network.Linears(), x.Router, x.GateUp, x.Down)
	for _, name := range names {
		modules = append(modules, x.ExpertsPath()+"."+name)
	}
	for _, module := range modules {
		name := module[strings.LastIndexByte(module, '.')+1:]
		if converts := slices.Contains(names, name) || name == "gate_up_proj"; converts &&
			(a.Lists(name) || a.Targets(module)) {
			return &fault.Input{Where: a.Place(),
				What: fmt.Sprintf("target_modules adapts %q: transformers 5 has the weights of all experts in one "+
					"parameter, and PEFT makes target_parameters of it, which is not planned yet", name),
				Hint: "name modules of the attention alone, or give the version that the job runs with, such as " +
					"--transformers 4.57"}
		}
	}
	for _, p := range r.job.Model.Parameters {
		modules = append(modules, strings.TrimSuffix(p.Name, ".weight"))
	}
	a.ToLeaves(modules)
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

// Quantizations returns the names that --quantization takes in place of a file.
func Quantizations() []string { return slices.Sorted(maps.Keys(quantizations)) }

// quantizations maps these names to what they mean.
var quantizations = map[string]recipe.Quantization{
	"nf4":    {Bits: 4, Kind: "nf4"},
	"fp4":    {Bits: 4, Kind: "fp4"},
	"nf4-dq": {Bits: 4, Kind: "nf4", DoubleQuant: true},
	"fp4-dq": {Bits: 4, Kind: "fp4", DoubleQuant: true},
	"int8":   {Bits: 8},
}

// quantization sets how the weights are stored. The quantization_config of the
// model's config.json has precedence over the request, as in transformers.
func (r *resolver) quantization() error {
	name := r.Request.Quantization
	if model := r.job.Model; model.Quantized && model.Source != name {
		if name != "" {
			r.assume("--quantization has no effect: transformers takes the quantization_config of %s", model.Source)
		}
		name = model.Source
	}
	switch {
	case name == "":
	case quantizations[name].Bits > 0:
		q := quantizations[name]
		r.job.Quantization = &q
	default:
		if _, err := os.Stat(name); err != nil && !strings.ContainsAny(name, "./") {
			return &fault.Input{What: fmt.Sprintf("unknown quantization %q", name),
				Hint: "expected " + strings.Join(Quantizations(), ", ") + ", or a file with BitsAndBytesConfig in JSON"}
		}
		q, err := recipe.LoadQuantization(name)
		if err != nil {
			return err
		}
		r.note(q.Notes)
		if q.Bits == 8 && q.FP16Weights {
			return &fault.Input{Where: fault.Position{File: q.File},
				What: "llm_int8_has_fp16_weight is true: 16-bit weights are kept beside those in 8 bits, which is " +
					"not planned yet",
				Hint: "set it to false, or plan without quantization"}
		}
		r.job.Quantization = q
	}
	return nil
}

// chooseOptimizer sets the optimizer, its variant and the gradient clipping.
func (r *resolver) chooseOptimizer() error {
	name, variant, _ := strings.Cut(r.Optimizer, "/")
	where := fault.Position{}
	if d := r.job.DeepSpeed; name == "" && d != nil && d.Optimizer != nil {
		name, where.File = strings.ToLower(d.Optimizer.Type), d.File
	}
	if name == "" && r.training != nil { // the Trainer's, unless DeepSpeed has one
		name, where.File = r.training.Optimizer.Name, r.training.File
	}
	if name == "" {
		name = "adamw"
		r.assume("AdamW: --optimizer was not given")
	}
	known, ok := optimizerNames[name]
	if !ok {
		hint := "planned are " + strings.Join(Optimizers(), ", ")
		if near := fault.Nearest(name, Optimizers()); near != "" {
			hint = fmt.Sprintf("did you mean %q? %s", near, hint)
		}
		return &fault.Input{Where: where, What: fmt.Sprintf("the optimizer %q is not one that can be planned",
			name), Hint: hint}
	}
	o := known.optimizer()
	if variant != "" {
		if err := checkVariant(known.kind, Variant(variant)); err != nil {
			return err
		}
		o.Variant = Variant(variant)
	}
	if d := r.job.DeepSpeed; o.Variant == "" && d != nil && d.Optimizer.IsFusedAdam() &&
		strings.HasPrefix(known.kind, "adam") {
		o.Variant = Fused
	}
	if o.Variant == "" { // torch's defaults
		o.Variant = Foreach
		if r.job.OnCPU {
			o.Variant = Loop
		}
	}
	r.job.Optimizer = o
	r.job.Clip = 1
	switch {
	case r.Clip != nil:
		r.job.Clip = *r.Clip
	case r.training != nil:
		r.job.Clip = r.training.MaxGradNorm
	case r.job.DeepSpeed != nil:
		r.job.Clip = r.job.DeepSpeed.GradientClipping
	}
	return nil
}

// sharding sets how the parameters are sharded.
func (r *resolver) sharding() error {
	j := r.job
	switch {
	case r.Request.FSDP == "":
	case slices.Contains(FSDPVersions, r.Request.FSDP):
		if j.FSDP != nil {
			return &fault.Input{What: "--fsdp is given, and a file configures FSDP too", Hint: "leave --fsdp out"}
		}
		j.FSDP = &recipe.FSDP{Version: int(r.Request.FSDP[0] - '0'), Strategy: "full_shard",
			WrapPolicy: "transformer_based_wrap", UseOrigParams: true,
			BackwardPrefetch: "backward_pre", OffloadParameters: r.OffloadParameters}
		j.ReduceType = dtype.F32
	default:
		return &fault.Input{What: fmt.Sprintf("--fsdp is %q, expected %s, the version", r.Request.FSDP,
			fault.OneOf(FSDPVersions...))}
	}
	if j.FSDP != nil && r.OffloadParameters {
		j.FSDP.OffloadParameters = true
	}
	j.Parallel.Shard = int64(j.World) / j.Parallel.Tensor
	whole := ledger.Bytes(j.Model.Elements() * j.ParameterType.Size())
	// For an unknown GPU, 80 GiB of memory are assumed.
	j.ZeROInit = r.launch != nil && r.launch.ZeRO3Init || whole > cmp.Or(j.GPU.Memory, 80*ledger.GiB)
	j.SplitsDecay = r.training != nil
	if d := j.DeepSpeed; d != nil {
		d.ResolveSizes(j.Model.Network.Hidden)
	}
	if d := j.DeepSpeed; d != nil && d.ZeROStage == 3 && r.launch == nil {
		if j.ZeROInit {
			r.assume("parameters are sharded as the model is made (zero.Init): whole it would not fit on a GPU")
		} else {
			r.assume("the model is made whole and then sharded: with zero.Init (accelerate's zero3_init_flag, or a " +
				"Trainer that is made first) its load takes less")
		}
	}
	if j.FSDP == nil {
		return nil
	}
	if oldest := (version.Version{Minor: 43}); j.Quantization != nil && !j.Versions.BitsAndBytes.AtLeast(0, 43, 0) {
		if r.BitsAndBytes != "" {
			return &fault.Input{What: fmt.Sprintf("FSDP shards quantized weights from bitsandbytes 0.43 on, and "+
				"this is %v",
				j.Versions.BitsAndBytes),
				Hint: "give a later --bitsandbytes"}
		}
		j.Versions.BitsAndBytes = oldest
	}
	if j.FSDP.Strategy == "no_shard" {
		j.Parallel.Shard = 1
	}
	if strings.HasPrefix(j.FSDP.Strategy, "hybrid") {
		j.Parallel.Shard = int64(j.RanksPerNode)
	}
	if l := r.launch; l != nil && l.Parallelism != nil {
		j.Parallel.Shard = int64(l.Parallelism.Shard * l.Parallelism.Context)
	}
	// FSDP casts the parameters itself. Accelerate has gradients reduced in
	// the same type.
	if j.AutocastType != dtype.Invalid {
		j.CastType, j.AutocastType = j.AutocastType, dtype.Invalid
	}
	r.assumeLoading()
	r.sayPadding()
	if j.ReduceType == dtype.Invalid || j.CastType == dtype.Invalid && j.ParameterType != dtype.F32 {
		j.ReduceType = j.ComputeType()
	}
	return nil
}

// sayPadding notes if padding makes FSDP2 gather at least a quarter more than
// the model. FSDP2 shards the rows of every parameter, and pads a rank that has
// fewer rows (_init_sharded_param in _fsdp_param.py).
func (r *resolver) sayPadding() {
	j := r.job
	if j.FSDP.Version != 2 {
		return
	}
	fused, ranks := j.FusedExperts(), j.Parallel.Shard
	var whole, padded, most, rows int64
	var name string
	for _, p := range j.Model.Parameters {
		if p.TiedTo != "" || len(p.Shape) == 0 {
			continue
		}
		first := p.Shape[0]
		if fused[p.Name] {
			first = max(1, first/j.Parallel.Expert)
		}
		all := (first + ranks - 1) / ranks * ranks * (p.Elements() / p.Shape[0])
		own := first * (p.Elements() / p.Shape[0])
		whole, padded = whole+own, padded+all
		if all-own > most {
			most, name, rows = all-own, p.Name, first
		}
	}
	if padded < whole*5/4 {
		return
	}
	r.assume("FSDP2 divides the %d rows of %s among %d ranks and pads every rank to a whole row, so that all ranks "+
		"together gather %.1f times the model: divide it among fewer (accelerate's dp_shard_size and "+
		"dp_replicate_size), give --expert-parallel, or divide another dimension (fully_shard's "+
		"shard_placement_fn), which is not planned",
		rows, name, ranks, float64(padded)/float64(whole))
}
