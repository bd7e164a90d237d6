//go:build linux

package plan

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/job"
)

// TestTensorParallelWidths plans blocks of every kind that tensor parallelism
// shards. With more ranks, a rank holds less.
func TestTensorParallelWidths(t *testing.T) {
	for _, name := range []string{"llama-3.2-1b", shallow(t, "qwen3-next-80b-a3b", 4), "deepseek-v2-lite",
		shallow(t, "deepseek-v3", 4), shallow(t, "qwen1.5-moe-a2.7b", 4),
		shallow(t, "mixtral-8x7b", 4), "t5-small", "bert-large", "gpt2", shallow(t, "falcon-40b", 4)} {
		q := job.Request{Model: name, Precision: "bf16", FSDP: "2", GPUs: 8,
			Modules: "torchtitan", Sequence: 384, MicroBatch: 8}
		one := planned(t, q)
		q.TensorParallel = 2
		two := planned(t, q)
		for i := range one.Devices[0].Phases {
			before, after := &one.Devices[0].Phases[i], &two.Devices[0].Phases[i]
			if after.PeakRequested > before.PeakRequested+before.PeakRequested/50 { // norms are not sharded
				t.Errorf("%s, %s %s: %v on each of two ranks that share a block, %v on one", name, after.Iteration,
					after.Name, after.PeakRequested, before.PeakRequested)
			}
		}
	}
}

// TestClassifierOfManyRanks: ranks of tensor parallelism do not share the outputs of a classifier, which may be fewer
// than the ranks.
func TestClassifierOfManyRanks(t *testing.T) {
	for _, class := range []string{"LlamaForTokenClassification", "LlamaForSequenceClassification"} {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, []byte(`{"architectures": ["`+class+`"], "model_type": "llama", "vocab_size": 1000,
			"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 8,
			"num_key_value_heads": 8, "pad_token_id": 0, "id2label": {"0": "a", "1": "b", "2": "c"}}`), 0o600); err != nil {
			t.Fatal(err)
		}
		outputs := func(ranks int) (held ledger.Bytes) {
			p := planned(t, job.Request{Model: file, Precision: "bf16", GPUs: 4, TensorParallel: ranks, Sequence: 512})
			for _, phase := range p.Devices[0].Phases {
				for _, c := range phase.End {
					if phase.Name == ledger.Forward && c.Component == ledger.LogitsAndLoss {
						held = max(held, c.Bytes)
					}
				}
			}
			return held
		}
		if one, four := outputs(1), outputs(4); one == 0 || one != four {
			t.Errorf("%s: the loss holds %v on one rank, and %v on each of four", class, one, four)
		}
	}
}

// TestAdapterOfConv1D tests an adapter on transposed weights, GPT-2's Conv1D. For
// every token the product with A is saved for B, beside the sum that attention has
// views of.
func TestAdapterOfConv1D(t *testing.T) {
	file := filepath.Join(t.TempDir(), "adapter_config.json")
	if err := os.WriteFile(file, []byte(`{"peft_type": "LORA", "r": 8, "target_modules": ["c_attn"]}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	p := planned(t, job.Request{Model: "gpt2", Precision: "fp32", Sequence: 1000, Adapter: file})
	for _, phase := range p.Devices[0].Phases {
		if phase.Name != ledger.Forward || phase.Iteration != ledger.First {
			continue
		}
		for _, c := range phase.End {
			if c.Component == ledger.AdapterActivations && c.Bytes == 12*1000*(8+3*768)*4 {
				return
			}
		}
		t.Errorf("of adapters, expected 12 x 1,000 x (8 + 3 x 768) x 4 B after the forward pass: %v", phase.End)
	}
}

// randomRequest returns a random request, which may be contradictory.
func randomRequest(r *rand.Rand, name, folder string) job.Request {
	q := job.Request{Model: name, Sequence: 1 + r.IntN(1<<(1+r.IntN(17))), MicroBatch: 1 + r.IntN(1<<r.IntN(7)),
		Accumulation: 1 + r.IntN(3)}
	if r.IntN(2) == 0 {
		q.Sequence = 1 << r.IntN(18)
	}
	maybe := func(values ...string) string { return values[r.IntN(len(values))] }
	q.Precision = maybe("bf16", "bf16", "fp16", "fp32", "amp-bf16", "amp-fp16")
	q.Attention = maybe("", "eager", "sdpa", "flash")
	q.Recompute = maybe("", "full", "reentrant", "selective", "every-2")
	q.Optimizer = maybe("", "", "adamw/fused", "sgd", "adafactor", "adamw/for-loop")
	q.Modules = maybe("", "", "litgpt", "torchtitan")
	q.Torch = maybe("", "", "2.4", "2.0", "1.10")
	q.Compile, q.FusedLoss = r.IntN(5) == 0, r.IntN(5) == 0
	if r.IntN(4) == 0 {
		q.Quantization = maybe("nf4", "nf4-dq", "int8")
	}
	if q.Quantization != "" || r.IntN(4) == 0 {
		q.Adapter = filepath.Join(folder, maybe("lora.json", "dora.json", "ia3.json"))
	}
	if r.IntN(12) == 0 {
		q.CPU = true
		return q
	}
	q.GPUs, q.Nodes, q.GPU = 1<<r.IntN(4), 1+r.IntN(3), maybe("", "H100-80GB", "T4")
	if q.Torch == "" {
		q.Allocator = maybe("", "", "expandable_segments:True")
	}
	switch r.IntN(3) {
	case 0:
		q.FSDP, q.OffloadParameters = maybe("1", "2"), r.IntN(4) == 0
	case 1:
		q.DeepSpeed, q.Precision = filepath.Join(folder,
			maybe("zero1.json", "zero2.json", "zero3.json", "offload.json")), ""
	}
	degree := func() int { return 1 << max(0, r.IntN(5)-1) }
	q.TensorParallel, q.ContextParallel = degree(), degree()
	if r.IntN(4) == 0 {
		q.ExpertParallel = degree()
	}
	return q
}

// TestRandomJobs plans jobs of the catalog's models with random flags, for five
// seconds. Contradictory jobs are refused as bad input. All others are planned,
// their sums agree, and every component has a reason. A rank that shares blocks with others holds no more than a
// rank that has them alone.
func TestRandomJobs(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{
		"lora.json": `{"peft_type": "LORA", "r": 8, "target_modules": "all-linear", "lora_dropout": 0.05}`,
		"dora.json": `{"peft_type": "LORA", "r": 8, "target_modules": "all-linear", "use_dora": true}`,
		"ia3.json": `{"peft_type": "IA3", "target_modules": ["q_proj", "v_proj", "down_proj", ` +
			`"query_key_value"], "feedforward_modules": ["down_proj"]}`,
		"zero1.json": `{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}`,
		"zero2.json": `{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_optimizer": ` +
			`{"device": "cpu"}}}`,
		"zero3.json": `{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}`,
		"offload.json": `{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_optimizer": ` +
			`{"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu", "pin_memory": true}}}`,
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := rand.New(rand.NewPCG(4, 0))
	names := model.Catalog()
	r.Shuffle(len(names), func(i, k int) { names[i], names[k] = names[k], names[i] })
	if testing.Short() {
		names = names[:15]
	}
	planned, refused := 0, 0
	for i := range 3 * len(names) { // most random jobs are refused
		q := randomRequest(r, names[i%len(names)], folder)
		j, err := q.Resolve()
		if err != nil {
			if !errors.As(err, new(*fault.Input)) {
				t.Errorf("%+v: %v", q, err)
			}
			refused++
			continue
		}
		planned++
		p, err := New(j)
		if err != nil {
			t.Errorf("%+v: %v", q, err)
			continue
		}
		for _, d := range p.Devices {
			for _, phase := range d.Phases {
				checkPhase(t, &phase, fmt.Sprintf("%+v: %s, %s %s", q, d.Kind, phase.Iteration, phase.Name))
			}
		}
		if q.TensorParallel > 1 {
			alone := *j
			alone.Parallel.Tensor, alone.Parallel.Shard = 1, j.Parallel.Shard*j.Parallel.Tensor
			one, err := New(&alone)
			if err != nil {
				t.Errorf("%+v, without tensor parallelism: %v", q, err)
				continue
			}
			if whole, part := one.Devices[0].Peak().PeakRequested,
				p.Devices[0].Peak().PeakRequested; part > whole+whole/20 {
				t.Errorf("%+v: %v on a rank, and %v on each of %d that share a block", q, whole, part,
					j.Parallel.Tensor)
			}
		}
	}
	if planned < len(names)/5 {
		t.Errorf("only %d random jobs were planned, %d were refused", planned, refused)
	}
}
