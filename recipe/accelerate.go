package recipe

import (
	"fmt"
	"slices"
	"strings"

	"plimsoll/fault"
)

// Accelerate is a configuration of accelerate: the number of processes and what
// they divide among them. The defaults are those of accelerate 1.15.
type Accelerate struct {
	File string

	Engine    string // "none", "ddp", "fsdp" or "deepspeed"
	Processes int    // on all machines; 0 = from the command line
	Machines  int
	GPUs      []string // nil = all
	OnCPU     bool

	Precision      Precision
	FP8Backend     string // of MixedFP8: "te", "ao" or "msamp"
	CompileBackend string // "" = not compiled

	FSDP        *FSDP      // nil without
	DeepSpeed   *DeepSpeed // nil without
	ZeRO3Init   bool       // parameters are sharded from the start
	MoELayers   []string   // classes of layers that ZeRO-3 gathers as one unit
	Parallelism *Parallelism
	Notes       []Note
}

// Parallelism is the number of ranks in each dimension. FSDP shards a model
// among Shard x Context ranks. Replicate such groups all-reduce gradients.
type Parallelism struct {
	Replicate, Shard, Tensor, Context, Sequence int
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
var engines = map[string]string{"NO": "none", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}

// LoadAccelerate reads the file at path, as "accelerate config" writes it.
func LoadAccelerate(path string) (*Accelerate, error) {
	return load(path, accelerateKind, ParseAccelerate)
}

// ParseAccelerate parses the text of a file. Paths in it are relative to it.
// Every error is a *fault.Input.
func ParseAccelerate(file string, text []byte) (*Accelerate, error) {
	document, err := parseDocument(file, text)
	if err != nil {
		return nil, err
	}
	c, err := accelerateSchema.read(document)
	if err != nil {
		return nil, err
	}
	kind := c.word("", "distributed_type")
	if kind == "" {
		return nil, &fault.Input{
			Where: fault.Position{File: file},
			What:  "there is no distributed_type",
			Hint:  "add distributed_type: MULTI_GPU, or 'NO' for one process",
		}
	}
	a := &Accelerate{File: file, Engine: engines[kind]}
	if err := c.fillAccelerate(a, kind); err != nil {
		return nil, err
	}
	switch a.Engine {
	case "fsdp":
		a.FSDP, err = c.acceleratedFSDP()
	case "deepspeed":
		a.DeepSpeed, err = c.acceleratedDeepSpeed(a.Precision)
		a.ZeRO3Init = c.truth(a.DeepSpeed != nil && a.DeepSpeed.ZeROStage == 3, "deepspeed_config.zero3_init_flag")
		a.MoELayers = c.list("deepspeed_config.deepspeed_moe_layer_cls_names")
	}
	if err != nil {
		return nil, err
	}
	if err := c.parallelism(a); err != nil {
		return nil, err
	}
	for _, engine := range []string{"fsdp", "deepspeed"} {
		if v := c.root.find(engine + "_config"); v != nil && len(v.members) > 0 && a.Engine != engine {
			c.note(engine+"_config", "has no effect: distributed_type is "+kind)
		}
	}
	a.Notes = c.notes
	return a, nil
}

func (c *checking) fillAccelerate(a *Accelerate, kind string) error {
	a.Machines = int(c.integer(1, "num_machines"))
	a.Processes = int(c.integer(0, "num_processes"))
	if ids := c.word("all", "gpu_ids"); ids != "all" {
		a.GPUs = c.list("gpu_ids")
	}
	a.OnCPU = c.truth(false, "use_cpu")
	a.Precision = Precision(strings.ToLower(c.word("no", "mixed_precision")))
	if c.truth(false, "fp16") && c.root.find("mixed_precision") == nil {
		a.Precision = MixedF16 // the oldest form
	}
	if a.Precision == MixedFP8 {
		a.FP8Backend = strings.ReplaceAll(strings.ToLower(c.word("te", c.spelled("fp8_config", "fp8_", "backend"))),
			"-", "")
	}
	backend := c.word(c.word("no", "dynamo_backend"), c.spelled("dynamo_config", "dynamo_", "backend"))
	if backend = strings.ToLower(backend); backend != "no" {
		a.CompileBackend = backend
	}
	if kind == "NO" && a.Processes > 1 {
		c.note("num_processes", "has no effect: distributed_type is NO, so accelerate starts one")
	}
	if kind == "NO" {
		a.Processes, a.Machines = 1, 1
	}
	if a.Processes%a.Machines != 0 {
		c.note("num_processes", fmt.Sprintf("is %d, which %d machines do not divide: accelerate starts %d on each",
			a.Processes, a.Machines, a.Processes/a.Machines))
	}
	return c.refuse([]conflict{
		{c.word("LOCAL_MACHINE", "compute_environment") != "LOCAL_MACHINE", "compute_environment",
			"is AMAZON_SAGEMAKER, which is not planned yet", "use LOCAL_MACHINE"},
		{a.Engine == "", "distributed_type", "is " + kind + ", which is not planned yet",
			"planned are NO, MULTI_GPU, FSDP and DEEPSPEED"},
		{a.Engine == "ddp" && len(a.GPUs) == 1 && a.Machines <= 1, "gpu_ids",
			"names one GPU, but distributed_type is MULTI_GPU", "name two or more, or write gpu_ids: all"},
	})
}

// acceleratedFSDP reads fsdp_config. With FSDP1, accelerate reads the sharding
// strategy, which always has a value, and ignores reshard_after_forward.
func (c *checking) acceleratedFSDP() (*FSDP, error) {
	const section = "fsdp_config"
	at := func(key string) string { return c.spelled(section, "fsdp_", key) }
	f := FSDP{
		Version:             1,
		Strategy:            "full_shard",
		WrapPolicy:          "no_wrap",
		WrapBySize:          1e8,
		RAMEfficientLoading: true,
		StateDictType:       "full_state_dict",
	}
	if c.integer(1, at("version")) == 2 {
		f.StateDictType = "sharded_state_dict"
	}
	read, err := c.fsdp(section, f, "offload_params")
	if err != nil {
		return nil, err
	}
	strategy := c.root.find(at("sharding_strategy"))
	switch {
	case read.Version == 2 && strategy != nil:
		c.note(at("sharding_strategy"), `has no effect with FSDP2: accelerate reads "fsdp_reshard_after_forward"`)
	case read.Version == 1:
		read.Strategy = f.Strategy
		if strategy != nil && slices.Contains(fsdpStrategies, strings.ToUpper(strategy.text)) {
			read.Strategy = strings.ToLower(strategy.text)
		} else if strategy != nil {
			read.Strategy = strings.ToLower(fsdpStrategies[strategy.integer-1])
		}
		if c.root.find(at("reshard_after_forward")) != nil {
			c.note(at("reshard_after_forward"), `has no effect with FSDP1: accelerate reads "fsdp_sharding_strategy"`)
		}
	}
	return read, nil
}

// acceleratedDeepSpeed reads the file that deepspeed_config names. Without one
// it builds the configuration from the other keys, as accelerate does:
// DeepSpeedPlugin.
func (c *checking) acceleratedDeepSpeed(precision Precision) (*DeepSpeed, error) {
	const section = "deepspeed_config."
	if c.root.find(section+"deepspeed_config_file") != nil {
		return c.deepSpeedFile(section)
	}
	device := func(of string) *value {
		v := &value{
			kind:    '{',
			members: []member{c.moved(section+of+"_device", "device", &value{kind: '"', text: "none"})},
		}
		if c.word("none", section+of+"_device") == "nvme" && c.root.find(section+of+"_nvme_path") != nil {
			v.members = append(v.members, c.moved(section+of+"_nvme_path", "nvme_path", nil))
		}
		return v
	}
	auto := &value{kind: '"', text: "auto"}
	zero := &value{kind: '{', members: []member{
		c.moved(section+"zero_stage", "stage", number(2)),
		{"offload_optimizer", c.at(section + "offload_optimizer_device"), device("offload_optimizer")},
		{"offload_param", c.at(section + "offload_param_device"), device("offload_param")},
		c.moved(section+"zero3_save_16bit_model", "stage3_gather_16bit_weights_on_model_save", truth(false)),
	}}
	root := &value{kind: '{', members: []member{
		{trainKey, 0, auto}, {microKey, 0, auto},
		c.moved(section+accumulationKey, accumulationKey, auto),
		c.moved(section+"gradient_clipping", "gradient_clipping", auto),
		{"zero_optimization", c.at("deepspeed_config"), zero},
	}}
	switch precision {
	case MixedF16:
		root.members = append(root.members, member{"fp16", c.at("mixed_precision"), &value{kind: '{', members: []member{
			{"enabled", c.at("mixed_precision"), truth(true)}, {"auto_cast", c.at("mixed_precision"), truth(true)}}}})
	case MixedBF16, MixedFP8:
		root.members = append(root.members, member{"bf16", c.at("mixed_precision"), &value{
			kind:    '{',
			members: []member{{"enabled", c.at("mixed_precision"), truth(true)}},
		}})
	}
	return readDeepSpeed(&document{file: c.file, text: c.text, root: root})
}

// moved returns the value at path under another name, with its place.
func (c *checking) moved(path, name string, otherwise *value) member {
	if v := c.root.find(path); v != nil {
		otherwise = v
	}
	return member{name, c.at(path), otherwise}
}

func (c *checking) deepSpeedFile(section string) (*DeepSpeed, error) {
	// accelerate would ignore these keys: _deepspeed_config_checks.
	for _, key := range []string{accumulationKey, "gradient_clipping", "zero_stage", "offload_optimizer_device",
		"offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"} {
		if c.root.find(section+key) != nil {
			return nil, &fault.Input{
				Where: c.place(section + key),
				What:  section + key + " is given beside deepspeed_config_file, which says it, too",
				Hint:  "remove it, and say it in the file",
			}
		}
	}
	if c.root.find("mixed_precision") != nil {
		return nil, &fault.Input{
			Where: c.place("mixed_precision"),
			What:  "mixed_precision is given beside deepspeed_config_file, which says it, too",
			Hint:  `remove it, and enable "bf16" or "fp16" in the file`,
		}
	}
	path, err := c.companion(section + "deepspeed_config_file")
	if err != nil {
		return nil, err
	}
	d, err := load(path, deepSpeedKind, parseCommented)
	if err != nil {
		return nil, err
	}
	off := truth(false)
	if err := d.fill(append(fillingsOfPlugin(),
		filling{path: "fp16.enabled", is: off, lenient: true},
		filling{path: "bf16.enabled", is: off, lenient: true})); err != nil {
		return nil, err
	}
	return hostedDeepSpeed(d)
}

// parallelism reads parallelism_config: ParallelismConfig.
func (c *checking) parallelism(a *Accelerate) error {
	const prefix = "parallelism_config.parallelism_config_"
	if v := c.root.find("parallelism_config"); v == nil || len(v.members) == 0 {
		return nil
	}
	size := func(key string) int { return int(c.integer(1, prefix+key+"_size")) }
	p := &Parallelism{
		Replicate: size("dp_replicate"),
		Shard:     size("dp_shard"),
		Tensor:    size("tp"),
		Context:   size("cp"),
		Sequence:  size("sp"),
	}
	a.Parallelism = p
	return c.refuse([]conflict{
		{a.Engine == "none", "parallelism_config", "is given, but distributed_type is NO",
			"remove it, or set distributed_type to FSDP"},
		{a.Engine == "fsdp" && a.FSDP.Version == 1, "parallelism_config", "needs FSDP2",
			"add fsdp_version: 2 to fsdp_config"},
		{a.Engine == "ddp" && p.Shard > 1, prefix + "dp_shard_size",
			"is above 1, but distributed_type is MULTI_GPU, which shards nothing",
			"set distributed_type to FSDP, with fsdp_version: 2"},
		{p.Sequence > 1 && p.Context == 1, prefix + "sp_size", "is above 1, which is not planned yet",
			"plan without it for an upper bound: whole sequences on every rank"},
		{p.Context > 1 && p.Sequence > 1, prefix + "cp_size", "and sp_size are both above 1: they exclude each other",
			"set one of the two to 1"},
		{p.Replicate > 1 && p.Shard == 1 && (p.Tensor > 1 || p.Context > 1), prefix + "dp_replicate_size",
			"is above 1, and dp_shard_size is 1: tensor and context parallelism do not go with replicas alone",
			"set dp_shard_size above 1, or dp_replicate_size to 1"},
		{a.Engine == "fsdp" && p.Shard == 1 && p.Context == 1, "parallelism_config",
			"leaves FSDP no ranks to divide the model among",
			"set dp_shard_size to the number of ranks, or remove parallelism_config"},
		{a.Processes > 0 && p.Ranks() != a.Processes, "parallelism_config",
			fmt.Sprintf("makes %d ranks, but num_processes is %d", p.Ranks(), a.Processes),
			"change one of the sizes, or num_processes"},
	})
}
