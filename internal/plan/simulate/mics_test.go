package simulate

import (
	"testing"

	"plimsoll/internal/base/ledger"
)

// TestGatherOfGroupsAndBytes holds gathers of two matrices of 1 Mi elements in bf16 against the source of DeepSpeed
// 0.19.6. ZeRO-3 gathers both in one tensor and copies them out of it (AllGatherCoalescedHandle.wait in
// zero/partition_parameters.py). MiCS gathers each into a tensor of its own (zero/mics.py). zero_quantized_weights
// gathers bytes, dequantizes all of them to fp16, and casts one after the other.
func TestGatherOfGroupsAndBytes(t *testing.T) {
	const n, half = 1 << 20, 1 << 21 // elements and bytes of one matrix
	for _, test := range []struct {
		name, section string
		peak          int64
	}{
		{"ZeRO-3", "", 4 * half},
		{"MiCS", `, "mics_shard_size": 2`, 2 * half},
		{"qwZ", `, "zero_quantized_weights": true`, half + half/8000*4*2 + 2*half + 3*half},
	} {
		m := linears([]int64{1024, 1024}, []int64{1024, 1024})
		j := onRanks(2, deepSpeedJob(t, m, zero(3, test.section), "0.19.6"))
		s := newSimulation(j, newTrace(nil), newTrace(nil))
		s.phase(ledger.Forward, ledger.First, func() { s.engine.(*zero3).coordinator.fetch(s.parameters) })
		if got := int64(s.gpu.phases()[0].PeakRequested); got < test.peak-4096 || got > test.peak+4096 {
			t.Errorf("%s: a peak of %d bytes, want %d of %d elements", test.name, got, test.peak, 2*n)
		}
	}
}

// TestMiCS holds the master weights of MiCS against MiCS_Optimizer.partition_count: they are sharded among the ranks of
// a group.
func TestMiCS(t *testing.T) {
	m := catalog(t, "qwen2.5-0.5b")
	masters := func(shard int64) int64 {
		j := onRanks(8, deepSpeedJob(t, m, zero(3, `, "mics_shard_size": 2`), "0.19.6"))
		j.Parallel.Shard = shard
		return ends(t, simulated(j).gpu, ledger.Initialize, ledger.Once)[ledger.MasterWeights]
	}
	if got, want := masters(2), 4*masters(8); got < want-4096 || got > want+4096 {
		t.Errorf("master weights of %d bytes, want about %d", got, want)
	}
}
