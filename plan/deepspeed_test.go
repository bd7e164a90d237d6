package plan

import (
	"testing"

	"plimsoll/files/filestest"
	"plimsoll/job"
	"plimsoll/ledger"
)

// TestInitializeOfDeepSpeed tests what DeepSpeed's constructors leave on the GPU.
func TestInitializeOfDeepSpeed(t *testing.T) {
	file := filestest.InNewFolder(t)
	config := func(zero string) string {
		return file("zero.json", `{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, `+
			`"optimizer": {"type": "AdamW"}, "zero_optimization": {`+zero+`}}`)
	}
	initialized := func(zero, release string, gpus int) (load, made *ledger.Phase) {
		p := planned(t, job.Request{Model: "llama-3-8b", GPU: "H100-80GB", GPUs: gpus, Sequence: 512,
			DeepSpeed: config(zero), DeepSpeedVersion: release, Recompute: "full"})
		return phaseOf(t, &p.Devices[0], ledger.Load), phaseOf(t, &p.Devices[0], ledger.Initialize)
	}
	// Until 0.18.2 an offloaded partition is cloned on the host, then on the GPU.
	const offload = `"stage": 2, "offload_optimizer": {"device": "cpu"}`
	load, before := initialized(offload, "0.18.2", 1)
	_, since := initialized(offload, "0.18.3", 1)
	if before.PeakRequested > load.EndRequested*11/10 || since.PeakRequested < load.EndRequested*19/10 {
		t.Errorf("a model of %v is initialized with %v on the GPU by 0.18.2, and with %v by 0.18.3",
			load.EndRequested, before.PeakRequested, since.PeakRequested)
	}
	// ZeRO-3's defragment empties the cache that the full model has left.
	if _, made := initialized(`"stage": 3`, "0.18.9", 4); made.EndReserved > made.EndAllocated*11/10 {
		t.Errorf("%v reserved after initialize, of them %v allocated", made.EndReserved, made.EndAllocated)
	}
}
