package plan

import (
	"fmt"
	"math"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/plan/job"
)

// keptByLayer returns what a layer of a plan keeps between the passes: the
// difference of two models.
func keptByLayer(t *testing.T, few, more job.Request) ledger.Bytes {
	t.Helper()
	var held [2]ledger.Bytes
	for i, q := range []job.Request{few, more} {
		for _, phase := range planned(t, q).Devices[0].Phases {
			if phase.Name == ledger.Forward && phase.Iteration == ledger.First {
				for _, c := range phase.End {
					if c.Component != ledger.Parameters && c.Component != ledger.AutocastWeights {
						held[i] += c.Bytes
					}
				}
			}
		}
	}
	return held[1] - held[0]
}

// TestCompiledAgainstPyTorch compares what a layer keeps in a compiled model with
// torch.compile's own partition of the passes.
func TestCompiledAgainstPyTorch(t *testing.T) {
	file := filestest.InNewFolder(t)
	for name, config := range map[string]string{
		"llama": `{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, ` +
			`"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 6, "num_key_value_heads": 2, `,
		"qwen3": `{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1024, "head_dim": 128, ` +
			`"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8, `,
	} {
		for _, precision := range map[string][]string{"llama": {"bf16", "amp-bf16"}, "qwen3": {"bf16"}}[name] {
			t.Run(name+" "+precision, func(t *testing.T) {
				t.Parallel()
				path := func(layers int) string {
					return file(fmt.Sprintf("%s%s%d.json", name, precision, layers),
						config+fmt.Sprintf(`"num_hidden_layers": %d}`, layers))
				}
				measured := torchtest.Answer[struct {
					Torch, Transformers string
					Saved               []int64
				}](t, torchtest.Forked("torch", "transformers.models.llama.modeling_llama"),
					"../../../scripts/measure/compiled.py", "--config", path(2), "--layers", "2", "3", "--precision",
					precision)
				request := func(layers int) job.Request {
					return job.Request{Model: path(layers), Sequence: 256, Compile: true, Precision: precision,
						Torch: measured.Torch, Transformers: measured.Transformers}
				}
				got, want := keptByLayer(t, request(2), request(3)), ledger.Bytes(measured.Saved[1]-measured.Saved[0])
				if off := float64(got)/float64(want) - 1; math.Abs(off) > 0.005 {
					t.Errorf("a layer keeps %v, in PyTorch %v (%+.2f %%)", got.Exact(), want.Exact(), 100*off)
				}
			})
		}
	}
}

// TestAttentionOfReleases compares what a layer keeps with real releases of
// transformers. The figures are of torch 2.15 and llama-3.1-8b with 512
// tokens and an attention mask, three layers less two.
func TestAttentionOfReleases(t *testing.T) {
	file := filestest.InNewFolder(t)
	request := func(layers int, transformers string) job.Request {
		config := file(fmt.Sprintf("%d.json", layers), fmt.Sprintf(`{"model_type": "llama", "vocab_size": 128256, `+
			`"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, `+
			`"num_hidden_layers": %d}`, layers))
		return job.Request{Model: config, Sequence: 512, Precision: "bf16", Torch: "2.15", Transformers: transformers}
	}
	for release, want := range map[string]float64{"4.46.3": 26.0167, "4.48.3": 27.0166, "4.53.3": 27.0166,
		"4.54.1": 25.5166, "4.55.4": 25.5166, "4.56.2": 24.5166, "4.57.1": 24.5166, "5.23.0": 24.5166} {
		kept := keptByLayer(t, request(2, release), request(3, release))
		if got := float64(kept) / (512 * 4096 * 2); math.Abs(got-want) > 0.001 {
			t.Errorf("transformers %s: a layer keeps %.4f times its input, real transformers %.4f", release, got, want)
		}
	}
}

// TestWindowOfReleases is the same for a window shorter than the sequence. The
// memory-efficient kernel stores its output by token, so that nothing copies it.
func TestWindowOfReleases(t *testing.T) {
	file := filestest.InNewFolder(t)
	request := func(layers int, transformers string) job.Request {
		config := file(fmt.Sprintf("%d.json", layers), fmt.Sprintf(`{"model_type": "mistral", "vocab_size": 32000, `+
			`"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, `+
			`"sliding_window": 128, "num_hidden_layers": %d}`, layers))
		return job.Request{Model: config, Sequence: 512, Precision: "bf16", Torch: "2.15", Transformers: transformers}
	}
	for release, want := range map[string]ledger.Bytes{"4.48.3": 10_506_256, "4.52.4": 10_506_256,
		"4.53.3": 11_030_544, "5.23.0": 11_030_544} {
		kept := keptByLayer(t, request(2, release), request(3, release))
		if math.Abs(float64(kept-want)) > 16 { // the seed and the offset of dropout
			t.Errorf("transformers %s: a layer keeps %v, real transformers %v", release, kept.Exact(), want.Exact())
		}
	}
}

// TestCompiledLogits tests what a compiled graph that returns logits takes for the gradient of them that nobody gives:
// zeros, in fp32 where accelerate returns them so. The figure is that of a Trainer on a GPU that is not there, with
// torch 2.15: the backward pass begins with 1002 MiB (docs/rows.md).
func TestCompiledLogits(t *testing.T) {
	file := filestest.InNewFolder(t)
	p := planned(t, job.Request{Model: "llama-3.2-1b", Sequence: 2048, Torch: "2.15", Transformers: "5.24.0",
		TrainingArgs: file("arguments.json", `{"per_device_train_batch_size": 1, "bf16": true, "torch_compile": true}`)})
	var before ledger.Bytes
	for _, phase := range p.Devices[0].Phases {
		if phase.Iteration != ledger.Steady {
			continue
		}
		if off := phase.PeakRequested - before - 4*2048*128256; phase.Name == ledger.Backward &&
			(off < 0 || off > ledger.MiB) {
			t.Errorf("the backward pass takes %v more than 1002 MiB beyond what the forward pass left", off)
		}
		before = phase.EndRequested
	}
}
