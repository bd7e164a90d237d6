package recipe

import (
	"fmt"
	"math"
)

// Training is the part of transformers' TrainingArguments that affects memory.
// The defaults are those of transformers 5.23.
type Training struct {
	File string

	MicroBatch           int // samples in a micro batch of one rank
	GradientAccumulation int
	AutoFindBatchSize    bool // the micro batch is halved until it fits
	GroupByLength        bool

	Precision     Precision
	TF32          bool
	Optimizer     TrainerOptimizer // unused if DeepSpeed has its own
	MaxGradNorm   float64          // 0 = off
	Checkpointing Checkpointing

	TorchCompile         bool
	UseLigerKernel       bool
	TorchEmptyCacheSteps int // 0 = never
	OnCPU                bool
	DataLoader           DataLoader
	DDPBucketMiB         int
	Evaluation           Evaluation
	Saving               Saving

	DeepSpeed *DeepSpeed // nil without
	FSDP      *FSDP      // nil without
	Notes     []Note
}

// Checkpointing says which activations are recomputed in the backward pass.
type Checkpointing struct {
	Enabled   bool
	Reentrant bool
	EveryN    int  // only every n-th layer is checkpointed
	Offload   bool // kept activations go to the CPU
}

// DataLoader is the configuration of PyTorch's DataLoader.
type DataLoader struct {
	Workers           int
	PrefetchFactor    int // batches that each worker loads ahead; 0 without workers
	PinMemory         bool
	PersistentWorkers bool
}

// Evaluation is the evaluation between steps.
type Evaluation struct {
	Enabled           bool
	MicroBatch        int
	AccumulationSteps int // steps after which predictions go to the CPU; 0 = at the end
	LossOnly          bool
}

// Saving is the saving of checkpoints between steps.
type Saving struct {
	Enabled   bool
	ModelOnly bool
}

// LoadTraining reads the file at path: the output of
// TrainingArguments.to_json_string, or some of its fields, as JSON or YAML.
func LoadTraining(path string) (*Training, error) {
	return load(path, trainingKind, ParseTraining)
}

// ParseTraining parses the text of a file. Paths in it are relative to it.
// Every error is a *fault.Input.
func ParseTraining(file string, text []byte) (*Training, error) {
	document, err := parseDocument(file, text)
	if err != nil {
		return nil, err
	}
	c, err := trainingSchema.read(document)
	if err != nil {
		return nil, err
	}
	optimizer, err := c.trainerOptimizer()
	if err != nil {
		return nil, err
	}
	t := &Training{File: file, Optimizer: optimizer}
	c.fillTraining(t)
	if err := c.trainingConflicts(); err != nil {
		return nil, err
	}
	if c.usesFSDP() {
		if t.FSDP, err = c.trainerFSDP(); err != nil {
			return nil, err
		}
	}
	if c.usesDeepSpeed() {
		if t.DeepSpeed, err = c.trainerDeepSpeed(t); err != nil {
			return nil, err
		}
	}
	if err := c.shardedConflicts(t); err != nil {
		return nil, err
	}
	t.Notes = c.notes
	return t, nil
}

func (c *checking) fillTraining(t *Training) {
	t.MicroBatch = int(c.integer(8, "per_gpu_train_batch_size", "per_device_train_batch_size"))
	t.GradientAccumulation = int(c.integer(1, accumulationKey))
	t.AutoFindBatchSize = c.truth(false, "auto_find_batch_size")
	t.GroupByLength = c.truth(false, "group_by_length") || c.word("", "train_sampling_strategy") == "group_by_length"
	switch t.Precision = Unmixed; {
	case c.truth(false, "bf16"):
		t.Precision = MixedBF16
	case c.truth(false, "fp16"):
		t.Precision = MixedF16
	}
	if t.MaxGradNorm = c.number(1, "max_grad_norm"); c.root.member("max_grad_norm") != nil &&
		c.root.find("max_grad_norm") == nil {
		t.MaxGradNorm = 0 // null
	}
	t.TorchCompile = c.truth(false, "torch_compile") || c.root.find("torch_compile_backend") != nil ||
		c.root.find("torch_compile_mode") != nil
	t.TF32 = c.truth(t.TorchCompile, "tf32")
	t.UseLigerKernel = c.truth(false, "use_liger_kernel")
	t.TorchEmptyCacheSteps = int(c.integer(0, "torch_empty_cache_steps"))
	t.OnCPU = c.truth(false, "use_cpu") || c.truth(false, "no_cuda")
	t.DDPBucketMiB = int(c.integer(25, "ddp_bucket_cap_mb")) // PyTorch's default
	t.DataLoader = DataLoader{
		Workers:           int(c.integer(0, "dataloader_num_workers")),
		PrefetchFactor:    int(c.integer(0, "dataloader_prefetch_factor")),
		PinMemory:         c.truth(true, "dataloader_pin_memory") && !t.OnCPU,
		PersistentWorkers: c.truth(false, "dataloader_persistent_workers"),
	}
	if t.DataLoader.Workers > 0 && t.DataLoader.PrefetchFactor == 0 {
		t.DataLoader.PrefetchFactor = 2 // PyTorch's default
	}
	t.Evaluation = Evaluation{
		Enabled:           c.evaluates() != "no" || c.truth(false, "eval_on_start"),
		MicroBatch:        int(c.integer(8, "per_gpu_eval_batch_size", "per_device_eval_batch_size")),
		AccumulationSteps: int(c.integer(0, "eval_accumulation_steps")),
		LossOnly:          c.truth(false, "prediction_loss_only"),
	}
	t.Saving = Saving{Enabled: c.word("steps", "save_strategy") != "no", ModelOnly: c.truth(false, "save_only_model")}

	name := "activation_checkpointing"
	if c.root.find(name) == nil && c.root.find("gradient_checkpointing") != nil {
		name = "gradient_checkpointing"
	}
	options := "activation_checkpointing_kwargs"
	if c.root.find(options) == nil {
		options = "gradient_checkpointing_kwargs"
	}
	if !c.truth(false, name) {
		return
	}
	t.Checkpointing = Checkpointing{
		Enabled:   true,
		Reentrant: c.truth(false, options+".use_reentrant"),
		EveryN:    int(c.integer(1, options+".every_n_layers")),
		Offload:   c.truth(false, options+".offload"),
	}
	if c.root.find(options+".use_reentrant") == nil {
		c.note(name, "is given without use_reentrant, which is false since transformers 5 and true before")
	}
}

// evaluates returns the strategy of evaluation: when it happens.
func (c *checking) evaluates() string {
	return c.word(c.word("no", "evaluation_strategy"), "eval_strategy")
}

// trainingConflicts refuses what TrainingArguments (_validate_args), the
// Trainer and PyTorch's DataLoader refuse at start.
func (c *checking) trainingConflicts() error {
	when, saves := c.evaluates(), c.word("steps", "save_strategy")
	logs := c.number(500, "logging_steps")
	evalSteps := c.number(0, "eval_steps")
	if evalSteps == 0 {
		evalSteps = logs
	}
	best := c.truth(false, "load_best_model_at_end") && saves != "best"
	var list []conflict
	for _, pair := range [][2]string{{"fp16", "bf16"}, {"fp16_full_eval", "bf16_full_eval"}} {
		list = append(list, conflict{c.truth(false, pair[0]) && c.truth(false, pair[1]), pair[0],
			fmt.Sprintf("and %s (line %d) are both true: at most one can be", pair[1], c.place(pair[1]).Line),
			"set one of the two to false"})
	}
	for _, at := range [][2]string{{"logging_steps", c.word("steps", "logging_strategy")}, {"eval_steps", when},
		{"save_steps", saves}} {
		steps := c.number(0, at[0])
		list = append(list, conflict{at[1] == "steps" && steps > 1 && steps != math.Trunc(steps), at[0],
			fmt.Sprintf("is %v, but above 1 it counts steps", steps),
			"use a whole number, or a share of all steps below 1"})
	}
	schedule := c.word("linear", "lr_scheduler_type")
	workers := c.integer(0, "dataloader_num_workers")
	return c.refuse(append(list, []conflict{
		{c.word("steps", "logging_strategy") == "steps" && logs == 0, "logging_steps",
			`is 0, but logging_strategy is "steps"`, `set it to 1 or more, or logging_strategy to "no"`},
		{best && when != saves, "load_best_model_at_end",
			fmt.Sprintf("is true, which needs one strategy for both, but evaluation is at %q and saving at %q",
				when, saves), `set "eval_strategy" to "` + saves + `"`},
		{best && when == "steps" && !isMultiple(c.number(500, "save_steps"), evalSteps), "load_best_model_at_end",
			fmt.Sprintf("is true, which needs save_steps, %v, to be a multiple of eval_steps, %v",
				c.number(500, "save_steps"), evalSteps), "change one of the two"},
		{(schedule == "reduce_lr_on_plateau" || schedule == "greedy") && when == "no", "lr_scheduler_type",
			fmt.Sprintf("is %q, which needs evaluation", schedule), `add "eval_strategy": "steps"`},
		{workers == 0 && c.root.find("dataloader_prefetch_factor") != nil, "dataloader_prefetch_factor",
			"is given, but without workers nothing is prefetched",
			`set "dataloader_num_workers" to 1 or more, or remove the key`},
		{workers == 0 && c.truth(false, "dataloader_persistent_workers"), "dataloader_persistent_workers",
			"is true, but there are no workers", `set "dataloader_num_workers" to 1 or more, or remove the key`},
		{c.root.find("parallelism_config") != nil &&
			(c.root.find("parallelism_config").text != "" || len(c.root.find("parallelism_config").members) > 0),
			"parallelism_config", "is given, which is not planned yet", "say it in an accelerate configuration"},
		{c.usesFSDP() && c.usesDeepSpeed(), "fsdp",
			fmt.Sprintf("and deepspeed (line %d) exclude each other", c.place("deepspeed").Line),
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
func (c *checking) shardedConflicts(t *Training) error {
	engine := "FSDP"
	if t.DeepSpeed != nil {
		engine = "DeepSpeed"
	}
	sharded := t.DeepSpeed != nil || t.FSDP != nil
	if t.FSDP != nil && t.Checkpointing.Enabled && !t.FSDP.ActivationCheckpointing {
		c.note("fsdp",
			`goes better with "activation_checkpointing" in fsdp_config: gradient checkpointing gathers the parameters once more in the backward pass`)
	}
	return c.refuse([]conflict{
		{sharded && t.Saving.ModelOnly && c.truth(false, "load_best_model_at_end"), "save_only_model",
			"is true, which " + engine + " does not combine with load_best_model_at_end",
			"set one of the two to false"},
		{t.FSDP != nil && t.Saving.ModelOnly && t.FSDP.StateDictType == "sharded_state_dict", "save_only_model",
			"is true, which FSDP does not combine with SHARDED_STATE_DICT",
			`set "state_dict_type" to "FULL_STATE_DICT"`},
		{t.DeepSpeed != nil && t.DeepSpeed.ZeROStage == 3 && t.AutoFindBatchSize, "auto_find_batch_size",
			"is true, which the Trainer does not combine with ZeRO stage 3", "remove the key"},
		{t.FSDP != nil && t.FSDP.ActivationCheckpointing && t.Checkpointing.Enabled, "fsdp_config",
			"and the arguments both checkpoint activations", `remove "gradient_checkpointing"`},
	})
}
