package recipe

import "plimsoll/internal/input/rollout"

// Policy is what a program does that trains a policy by Megatron core: it generates answers, judges them, and trains
// the policy on them.
type Policy struct {
	Program string
	Engine  *rollout.Engine // that generates answers, nil where files say them
	// Copies are the models whose parameters wait on the host beside those of the engine's settings, such as the actor.
	Copies []string
	// InBuffers says that a copy is a block for each buffer of parameters, and not for each parameter.
	InBuffers bool
	// Reference says that a frozen model judges answers. It takes the place of the trained one for its passes, or has
	// memory of its own, Apart, on the GPU or the host.
	Reference, Apart bool
	// Judges says that a pass without gradients makes log-probabilities of the answers before the update.
	Judges bool
	// Packs says that the program makes micro batches of as many samples as have so many tokens.
	Packs bool
	// PackedTokens are those of a rank's part of a packed micro batch, as arguments say them. They are 0 where samples
	// are counted.
	PackedTokens int64
	Loss         PolicyLoss
	LeftOut      []string // see Generation
}

// PolicyLoss says how log-probabilities are made of logits.
type PolicyLoss struct {
	// InPlace says that Megatron core's cross entropy makes them, in place of the logits. Entropies then need a copy.
	// JudgesEntropy says that passes without gradients make entropies, too.
	InPlace, JudgesEntropy bool
	// Fused says that a kernel makes them of the hidden states, and never the logits. Its backward pass makes gradients
	// of the logits of so many tokens of the vocabulary at a time.
	Fused int64

	Scaled        bool // the logits are divided by a temperature
	TrainsEntropy bool // the loss has the entropy of the logits
	Masked        bool // tokens that the engine may not have drawn are left out
	// Chunk is the number of tokens that are computed at a time, 0 for all.
	Chunk int64
}
