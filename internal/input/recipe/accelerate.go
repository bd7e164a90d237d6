package recipe

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/strict"
)

// Accelerate is a configuration of accelerate: the number of processes and what
// they divide among them. The defaults are those of accelerate 1.15.
type Accelerate struct {
	File string

	Engine    string   // "none", "ddp", "fsdp" or "deepspeed"
	Processes int      `key:"num_processes"` // on all machines; 0 = from the command line
	Machines  int      `key:"num_machines"`
	GPUs      []string // nil = all
	OnCPU     bool     `key:"use_cpu"`

	Precision      Precision
	FP8Backend     string // of MixedFP8: "te", "ao" or "msamp"
	CompileBackend string // "" = not compiled

	FSDP        *FSDP             // nil without
	DeepSpeed   *deepspeed.Config // nil without
	ZeRO3Init   bool              // parameters are sharded from the start
	MoELayers   []string          // classes of layers that ZeRO-3 gathers as one unit
	Parallelism *Parallelism
	Notes       []Note
}

// Parallelism is the number of ranks in each dimension. FSDP shards a model
// among Shard x Context ranks. Replicate such groups all-reduce gradients.
type Parallelism struct {
	Replicate int `key:"parallelism_config_dp_replicate_size"`
	Shard     int `key:"parallelism_config_dp_shard_size"`
	Tensor    int `key:"parallelism_config_tp_size"`
	Context   int `key:"parallelism_config_cp_size"`
	Sequence  int `key:"parallelism_config_sp_size"`
	// Attention is what ranks that share a sequence compute; "" = as the model says.
	Attention string `key:"parallelism_config_sp_attn_implementation"`
	Ulysses   bool   // ranks of Context exchange heads around attention
}

// Ranks returns the number of ranks: the product of all dimensions.
func (p *Parallelism) Ranks() int {
	product := 1
	for _, size := range []int{p.Replicate, p.Shard, p.Tensor, p.Context, p.Sequence} {
		product *= size
	}
	return product
}

// engines are the distributed types that Plimsoll plans.
var engines = map[string]string{"NO": "none", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "MULTI_XPU": "ddp",
	"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}

// LoadAccelerate reads the file at path, as "accelerate config" writes it. A DeepSpeed configuration in it is for that
// release of DeepSpeed.
func LoadAccelerate(path string, from Source) (*Accelerate, error) {
	return load(from.Texts, path, AccelerateKind, of(from, ParseAccelerate))
}

// ParseAccelerate parses the text of a file. Paths in it are relative to it.
// Every error is a *fault.Input.
func ParseAccelerate(file string, text []byte, from Source) (*Accelerate, error) {
	document, err := strict.Parse(file, text)
	if err != nil {
		return nil, err
	}
	return ReadAccelerate(document, from)
}

// ReadAccelerate reads a configuration that a file says, or a script.
func ReadAccelerate(document *strict.Document, from Source) (*Accelerate, error) {
	file := document.File
	if v := document.Root.Find("distributed_type"); v != nil && v.Kind == 'f' {
		v.Kind, v.Text = '"', "NO" // accelerate starts one process for every type that it does not know, such as False
	}
	checked, err := accelerateSchema.Read(document)
	if err != nil {
		return nil, err
	}
	r := &accelerateReader{checked, from}
	kind := r.Word("distributed_type")
	if kind == "" {
		return nil, fault.File(file).Inputf("distributed_type is missing").
			WithHint("add distributed_type: MULTI_GPU, or 'NO' for one process")
	}
	a := &Accelerate{File: file, Engine: engines[kind]}
	if err := r.fill(a, kind); err != nil {
		return nil, err
	}
	a.OnCPU = a.OnCPU || kind == "MULTI_CPU"
	if kind == "MULTI_XPU" {
		r.Note("distributed_type", "is MULTI_XPU: the plan takes CUDA's context and libraries for those of Intel "+
			"GPUs, where torch has an allocator of the same kind")
	}
	switch a.Engine {
	case "fsdp":
		a.FSDP, err = r.fsdp()
	case "deepspeed":
		a.DeepSpeed, err = r.deepSpeed(a.Precision)
		const initialize = "deepspeed_config.zero3_init_flag"
		a.ZeRO3Init = r.Truth(initialize) || !r.Gives(initialize) && a.DeepSpeed != nil && a.DeepSpeed.ZeROStage == 3
		a.MoELayers = r.List("deepspeed_config.deepspeed_moe_layer_cls_names")
	}
	if err != nil {
		return nil, err
	}
	if err := r.parallelism(a); err != nil {
		return nil, err
	}
	for _, engine := range []string{"fsdp", "deepspeed"} {
		if v := r.Find(engine + "_config"); v != nil && !v.IsEmpty() && a.Engine != engine {
			r.Note(engine+"_config", "has no effect: distributed_type is "+kind)
		}
	}
	a.Notes = r.Notes
	return a, nil
}

// accelerateReader reads a configuration of accelerate.
type accelerateReader struct {
	*strict.Reader
	from Source
}

// fill sets the fields of a that do not depend on the engine.
func (r *accelerateReader) fill(a *Accelerate, kind string) error {
	r.Fill(a)
	if ids := r.Word("gpu_ids"); ids != "all" {
		a.GPUs = r.List("gpu_ids")
	}
	a.Precision = Precision(strings.ToLower(r.Word("mixed_precision")))
	if r.Truth("fp16") && !r.Gives("mixed_precision") {
		a.Precision = MixedF16 // the oldest form
	}
	if a.Precision == MixedFP8 {
		a.FP8Backend = strings.ReplaceAll(strings.ToLower(r.Word("fp8_config.backend")),
			"-", "")
	}
	backend := r.Word("dynamo_config.backend")
	if !r.Gives("dynamo_config.backend") {
		backend = r.Word("dynamo_backend")
	}
	if backend = strings.ToLower(backend); backend != "no" {
		a.CompileBackend = backend
	}
	if kind == "NO" && a.Processes > 1 {
		r.Note("num_processes", "has no effect: distributed_type is NO, so accelerate starts one process")
	}
	if kind == "NO" {
		a.Processes, a.Machines = 1, 1
	}
	if a.Processes%a.Machines != 0 {
		r.Note("num_processes", fmt.Sprintf("is %d, which is not a multiple of the %d machines: accelerate starts "+
			"%d on each",
			a.Processes, a.Machines, a.Processes/a.Machines))
	}
	return r.Refuse([]strict.Conflict{
		{r.Word("compute_environment") != "LOCAL_MACHINE", "compute_environment",
			"is AMAZON_SAGEMAKER, which is not planned yet", "use LOCAL_MACHINE"},
		{a.Engine == "", "distributed_type", "is " + kind + ", which is not planned yet",
			"plimsoll plans NO, MULTI_GPU, MULTI_CPU, MULTI_XPU, FSDP and DEEPSPEED"},
		{a.Engine == "ddp" && len(a.GPUs) == 1 && a.Machines <= 1, "gpu_ids",
			"names one GPU, but distributed_type is MULTI_GPU", "name two or more, or write gpu_ids: all"},
	})
}

// fsdp reads fsdp_config. With FSDP1, accelerate reads the sharding strategy,
// which always has a value, and ignores reshard_after_forward.
func (r *accelerateReader) fsdp() (*FSDP, error) {
	s := r.Section("fsdp_config")
	f, err := readFSDP(s, FSDP{Strategy: "full_shard"}, "offload_params")
	if err != nil {
		return nil, err
	}
	if f.StateDictType == "" {
		f.StateDictType = UsualStateDict(f.Version)
	}
	strategy := s.Find("sharding_strategy")
	switch {
	case f.Version == 2 && strategy != nil:
		s.Note("sharding_strategy", `has no effect with FSDP2: accelerate reads "fsdp_reshard_after_forward"`)
	case f.Version == 1:
		f.Strategy = "full_shard"
		if strategy != nil && slices.Contains(fsdpStrategies, strings.ToUpper(strategy.Text)) {
			f.Strategy = strings.ToLower(strategy.Text)
		} else if strategy != nil {
			f.Strategy = strings.ToLower(fsdpStrategies[strategy.Integer-1])
		}
		if s.Gives("reshard_after_forward") {
			s.Note("reshard_after_forward", `has no effect with FSDP1: accelerate reads "fsdp_sharding_strategy"`)
		}
	}
	return f, nil
}

// pluginKeys are the keys of deepspeed_config that stand for keys of DeepSpeed,
// with the defaults of accelerate's DeepSpeedPlugin.
var pluginKeys = []struct {
	key, path string
	fallback  any
}{
	{deepspeed.AccumulationKey, deepspeed.AccumulationKey, "auto"},
	{"gradient_clipping", "gradient_clipping", "auto"},
	{"zero_stage", "zero_optimization.stage", 2},
	{"offload_optimizer_device", "zero_optimization.offload_optimizer.device", "none"},
	{"offload_param_device", "zero_optimization.offload_param.device", "none"},
	{"offload_param_nvme_path", "zero_optimization.offload_param.nvme_path", nil},
	{"offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path", nil},
	{"zero3_save_16bit_model", "zero_optimization.stage3_gather_16bit_weights_on_model_save", false},
}

// pluginDefaults returns the values that replace "auto" in a file.
func pluginDefaults() []deepspeed.Autofill {
	var values []deepspeed.Autofill
	for _, k := range pluginKeys {
		if k.fallback != "auto" {
			values = append(values, deepspeed.Autofill{Path: k.path, Is: strict.Of(k.fallback), Lenient: true})
		}
	}
	return values
}

// deepSpeed reads the file that deepspeed_config names. Without one it builds
// the configuration from the other keys, as accelerate does: DeepSpeedPlugin.
func (r *accelerateReader) deepSpeed(precision Precision) (*deepspeed.Config, error) {
	const section = "deepspeed_config."
	if r.Gives(section + "deepspeed_config_file") {
		return r.deepSpeedFile(section)
	}
	root := &strict.Value{Kind: '{'}
	root.Set(deepspeed.TrainKey, 0, strict.Of("auto"))
	root.Set(deepspeed.MicroKey, 0, strict.Of("auto"))
	for _, k := range pluginKeys {
		v := r.Find(section + k.key)
		device, isPath := strings.CutSuffix(k.key, "_nvme_path")
		if isPath && r.Word(section+device+"_device") != "nvme" { // accelerate does not read it
			v = nil
		}
		if v == nil {
			v = strict.Of(k.fallback)
		}
		root.Set(k.path, r.At(section+k.key), v)
	}
	at := r.At("mixed_precision")
	switch precision {
	case MixedF16:
		root.Set("fp16.enabled", at, strict.Of(true))
		root.Set("fp16.auto_cast", at, strict.Of(true))
	case MixedBF16, MixedFP8:
		root.Set("bf16.enabled", at, strict.Of(true))
	}
	return deepspeed.Read(&strict.Document{File: r.File, Text: r.Text, Root: root}, r.from.DeepSpeed)
}

func (r *accelerateReader) deepSpeedFile(section string) (*deepspeed.Config, error) {
	var list []strict.Conflict // accelerate would ignore these keys: _deepspeed_config_checks
	for _, k := range pluginKeys {
		list = append(list, strict.Conflict{r.Gives(section + k.key), section + k.key,
			"is given beside deepspeed_config_file, so accelerate would ignore it",
			"remove it, and set it in the file"})
	}
	list = append(list, strict.Conflict{r.Gives("mixed_precision"), "mixed_precision",
		"is given beside deepspeed_config_file, so accelerate would ignore it",
		`remove it, and enable "bf16" or "fp16" in the file`})
	if err := r.Refuse(list); err != nil {
		return nil, err
	}
	path, err := companion(r.Reader, section+"deepspeed_config_file")
	if err != nil {
		return nil, err
	}
	d, err := load(r.from.Texts, path, DeepSpeedKind, strict.ParseJSON)
	if err != nil {
		return nil, err
	}
	if err := deepspeed.FillIn(d, append(pluginDefaults(),
		deepspeed.Autofill{Path: "fp16.enabled", Is: strict.Of(false), Lenient: true},
		deepspeed.Autofill{Path: "bf16.enabled", Is: strict.Of(false), Lenient: true})); err != nil {
		return nil, err
	}
	return deepspeed.Hosted(d, r.from.DeepSpeed)
}

// parallelism reads parallelism_config: ParallelismConfig.
func (r *accelerateReader) parallelism(a *Accelerate) error {
	const prefix = "parallelism_config.parallelism_config_"
	if v := r.Find("parallelism_config"); v == nil || v.IsEmpty() {
		return nil
	}
	p := &Parallelism{}
	r.Section("parallelism_config").Fill(p)
	a.Parallelism = p
	return r.Refuse([]strict.Conflict{
		{a.Engine == "none", "parallelism_config", "is given, but distributed_type is NO",
			"remove it, or set distributed_type to FSDP"},
		{a.Engine == "fsdp" && a.FSDP.Version == 1, "parallelism_config", "needs FSDP2",
			"add fsdp_version: 2 to fsdp_config"},
		{a.Engine == "ddp" && p.Shard > 1, prefix + "dp_shard_size",
			"is above 1, but distributed_type is MULTI_GPU, which shards nothing",
			"set distributed_type to FSDP, with fsdp_version: 2"},
		{p.Context > 1 && p.Sequence > 1, prefix + "cp_size", "and sp_size are both above 1: they exclude each other",
			"set one of the two to 1"},
		{p.Sequence > 1 && a.Engine != "deepspeed", prefix + "sp_size",
			"is above 1, but only DeepSpeed divides sequences so", "set distributed_type to DEEPSPEED"},
		{p.Replicate > 1 && p.Shard == 1 && (p.Tensor > 1 || p.Context > 1), prefix + "dp_replicate_size",
			"is above 1, but dp_shard_size is 1: tensor and context parallelism need shards, too",
			"set dp_shard_size above 1, or dp_replicate_size to 1"},
		{a.Engine == "fsdp" && p.Shard == 1 && p.Context == 1, "parallelism_config",
			"leaves FSDP no ranks to divide the model among",
			"set dp_shard_size to the number of ranks, or remove parallelism_config"},
		{a.Processes > 0 && p.Ranks() != a.Processes, "parallelism_config",
			fmt.Sprintf("makes %d ranks, but num_processes is %d", p.Ranks(), a.Processes),
			"change one of the sizes, or num_processes"},
	})
}
