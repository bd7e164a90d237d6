package plan

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
)

// ShareMemory holds hosts and GPUs that have one memory to it: a node holds what its GPUs do, too. Its capacity is that
// memory, or the smaller one that a job is given.
func ShareMemory(model gpu.Model, ranksPerNode int, gpus, nodes []ledger.Device) {
	each := model.Shared()
	if each == 0 || len(gpus) == 0 {
		return
	}
	ranks := ledger.Bytes(ranksPerNode)
	largest := &gpus[0]
	for i := range gpus {
		if gpus[i].Peak().PeakUsed > largest.Peak().PeakUsed {
			largest = &gpus[i]
		}
	}
	for i := range nodes {
		n := &nodes[i]
		apart := n.Peak().PeakUsed + ranks*largest.Peak().PeakUsed
		for k := range n.Phases {
			n.Phases[k].Hold(heldByGPUs(largest, &n.Phases[k], ranks))
		}
		n.Interval.Lower += ranks*largest.Interval.Lower + n.Peak().PeakUsed - apart
		n.Interval.Upper += ranks*largest.Interval.Upper + n.Peak().PeakUsed - apart
		if n.Capacity == 0 || n.Capacity > ranks*each {
			n.Capacity = ranks * each
		}
	}
}

// heldByGPUs returns what the GPUs of a node hold in a phase of the host.
func heldByGPUs(g *ledger.Device, of *ledger.Phase, ranks ledger.Bytes) ledger.Holding {
	phase := g.Peak()
	for i := range g.Phases {
		if p := &g.Phases[i]; p.Name == of.Name && p.Iteration == of.Iteration {
			phase = p
		}
	}
	return ledger.Holding{Component: ledger.GPUMemory, Bytes: ranks * phase.PeakUsed,
		Why: fmt.Sprintf("%d x %v that a GPU holds in the memory that it shares with the host", ranks, phase.PeakUsed)}
}
