package recipe

import (
	"errors"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/input/recipe/strict"
)

// Setting is what files of several programs say under keys of their own.
type Setting string

// The settings.
const (
	MicroBatch            Setting = "micro batch"
	Accumulation          Setting = "gradient accumulation"
	TrainBatch            Setting = "batch of all ranks"
	GradientCheckpointing Setting = "gradient checkpointing"
	OptimizerName         Setting = "optimizer"
	Stage                 Setting = "ZeRO stage"
	OptimizerDevice       Setting = "offloaded optimizer"
	ParameterDevice       Setting = "offloaded parameters"
	OverlapReduction      Setting = "overlapped reduction"
	ReduceBucket          Setting = "reduce bucket"
	PrefetchBucket        Setting = "prefetch bucket"
	LiveParameters        Setting = "live parameters"
	PinnedOptimizer       Setting = "pinned optimizer"
	FSDPOffload           Setting = "FSDP offload"
	TensorDegree          Setting = "tensor parallel degree"
	ContextDegree         Setting = "context parallel degree"
	ShardDegree           Setting = "shard degree"
	PipelineDegree        Setting = "pipeline parallel degree"
	PipelineSchedule      Setting = "pipeline schedule"
	PipelineMicroBatch    Setting = "micro batch of the pipeline"
	Reshard               Setting = "resharding after the forward pass"

	SequenceSplit        Setting = "sequence parallelism"
	RecomputeGranularity Setting = "granularity of recomputation"
	RecomputeMethod      Setting = "method of recomputation"
	RecomputeLayers      Setting = "layers of recomputation"
	DistributedOptimizer Setting = "distributed optimizer"
	PrecisionAware       Setting = "precision-aware optimizer"
	OptimizerOffload     Setting = "optimizer on the CPU"
	OffloadFraction      Setting = "fraction of the optimizer on the CPU"
	StatesOffload        Setting = "states on the host between steps"
	ChunkedStatesOffload Setting = "states on the host in chunks"
	FusedLoss            Setting = "fused loss"
	FusedLossBy          Setting = "implementation of the fused loss"
)

// settingKey is the key of a setting in one kind of file. A value is written as the kind says it.
type settingKey struct {
	path  string
	says  func(any) any // nil for as it is
	unset any           // what a file says that lacks the key; nil where that is not known
	// follows is the setting that a program computes this one from, where files have no key of it.
	follows Setting
}

func inverse(x any) any { return x != true }

// modeOf is torchtitan's name of checkpointing.
func modeOf(x any) any {
	if x == true {
		return "full"
	}
	return "none"
}

// policyOf is torchtitan's name of resharding.
func policyOf(x any) any {
	if x == true {
		return "always"
	}
	return "never"
}

// strategyOf is accelerate's name of what FSDP1 shards.
func strategyOf(x any) any {
	if x == true {
		return "FULL_SHARD"
	}
	return "SHARD_GRAD_OP"
}

var deepSpeedKeys = map[Setting]settingKey{
	MicroBatch: {path: microKey}, Accumulation: {path: accumulationKey}, TrainBatch: {path: trainKey},
	Stage:            {path: "zero_optimization.stage"},
	OptimizerDevice:  {path: "zero_optimization.offload_optimizer.device"},
	ParameterDevice:  {path: "zero_optimization.offload_param.device"},
	PinnedOptimizer:  {path: "zero_optimization.offload_optimizer.pin_memory"},
	OverlapReduction: {path: "zero_optimization.overlap_comm"},
	ReduceBucket:     {path: "zero_optimization.reduce_bucket_size"},
	PrefetchBucket:   {path: "zero_optimization.stage3_prefetch_bucket_size"},
	LiveParameters:   {path: "zero_optimization.stage3_max_live_parameters"},
}

var trainerKeys = map[Setting]settingKey{
	MicroBatch: {path: "per_device_train_batch_size"}, Accumulation: {path: "gradient_accumulation_steps"},
	GradientCheckpointing: {path: "gradient_checkpointing"}, OptimizerName: {path: "optim"},
}

// settingKeys are the keys of settings by the kind of file.
var settingKeys = map[*kind]map[Setting]settingKey{
	deepSpeedKind: deepSpeedKeys, trainingKind: trainerKeys, swiftKind: trainerKeys, scriptKind: trainerKeys,
	llamaFactoryKind: {MicroBatch: trainerKeys[MicroBatch], Accumulation: trainerKeys[Accumulation],
		GradientCheckpointing: {path: "disable_gradient_checkpointing", says: inverse}, OptimizerName: {path: "optim"}},
	axolotlKind: {MicroBatch: {path: "micro_batch_size"}, Accumulation: {path: "gradient_accumulation_steps"},
		GradientCheckpointing: {path: "gradient_checkpointing"}, OptimizerName: {path: "optimizer"}},
	torchtuneKind: {MicroBatch: {path: "batch_size"}, Accumulation: {path: "gradient_accumulation_steps"},
		GradientCheckpointing: {path: "enable_activation_checkpointing"},
		FSDPOffload:           {path: "fsdp_cpu_offload"}},
	torchtitanKind: {MicroBatch: {path: "training.local_batch_size"},
		Accumulation:          {follows: TrainBatch},
		TrainBatch:            {path: "training.global_batch_size"},
		FSDPOffload:           {path: "training.enable_cpu_offload"},
		Reshard:               {path: "parallelism.fsdp_reshard_after_forward", says: policyOf},
		GradientCheckpointing: {path: "activation_checkpoint.mode", says: modeOf},
		TensorDegree:          {path: "parallelism.tensor_parallel_degree", unset: 1},
		ContextDegree:         {path: "parallelism.context_parallel_degree", unset: 1},
		ShardDegree:           {path: "parallelism.data_parallel_shard_degree", unset: -1},
		PipelineDegree:        {path: "parallelism.pipeline_parallel_degree", unset: 1},
		PipelineSchedule:      {path: "parallelism.pipeline_parallel_schedule", unset: "1F1B"},
		PipelineMicroBatch:    {path: "parallelism.pipeline_parallel_microbatch_size", unset: 1}},
	accelerateKind: {Stage: {path: "deepspeed_config.zero_stage"},
		FSDPOffload:     {path: "fsdp_config.fsdp_offload_params"},
		OptimizerDevice: {path: "deepspeed_config.offload_optimizer_device"},
		ParameterDevice: {path: "deepspeed_config.offload_param_device"},
		Accumulation:    {path: "deepspeed_config.gradient_accumulation_steps"}},
}

// Settings is a file whose settings can be edited.
type Settings struct {
	File     string
	document *strict.Document
	keys     map[Setting]settingKey
	isScript bool // its keys are arguments of Megatron-LM
}

// LoadSettings reads the settings of a file. It returns nil for a file of a kind without any, such as a model's. Texts
// may stand for files.
func LoadSettings(file string, texts files.Texts) (*Settings, error) {
	text, err := texts.Read(file, largest)
	if errors.As(err, new(*files.TooLarge)) {
		return nil, nil
	}
	if err != nil {
		return nil, &fault.Input{Where: fault.Position{File: file}, Err: err}
	}
	d := parseContent(file, text)
	if d == nil {
		return nil, nil
	}
	found, _ := recognized(d.Root)
	s := &Settings{File: file, document: d, keys: settingKeys[found], isScript: d.Root.Member(megatronMark) != nil}
	switch {
	case s.isScript:
		s.keys = argumentKeys
	case found == argumentsKind:
		s.keys = keysInYAML(d.Root)
	}
	if s.keys == nil {
		return nil, nil
	}
	if v := d.Root.Find("deepspeed"); found == trainingKind && v != nil && v.Kind == '{' {
		merged := map[Setting]settingKey{}
		for setting, key := range deepSpeedKeys {
			merged[setting] = settingKey{path: "deepspeed." + key.path, says: key.says}
		}
		for setting, key := range trainerKeys {
			merged[setting] = key
		}
		s.keys = merged
	}
	if found == torchtitanKind && d.Root.Find("training.batch_size") != nil {
		s.keys = map[Setting]settingKey{MicroBatch: {path: "training.batch_size"},
			GradientCheckpointing: s.keys[GradientCheckpointing]}
	}
	if v := d.Root.Find("distributed_type"); found == accelerateKind && v != nil && v.Text == "FSDP" {
		s.keys = fsdpKeysOf(d.Root)
	}
	return s, nil
}

// fsdpKeysOf returns the keys of an accelerate configuration with FSDP. What FSDP2 reshards is a key of its own.
func fsdpKeysOf(root *strict.Value) map[Setting]settingKey {
	of := map[Setting]settingKey{FSDPOffload: {path: "fsdp_config.fsdp_offload_params"},
		GradientCheckpointing: {path: "fsdp_config.fsdp_activation_checkpointing", unset: false},
		Reshard:               {path: "fsdp_config.fsdp_sharding_strategy", says: strategyOf}}
	if v := root.Find("fsdp_config.fsdp_version"); v != nil && v.String() == "2" {
		of[Reshard] = settingKey{path: "fsdp_config.fsdp_reshard_after_forward"}
	}
	return of
}

// Follows returns the setting that a program computes another one from, or "" if files have a key of it.
func (s *Settings) Follows(setting Setting) Setting { return s.keys[setting].follows }

// Key returns the key of a setting, or "" if files of this kind do not have it.
func (s *Settings) Key(setting Setting) string {
	if key := s.keys[setting].path; key != "" && s.isScript {
		return "--" + strings.ReplaceAll(key, "_", "-")
	}
	return s.keys[setting].path
}

// IsUnset reports whether a file without the key of a setting says this value.
func (s *Settings) IsUnset(setting Setting, value any) bool {
	unset := s.keys[setting].unset
	return unset != nil && unset == value
}

// Gives reports whether the file has a value of its own for a setting: neither "auto" nor null.
func (s *Settings) Gives(setting Setting) bool {
	key := s.keys[setting].path
	if key == "" {
		return false
	}
	v := s.document.Root.Find(key)
	return v != nil && !v.IsAuto() && v.Kind != 'n'
}

// errWithoutKey is for a setting that files of the kind do not have.
var errWithoutKey = errors.New("recipe: files of this kind do not have the setting")

// Revise returns the file with another value of a setting, and the place of the change. The text is that of the file,
// or of a revision of it.
func (s *Settings) Revise(setting Setting, to any) (*strict.Revision, fault.Position, error) {
	key, ok := s.keys[setting]
	if !ok {
		return nil, fault.Position{}, errWithoutKey
	}
	if key.says != nil {
		to = key.says(to)
	}
	var r *strict.Revision
	var err error
	if s.isScript {
		r, err = reviseScript(s.document, Argument{key.path, to})
	} else {
		r, err = s.document.Revise(key.path, strict.Of(to))
	}
	if err != nil {
		return nil, fault.Position{}, err
	}
	return r, s.document.Position(r.At), nil
}

// With returns the settings of a revised text of the file.
func (s *Settings) With(text []byte) (*Settings, error) {
	d := parseContent(s.File, text)
	if d == nil {
		return nil, fault.File(s.File).Inputf("the revised text cannot be read")
	}
	return &Settings{File: s.File, document: d, keys: s.keys, isScript: s.isScript}, nil
}
