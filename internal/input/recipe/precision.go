package recipe

// Precision is the type that a trainer computes in: the type of the weights, or
// a smaller one by autocast. Autocast leaves weights, gradients and optimizer
// state in their types.
type Precision string

// The precisions, as accelerate names them.
const (
	Unmixed   Precision = "no"
	MixedF16  Precision = "fp16" // with loss scaling
	MixedBF16 Precision = "bf16"
	MixedFP8  Precision = "fp8" // matrix products only; the rest is bf16
)
