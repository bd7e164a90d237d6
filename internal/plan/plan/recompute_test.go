package plan

import (
	"fmt"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestCheckpointedLayers checkpoints layers 0, n, 2n..., as transformers does with
// every_n_layers.
func TestCheckpointedLayers(t *testing.T) {
	file := filestest.InNewFolder(t)
	config := file("config.json", `{"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, `+
		`"intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}`)
	held := func(options string) ledger.Bytes {
		arguments := file("arguments.json", `{"per_device_train_batch_size": 1, `+options+`}`)
		p := planned(t, job.Request{Model: config, TrainingArgs: arguments, Sequence: 512})
		for _, phase := range p.Devices[0].Phases {
			if phase.Name == ledger.Forward && phase.Iteration == ledger.Steady {
				return phase.EndRequested
			}
		}
		t.Fatal("there is no forward pass")
		return 0
	}
	all, none := held(`"gradient_checkpointing": true`), held(`"gradient_checkpointing": false`)
	layer := (none - all) / 4
	for n, checkpointed := range map[int]ledger.Bytes{1: 4, 2: 2, 3: 2, 4: 1, 9: 1} {
		got := held(fmt.Sprintf(`"gradient_checkpointing": true, "gradient_checkpointing_kwargs": {"use_reentrant": `+
			`false, "every_n_layers": %d}`,
			n))
		if expected := none - checkpointed*layer; got < expected-layer/10 || got > expected+layer/10 {
			t.Errorf("every %d layers: %v are held, expected %v", n, got, expected)
		}
	}
	arguments := file("offload.json",
		`{"gradient_checkpointing": true, "gradient_checkpointing_kwargs": {"offload": true}}`)
	if _, err := (job.Request{Model: config, TrainingArgs: arguments}).Resolve(); err == nil {
		t.Error("offloaded inputs of blocks are planned as if they were on the GPU")
	}
}

// TestReentrantByRelease leaves use_reentrant to transformers.
func TestReentrantByRelease(t *testing.T) {
	arguments := filestest.InNewFolder(t)("arguments.json", `{"gradient_checkpointing": true}`)
	for release, want := range map[string]bool{"4.57.0": true, "5.0.0": false} {
		j, err := (job.Request{Model: "gpt2", TrainingArgs: arguments, Transformers: release}).Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if j.Recompute.Reentrant != want {
			t.Errorf("transformers %s: reentrant is %v, want %v", release, !want, want)
		}
	}
}

// TestUntied plans litgpt's head, which shares no storage with the embedding.
func TestUntied(t *testing.T) {
	held := func(modules string) ledger.Bytes {
		q := job.Request{Model: "gemma-2b", Modules: modules, Precision: "bf16", Sequence: 128}
		return phaseOf(t, &planned(t, q).Devices[0], ledger.Load).EndRequested
	}
	if more := held("litgpt") - held(""); more != 256000*2048*2 {
		t.Errorf("litgpt's gemma-2b takes %v more than transformers', want a head in bf16", more)
	}
}
