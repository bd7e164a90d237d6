package recipe

import "plimsoll/internal/input/rollout"

// Policy is what a program does that trains a policy by Megatron core: it generates answers, judges them, and trains
// the policy on them.
type Policy struct {
	Program string
	Engine  *rollout.Engine // that generates answers, nil where files say them
	// Copies are the models whose parameters wait on the host beside those of the engine's settings, such as the actor.
	Copies []string
	// Reference says that one more copy is the frozen model.
	Reference bool
	// Judges says that a pass without gradients makes log-probabilities of the answers before the update.
	Judges bool
	// PackedTokens are those of a rank's part of a packed micro batch, as arguments say them. They are 0 where samples
	// are counted.
	PackedTokens int64
	Loss         PolicyLoss
}

// PolicyLoss says how log-probabilities are made of logits.
type PolicyLoss struct {
	Scaled        bool // the logits are divided by a temperature
	TrainsEntropy bool // the loss has the entropy of the logits
	Masked        bool // tokens that the engine may not have drawn are left out
	// Chunk is the number of tokens that are computed at a time, 0 for all.
	Chunk int64
}
