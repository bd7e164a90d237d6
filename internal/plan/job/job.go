// Package job decides a training job. It reads a user's request and the files that the training is started with, and
// returns a Job with every setting decided.
package job

import (
	"cmp"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/input/rollout"
	"plimsoll/internal/plan/forward"
)

// Job is a training job with every setting decided.
type Job struct {
	Model *model.Model
	Machine
	Batch
	Precision
	forward.Passes
	Trained
	Update
	Sharding
	Program

	Evaluation *Evaluation // between two steps; nil without

	Reference *model.Model // a frozen model beside it, as DPO and RLHF have; nil without
	Answers   *Answers     // nil without a training on answers
	// Companions are further models on the GPUs of a policy.
	Companions []Companion
	// Rollout is an engine that generates answers on the GPUs of the training; nil without.
	Rollout *rollout.Engine

	// Megatron is the job as Megatron-LM runs it; nil for other programs. What its arguments say stands there, and
	// fields of all programs have their values here, too.
	Megatron *megatron.Job

	// Learned is memory beside the model that a recorded run has taught.
	Learned map[ledger.Component]ledger.Holding

	Files []string // that the job was read from, without the catalog

	// Assumptions are the defaults of settings that were not given, and notes.
	Assumptions []string
	// LeftOut names what the job has beside what is planned, so that a verdict says what it does not count.
	LeftOut []string
}

// Machine is what a job runs on.
type Machine struct {
	World        int // ranks
	Nodes        int
	RanksPerNode int
	OnCPU        bool // there are no GPUs
	GPU          gpu.Model
	HostMemory   ledger.Bytes // of one node; 0 = unknown
	NUMANodes    int          // of one node; 0 = unknown
}

// Batch is what a rank reads in a step.
type Batch struct {
	MicroBatch   int64
	Pairs        bool  // each of a micro batch is two sequences: a chosen and a rejected answer
	BatchTensors int64 // of int64, each as large as the sequences of a micro batch
	Sequence     int64
	// UsualSequence is the length in all micro batches but the first; 0 for Sequence.
	UsualSequence int64
	// ShortestSequence is the length that lengths vary from, up to Sequence; 0 if all sequences are as long.
	ShortestSequence int64
	Images           forward.Images // of a pass
	Accumulation     int
	// DividesBatch says that a file has the batch of a rank, and the size of a pipeline's micro batches, which divide
	// it.
	DividesBatch bool
}

// Precision says in which types a job stores parameters and computes.
type Precision struct {
	// ParameterType is the type of the stored parameters. AutocastType is the type that torch.autocast computes in, or
	// Invalid. CastType is the type that an engine casts parameters to before their use, or Invalid. ReduceType is the
	// type that gradients are reduced in.
	ParameterType, AutocastType, CastType, ReduceType dtype.Type
	AdapterType                                       dtype.Type
	// ReferenceType is the type that the frozen model is loaded in.
	ReferenceType dtype.Type
	// WidensNorms means that norms, embeddings and the head are in fp32; with NormsAlone, the norms are.
	WidensNorms, NormsAlone bool
	// ScalesProducts means that products of blocks are in fp8. What they save is planned in 16 bits.
	ScalesProducts bool
}

// FP8 reports whether products of blocks are in fp8.
func (j *Job) FP8() bool { return j.ScalesProducts || j.Megatron != nil && j.Megatron.FP8 != "" }

// Trained says which parameters a job trains, and how the others are stored.
type Trained struct {
	// Unfrozen are the only parameters that are trained, nil if all are.
	Unfrozen     *recipe.Unfrozen
	Adapter      *peft.Adapter
	AddsInFull   bool // PEFT makes what it adds to parameters in full first
	Quantization *recipe.Quantization
	// QuantizesExperts means that the parameters that hold all experts of a layer are quantized, too.
	QuantizesExperts bool
	HostExperts      *HostExperts // nil: the experts are a part of the model
}

// Update says how a step updates the parameters, and where the states rest.
type Update struct {
	Optimizer Optimizer
	Offload   *StateOffload // nil: the states stay where the optimizer makes them
	Clip      float64
	// StepsInBackward means that every parameter has an optimizer of its own, which steps once its gradient is
	// complete.
	StepsInBackward bool
	// SplitsDecay means that the optimizer has a parameter group without weight decay for norms and biases, as
	// transformers' Trainer makes it.
	SplitsDecay bool
}

// Sharding says how ranks share the parameters, and the work.
type Sharding struct {
	DeepSpeed *deepspeed.Config
	FSDP      *recipe.FSDP
	Parallel  Parallel
	Pipeline  *Pipeline // nil without pipeline stages
	Stage     *Stage    // of a job that OfStage has made
	// KeepsLastBlock means that FSDP does not reshard the last block between the passes.
	KeepsLastBlock bool
	UnitsAtEnds    recipe.UnitsAtEnds
	// WidensShards means that accelerate converts the shards of FSDP1 to fp32 on the GPU. The program has loaded the
	// weights as they were published.
	WidensShards bool
	// ZeROInit means that parameters are sharded while the model is made, as transformers does with ZeRO-3 if the
	// Trainer is made first.
	ZeROInit bool
	// WrapsTrained means that FSDP1 has a unit for every trained module of an adapter (PEFT's fsdp_auto_wrap_policy),
	// so that frozen parameters have no gradient. The Trainer sets that policy (update_fsdp_plugin_peft in
	// transformers). Without use_orig_params FSDP1 refuses units that are trained in parts. litgpt's are.
	WrapsTrained bool
	// SyncEachBatch means that gradients are reduced after every micro batch: without, FSDP keeps full gradients until
	// the last (no_sync).
	SyncEachBatch bool
	// FindsUnused means that DDP looks for parameters without a gradient. The Trainer asks for it in every pass, but
	// for models of transformers that checkpoint activations. UnusedGiven is what its arguments say instead.
	FindsUnused bool
	UnusedGiven string
	// DDPBucketMiB is the size of DDP's buckets, 0 for its default.
	DDPBucketMiB int
	// LoadsOnGPU means that every rank loads the full model on its GPU, before FSDP shards it.
	LoadsOnGPU bool
	// LoadsOnFirst means that the first rank loads the model, and the others make it without memory.
	LoadsOnFirst bool
}

// Program is the code that runs the job.
type Program struct {
	// Modules is the library whose modules the model consists of: transformers (also if empty), litgpt or torchtitan.
	Modules  string
	Versions Versions
	// AssumesTransformers means that nobody has said which release of transformers the job runs on.
	AssumesTransformers bool
	// HoldsOutputs means that the training loop keeps the outputs of the model until the next forward pass is done, as
	// a hand-written loop does.
	HoldsOutputs bool
	TilesMLP     *recipe.Tiles
	Saving       Saving
	// Allocator is the value of PYTORCH_CUDA_ALLOC_CONF.
	Allocator string
}

// Parallel holds the degrees of parallelism. A degree is 1 if ranks share nothing.
type Parallel struct {
	forward.Degrees
	Expert int64 // ranks that share the experts
	Shard  int64 // ranks that parameters are sharded among
}

// Replicas returns the number of groups of ranks that together hold the full model, in data parallelism and in hybrid
// sharding.
func (j *Job) Replicas() int {
	return max(1, j.World/int(j.Parallel.Shard*j.Parallel.Tensor*j.Stages()))
}

// Stages returns the number of pipeline stages, 1 without.
func (j *Job) Stages() int64 {
	if j.Megatron != nil {
		return j.Megatron.Degrees.Pipeline
	}
	if j.Pipeline == nil {
		return 1
	}
	return j.Pipeline.Degree
}

// DataRanks returns the number of ranks that have sequences of their own.
func (j *Job) DataRanks() int { return j.World / int(j.Parallel.Tensor*j.Parallel.Context*j.Stages()) }

// Micros returns the number of micro batches of an optimizer step, also of those that a pipeline makes.
func (j *Job) Micros() int {
	if j.Pipeline == nil {
		return j.Accumulation
	}
	return j.Accumulation * j.Pipeline.Micros
}

// Sequences returns the number of sequences in a pass.
func (j *Job) Sequences() int64 {
	if j.Pairs {
		return 2 * j.MicroBatch
	}
	return j.MicroBatch
}

// FusedExperts returns the parameters that hold the weights of all experts of a
// layer.
func (j *Job) FusedExperts() map[string]bool {
	fused := map[string]bool{}
	for _, b := range j.Model.Network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil && x.Fused() {
			fused[x.GateUp], fused[x.Down] = true, true
		}
	}
	if o := j.Model.Network.Opaque; o != nil {
		for _, name := range o.Experts {
			fused[name] = true
		}
	}
	return fused
}

// Tiles returns the number of tiles that a feed-forward network divides a sequence into, 0 if it does not.
func (j *Job) Tiles(sequence int64) int64 {
	if j.TilesMLP == nil {
		return 0
	}
	own := sequence / max(1, j.Parallel.Context)
	return int64(cmp.Or(j.TilesMLP.Count, int((own+recipe.TileTokens-1)/recipe.TileTokens)))
}

// Widens reports whether a program converts the parameter to fp32: _convert_embedding_modules_dtype of axolotl
// (src/axolotl/loaders/model.py), prepare_model_for_kbit_training of PEFT.
func (j *Job) Widens(parameter string) bool {
	if !j.WidensNorms {
		return false
	}
	module := parameter[:max(0, strings.LastIndexByte(parameter, '.'))]
	names := []string{"norm", "embed_tokens", "lm_head"}
	if j.NormsAlone {
		return strings.Contains(module, names[0])
	}
	switch j.Model.Type {
	case "gpt_neox":
		names = []string{"norm", "embed_in", "embed_out"}
	case "falcon":
		names = []string{"norm", "word_embeddings", "lm_head"}
	}
	return strings.HasSuffix(module, ".gate") ||
		slices.ContainsFunc(names, func(name string) bool { return strings.Contains(module, name) })
}

// Versions are the versions of the programs that the job runs on.
type Versions struct {
	Torch, DeepSpeed, Transformers, Accelerate, BitsAndBytes version.Version
}

// ComputeType returns the type of the parameters in the passes.
func (j *Job) ComputeType() dtype.Type {
	if j.CastType != dtype.Invalid {
		return j.CastType
	}
	return j.ParameterType
}
