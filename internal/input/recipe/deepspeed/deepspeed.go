// Package deepspeed reads configurations of DeepSpeed.
package deepspeed

import (
	"cmp"
	"maps"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/strict"
)

// Config is a DeepSpeed configuration. Missing keys and "auto" have the
// defaults of DeepSpeed 0.19.6. A note names each default that matters and
// differs in earlier versions.
type Config struct {
	File string

	ZeRO  `key:""`
	Types `key:""`

	TensorParallel   int        `key:"tensor_parallel.autotp_size"` // 0 = not given
	SequenceParallel int        `key:"sequence_parallel_size"`      // ranks that share a sequence (Ulysses)
	Optimizer        *Optimizer // nil when the file has none
	GradientClipping float64    `key:"gradient_clipping"` // the largest norm; 0 = off
	Batch            Batch      `key:""`

	PipelineCheckpoints        int64 `key:"pipeline.activation_checkpoint_interval"` // layers of a checkpoint; 0 is none
	PipelineReentrant          bool  `key:"pipeline.use_reentrant"`                  // the way of these checkpoints
	CheckpointActivationsOnCPU bool  `key:"activation_checkpointing.cpu_checkpointing"`

	// Auto lists the keys with the value "auto", as sorted dotted paths.
	Auto []string
	// Notes name keys that DeepSpeed accepts, but ignores or calls deprecated.
	Notes []strict.Note
	// Unplanned names keys that change how much memory a job takes, but have no
	// field here.
	Unplanned []strict.Note
	// Beside says what the file turns on that changes memory, and that a plan leaves out.
	Beside []string

	document   *strict.Document       // that With reads again
	release    version.Version        // of DeepSpeed
	numbers    map[string]givenNumber // by key: of the batch and gradient_clipping
	elasticity fault.Position         // zero when it is off
}

// ZeRO is how states, gradients and parameters are sharded and offloaded.
type ZeRO struct {
	ZeROStage         int      `key:"zero_optimization.stage"`
	Sizes             Sizes    `key:"zero_optimization"`
	OverlapReduction  bool     // overlap_comm: a second reduce bucket
	OffloadOptimizer  Offload  `key:"zero_optimization.offload_optimizer"`
	OffloadParameters Offload  `key:"zero_optimization.offload_param"`
	KeepsOptimizer    bool     // an offloaded one of the program (zero_force_ds_cpu_optimizer is false)
	ZenFlow           *ZenFlow `key:"zero_optimization.zenflow"`                 // nil when the file has none
	QuantizedGather   bool     `key:"zero_optimization.zero_quantized_weights"`  // of ZeRO-3: in 8 bits
	EfficientLinear   bool     `key:"zero_optimization.memory_efficient_linear"` // of ZeRO-3, under autocast
	GatherOnSave      bool     `key:"zero_optimization.stage3_gather_16bit_weights_on_model_save"`
}

// Types are the types of weights, gradients and states, and what is computed and sent in.
type Types struct {
	// Precision is BF16, F16 or F32. It is Invalid if the file leaves it to the
	// trainer's arguments ("auto").
	Precision dtype.Type
	// LowPrecisionMaster keeps master weights and gradients in Precision
	// (fp16_master_weights_and_grads, bf16_master_weights_and_grads).
	// LowPrecisionState keeps the optimizer's moments in it, too.
	LowPrecisionMaster bool
	LowPrecisionState  bool
	LossScale          LossScale `key:"fp16"` // for F16 or Invalid Precision; else zero
	// GradientAccumulationDType is Invalid if the file has none. Then gradients
	// accumulate in their own type.
	GradientAccumulationDType dtype.Type
	// Communication is the type that gradients are reduced in, Invalid if the file has none: then it is Precision.
	Communication dtype.Type
	// SequenceCommunication replaces Communication where ranks share a sequence.
	SequenceCommunication dtype.Type
	// Autocast is the type of torch_autocast, Invalid without. Weights of linear modules are then gathered and reduced
	// in it, unless AutocastsOthers names other modules.
	Autocast        dtype.Type
	AutocastsOthers bool
}

// givenNumber is a number of the file.
type givenNumber struct {
	number float64
	where  fault.Position
}

// Number returns a number that the file gives for a key of the batch or gradient_clipping, and its place.
func (d *Config) Number(key string) (number float64, where fault.Position, given bool) {
	n, given := d.numbers[key]
	return n.number, n.where, given
}

// Offload says where state is kept while the GPU does not need it.
type Offload struct {
	Device    string `key:"device"` // "none", "cpu" or "nvme"
	PinMemory bool   `key:"pin_memory"`
	// PinGiven reports whether the file sets pin_memory. The default was false
	// before 0.19.5.
	PinGiven bool
	// Ratio is the share of the optimizer that runs on the CPU (ZeRO-3 only).
	Ratio float64
	// SuperOffload is DeepSpeed's offloading for Grace Hopper (ZeRO-3 only).
	SuperOffload bool
	// Buffers is the number of pinned staging buffers for NVMe. For parameters,
	// each buffer has BufferElements, and HeldElements always stay on the host.
	Buffers                      int64 `key:"buffer_count"`
	BufferElements, HeldElements int64
}

// Sizes are the sizes of ZeRO's buffers, in elements.
type Sizes struct {
	ReduceBucket        int64 `key:"reduce_bucket_size"`
	AllgatherBucket     int64 `key:"allgather_bucket_size"`
	SubGroup            int64 `key:"sub_group_size"`
	PrefetchBucket      int64 `key:"stage3_prefetch_bucket_size"`
	PersistentParameter int64 `key:"stage3_param_persistence_threshold"` // parameters up to this size stay unsharded
	PersistentModel     int64 `key:"stage3_model_persistence_threshold"` // the limit for all of them together
	LiveParameters      int64 `key:"stage3_max_live_parameters"`
	ReuseDistance       int64 `key:"stage3_max_reuse_distance"`
	// Group is the number of ranks that parameters and states are sharded among (MiCS of ZeRO-3); below 1 all ranks.
	Group int64 `key:"mics_shard_size"`
	// SecondaryPartition is the number of ranks that together keep a second copy of gathered parameters (hpZ of
	// ZeRO++); 0 and 1 mean none.
	SecondaryPartition int64 `key:"zero_hpz_partition_size"`
}

// LossScale is how losses are scaled so that fp16 gradients do not underflow.
type LossScale struct {
	Static                float64 `key:"loss_scale"`          // 0 = dynamic, by the fields below
	InitialPower          int     `key:"initial_scale_power"` // the first scale is 2 to this power
	Window                int     `key:"loss_scale_window"`   // steps without overflow after which the scale doubles
	Hysteresis            int     `key:"hysteresis"`          // overflows after which the scale halves
	Minimum               float64 `key:"min_loss_scale"`
	ConsecutiveHysteresis bool    `key:"consecutive_hysteresis"`
}

// ZenFlow is the part of the ZenFlow section that determines sizes.
type ZenFlow struct {
	TopKRatio      float64 `key:"topk_ratio"`      // the share of gradient columns that stays on the GPU
	UpdateInterval int     `key:"update_interval"` // 0 = "auto"
	OverlapStep    bool    `key:"overlap_step"`
	Offload        bool    `key:"offload"`
}

// Newest is the newest release of DeepSpeed that is known. A zero version means it, too.
var Newest = version.Version{Major: 0, Minor: 19, Patch: 6}

// Parse parses the text of a file. The name of the file is for
// messages only. Every error is a *fault.Input.
func Parse(file string, text []byte, release version.Version) (*Config, error) {
	document, err := strict.ParseCommented(file, text)
	if err != nil {
		return nil, err
	}
	return Read(document, release)
}

// With returns the configuration that the file would give with other values at
// these dotted paths.
func (d *Config) With(values map[string]any) (*Config, error) {
	const zero = "zero_optimization"
	root := d.document.Root.Clone()
	if v := root.Find(zero); v != nil && v.Kind != '{' { // the oldest form
		*v = strict.Value{At: v.At, Kind: '{'}
		v.Set("stage", v.At, strict.Of(d.ZeROStage))
	}
	for _, path := range slices.Sorted(maps.Keys(values)) {
		is := strict.Of(values[path])
		if v := root.Find(path); v != nil {
			is.At = v.At
			*v = *is
		} else {
			root.Set(path, root.At, is)
		}
	}
	return Read(&strict.Document{File: d.File, Text: d.document.Text, Root: root}, d.release)
}

// reader reads a DeepSpeed configuration.
type reader struct {
	*strict.Reader
	bf16   string         // the section that DeepSpeed reads for bfloat16
	params *strict.Reader // optimizer.params; nil without an optimizer
}

// Read reads a configuration, which may be a part of another file.
func Read(document *strict.Document, release version.Version) (*Config, error) {
	schema := strict.Schema{Program: "DeepSpeed", Release: cmp.Or(release, Newest), Rule: Rule}
	checked, err := schema.Read(document)
	if err != nil {
		return nil, err
	}
	r := &reader{Reader: checked, bf16: "bf16"}
	if !r.Has("bf16") { // the old name counts only if the new one is missing
		r.bf16 = "bfloat16"
	}
	d := &Config{File: document.File, document: document, release: release}
	if d.Optimizer, err = r.optimizer(); err != nil {
		return nil, err
	}
	if err := r.scheduler(); err != nil {
		return nil, err
	}
	r.fill(d)
	if err := r.conflicts(d); err != nil {
		return nil, err
	}
	d.Unplanned, d.Beside = r.unplanned(d), r.beside(d)
	slices.Sort(r.Auto)
	d.Auto, d.Notes = r.Auto, r.Notes
	return d, nil
}

// fill sets the fields of d by their keys, and those that depend on several.
func (r *reader) fill(d *Config) {
	const zero = "zero_optimization"
	r.Fill(d)
	if whole := r.Find(zero); whole != nil && whole.Kind != '{' && whole.Truth {
		// The oldest form: "zero_optimization": true.
		d.ZeROStage = 1
		d.Sizes.AllgatherBucket = r.Integer("allgather_size")
	}
	d.OverlapReduction = r.Truth(zero + ".overlap_comm")
	if !r.Gives(zero + ".overlap_comm") {
		d.OverlapReduction = d.ZeROStage == 3
	}
	r.fillOffload(&d.OffloadOptimizer, zero+".offload_optimizer", zero+".cpu_offload")
	d.KeepsOptimizer = !r.Truth("zero_force_ds_cpu_optimizer")
	d.OffloadOptimizer.Ratio = r.Number(zero + ".offload_optimizer.ratio")
	d.OffloadOptimizer.SuperOffload = r.Truth(zero + ".offload_optimizer.super_offload")
	r.fillOffload(&d.OffloadParameters, zero+".offload_param", zero+".cpu_offload_param")
	d.OffloadParameters.BufferElements = r.Integer(zero + ".offload_param.buffer_size")
	d.OffloadParameters.HeldElements = r.Integer(zero + ".offload_param.max_in_cpu")
	r.fillPrecision(d)

	d.numbers = map[string]givenNumber{}
	for _, key := range []string{TrainKey, MicroKey, AccumulationKey, "gradient_clipping"} {
		if v := r.Find(key); v != nil {
			d.numbers[key] = givenNumber{v.Number, r.Place(key)}
		}
	}
	if r.Truth("elasticity.enabled") {
		d.elasticity = r.Place("elasticity")
	}
}

// fillOffload adds what the deprecated boolean in place of a section says.
func (r *reader) fillOffload(o *Offload, section, deprecated string) {
	if r.Truth(deprecated) && !r.Gives(section+".device") {
		o.Device = "cpu"
	}
	o.PinGiven = r.Gives(section + ".pin_memory")
}

func (r *reader) fillPrecision(d *Config) {
	switch {
	case r.Truth(r.bf16 + ".enabled"):
		d.Precision = dtype.BF16
	case r.Truth("fp16.enabled"):
		d.Precision = dtype.F16
	case !r.IsAuto(r.bf16+".enabled") && !r.IsAuto("fp16.enabled"):
		d.Precision = dtype.F32
	}
	if d.Precision != dtype.F16 && d.Precision != dtype.Invalid {
		d.LossScale = LossScale{}
	}
	d.LowPrecisionMaster = r.Truth(r.bf16+".bf16_master_weights_and_grads") ||
		r.Truth("fp16.fp16_master_weights_and_grads")
	d.LowPrecisionState = r.Truth(r.bf16 + ".bf16_optimizer_states")
	d.GradientAccumulationDType = r.Type("data_types.grad_accum_dtype")
	d.Communication = r.Type("communication_data_type")
	d.SequenceCommunication = r.Type("seq_parallel_communication_data_type")
	if r.Truth("torch_autocast.enabled") {
		const modules = "torch_autocast.lower_precision_safe_modules"
		d.Autocast = r.Type("torch_autocast.dtype")
		d.AutocastsOthers = r.Gives(modules) && !slices.Contains(r.List(modules), "torch.nn.Linear")
	}
}

// unplanned lists the keys in the file that change memory, but have no field.
func (r *reader) unplanned(d *Config) []strict.Note {
	const zero = "zero_optimization."
	shards := d.ZeROStage == 3
	var list []strict.Note
	for _, k := range []struct {
		is        bool
		path, why string
	}{
		{shards && r.Truth(zero+"zero_quantized_nontrainable_weights"), zero + "zero_quantized_nontrainable_weights",
			"keeps frozen parameters in 8 bits"},
		{r.Truth("expert_parallel.enabled") && r.Integer("expert_parallel.autoep_size") > 1, "expert_parallel",
			"divides the experts among ranks"},
		{r.Truth("amp.enabled"), "amp", "leaves the precision to Apex"},
	} {
		if k.is {
			list = append(list, strict.Note{Where: r.Place(k.path), What: k.path + " " + k.why})
		}
	}
	return list
}
