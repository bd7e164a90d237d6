package plan

import (
	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/forward"
	"plimsoll/gpu"
	"plimsoll/ledger"
	"plimsoll/model"
	"plimsoll/recipe"
	"plimsoll/version"
)

// Job is a training job with nothing left open.
type Job struct {
	Model *model.Model

	World        int // ranks
	Nodes        int
	RanksPerNode int
	ShardRanks   int  // that parameters are divided among
	OnCPU        bool // there are no GPUs
	GPU          gpu.Model
	HostMemory   ledger.Bytes // of one node; 0 = unknown
	NUMANodes    int          // of one node; 0 = unknown

	MicroBatch   int64
	Sequence     int64
	Accumulation int

	// Weights is the type that parameters are held in, Autocast the one that
	// torch.autocast computes in, Invalid without. Compute is the type that an
	// engine casts parameters to before they are used, Invalid where it does
	// not; ReduceType the one that gradients are added up in.
	Weights, Autocast, Compute, ReduceType dtype.Type

	Attention forward.AttentionKind
	Recompute *autograd.Checkpoint
	Loss      forward.LossKind
	Compile   bool
	// Modules is whose code the model runs: transformers', litgpt's or
	// torchtitan's; empty for transformers'.
	Modules string
	// FusedActivations says that functions between projections are one kernel.
	FusedActivations bool
	// JoinsProjections says that queries, keys and values are one tensor.
	JoinsProjections bool
	// KeepsLastBlock says that FSDP does not give the last block back between the
	// passes.
	KeepsLastBlock bool
	RecomputeEvery int  // blocks are recomputed at this distance; 0 and 1: all
	RecomputeFirst bool // of these it is the first, not the last
	// ZeROInit says that parameters are divided among the ranks while the model
	// is made, as transformers does with ZeRO-3 when the Trainer is made first.
	ZeROInit bool
	// SplitsDecay says that the optimizer has norms and biases, which are not
	// decayed, in a group of their own, as transformers' Trainer makes.
	SplitsDecay bool
	// HoldsOutputs says that the training loop keeps the outputs of the model
	// until the next forward pass is done, as a loop written by hand does.
	HoldsOutputs bool

	Optimizer optimizer
	Clip      float64

	Adapter      *recipe.Adapter
	AdapterType  dtype.Type
	Quantization *recipe.Quantization
	DeepSpeed    *recipe.DeepSpeed
	FSDP         *recipe.FSDP
	Versions     Versions

	// The degrees of tensor, context and expert parallelism, 1 without.
	SplitWidth, SplitSequence, SplitExperts int64

	// Allocator is what PYTORCH_CUDA_ALLOC_CONF says.
	Allocator string

	// Assumptions are what nobody said.
	Assumptions []string
}

// Replicas is how many groups of ranks each hold all parts of the model
// between them, and add their gradients up: those of data parallelism, and of
// hybrid sharding.
func (j *Job) Replicas() int {
	return max(1, j.World/(j.ShardRanks*int(max(1, j.SplitWidth))))
}

// Versions are those of the programs that the job runs on.
type Versions struct {
	Torch, DeepSpeed, Transformers, BitsAndBytes version.Version
}
