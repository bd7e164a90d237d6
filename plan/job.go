package plan

import (
	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/forward"
	"plimsoll/ledger"
	"plimsoll/model"
	"plimsoll/recipe"
)

// Job is a training job with nothing left open.
type Job struct {
	Model *model.Model

	World        int // ranks
	Nodes        int
	RanksPerNode int
	GPU          string       // its name
	GPUMemory    ledger.Bytes // of one GPU; 0 = unknown
	HostMemory   ledger.Bytes // of one node; 0 = unknown

	MicroBatch   int64
	Sequence     int64
	Accumulation int

	// Weights is the type that the model is in when training starts, Autocast
	// the one that torch.autocast computes in, Invalid without.
	Weights  dtype.Type
	Autocast dtype.Type

	Attention forward.AttentionKind
	Recompute *autograd.Checkpoint
	Loss      forward.LossKind
	// HoldsOutputs says that the training loop keeps the outputs of the model
	// until the next forward pass is done, as a loop written by hand does.
	HoldsOutputs bool

	Optimizer optimizer
	Clip      float64

	Workspace ledger.Bytes // of cuBLAS, for one handle

	DeepSpeed *recipe.DeepSpeed
	Versions  Versions

	SplitSequence, SplitWidth int64
}

// Versions are those of the programs that the job runs on.
type Versions struct {
	Torch, DeepSpeed, Transformers Version
}
