package recipe

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/strict"
)

// Training is the part of transformers' TrainingArguments that affects memory.
// The defaults are those of transformers 5.23.
type Training struct {
	File string

	MicroBatch           int  // samples in a micro batch of one rank
	GradientAccumulation int  `key:"gradient_accumulation_steps"`
	AutoFindBatchSize    bool `key:"auto_find_batch_size"` // the micro batch is halved until it fits
	GroupByLength        bool

	Precision     Precision
	TF32          bool
	Optimizer     TrainerOptimizer // unused if DeepSpeed has its own
	MaxGradNorm   float64          `key:"max_grad_norm"` // 0 = off
	Checkpointing Checkpointing

	LabelSmoothing float64 `key:"label_smoothing_factor"` // 0 = off

	TorchCompile         bool
	UseLigerKernel       bool `key:"use_liger_kernel"`
	SyncEachBatch        bool // accelerate reduces gradients after every micro batch
	TorchEmptyCacheSteps int  `key:"torch_empty_cache_steps"` // 0 = never
	OnCPU                bool
	DataLoader           DataLoader `key:""`
	DDPBucketMiB         int        `key:"ddp_bucket_cap_mb"`
	FindsUnused          string     // ddp_find_unused_parameters: true, false or not given
	Evaluation           Evaluation `key:""`
	Saving               Saving     `key:""`

	DeepSpeed *deepspeed.Config // nil without
	FSDP      *FSDP             // nil without
	Notes     []Note
}

// Checkpointing says which activations are recomputed in the backward pass.
type Checkpointing struct {
	Enabled   bool
	Reentrant bool `key:"use_reentrant"`
	ByRelease bool // use_reentrant is not given: it is false since transformers 5 and true before
	EveryN    int  `key:"every_n_layers"` // only every n-th layer is checkpointed
	Offload   bool `key:"offload"`        // kept activations go to the CPU
}

// DataLoader is the configuration of PyTorch's DataLoader.
type DataLoader struct {
	Workers           int  `key:"dataloader_num_workers"`
	PrefetchFactor    int  `key:"dataloader_prefetch_factor"` // batches that each worker loads ahead; 0 without workers
	PinMemory         bool `key:"dataloader_pin_memory"`
	PersistentWorkers bool `key:"dataloader_persistent_workers"`
}

// Evaluation is the evaluation between steps.
type Evaluation struct {
	Enabled           bool
	MicroBatch        int
	AccumulationSteps int  `key:"eval_accumulation_steps"` // until predictions go to the CPU; 0 = at the end
	LossOnly          bool `key:"prediction_loss_only"`
}

// Saving is the saving of checkpoints between steps.
type Saving struct {
	Enabled   bool
	ModelOnly bool `key:"save_only_model"`
}

// LoadTraining reads the file at path: the output of
// TrainingArguments.to_json_string, or some of its fields, as JSON or YAML. A DeepSpeed configuration in it is for
// that release of DeepSpeed.
func LoadTraining(path string, from Source) (*Training, error) {
	return load(from.Texts, path, TrainingKind, of(from, ParseTraining))
}

// ParseTraining parses the text of a file. Paths in it are relative to it.
// Every error is a *fault.Input.
func ParseTraining(file string, text []byte, from Source) (*Training, error) {
	document, err := strict.Parse(file, text)
	if err != nil {
		return nil, err
	}
	return readTraining(document, from)
}

// readTraining reads a parsed document.
func readTraining(document *strict.Document, from Source) (*Training, error) {
	checked, err := trainingSchema.Read(document)
	if err != nil {
		return nil, err
	}
	r := &trainingReader{checked, from}
	t := &Training{File: document.File}
	if t.Optimizer, err = r.optimizer(); err != nil {
		return nil, err
	}
	r.fill(t)
	if err := r.conflicts(); err != nil {
		return nil, err
	}
	if r.usesFSDP() {
		if t.FSDP, err = r.fsdp(); err != nil {
			return nil, err
		}
	}
	if r.usesDeepSpeed() {
		if t.DeepSpeed, err = r.deepSpeed(t); err != nil {
			return nil, err
		}
	}
	if err := r.shardedConflicts(t); err != nil {
		return nil, err
	}
	t.Notes = r.Notes
	return t, nil
}

// trainingReader reads TrainingArguments.
type trainingReader struct {
	*strict.Reader
	from Source
}

// fill sets the fields of t by their keys, and those that depend on several.
func (r *trainingReader) fill(t *Training) {
	r.Fill(t)
	t.MicroBatch = int(r.Integer(r.first("per_gpu_train_batch_size", "per_device_train_batch_size")))
	t.GroupByLength = r.Truth("group_by_length") || r.Word("train_sampling_strategy") == "group_by_length"
	switch t.Precision = Unmixed; {
	case r.Truth("bf16"):
		t.Precision = MixedBF16
	case r.Truth("fp16"):
		t.Precision = MixedF16
	}
	if r.Has("max_grad_norm") && !r.Gives("max_grad_norm") { // null
		t.MaxGradNorm = 0
	}
	t.TorchCompile = r.Truth("torch_compile") || r.Gives("torch_compile_backend") || r.Gives("torch_compile_mode") ||
		r.Gives("torchdynamo")
	if mode := r.Word("torch_compile_mode"); mode == "reduce-overhead" || mode == "max-autotune" {
		r.Note("torch_compile_mode", "is "+mode+": CUDA graphs hold memory of their own, which is not planned")
	}
	t.TF32 = r.Truth("tf32") || t.TorchCompile && !r.Gives("tf32")
	if v := r.Find("accelerator_config"); v != nil && v.Kind == '"' {
		r.Note("accelerator_config", "names a file that is not read: sync_each_batch and split_batches are "+
			"taken as false")
	}
	t.SyncEachBatch = r.Truth("accelerator_config.gradient_accumulation_kwargs.sync_each_batch")
	if r.Gives("ddp_find_unused_parameters") {
		t.FindsUnused = strconv.FormatBool(r.Truth("ddp_find_unused_parameters"))
	}
	t.OnCPU = r.Truth("use_cpu") || r.Truth("no_cuda")
	t.DataLoader.PinMemory = t.DataLoader.PinMemory && !t.OnCPU
	if t.DataLoader.Workers > 0 && t.DataLoader.PrefetchFactor == 0 {
		t.DataLoader.PrefetchFactor = 2 // PyTorch's default
	}
	t.Evaluation.Enabled = r.evaluates() != "no" || r.Truth("eval_on_start")
	t.Evaluation.MicroBatch = int(r.Integer(r.first("per_gpu_eval_batch_size", "per_device_eval_batch_size")))
	t.Saving.Enabled = r.Word("save_strategy") != "no"

	name := r.first("activation_checkpointing", "gradient_checkpointing")
	options := r.Section(r.first("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"))
	if !r.Truth(name) {
		return
	}
	t.Checkpointing.Enabled = true
	options.Fill(&t.Checkpointing)
	if t.Checkpointing.ByRelease = !options.Gives("use_reentrant"); t.Checkpointing.ByRelease {
		r.Note(name, "is given without use_reentrant, which is false since transformers 5 and true before")
	}
}

// first returns the first key if the file gives it, and else the second.
func (r *trainingReader) first(first, second string) string {
	if r.Gives(first) {
		return first
	}
	return second
}

// evaluates returns the strategy of evaluation: when it happens.
func (r *trainingReader) evaluates() string {
	return r.Word(r.first("eval_strategy", "evaluation_strategy"))
}

// conflicts refuses what TrainingArguments (_validate_args), the
// Trainer and PyTorch's DataLoader refuse at start.
func (r *trainingReader) conflicts() error {
	when, saves := r.evaluates(), r.Word("save_strategy")
	logs := r.Number("logging_steps")
	evalSteps := r.Number("eval_steps")
	if evalSteps == 0 {
		evalSteps = logs
	}
	best := r.Truth("load_best_model_at_end") && saves != "best"
	var list []strict.Conflict
	for _, pair := range [][2]string{{"fp16", "bf16"}, {"fp16_full_eval", "bf16_full_eval"}} {
		list = append(list, strict.Conflict{r.Truth(pair[0]) && r.Truth(pair[1]), pair[0],
			fmt.Sprintf("and %s (line %d) are both true: at most one can be", pair[1], r.Place(pair[1]).Line),
			"set one of the two to false"})
	}
	for _, at := range [][2]string{{"logging_steps", r.Word("logging_strategy")}, {"eval_steps", when},
		{"save_steps", saves}} {
		steps := r.Number(at[0])
		list = append(list, strict.Conflict{at[1] == "steps" && steps > 1 && steps != math.Trunc(steps), at[0],
			fmt.Sprintf("is %v: a value above 1 is a number of steps", steps),
			"use a whole number, or a fraction of all steps below 1"})
	}
	for _, key := range []string{"split_batches", "accelerator_config.split_batches"} {
		list = append(list, strict.Conflict{r.Truth(key), key,
			"is true: then all ranks share a batch of per_device_train_batch_size, which is not planned yet",
			"set it to false, and per_device_train_batch_size to what one rank gets"})
	}
	schedule := r.Word("lr_scheduler_type")
	workers := r.Integer("dataloader_num_workers")
	return r.Refuse(append(list, []strict.Conflict{
		{r.Word("logging_strategy") == "steps" && logs == 0, "logging_steps",
			`is 0, but logging_strategy is "steps"`, `set it to 1 or more, or logging_strategy to "no"`},
		{best && when != saves, "load_best_model_at_end",
			fmt.Sprintf("is true, which needs one strategy for both, but evaluation is at %q and saving at %q",
				when, saves), `set "eval_strategy" to "` + saves + `"`},
		{best && when == "steps" && !isMultiple(r.Number("save_steps"), evalSteps), "load_best_model_at_end",
			fmt.Sprintf("is true, which needs save_steps, %v, to be a multiple of eval_steps, %v",
				r.Number("save_steps"), evalSteps), "change one of the two"},
		{(schedule == "reduce_lr_on_plateau" || schedule == "greedy") && when == "no", "lr_scheduler_type",
			fmt.Sprintf("is %q, which needs evaluation", schedule), `add "eval_strategy": "steps"`},
		{workers == 0 && r.Gives("dataloader_prefetch_factor"), "dataloader_prefetch_factor",
			"is given, but without workers nothing is prefetched",
			`set "dataloader_num_workers" to 1 or more, or remove the key`},
		{workers == 0 && r.Truth("dataloader_persistent_workers"), "dataloader_persistent_workers",
			"is true, but there are no workers", `set "dataloader_num_workers" to 1 or more, or remove the key`},
		{r.Truth("use_liger_kernel") && r.Gives("liger_kernel_config") && !r.Find("liger_kernel_config").IsEmpty(),
			"liger_kernel_config", "chooses among Liger's kernels, which is not planned yet", "remove the key"},
		{strings.Contains(r.Word("mp_parameters"), ":"), "mp_parameters",
			"is given: SageMaker divides the model, which is not planned", "remove the key"},
		{r.Word("half_precision_backend") == "apex" || r.Word("fp16_backend") == "apex", "half_precision_backend",
			"is apex, which is not planned", "remove the key"},
		{r.Gives("past_index") && r.Number("past_index") >= 0, "past_index",
			"has the model return states of the batch before, which are not planned", "remove the key"},
		{r.Gives("parallelism_config") &&
			!r.Find("parallelism_config").IsEmpty(),
			"parallelism_config", "is given, which is not planned yet", "set it in an accelerate configuration"},
		{r.usesFSDP() && r.usesDeepSpeed(), "fsdp",
			fmt.Sprintf("and deepspeed (line %d) exclude each other", r.Place("deepspeed").Line),
			"remove one of the two"},
	}...))
}

// isMultiple reports whether one number of steps is a multiple of another. It
// compares whole steps with whole steps and shares with shares.
func isMultiple(of, step float64) bool {
	if (of < 1) != (step < 1) {
		return false
	}
	if of < 1 {
		of, step = of*1e6, step*1e6
	}
	return step >= 1 && int64(of)%int64(step) == 0
}

// shardedConflicts refuses combinations with the FSDP or DeepSpeed
// configuration.
func (r *trainingReader) shardedConflicts(t *Training) error {
	engine := "FSDP"
	if t.DeepSpeed != nil {
		engine = "DeepSpeed"
	}
	sharded := t.DeepSpeed != nil || t.FSDP != nil
	if t.FSDP != nil && t.Checkpointing.Enabled && !t.FSDP.ActivationCheckpointing {
		r.Note("fsdp",
			`is given with gradient_checkpointing, which gathers the parameters once more in the `+
				`backward pass: "activation_checkpointing" in fsdp_config avoids that`)
	}
	return r.Refuse([]strict.Conflict{
		{sharded && t.Saving.ModelOnly && r.Truth("load_best_model_at_end"), "save_only_model",
			"is true, which " + engine + " does not combine with load_best_model_at_end",
			"set one of the two to false"},
		{t.FSDP != nil && t.Saving.ModelOnly && t.FSDP.StateDictType == "sharded_state_dict", "save_only_model",
			"is true, which FSDP does not combine with SHARDED_STATE_DICT",
			`set "state_dict_type" to "FULL_STATE_DICT"`},
		{t.DeepSpeed != nil && t.DeepSpeed.ZeROStage == 3 && t.AutoFindBatchSize, "auto_find_batch_size",
			"is true, which the Trainer does not combine with ZeRO stage 3", "remove the key"},
		{t.FSDP != nil && t.FSDP.ActivationCheckpointing && t.Checkpointing.Enabled, "fsdp_config",
			"and the arguments both checkpoint activations, which the Trainer refuses",
			`remove "gradient_checkpointing"`},
	})
}
