package recipe

import (
	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/rollout"
)

// Role is what a model does beside the policy of a training on answers.
type Role string

// The roles.
const (
	Critic Role = "critic"       // is trained to say what tokens are worth: PPO has one
	Reward Role = "reward model" // is frozen, and rewards answers
)

// Companion is a model beside the policy, on its GPUs. It has one label for each token.
type Companion struct {
	Role  Role
	Model string
	At    fault.Position // of the name
	// Weights is the type that they are loaded in, "" for that of the policy.
	Weights    string
	Recomputes bool // activations, in the backward pass
	// MicroBatch, Accumulation and Sequence are those of the update, and Judged are the sequences of a pass without
	// gradients. JudgedSequence is the length of these; 0 for Sequence.
	MicroBatch, Judged       int64
	Accumulation             int
	Sequence, JudgedSequence int64
	Attention                string // "flash", "sdpa" or "eager", "" for the policy's
	Liger                    bool   // modules of liger-kernel
	Context                  int64  // ranks that share a sequence, by Ulysses
	// Strategy says how FSDP shards it; nil for the policy's.
	Strategy *CompanionSharding
	// AccumulatesWhole says that ranks of FSDP keep full gradients of all micro batches but the last.
	AccumulatesWhole bool
	// Backups say what leaves the GPU between its passes.
	Backups rollout.Backups
	Apart   bool // it has a process of its own on each GPU
}

// CompanionSharding is the version of FSDP, and whether units are freed after the forward pass.
type CompanionSharding struct {
	Version  int
	Reshards bool
}
