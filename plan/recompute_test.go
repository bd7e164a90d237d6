package plan

import (
	"fmt"
	"testing"

	"plimsoll/files/filestest"
	"plimsoll/job"
	"plimsoll/ledger"
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
