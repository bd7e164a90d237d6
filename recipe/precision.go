package recipe

// Precision is how a trainer computes: in the type of the weights, or in a
// smaller type by autocast, which leaves weights, gradients and optimizer state
// in the type that they have.
type Precision string

// The precisions, as accelerate names them.
const (
	Unmixed   Precision = "no"
	MixedF16  Precision = "fp16" // and the loss is scaled
	MixedBF16 Precision = "bf16"
	MixedFP8  Precision = "fp8" // matrix products only; the rest is bf16
)
