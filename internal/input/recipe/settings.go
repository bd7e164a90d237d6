package recipe

import (
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/strict"
)

// Setting is what files of several programs say under keys of their own.
type Setting string

// The settings.
const (
	MicroBatch            Setting = "micro batch"
	EvaluationBatch       Setting = "batch of an evaluation"
	Accumulation          Setting = "gradient accumulation"
	TrainBatch            Setting = "batch of all ranks"
	GradientCheckpointing Setting = "gradient checkpointing"
	OptimizerName         Setting = "optimizer"
	Liger                 Setting = "kernels of Liger"
	BF16                  Setting = "passes in bf16"
	FP16                  Setting = "passes in fp16"
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
	SavesModelOnly        Setting = "checkpoints without optimizer states"
	SavedStateDict        Setting = "state_dict of checkpoints"

	RolloutFraction  Setting = "fraction of the rollout engine"
	RolloutSleep     Setting = "sleep of the rollout engine"
	RolloutServer    Setting = "place of the rollout engine"
	RolloutBackups   Setting = "backups of the trainer"
	RolloutReference Setting = "place of the frozen model"
	RolloutLogProbs  Setting = "log-probabilities of answers"
	RolloutJudged    Setting = "sequences that are judged at a time"
	SampleBound      Setting = "tokens of the longest sample"
	PackedTokens     Setting = "tokens of a packed micro batch"

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

// SettingKey is the key of a setting in one kind of file. A value is written as the kind says it. A path that begins
// with -- is a flag of a command, as the program spells it.
type SettingKey struct {
	Path  string
	Says  func(any) any // nil for as it is
	Unset any           // what a file says that lacks the key; nil where that is not known
	// Follows is the setting that a program computes this one from, where files have no key of it.
	Follows Setting
}

// AssignedFraction returns the number of a setting that is a word of --rollout: fraction=0.4.
func AssignedFraction(word any) any {
	_, value, _ := strings.Cut(fmt.Sprint(word), "=")
	f, err := strconv.ParseFloat(value, 64)
	if err != nil {
		return word
	}
	return f
}

// AssignedCount returns the whole number of a setting that is a word of --rollout: log-probs-batch=1.
func AssignedCount(word any) any {
	_, value, _ := strings.Cut(fmt.Sprint(word), "=")
	n, err := strconv.Atoi(value)
	if err != nil {
		return word
	}
	return n
}

// Constant returns a function that says a value, whatever the setting.
func Constant(value any) func(any) any { return func(any) any { return value } }

// SettingKeys are the keys of settings in one kind of file.
type SettingKeys map[Setting]SettingKey

// strategyOf is accelerate's name of what FSDP1 shards.
func strategyOf(x any) any {
	if x == true {
		return "FULL_SHARD"
	}
	return "SHARD_GRAD_OP"
}

var deepSpeedKeys = SettingKeys{
	MicroBatch: {Path: deepspeed.MicroKey}, Accumulation: {Path: deepspeed.AccumulationKey},
	TrainBatch:       {Path: deepspeed.TrainKey},
	Stage:            {Path: "zero_optimization.stage"},
	OptimizerDevice:  {Path: "zero_optimization.offload_optimizer.device"},
	ParameterDevice:  {Path: "zero_optimization.offload_param.device"},
	PinnedOptimizer:  {Path: "zero_optimization.offload_optimizer.pin_memory"},
	OverlapReduction: {Path: "zero_optimization.overlap_comm"},
	ReduceBucket:     {Path: "zero_optimization.reduce_bucket_size"},
	PrefetchBucket:   {Path: "zero_optimization.stage3_prefetch_bucket_size"},
	LiveParameters:   {Path: "zero_optimization.stage3_max_live_parameters"},
	BF16:             {Path: "bf16.enabled", Says: Constant(true)},
	FP16:             {Path: "fp16.enabled", Says: Constant(true)},
}

var TrainerKeys = SettingKeys{
	MicroBatch: {Path: "per_device_train_batch_size"}, Accumulation: {Path: "gradient_accumulation_steps"},
	GradientCheckpointing: {Path: "gradient_checkpointing"}, OptimizerName: {Path: "optim"},
	SavesModelOnly:  {Path: "save_only_model", Unset: false},
	Liger:           {Path: "use_liger_kernel"},
	EvaluationBatch: {Path: "per_device_eval_batch_size"},
	BF16:            {Path: "bf16", Says: Constant(true)},
	FP16:            {Path: "fp16", Says: Constant(true)},
}

var accelerateKeys = SettingKeys{Stage: {Path: "deepspeed_config.zero_stage"},
	FSDPOffload:     {Path: "fsdp_config.fsdp_offload_params"},
	OptimizerDevice: {Path: "deepspeed_config.offload_optimizer_device"},
	ParameterDevice: {Path: "deepspeed_config.offload_param_device"},
	Accumulation:    {Path: "deepspeed_config.gradient_accumulation_steps"},
	BF16:            {Path: "mixed_precision", Says: Constant(string(MixedBF16))},
	FP16:            {Path: "mixed_precision", Says: Constant(string(MixedF16))},
}

// Settings is a file whose settings can be edited.
type Settings struct {
	File     string
	document *strict.Document
	keys     SettingKeys
	// underscored says that flags of the script have underscores, and the program knows no others.
	underscored bool
	isScript    bool // its keys are arguments of a command, as Megatron-LM has them
	assigns     bool // they are assignments on a command line
	// translated says that a program makes arguments of Megatron-LM of its keys.
	translated bool
}

// LoadSettings reads the settings of a file. It returns nil for a file of a kind without any, such as a model's, and
// for a source of Python, which is not edited: flags say its changes. Texts may stand for files.
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
	if found == nil || found.Settings == nil || found.Arguments == nil && python.IsSource(file) {
		return nil, nil
	}
	isStarted := isStartedBy(d.Root, found)
	s := &Settings{File: file, document: d, keys: found.Settings, assigns: found.Assigns && isStarted,
		translated: found.Arguments != nil,
		isScript: d.Root.Member(megatronMark) != nil ||
			found.Arguments != nil && isStarted && !found.Assigns}
	if found.SettingsOf != nil {
		s.keys = found.SettingsOf(d.Root)
	}
	if flags := s.keys.ofFlags(); flags != nil {
		s.keys, s.underscored, s.isScript = flags, true, true
	}
	return s, nil
}

// ofFlags returns the keys of a program whose paths are flags, or nil for others.
func (k SettingKeys) ofFlags() SettingKeys {
	keys, any := SettingKeys{}, false
	for setting, key := range k {
		var is bool
		if key.Path, is = strings.CutPrefix(key.Path, "--"); is {
			any = true
		}
		keys[setting] = key
	}
	if !any {
		return nil
	}
	return keys
}

// trainerKeysOf returns the keys of TrainingArguments, and of a DeepSpeed configuration in them.
func trainerKeysOf(root *strict.Value) SettingKeys {
	v := root.Find("deepspeed")
	if v == nil || v.Kind != '{' {
		return TrainerKeys
	}
	merged := SettingKeys{}
	for setting, key := range deepSpeedKeys {
		merged[setting] = SettingKey{Path: "deepspeed." + key.Path, Says: key.Says}
	}
	maps.Copy(merged, TrainerKeys)
	return merged
}

// accelerateKeysOf returns the keys of an accelerate configuration. What FSDP2 reshards is a key of its own.
func accelerateKeysOf(root *strict.Value) SettingKeys {
	if v := root.Find("distributed_type"); v == nil || v.Text != "FSDP" {
		return accelerateKeys
	}
	of := SettingKeys{FSDPOffload: accelerateKeys[FSDPOffload], BF16: accelerateKeys[BF16], FP16: accelerateKeys[FP16],
		SavedStateDict:        {Path: "fsdp_config.fsdp_state_dict_type"},
		GradientCheckpointing: {Path: "fsdp_config.fsdp_activation_checkpointing", Unset: false},
		Reshard:               {Path: "fsdp_config.fsdp_sharding_strategy", Says: strategyOf}}
	if v := root.Find("fsdp_config.fsdp_version"); v != nil && v.String() == "2" {
		of[Reshard] = SettingKey{Path: "fsdp_config.fsdp_reshard_after_forward"}
	}
	return of
}

// SaysAsMegatron reports whether the file has a setting by an argument of Megatron-LM's name. Other programs have their
// own keys, or none.
func (s *Settings) SaysAsMegatron(setting Setting) bool {
	key := s.keys[setting].Path
	return key != "" && key == argumentKeys[setting].Path
}

// Translated reports whether the file has a command of a program that makes arguments of Megatron-LM of its own.
func (s *Settings) Translated() bool { return s.translated }

// Follows returns the setting that a program computes another one from, or "" if files have a key of it.
func (s *Settings) Follows(setting Setting) Setting { return s.keys[setting].Follows }

// Key returns the key of a setting, or "" if files of this kind do not have it.
func (s *Settings) Key(setting Setting) string {
	key := s.keys[setting].Path
	switch {
	case key != "" && s.underscored:
		return "--" + key
	case key != "" && s.isScript:
		return "--" + strings.ReplaceAll(key, "_", "-")
	}
	return s.keys[setting].Path
}

// IsUnset reports whether a file without the key of a setting says this value.
func (s *Settings) IsUnset(setting Setting, value any) bool {
	unset := s.keys[setting].Unset
	return unset != nil && unset == value
}

// Gives reports whether the file has a value of its own for a setting: neither "auto" nor null.
func (s *Settings) Gives(setting Setting) bool {
	key := s.keys[setting].Path
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
	if key.Says != nil {
		to = key.Says(to)
	}
	var r *strict.Revision
	var err error
	switch {
	case s.isScript:
		r, err = reviseScript(s.document, Argument{key.Path, to})
	case s.assigns:
		r, err = reviseAssignment(s.document, key.Path, strict.Of(to))
	default:
		r, err = s.document.Revise(key.Path, strict.Of(to))
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
	return &Settings{File: s.File, document: d, keys: s.keys, isScript: s.isScript, assigns: s.assigns,
		underscored: s.underscored,
		translated:  s.translated}, nil
}
