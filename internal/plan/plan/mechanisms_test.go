package plan

import (
	"fmt"
	"math"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestLigerLayer tests what a layer with Liger's kernels keeps: the inputs of its
// norms and projections, queries, keys, values and output of attention, and gate
// and up, in multiples of its input (liger_kernel/ops).
func TestLigerLayer(t *testing.T) {
	file := filestest.InNewFolder(t)
	arguments := file("arguments.json", `{"per_device_train_batch_size": 1, "use_liger_kernel": true}`)
	request := func(kind string, layers int) job.Request {
		return job.Request{Model: file(fmt.Sprintf("%s%d.json", kind, layers), fmt.Sprintf(`{"model_type": %q, `+
			`"vocab_size": 1000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, `+
			`"num_key_value_heads": 8, "num_hidden_layers": %d, "rms_norm_eps": 1e-5}`, kind, layers)), Sequence: 512,
			Precision: "bf16", TrainingArgs: arguments}
	}
	kept := float64(keptByLayer(t, request("llama", 2), request("llama", 3))) / (512 * 4096 * 2)
	if want := 5 + 2*0.25 + 1 + 3*3.5; math.Abs(kept-want) > 0.02 {
		t.Errorf("a layer keeps %.3f times its input, want %.3f", kept, want)
	}
	if j, err := request("ernie4_5", 2).Resolve(); err != nil || j.Liger || j.Loss != 0 {
		t.Errorf("a model that liger-kernel does not know has its kernels: %v", err)
	}
}

// TestLosses tests what a loss holds at its peak, in sizes of the logits in 16 bits.
func TestLosses(t *testing.T) {
	logits := func(loss string) float64 {
		p := planned(t, job.Request{Model: "llama-3.2-1b", Sequence: 4096, Precision: "bf16", Loss: loss,
			Recompute: "full"})
		var most ledger.Bytes
		for _, phase := range p.Devices[0].Phases {
			for _, c := range phase.Components {
				if c.Component == ledger.LogitsAndLoss {
					most = max(most, c.Bytes)
				}
			}
		}
		return float64(most) / (4096 * 128256 * 2)
	}
	for loss, want := range map[string]float64{"fp32": 5, "native": 2, "": 5} {
		if got := logits(loss); math.Abs(got-want) > 1.1 {
			t.Errorf("loss %q: %.2f times the logits, want about %.1f", loss, got, want)
		}
	}
	if fused := logits("fused"); fused > 1 {
		t.Errorf("loss fused: %.2f times the logits", fused)
	}
	if _, err := (job.Request{Model: "gpt2", Loss: "kahan"}).Resolve(); err == nil {
		t.Error("an unknown loss is planned")
	}
}

// TestReferenceModel plans a frozen model, sharded as the trained one or in full.
func TestReferenceModel(t *testing.T) {
	for fsdp, ranks := range map[string]ledger.Bytes{"": 1, "2": 4} {
		q := job.Request{Model: "llama-3.2-1b", GPUs: 4, FSDP: fsdp, Sequence: 128, Precision: "bf16"}
		without := phaseOf(t, &planned(t, q).Devices[0], ledger.Load).EndRequested
		q.Reference = "llama-3.2-3b"
		with := phaseOf(t, &planned(t, q).Devices[0], ledger.Load).EndRequested
		if want := 3_212_749_824 * 2 / ranks; with-without < want || with-without > want+1 {
			t.Errorf("--fsdp %q: the reference model takes %v, want %v", fsdp, with-without, want)
		}
	}
}

// TestReferenceLogits: a frozen model leaves its logits, and their logarithms, beside what the trained model's forward
// pass keeps, however small the trained model's own logits are.
func TestReferenceLogits(t *testing.T) {
	q := job.Request{Model: "llama-3.2-1b", GPUs: 1, Sequence: 2048, MicroBatch: 4, Precision: "bf16", Loss: "chunked"}
	peak := func() ledger.Bytes {
		p := phaseOf(t, &planned(t, q).Devices[0], ledger.Forward)
		return p.PeakRequested - p.EndRequested
	}
	q.Reference = "llama-3.2-1b"
	if logits := ledger.Bytes(4 * 2048 * 128256 * (2 + 4)); peak() < logits {
		t.Errorf("the forward pass has %v for a moment, want at least %v of the reference model", peak(), logits)
	}
}

// TestClampedScores tests eager attention that saves its scores once more.
func TestClampedScores(t *testing.T) {
	file := filestest.InNewFolder(t)
	kept := func(transformers string) ledger.Bytes {
		request := func(layers int) job.Request {
			return job.Request{Model: file(fmt.Sprintf("%d.json", layers), fmt.Sprintf(`{"model_type": "llama", `+
				`"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, `+
				`"num_hidden_layers": %d}`, layers)), Sequence: 256, MicroBatch: 2, Precision: "fp16",
				Attention: "eager", Torch: "2.0", Transformers: transformers}
		}
		return keptByLayer(t, request(2), request(3))
	}
	if more := kept("4.29.0") - kept("4.33.0"); more != 2*8*256*256*2 {
		t.Errorf("a layer of 4.29 keeps %v more than one of 4.33, want the scores in fp16", more)
	}
}

// TestContexts compares the context with measurements of torch.cuda.mem_get_info.
func TestContexts(t *testing.T) {
	for _, c := range []struct {
		gpu, torch string
		gib        float64
	}{{"A100-80GB", "1.10", 1.78}, {"A100-80GB", "1.13", 0.90}, {"A100-80GB", "2.1", 0.47},
		{"V100-16GB", "1.10", 1.31}} {
		p := planned(t, job.Request{Model: "gpt2", GPU: c.gpu, Torch: c.torch, Sequence: 64})
		for _, held := range p.Devices[0].Outside {
			got := float64(held.Bytes) / (1 << 30)
			if held.Component == ledger.CUDAContext && math.Abs(got-c.gib) > 0.01 {
				t.Errorf("%s, torch %s: %.2f GiB, want %.2f", c.gpu, c.torch, got, c.gib)
			}
		}
	}
}
