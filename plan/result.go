package plan

import "plimsoll/ledger"

// PhaseName is a part of a training job.
type PhaseName string

// The phases, in their order.
const (
	Load       PhaseName = "load"
	Initialize PhaseName = "initialize"
	Forward    PhaseName = "forward"
	Backward   PhaseName = "backward"
	Step       PhaseName = "step"
	Checkpoint PhaseName = "checkpoint"
)

// Iteration tells the first optimizer step from those that follow.
type Iteration string

// The iterations. Once is that of phases outside of the loop.
const (
	Once   Iteration = ""
	First  Iteration = "first"
	Steady Iteration = "steady"
)

// Component is what holds bytes, and why.
type Component struct {
	Name  string       `json:"component"`
	Bytes ledger.Bytes `json:"bytes"`
	Why   string       `json:"why"`
}

// Phase is what a device holds in a phase: what is asked for, what the
// allocator's blocks take, and what it has reserved of the device. The
// components are those at the peak of what is asked for.
type Phase struct {
	Name          PhaseName    `json:"phase"`
	Iteration     Iteration    `json:"iteration,omitempty"`
	PeakRequested ledger.Bytes `json:"peak_requested_bytes"`
	PeakAllocated ledger.Bytes `json:"peak_allocated_bytes"`
	PeakReserved  ledger.Bytes `json:"peak_reserved_bytes"`
	// PeakUsed adds what is outside of the allocator: the CUDA context, NCCL.
	PeakUsed     ledger.Bytes `json:"peak_used_bytes"`
	EndRequested ledger.Bytes `json:"end_requested_bytes"`
	EndAllocated ledger.Bytes `json:"end_allocated_bytes"`
	EndReserved  ledger.Bytes `json:"end_reserved_bytes"`
	Components   []Component  `json:"components"`
	End          []Component  `json:"-"`
}
