package plan

import (
	"fmt"
	"math"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// endOfForward returns what is allocated at the end of the first forward pass.
func endOfForward(t *testing.T, q job.Request) ledger.Bytes {
	t.Helper()
	for _, p := range planned(t, q).Devices[0].Phases {
		if p.Name == ledger.Forward && p.Iteration == ledger.First {
			return p.EndAllocated
		}
	}
	t.Fatal("no forward pass")
	return 0
}

// TestFirstQwen compares four blocks of the first Qwen with the code beside its weights. Torch 2.15 ran that without a
// GPU: bf16 weights under bf16 autocast, with the loss of that code.
func TestFirstQwen(t *testing.T) {
	file := filestest.InNewFolder(t)
	clip := 0.0
	q := job.Request{Model: file("config.json", `{"architectures": ["QWenLMHeadModel"], "model_type": "qwen",
		"hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32, "intermediate_size": 22016,
		"vocab_size": 151936, "kv_channels": 128, "no_bias": true, "tie_word_embeddings": false}`),
		TrainingArgs: file("training.json", `{"output_dir": "out", "bf16": true, "optim": "adamw_torch_fused"}`),
		Precision:    "bf16", GPU: "A100-80GB", Sequence: 2048, MicroBatch: 1, Attention: "sdpa", Clip: &clip}
	for recompute, gib := range map[string]float64{"none": 7.210, "reentrant": 5.693} {
		q.Recompute = recompute
		if got := float64(endOfForward(t, q)) / float64(ledger.GiB); math.Abs(got/gib-1) > 0.004 {
			t.Errorf("recomputing %s: %.3f GiB, expected %.3f", recompute, got, gib)
		}
	}
}

// TestClippedProjections: clamp_ saves a copy of queries, keys and values, as real torch does.
func TestClippedProjections(t *testing.T) {
	const layers, hidden, tokens = 2, 256, 512
	file := filestest.InNewFolder(t)
	held := func(limit string) ledger.Bytes {
		return endOfForward(t, job.Request{Model: file("config"+limit+".json", fmt.Sprintf(`{"architectures":
			["OlmoForCausalLM"], "model_type": "olmo", "hidden_size": %d, "num_hidden_layers": %d,
			"num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1000, "clip_qkv": %s}`, hidden, layers,
			limit)), Precision: "bf16", Sequence: tokens, MicroBatch: 1, Recompute: "none"})
	}
	if more := held("8.0") - held("null"); more != layers*3*hidden*tokens*2 {
		t.Errorf("%v more are held, expected a copy of three projections in two blocks", more)
	}
}

// TestShiftedLogits: transformers before 4.49 copies the logits of several sequences. What is left of one sequence is
// contiguous.
func TestShiftedLogits(t *testing.T) {
	q := job.Request{Model: "smollm-135m", Precision: "bf16", Sequence: 1024, MicroBatch: 1, Transformers: "4.48.3",
		Recompute: "full"}
	peak := func() (most ledger.Bytes) {
		for _, p := range planned(t, q).Devices[0].Phases {
			if p.Name == ledger.Forward {
				for _, c := range p.Components {
					if c.Component == ledger.LogitsAndLoss {
						most = max(most, c.Bytes)
					}
				}
			}
		}
		return most
	}
	one := peak()
	q.Sequence, q.MicroBatch = 512, 2
	if two := peak(); two-one < 1000*49152*4 {
		t.Errorf("the loss of two sequences takes %v, and that of one with as many tokens %v", two, one)
	}
}
