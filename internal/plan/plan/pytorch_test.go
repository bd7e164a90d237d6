//go:build linux

package plan_test

import (
	"math"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/plan/job"
)

const loraOfQueriesAndValues = `{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05, ` +
	`"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}`

// TestAgainstPyTorch compares plans with what PyTorch, transformers and PEFT hold: precisions, optimizers, adapters of
// every kind and mixtures of experts.
func TestAgainstPyTorch(t *testing.T) {
	list := []training{
		{name: "llama", model: catalogued(t, "llama-3.2-1b", 3), batch: 2, length: 384,
			options: map[string]any{"clip": 1}, request: job.Request{Precision: "bf16"}},
		{name: "recomputed", model: catalogued(t, "llama-3.2-1b", 3), batch: 1, length: 512,
			options: map[string]any{"implementation": "fused"},
			request: job.Request{Precision: "bf16", Recompute: "full", Optimizer: "adamw/fused"}},
		{name: "autocast", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 256,
			options: map[string]any{"implementation": "for-loop"},
			request: job.Request{Precision: "amp-bf16", Optimizer: "adamw/for-loop"}},
		{name: "eager", model: catalogued(t, "gpt2", 4), batch: 4, length: 512,
			request: job.Request{Precision: "fp32", Attention: "eager"}},
		{name: "eager, recomputed", model: catalogued(t, "llama-3.2-1b", 3), batch: 1, length: 2048,
			request: job.Request{Precision: "bf16", Attention: "eager", Recompute: "full"}},
		{name: "lora", model: catalogued(t, "qwen2.5-0.5b", 4), batch: 2, length: 512, adapter: loraOfQueriesAndValues,
			request: job.Request{Precision: "bf16"}},
		{name: "copied modules", model: catalogued(t, "qwen2.5-0.5b", 4), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ` +
				`["embed_tokens"]}`},
		{name: "adapted embedding", model: catalogued(t, "llama-3.2-1b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj", "embed_tokens"]}`},
		{name: "adalora", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "ADALORA", "init_r": 12, "target_r": 8, "total_step": 100, "target_modules": ` +
				`["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1}`},
		{name: "dora", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LORA", "r": 8, "use_dora": true, "target_modules": ["q_proj", "v_proj", ` +
				`"down_proj"], "lora_dropout": 0.1}`},
		{name: "ia3", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "IA3", "target_modules": ["k_proj", "v_proj", "down_proj"], ` +
				`"feedforward_modules": ["down_proj"]}`},
		{name: "vera", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "VERA", "r": 64, "target_modules": ["q_proj", "v_proj", "down_proj"]}`},
		{name: "oft", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "OFT", "oft_block_size": 128, "target_modules": "all-linear"}`},
		{name: "oft under autocast", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "amp-bf16"},
			adapter: `{"peft_type": "OFT", "r": 7, "oft_block_size": 0, "num_cayley_neumann_terms": 6, ` +
				`"target_modules": ["q_proj", "v_proj", "down_proj"]}`},
		{name: "one block of oft", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "OFT", "oft_block_size": 64, "block_share": true, "use_cayley_neumann": false, ` +
				`"target_modules": ["q_proj", "up_proj"]}`},
		{name: "loha", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LOHA", "r": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}`},
		{name: "loha under autocast", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "amp-bf16"},
			adapter: `{"peft_type": "LOHA", "r": 16, "target_modules": "all-linear"}`},
		{name: "lokr", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LOKR", "r": 8, "decompose_factor": 4, "target_modules": ["q_proj", "v_proj", ` +
				`"down_proj"]}`},
		{name: "lokr, both of low rank", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "amp-bf16"},
			adapter: `{"peft_type": "LOKR", "r": 4, "decompose_both": true, "target_modules": ["q_proj", "up_proj"]}`},
		{name: "miss", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "MISS", "r": 60, "miss_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}`},
		{name: "mini miss", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "amp-bf16"},
			adapter: `{"peft_type": "MISS", "r": 64, "mini_r": 32, "init_weights": "mini", "target_modules": ["q_proj", ` +
				`"v_proj"]}`},
		{name: "prompt tuning", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "bf16"}, adapter: `{"peft_type": "PROMPT_TUNING", ` +
				`"num_virtual_tokens": 64, "task_type": "CAUSAL_LM"}`},
		{name: "p-tuning", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 512,
			request: job.Request{Precision: "amp-bf16"}, adapter: `{"peft_type": "P_TUNING", "num_virtual_tokens": 32, ` +
				`"encoder_hidden_size": 512, "task_type": "CAUSAL_LM"}`},
		{name: "mixture", model: catalogued(t, "qwen3-30b-a3b", 2), batch: 1, length: 1024,
			request: job.Request{Precision: "bf16"}},
		{name: "mixture under autocast", model: catalogued(t, "mixtral-8x7b", 1), batch: 1, length: 512,
			options: map[string]any{"optimizer": "sgd"},
			request: job.Request{Precision: "amp-bf16", Optimizer: "sgd"}},
		{name: "adapted experts", model: catalogued(t, "qwen3-30b-a3b", 2), batch: 1, length: 512,
			request: job.Request{Precision: "bf16"}, adapter: `{"peft_type": "LORA", "r": 8, ` +
				`"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}`},
		{name: "converted targets", model: catalogued(t, "qwen3-30b-a3b", 1), batch: 1, length: 512,
			request: job.Request{Precision: "amp-bf16", Recompute: "full"},
			adapter: `{"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}`},
		{name: "mixture with shared experts", model: catalogued(t, "deepseek-v2-lite", 3), batch: 1, length: 512,
			request: job.Request{Precision: "bf16"}},
		{name: "encoder and decoder", model: catalogued(t, "t5-small", 3), batch: 2, length: 256,
			request: job.Request{Precision: "bf16"}},
		{name: "muon", model: catalogued(t, "llama-3.2-1b", 3), batch: 1, length: 256,
			options: map[string]any{"optimizer": "muon"},
			request: job.Request{Precision: "bf16", Optimizer: "muon"}},
		{name: "muon under autocast", model: catalogued(t, "qwen2.5-0.5b", 3), batch: 1, length: 256,
			options: map[string]any{"optimizer": "muon", "implementation": "for-loop"},
			request: job.Request{Precision: "amp-bf16", Optimizer: "muon/for-loop"}},
		{name: "partial rotary", model: catalogued(t, "gpt-neox-20b", 2), batch: 1, length: 512,
			options: map[string]any{"optimizer": "sgd"}, request: job.Request{Precision: "bf16", Optimizer: "sgd"}},
	}
	compare(t, list, map[string]string{
		"converted targets": unexplained,
	})
}

// TestHostMemoryOnCPU trains on the CPU, with real memory. The plan predicts the resident memory at the peak and at the
// end of every phase within 3 %, free memory that malloc keeps included.
func TestHostMemoryOnCPU(t *testing.T) {
	c := training{model: catalogued(t, "qwen2.5-0.5b", 3), batch: 2, length: 256,
		options: map[string]any{"device": "cpu"},
		request: job.Request{CPU: true, Precision: "fp32"}}
	fresh := torchtest.Fresh("torch", "transformers") // whose memory is its own
	m := torchtest.Measured[measured](t, fresh, "testdata/trainings.py", question(t, []training{c}))
	_, p := c.plan(t, m.Versions)
	compared := 0
	for _, h := range m.Trainings[0] {
		for i := range p.Devices[0].Phases {
			phase := &p.Devices[0].Phases[i]
			if !h.of(phase) {
				continue
			}
			process := phase.PeakUsed - phase.PeakReserved
			figures := map[string][2]ledger.Bytes{}
			if phase.Name != ledger.Load { // the program makes random weights, which have another peak
				figures["peak"] = [2]ledger.Bytes{phase.PeakUsed, h.Peak}
			}
			if phase.Name != ledger.Step { // the program has dropped the gradients
				figures["end"] = [2]ledger.Bytes{phase.EndReserved + process, h.End}
			}
			for what, of := range figures {
				compared++
				if off := apart(of[0], of[1]); math.Abs(off) > 3 {
					t.Errorf("%s %s, %s: planned %v, measured %v (%+.2f %%)", phase.Iteration, phase.Name, what, of[0],
						of[1], off)
				}
			}
		}
	}
	if compared < 10 {
		t.Errorf("only %d figures were compared", compared)
	}
}
