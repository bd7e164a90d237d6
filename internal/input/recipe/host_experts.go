package recipe

import (
	"plimsoll/internal/base/fault"
)

// HostExperts says how KTransformers runs the experts of all layers on the host of the first rank: KTConfig in
// kt_kernel/sft/config.py of August 2026 (commit 95009ea6).
type HostExperts struct {
	Place  fault.Position
	Format string // of their weights: bf16, int8 or fp8
	Rank   int64  // of their adapters
	Pools  int64  // of threads, which share the width of every expert: one for each NUMA node
	Slots  int64  // that each layer could keep for the backward pass
	Tokens int64  // of a rank, that buffers are made for at least
	// Retains says that all layers keep what the backward pass needs, and not one layer at a time.
	Retains bool
	// KeepsTransposed says that all layers keep weights for the backward pass, and not one layer at a time.
	KeepsTransposed bool
	FromKT          bool // the weights are read in the form that the kernels have them in
	ForcesFused     bool // experts that have modules of their own get the adapters of those that have none
}
