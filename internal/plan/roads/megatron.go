package roads

import "plimsoll/internal/base/ledger"

// Design is what another program holds of the same states, on the GPU and in pinned memory of the host.
type Design struct {
	Name string `json:"name"`
	// Between is on the GPU during the passes, Step in an optimizer step, and First in the first one.
	Between ledger.Bytes `json:"between_bytes"`
	Step    ledger.Bytes `json:"step_bytes"`
	First   ledger.Bytes `json:"first_step_bytes"`
	// Save and Load are on the GPU while a checkpoint is written and read.
	Save ledger.Bytes `json:"save_bytes"`
	Load ledger.Bytes `json:"load_bytes"`
	// Pinned is what PyTorch's allocator pins. It takes a block for each tensor, of a power of two.
	Pinned ledger.Bytes `json:"pinned_bytes"`
}

// Megatron returns Megatron-LM's two designs for the same parameters. rounded is the size of PyTorch's pinned block for
// a tensor.
//
// OptimizerStateOffloader (--offload-optimizer-states; pull requests 2760 and 2811 of NVIDIA/Megatron-LM, read in
// core_dev_r0.16.0, optimizer_state_offloader.py): states and master weights leave after the step (offload), their
// storages are resized to 0 (release_gpu_memory), and all of them come back when gradients are finalized (reload). The
// first step makes all states at once. A checkpoint reads and writes the optimizer's tensors on the GPU.
//
// ChunkedOptimizerStateOffloader (--chunked-optimizer-state-offload; pull request 6244, merged into dev as 9050d4c5fb,
// chunked_optimizer_state_offload.py): pinned tensors are what a checkpoint is written from. Two staging slots take the
// states chunk by chunk, in the first step and in a load, too. All master weights are there in every step. A parameter
// is never divided.
func Megatron(parameters []Parameter, chunk ledger.Bytes, rounded func(ledger.Bytes) ledger.Bytes) []Design {
	var states, masters, largest, pinned ledger.Bytes
	for i := range parameters {
		p := &parameters[i]
		own := ledger.Bytes(0)
		for _, bytes := range p.States {
			own += ledger.Bytes(bytes)
			pinned += rounded(ledger.Bytes(bytes))
		}
		states, masters, largest = states+own, masters+ledger.Bytes(p.Master), max(largest, own)
		if p.Master > 0 {
			pinned += rounded(ledger.Bytes(p.Master))
		}
	}
	all, window := states+masters, min(states, 2*max(chunk, largest))
	return []Design{
		{Name: "Megatron v1", Step: all, First: all, Save: all, Load: all, Pinned: pinned},
		{Name: "Megatron v2", Step: window + masters, First: window + masters, Load: window, Pinned: pinned},
	}
}
