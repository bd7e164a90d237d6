package plan

import (
	"fmt"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
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

// TestInitOfTrainers tests that TrainingArguments shard a model while it is made,
// and that accelerate's sync_each_batch keeps no full gradients.
func TestInitOfTrainers(t *testing.T) {
	file := filestest.InNewFolder(t)
	zero := file("zero.json", `{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}`)
	q := job.Request{Model: "qwen2.5-14b", GPUs: 8, Sequence: 512, MicroBatch: 1, DeepSpeed: zero}
	alone := phaseOf(t, &planned(t, q).Devices[0], ledger.Load).PeakRequested
	q.DeepSpeed, q.TrainingArgs = "", file("arguments.json", fmt.Sprintf(
		`{"per_device_train_batch_size": 1, "bf16": true, "deepspeed": %q}`, zero))
	if trained := phaseOf(t, &planned(t, q).Devices[0], ledger.Load).PeakRequested; trained > alone/4 {
		t.Errorf("%v while the model is made, and %v with TrainingArguments", alone, trained)
	}
	held := func(config string) ledger.Bytes {
		arguments := file("sync.json", `{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "bf16": true`+
			config+`}`)
		p := planned(t, job.Request{Model: "llama-3.2-1b", GPUs: 4, FSDP: "2", Sequence: 128, TrainingArgs: arguments})
		var most ledger.Bytes
		for _, phase := range p.Devices[0].Phases {
			for _, c := range phase.Components {
				if c.Component == ledger.Gradients {
					most = max(most, c.Bytes)
				}
			}
		}
		return most
	}
	synced := held(`, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": true}}`)
	if full := held(""); synced > full*3/4 {
		t.Errorf("%v of gradients with sync_each_batch, %v without", synced, full)
	}
}
