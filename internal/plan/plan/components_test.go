package plan

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// jobs returns jobs of all kinds, with small models.
func jobs(t *testing.T) map[string]job.Request {
	file := filestest.InNewFolder(t)
	lora := file("lora.json", `{"peft_type": "LORA", "r": 8, "target_modules": "all-linear", "lora_dropout": 0.1}`)
	zero := func(name, text string) string {
		return file(name,
			`{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "zero_optimization": {`+text+`}}`)
	}
	clip := 1.0
	list := map[string]job.Request{
		"one GPU":              {},
		"autocast":             {Precision: "amp-bf16"},
		"autocast, recomputed": {Precision: "amp-bf16", Recompute: "full"},
		"autocast fp16":        {Precision: "amp-fp16", Accumulation: 4},
		"fp32, eager":          {Precision: "fp32", Attention: "eager"},
		"flash, chunked":       {Attention: "flash", Modules: "litgpt"},
		"compiled":             {Compile: true},
		"fused loss":           {FusedLoss: true, Clip: &clip},
		"on the CPU":           {CPU: true, Precision: "fp32"},
		"on the CPU, bf16":     {CPU: true, Precision: "bf16", Recompute: "full"},
		"recomputed":           {Recompute: "full", MicroBatch: 4},
		"recomputed, old way":  {Recompute: "reentrant"},
		"recomputed in part":   {Recompute: "selective"},
		"every other block":    {Recompute: "every-2"},
		"DDP":                  {GPUs: 8, Accumulation: 2},
		"FSDP1":                {FSDP: "1", GPUs: 8, Precision: "amp-bf16", Accumulation: 2},
		"FSDP2":                {FSDP: "2", GPUs: 8, Precision: "amp-bf16", Recompute: "full"},
		"FSDP2, offloaded":     {FSDP: "2", GPUs: 4, OffloadParameters: true},
		"FSDP2, torchtitan":    {FSDP: "2", GPUs: 8, Modules: "torchtitan", Compile: true},
		"tensor parallel":      {FSDP: "2", GPUs: 4, TensorParallel: 2},
		"context parallel":     {FSDP: "2", GPUs: 4, ContextParallel: 2},
		"LoRA":                 {Adapter: lora, Recompute: "full"},
		"LoRA, autocast":       {Adapter: lora, Precision: "amp-bf16", Recompute: "reentrant"},
		"LoRA in bf16":         {Adapter: lora, AdapterPrecision: "bf16"},
		"DoRA": {Adapter: file("dora.json",
			`{"peft_type": "LORA", "r": 8, "use_dora": true, "target_modules": "all-linear"}`)},
		"AdaLoRA": {Adapter: file("adalora.json",
			`{"peft_type": "ADALORA", "init_r": 12, "target_r": 8, "total_step": 100, `+
				`"target_modules": "all-linear"}`)},
		"IA3": {Adapter: file("ia3.json",
			`{"peft_type": "IA3", "target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}`)},
		"VeRA": {Adapter: file("vera.json",
			`{"peft_type": "VERA", "r": 16, "target_modules": ["q_proj", "v_proj"]}`)},
		"norms": {Adapter: file("norms.json",
			`{"peft_type": "LN_TUNING", "target_modules": ["input_layernorm"]}`)},
		"nf4":               {Adapter: lora, Quantization: "nf4-dq", Optimizer: "paged_adamw_8bit"},
		"int8":              {Adapter: lora, Quantization: "int8"},
		"nf4 under FSDP":    {Adapter: lora, Quantization: "nf4", FSDP: "1", GPUs: 2},
		"experts":           {Model: "mixtral-8x7b"},
		"experts in parts":  {Model: "qwen3-30b-a3b", FSDP: "2", GPUs: 8, ExpertParallel: 8},
		"latent attention":  {Model: "deepseek-v2-lite"},
		"linear attention":  {Model: "qwen3-next-80b-a3b", FSDP: "2", GPUs: 8},
		"T5":                {Model: "t5-base"},
		"Whisper":           {Model: "whisper-tiny", Sequence: 448, Precision: "amp-bf16", Recompute: "full"},
		"ViT":               {Model: "vit-base-patch16-224", Precision: "amp-fp16", MicroBatch: 4},
		"T5 under autocast": {Model: "t5-small", Precision: "amp-bf16", Recompute: "full"},
		"BERT":              {Model: "bert-large", Precision: "fp32"},
		"GPT-2":             {Model: "gpt2", Precision: "amp-fp16"},
		"Falcon":            {Model: "falcon-7b"},
		"Gemma":             {Model: "gemma-2-2b", Attention: "eager"},
		"ZeRO-0":            {DeepSpeed: zero("0.json", `"stage": 0`), GPUs: 2},
		"ZeRO-1":            {DeepSpeed: zero("1.json", `"stage": 1`), GPUs: 4},
		"ZeRO-2":            {DeepSpeed: zero("2.json", `"stage": 2`), GPUs: 4, Accumulation: 2},
		"ZeRO-2, offloaded": {DeepSpeed: zero("2o.json",
			`"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}`),
			GPUs: 4},
		"ZeRO-3": {DeepSpeed: zero("3.json", `"stage": 3`), GPUs: 8, Nodes: 2},
		"ZeRO-3, offloaded": {DeepSpeed: zero("3o.json",
			`"stage": 3, "offload_optimizer": {"device": "cpu"}, `+
				`"offload_param": {"device": "cpu", "pin_memory": true}`),
			GPUs: 4, Recompute: "full"},
		"rollout asleep on the host": {FSDP: "2", GPUs: 4, GPU: "H100-80GB", Reference: "qwen2.5-0.5b",
			Shorthand: job.Shorthand{Rollout: "vllm:0.4,sleep=1,tp=2,reference=host,log-probs-batch=4,ray," +
				"object-store=1GiB"}},
		"rollout beside a trainer that moves": {GPUs: 2, GPU: "H100-80GB",
			Shorthand: job.Shorthand{Rollout: "sglang:0.4,sleep=2,backups,log-probs=chunked,sync=full"}},
		"rollout that stays, states that move": {DeepSpeed: zero("r.json", `"stage": 3`), GPUs: 2, GPU: "H100-80GB",
			Shorthand: job.Shorthand{Rollout: "vllm:0.3,process=shared,graphs=off,backups=optimizer,sync=64MiB"}},
	}
	for name, o := range map[string]job.Offload{
		"states": {}, "split": {Master: "split"}, "whole": {Mode: "whole", Master: "fp32"},
		"moments": {Master: "split", Moments: "bf16", NoRecovery: true}, "half": {Fraction: 0.5, Chunk: 1},
	} {
		o.What = job.OffloadStates
		list["offload, "+name] = job.Request{Precision: "bf16", Offload: o}
		list["offload with FSDP2, "+name] = job.Request{Precision: "bf16", Offload: o, FSDP: "2", GPUs: 4}
		list["offload of Muon, "+name] = job.Request{Precision: "bf16", Offload: o, Optimizer: "muon"}
	}
	for _, name := range job.Optimizers() {
		q := job.Request{Optimizer: name}
		if o := job.NewOptimizer(name, ""); o.IsOfDeepSpeed() {
			q.DeepSpeed = zero("lamb.json", `"stage": 0`)
		}
		if name == "soap" {
			q.Precision = "amp-bf16" // its parameters are in fp32
		}
		list["optimizer "+name] = q
	}
	const trainers = "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_anyprecision adamw_torch_8bit " +
		"adamw_torch_4bit adamw_bnb_8bit adamw_8bit paged_adamw_8bit paged_adamw_32bit paged_adamw lion_8bit " +
		"lion_32bit paged_lion_8bit paged_lion_32bit rmsprop_bnb fusedadam fused_adam adam8bit adamw8bit " +
		"adalomo"
	for name := range strings.FieldsSeq(trainers) {
		list["optimizer "+name] = job.Request{Optimizer: name, Recompute: "full"}
	}
	for name, q := range list {
		if q.Model == "" {
			q.Model = "qwen2.5-0.5b"
		}
		if q.Sequence == 0 && !strings.HasPrefix(q.Model, "vit") {
			q.Sequence = 512
		}
		list[name] = q
	}
	return list
}

// planned returns the plan of a request.
// shallow returns the path of a config.json: that of a model of the catalog, with some layers of it.
func shallow(t *testing.T, name string, layers int) string {
	t.Helper()
	text, err := os.ReadFile("../../input/model/catalog/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	var config map[string]any
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	config["num_hidden_layers"] = layers
	if text, err = json.Marshal(config); err != nil {
		t.Fatal(err)
	}
	return filestest.InNewFolder(t)("config.json", string(text))
}

func planned(t testing.TB, q job.Request) *Plan {
	t.Helper()
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	p, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestComponents plans jobs of all kinds. Every byte of every phase belongs to a
// component, and every component has a reason.
func TestComponents(t *testing.T) {
	for name, request := range jobs(t) {
		t.Run(name, func(t *testing.T) {
			for _, d := range planned(t, request).Devices {
				for _, c := range d.Outside {
					if c.Component == "" || c.Why == "" || c.Bytes <= 0 {
						t.Errorf("%s, outside of the allocator: %+v", d.Kind, c)
					}
				}
				for _, p := range d.Phases {
					checkPhase(t, &p, string(d.Kind)+", "+string(p.Iteration)+" "+string(p.Name))
				}
			}
		})
	}
}

func checkPhase(t *testing.T, p *ledger.Phase, where string) {
	t.Helper()
	for _, list := range []struct {
		of         string
		components []ledger.Holding
		sum        ledger.Bytes
	}{{"peak", p.Components, p.PeakRequested}, {"end", p.End, p.EndRequested}} {
		var sum ledger.Bytes
		for _, c := range list.components {
			if c.Component == "" || c.Why == "" || c.Bytes <= 0 {
				t.Errorf("%s, %s: %+v", where, list.of, c)
			}
			sum += c.Bytes
		}
		if sum != list.sum {
			t.Errorf("%s, %s: components are %v, and %v are requested", where, list.of, sum.Exact(), list.sum.Exact())
		}
		if !slices.IsSortedFunc(list.components, func(a, b ledger.Holding) int { return int(b.Bytes - a.Bytes) }) {
			t.Errorf("%s, %s: components are not in order", where, list.of)
		}
	}
	ordered := []ledger.Bytes{0, p.EndRequested, p.PeakRequested, p.PeakAllocated, p.PeakReserved, p.PeakUsed}
	if !slices.IsSorted(ordered) {
		t.Errorf("%s: not in order: %v", where, ordered)
	}
	if p.EndAllocated < p.EndRequested || p.EndAllocated > p.PeakAllocated || p.EndReserved > p.PeakReserved ||
		p.EndReserved < p.EndAllocated {
		t.Errorf("%s: the end is %v, %v, %v, and the peak %v, %v, %v", where, p.EndRequested, p.EndAllocated,
			p.EndReserved, p.PeakRequested, p.PeakAllocated, p.PeakReserved)
	}
}

// TestRecomputedDecoder recomputes blocks that read the encoder's output. No
// block is freed twice.
func TestRecomputedDecoder(t *testing.T) {
	for _, q := range []job.Request{{FSDP: "2", GPUs: 8}, {}, {GPUs: 2}} {
		q.Model, q.Sequence, q.Precision, q.Recompute = "t5-small", 512, "bf16", "full"
		planned(t, q)
	}
}
