package plan

import (
	"fmt"
	"math"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// litgptModels are small models of the families in TestLitgptAdapters.
var litgptModels = map[string]string{
	"llama": `"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 8,
		"intermediate_size": 2752, "vocab_size": 32000`,
	"neox": `"architectures": ["GPTNeoXForCausalLM"], "num_attention_heads": 8, "intermediate_size": 4096,
		"vocab_size": 50688`,
	"phi": `"architectures": ["PhiForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": 16,
		"intermediate_size": 4096, "vocab_size": 51200`,
}

// adaptedByLitgpt returns the request for such a model of so many layers, whose listed modules litgpt adapts.
func adaptedByLitgpt(t *testing.T, family string, layers int, targets string) job.Request {
	file := filestest.InNewFolder(t)
	return job.Request{
		Model: file("config.json", fmt.Sprintf(`{%s, "hidden_size": 1024, "num_hidden_layers": %d}`,
			litgptModels[family], layers)),
		Adapter: file("adapter.json", fmt.Sprintf(`{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8,
			"lora_dropout": 0.05, "target_modules": [%s]}`, targets)),
		Modules: "litgpt", Precision: "bf16", AdapterPrecision: "bf16", Attention: "sdpa", Sequence: 256,
		GPU: "A100-80GB",
	}
}

// TestLitgptAdapters compares what a layer keeps between the passes, in hidden sizes of bf16, with litgpt's own modules
// (commit 32a9c181, saved_tensors_hooks, torch 2.15 on the CPU; masks of dropout with one byte, as on GPUs, and without
// the indexes of LoRAQKVLinear).
func TestLitgptAdapters(t *testing.T) {
	for _, c := range []struct {
		family, targets string
		kept            float64
	}{
		{"llama", `"q_proj", "v_proj"`, 21.60},
		{"llama", `"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"`, 28.17},
		{"neox", `"query", "value"`, 14.54},
		{"neox", `"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"`, 21.57},
		{"phi", `"q_proj", "v_proj"`, 14.55},
		{"phi", `"q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"`, 21.58},
	} {
		var made [2]float64 // in the forward pass, with one layer and with two
		for i := range made {
			d := &planned(t, adaptedByLitgpt(t, c.family, i+1, c.targets)).Devices[0]
			before, after := phaseOf(t, d, ledger.Initialize), phaseOf(t, d, ledger.Forward)
			made[i] = float64(after.EndRequested - before.EndRequested)
		}
		if kept := (made[1] - made[0]) / (256 * 1024 * 2); math.Abs(kept-c.kept) > 0.01 {
			t.Errorf("a layer of %s with %s keeps %.3f hidden sizes, litgpt's %.2f", c.family, c.targets, kept, c.kept)
		}
	}
}

// TestLitgptHead casts the frozen weight of the head again for every 128 tokens.
func TestLitgptHead(t *testing.T) {
	q := adaptedByLitgpt(t, "llama", 1, `"q_proj"`)
	q.Precision, q.AdapterPrecision = "amp-bf16", "fp32"
	cast := func(tokens int) ledger.Bytes {
		q.Sequence = tokens
		for _, c := range phaseOf(t, &planned(t, q).Devices[0], ledger.Forward).End {
			if c.Component == ledger.AutocastWeights {
				return c.Bytes
			}
		}
		return 0
	}
	if more := cast(1034) - cast(128); more != 8*32000*1024*2 {
		t.Errorf("1034 tokens take %v more than 128 for casts of weights, want 8 heads", more)
	}
}

// TestEmptySkipModules quantizes the head, too, where a list of modules to skip is empty.
func TestEmptySkipModules(t *testing.T) {
	file := filestest.InNewFolder(t)
	held := func(skipped string) ledger.Bytes {
		q := adaptedByLitgpt(t, "llama", 1, `"q_proj"`)
		q.Quantization = file("quantization.json", `{"load_in_4bit": true, "llm_int8_skip_modules": `+skipped+`}`)
		return phaseOf(t, &planned(t, q).Devices[0], ledger.Load).EndRequested
	}
	const head = 32000 * 1024
	if less := held("null") - held("[]"); less != head*2-head/2-head/64*4 {
		t.Errorf("a quantized head takes %v less", less)
	}
}

// TestUsualSequence plans the first micro batch with the longest sequences, and all others with shorter ones.
func TestUsualSequence(t *testing.T) {
	q := adaptedByLitgpt(t, "llama", 2, `"q_proj"`)
	q.Accumulation = 4
	peak := func(p *Plan, iteration ledger.Iteration) (most ledger.Bytes) {
		for _, phase := range p.Devices[0].Phases {
			if phase.Iteration == iteration {
				most = max(most, phase.PeakRequested)
			}
		}
		return most
	}
	long := planned(t, q)
	q.UsualSequence = 64
	mixed := planned(t, q)
	q.Sequence, q.UsualSequence = 64, 0
	short := planned(t, q)
	if peak(mixed, ledger.First) <= peak(short, ledger.First) || peak(mixed, ledger.First) > peak(long, ledger.First) {
		t.Errorf("the first step takes %v, with long sequences %v, with short ones %v", peak(mixed, ledger.First),
			peak(long, ledger.First), peak(short, ledger.First))
	}
	if peak(mixed, ledger.Steady) != peak(short, ledger.Steady) {
		t.Errorf("later steps take %v, with short sequences %v", peak(mixed, ledger.Steady), peak(short, ledger.Steady))
	}
	q.UsualSequence = 65
	if _, err := q.Resolve(); err == nil {
		t.Error("sequences may be longer than the longest")
	}
}

// TestAccumulatedRoot adds a gradient of FSDP1's root unit to that of the micro batch before: with the gradients of its
// views and their concatenation there are three. Real FSDP1 on two CPUs (torch 2.15, gloo) then takes 3.0 root units
// more than before the micro batch, with the gathered one.
func TestAccumulatedRoot(t *testing.T) {
	file := filestest.InNewFolder(t)
	const root, blocks = (2*40_000*512 + 512) * 2, 16 * (4*512*512 + 3*1024*512 + 2*512) * 2
	q := job.Request{Model: file("config.json", `{"architectures": ["LlamaForCausalLM"], "hidden_size": 512,
		"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 40000,
		"num_hidden_layers": 16}`), Precision: "bf16", FSDP: "1", GPUs: 2, Sequence: 8, Optimizer: "sgd"}
	peak := func(accumulation int) ledger.Bytes {
		q.Accumulation = accumulation
		for _, c := range phaseOf(t, &planned(t, q).Devices[0], ledger.Backward).Components {
			if c.Component == ledger.Gradients {
				return c.Bytes
			}
		}
		return 0
	}
	for accumulation, most := range map[int]ledger.Bytes{2: blocks + 2*root, 3: blocks + 3*root, 8: blocks + 3*root} {
		if got := peak(accumulation); got > most || accumulation > 2 && got < most {
			t.Errorf("%d micro batches: %v of gradients at the peak, want %v", accumulation, got, most)
		}
	}
}

// TestLitgptFiles plans a configuration of LitGPT as the same job by flags: with LoRA, in full, and quantized.
func TestLitgptFiles(t *testing.T) {
	file := filestest.InNewFolder(t)
	const common = "checkpoint_dir: checkpoints/org/model\ntrain:\n  micro_batch_size: 2\n  global_batch_size: 8\n" +
		"  max_seq_length: 256\noptimizer: AdamW\nprecision: "
	flags := adaptedByLitgpt(t, "llama", 2, `"q_proj", "v_proj"`)
	flags.MicroBatch, flags.Accumulation, flags.Optimizer, flags.Recompute = 2, 4, "adamw", "none"
	flags.Clip = new(float64)
	full := flags
	full.Adapter, full.AdapterPrecision, full.Precision = "", "", "amp-bf16"
	for name, c := range map[string]struct {
		text  string
		flags job.Request
	}{
		"LoRA": {"bf16-true\nlora_r: 8\nlora_query: true\nlora_value: true\nlora_dropout: 0.05\n", flags},
		"full": {"bf16-mixed\n", full},
	} {
		of := job.Request{Model: flags.Model, Configs: []string{file(name+".yaml", common+c.text)},
			Attention: "sdpa", GPU: flags.GPU}
		got, want := planned(t, of), planned(t, c.flags)
		for i, phase := range want.Devices[0].Phases {
			if g := got.Devices[0].Phases[i]; g.PeakAllocated != phase.PeakAllocated {
				t.Errorf("%s, %s %s: %v by the file, %v by flags", name, phase.Iteration, phase.Name, g.PeakAllocated,
					phase.PeakAllocated)
			}
		}
		if got.Job.EngineName() != want.Job.EngineName() || got.Job.OptimizerName() != want.Job.OptimizerName() {
			t.Errorf("%s: %s with %s, want %s with %s", name, got.Job.EngineName(), got.Job.OptimizerName(),
				want.Job.EngineName(), want.Job.OptimizerName())
		}
	}
	quantized := job.Request{Model: flags.Model, Attention: "sdpa", GPU: flags.GPU, Configs: []string{
		file("nf4.yaml", common+"bf16-true\nquantize: bnb.nf4\nlora_r: 8\n")}}
	p := planned(t, quantized)
	if q := p.Job.Quantization; q == nil || q.Bits != 4 || !p.Job.Optimizer.Managed {
		t.Errorf("bnb.nf4: %+v with %s", q, p.Job.OptimizerName())
	}
}

// TestLitgptFilesAreRefused for what is not planned, each with the key.
func TestLitgptFilesAreRefused(t *testing.T) {
	file := filestest.InNewFolder(t)
	for _, text := range []string{"devices: 4", "num_nodes: 2", "precision: fp8", "quantize: bnb.int8-training",
		"optimizer: Lion", "precision: bf16-mixed\nquantize: bnb.nf4", "galore:\n  use_galore: true"} {
		path := file("c.yaml", "checkpoint_dir: a/b\nlora_r: 8\ntrain: {}\n"+text)
		q := job.Request{Model: "gpt2", Configs: []string{path}}
		if _, err := q.Resolve(); err == nil {
			t.Errorf("%q is planned", text)
		}
	}
}
