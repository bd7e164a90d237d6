package plan

import (
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestSharedMemory: a GPU and a host with one memory are held to it together.
func TestSharedMemory(t *testing.T) {
	for tokens, want := range map[int]Result{2048: Fits, 8192: DoesNotFit} {
		q := job.Request{Model: "qwen3-8b", Sequence: tokens, GPU: "GB10", GPUs: 1, Nodes: 1}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		p, err := New(j)
		if err != nil {
			t.Fatal(err)
		}
		g, host := &p.Devices[0], &p.Devices[1]
		if host.Capacity != j.GPU.Shared() || p.Verdict.Device != ledger.Host || p.Verdict.Result != want {
			t.Errorf("%d tokens: %v of %v: %+v", tokens, host.Peak().PeakUsed, host.Capacity, p.Verdict)
		}
		for i := range host.Phases {
			of := &host.Phases[i]
			var held ledger.Bytes
			for _, c := range of.Components {
				if c.Component == ledger.GPUMemory {
					held += c.Bytes
				}
			}
			if held != heldByGPUs(g, of, 1).Bytes || held == 0 || held > of.PeakUsed {
				t.Errorf("%d tokens, %v: the GPU holds %v of %v", tokens, of.Name, held, of.PeakUsed)
			}
		}
	}
}
