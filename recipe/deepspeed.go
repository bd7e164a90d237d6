// Package recipe reads how a model is trained: the precision, the optimizer,
// the sharding and the offloading. It reads strictly: a key that is silently
// ignored would lead to a plan for another training run than the user starts.
package recipe

import (
	"math"
	"slices"

	"plimsoll/dtype"
	"plimsoll/fault"
)

// DeepSpeed is a DeepSpeed configuration. Missing keys and "auto" have the
// defaults of DeepSpeed 0.19.6. A note names each default that matters and
// differs in earlier versions.
type DeepSpeed struct {
	File string

	ZeROStage         int
	Sizes             Sizes
	TensorParallel    int  // autotp_size; 0 = not given
	OverlapReduction  bool // overlap_comm: a second reduce bucket
	OffloadOptimizer  Offload
	OffloadParameters Offload
	ZenFlow           *ZenFlow // nil when the file has none

	// Precision is BF16, F16 or F32. It is Invalid if the file leaves it to the
	// trainer's arguments ("auto").
	Precision dtype.Type
	// LowPrecisionMaster keeps master weights and gradients in Precision
	// (fp16_master_weights_and_grads, bf16_master_weights_and_grads).
	// LowPrecisionState keeps the optimizer's moments in it, too.
	LowPrecisionMaster bool
	LowPrecisionState  bool
	LossScale          LossScale // for F16 or Invalid Precision; else zero

	Optimizer        *Optimizer // nil when the file has none
	GradientClipping float64    // the largest norm; 0 = off
	// GradientAccumulationDType is Invalid if the file has none. Then gradients
	// accumulate in their own type.
	GradientAccumulationDType  dtype.Type
	Batch                      Batch
	CheckpointActivationsOnCPU bool // activation_checkpointing.cpu_checkpointing
	GatherOnSave               bool // stage3_gather_16bit_weights_on_model_save

	// Auto lists the keys with the value "auto", as sorted dotted paths.
	Auto []string
	// Notes name keys that DeepSpeed accepts, but ignores or calls deprecated.
	Notes []Note
	// Unplanned names keys that change how much memory a job takes, but have no
	// field here.
	Unplanned []Note

	places     map[string]fault.Position
	elasticity fault.Position // zero when it is off
}

// Offload says where state is kept while the GPU does not need it.
type Offload struct {
	Device    string // "none", "cpu" or "nvme"
	PinMemory bool
	// PinGiven reports whether the file sets pin_memory. The default was false
	// before 0.19.5.
	PinGiven bool
	// Ratio is the share of the optimizer that runs on the CPU (ZeRO-3 only).
	Ratio float64
	// SuperOffload is DeepSpeed's offloading for Grace Hopper (ZeRO-3 only).
	SuperOffload bool
	// Buffers is the number of pinned staging buffers for NVMe. For parameters,
	// each buffer has BufferElements, and HeldElements always stay on the host.
	Buffers                      int64
	BufferElements, HeldElements int64
}

// Sizes are the sizes of ZeRO's buffers, in elements.
type Sizes struct {
	ReduceBucket, AllgatherBucket int64
	SubGroup                      int64
	PrefetchBucket                int64
	PersistentParameter           int64 // parameters up to this size stay unsharded
	PersistentModel               int64 // the limit for all of them together
	LiveParameters, ReuseDistance int64
}

// LossScale is how losses are scaled so that fp16 gradients do not underflow.
type LossScale struct {
	Static                float64 // 0 = dynamic, by the fields below
	InitialPower          int     // the first scale is 2 to this power
	Window                int     // steps without overflow after which the scale doubles
	Hysteresis            int     // overflows after which the scale halves
	Minimum               int
	ConsecutiveHysteresis bool
}

// ZenFlow is the part of the ZenFlow section that determines sizes.
type ZenFlow struct {
	TopKRatio      float64 // the share of gradient columns that stays on the GPU
	UpdateInterval int     // 0 = "auto"
	OverlapStep    bool
	Offload        bool
}

// Note is a remark for the author of a file.
type Note struct {
	Where fault.Position
	What  string
}

func (n Note) String() string { return n.Where.String() + ": " + n.What }

// LoadDeepSpeed reads the file at path.
func LoadDeepSpeed(path string) (*DeepSpeed, error) {
	return load(path, deepSpeedKind, ParseDeepSpeed)
}

// ParseDeepSpeed parses the text of a file. The name of the file is for
// messages only. Every error is a *fault.Input.
func ParseDeepSpeed(file string, text []byte) (*DeepSpeed, error) {
	document, err := parseCommented(file, text)
	if err != nil {
		return nil, err
	}
	return readDeepSpeed(document)
}

// readDeepSpeed reads a configuration, which may be a part of another file.
func readDeepSpeed(document *document) (*DeepSpeed, error) {
	c, err := deepSpeedSchema.read(document)
	if err != nil {
		return nil, err
	}
	optimizer, err := c.optimizer()
	if err != nil {
		return nil, err
	}
	if err := c.scheduler(); err != nil {
		return nil, err
	}
	d := &DeepSpeed{File: document.file, Optimizer: optimizer}
	c.fill(d)
	if err := c.conflicts(d); err != nil {
		return nil, err
	}
	d.Unplanned = c.unplanned(d)
	slices.Sort(c.auto)
	d.Auto, d.Notes = c.auto, c.notes
	return d, nil
}

func (c *checking) fill(d *DeepSpeed) {
	const zero = "zero_optimization."
	d.ZeROStage = int(c.integer(0, zero+"stage"))
	d.TensorParallel = int(c.integer(0, "tensor_parallel.autotp_size"))
	d.Sizes = Sizes{
		ReduceBucket:    c.integer(5e8, zero+"reduce_bucket_size"),
		AllgatherBucket: c.integer(5e8, zero+"allgather_bucket_size"),
		SubGroup:        c.integer(1e9, zero+"sub_group_size"),
		PrefetchBucket:  c.integer(5e7, zero+"stage3_prefetch_bucket_size", zero+"prefetch_bucket_size"),
		PersistentParameter: c.integer(1e5, zero+"stage3_param_persistence_threshold",
			zero+"param_persistence_threshold"),
		PersistentModel: c.integer(math.MaxInt64, zero+"stage3_model_persistence_threshold",
			zero+"model_persistence_threshold"),
		LiveParameters: c.integer(1e9, zero+"stage3_max_live_parameters", zero+"max_live_parameters"),
		ReuseDistance:  c.integer(1e9, zero+"stage3_max_reuse_distance", zero+"max_reuse_distance"),
	}
	d.OffloadOptimizer = c.offload(zero+"offload_optimizer", zero+"cpu_offload", 4)
	d.OffloadParameters = c.offload(zero+"offload_param", zero+"cpu_offload_param", 5)
	d.OffloadParameters.BufferElements = c.integer(1e8, zero+"offload_param.buffer_size")
	d.OffloadParameters.HeldElements = c.integer(1e9, zero+"offload_param.max_in_cpu")
	d.GatherOnSave = c.truth(false, zero+"stage3_gather_16bit_weights_on_model_save") ||
		c.truth(false, zero+"gather_16bit_weights_on_model_save") ||
		c.truth(false, zero+"stage3_gather_fp16_weights_on_model_save")
	if whole := c.root.find("zero_optimization"); whole != nil && whole.kind != '{' && whole.truth {
		// The oldest form: "zero_optimization": true.
		d.ZeROStage = 1
		d.Sizes.AllgatherBucket = c.integer(5e8, "allgather_size")
	}
	d.OverlapReduction = c.truth(d.ZeROStage == 3, zero+"overlap_comm")
	if c.root.find(zero+"zenflow") != nil {
		d.ZenFlow = &ZenFlow{
			TopKRatio:      c.number(0.1, zero+"zenflow.topk_ratio"),
			UpdateInterval: int(c.integer(0, zero+"zenflow.update_interval")),
			OverlapStep:    c.truth(false, zero+"zenflow.overlap_step"),
			Offload:        c.truth(false, zero+"zenflow.offload"),
		}
	}

	bf16 := c.bf16()
	switch {
	case c.truth(false, bf16+".enabled"):
		d.Precision = dtype.BF16
	case c.truth(false, "fp16.enabled"):
		d.Precision = dtype.F16
	case !c.isAuto(bf16+".enabled") && !c.isAuto("fp16.enabled"):
		d.Precision = dtype.F32
	}
	d.LowPrecisionMaster = c.truth(false, bf16+".bf16_master_weights_and_grads") ||
		c.truth(false, "fp16.fp16_master_weights_and_grads")
	d.LowPrecisionState = c.truth(false, bf16+".bf16_optimizer_states")
	if d.Precision == dtype.F16 || d.Precision == dtype.Invalid {
		d.LossScale = LossScale{
			Static:                c.number(0, "fp16.loss_scale"),
			InitialPower:          int(c.integer(16, "fp16.initial_scale_power")),
			Window:                int(c.integer(1000, "fp16.loss_scale_window")),
			Hysteresis:            int(c.integer(2, "fp16.hysteresis")),
			Minimum:               int(c.integer(1, "fp16.min_loss_scale")),
			ConsecutiveHysteresis: c.truth(false, "fp16.consecutive_hysteresis"),
		}
	}

	d.GradientClipping = c.number(1, "gradient_clipping")
	d.GradientAccumulationDType = c.elements("data_types.grad_accum_dtype")
	d.CheckpointActivationsOnCPU = c.truth(false, "activation_checkpointing.cpu_checkpointing")
	d.Batch = Batch{
		Train:        int(c.integer(0, trainKey)),
		Micro:        int(c.integer(0, microKey)),
		Accumulation: int(c.integer(0, accumulationKey)),
	}
	d.places = map[string]fault.Position{}
	for _, key := range []string{trainKey, microKey, accumulationKey, "gradient_clipping"} {
		if v := c.root.find(key); v != nil && v.kind == '0' { // and not "auto"
			d.places[key] = c.place(key)
		}
	}
	if c.truth(false, "elasticity.enabled") {
		d.elasticity = c.place("elasticity")
	}
}

// unplanned lists the keys in the file that change memory, but have no field.
func (c *checking) unplanned(d *DeepSpeed) []Note {
	const zero = "zero_optimization."
	shards := d.ZeROStage == 3
	var list []Note
	for _, k := range []struct {
		is        bool
		path, why string
	}{
		{shards && c.integer(1, zero+"zero_hpz_partition_size") > 1, zero + "zero_hpz_partition_size",
			"has a second copy of the parameters held, divided among few ranks"},
		{shards && c.integer(-1, zero+"mics_shard_size") > 0, zero + "mics_shard_size",
			"has everything divided among few ranks, and not among all"},
		{shards && c.truth(false, zero+"zero_quantized_nontrainable_weights"),
			zero + "zero_quantized_nontrainable_weights", "has frozen parameters held in 8 bits"},
		{c.integer(1, "sequence_parallel_size") > 1, "sequence_parallel_size",
			"divides sequences among ranks, and the batch among fewer"},
		{c.truth(false, "torch_autocast.enabled"), "torch_autocast", "computes in 16 bits with parameters in 32"},
		{c.truth(false, "amp.enabled"), "amp", "leaves the precision to Apex"},
	} {
		if k.is {
			list = append(list, Note{c.place(k.path), k.path + " " + k.why})
		}
	}
	return list
}

// bf16 returns the name of the section that DeepSpeed reads for bfloat16. The
// old name counts only if the new one is missing.
func (c *checking) bf16() string {
	if c.root.member("bf16") == nil {
		return "bfloat16"
	}
	return "bf16"
}

// offload reads an offload section, or the deprecated boolean in its place.
func (c *checking) offload(section, deprecated string, buffers int64) Offload {
	device := "none"
	if c.truth(false, deprecated) {
		device = "cpu"
	}
	return Offload{
		Device:       c.word(device, section+".device"),
		PinMemory:    c.truth(true, section+".pin_memory"),
		PinGiven:     c.root.find(section+".pin_memory") != nil,
		Buffers:      c.integer(buffers, section+".buffer_count"),
		Ratio:        c.number(1, section+".ratio"),
		SuperOffload: c.truth(false, section+".super_offload"),
	}
}
