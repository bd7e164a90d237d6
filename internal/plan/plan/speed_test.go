//go:build linux

package plan

import (
	"testing"
	"time"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/machine/host/hosttest"
	"plimsoll/internal/plan/job"
)

// trillion is the config.json of a mixture of experts with a trillion parameters.
const trillion = `{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 7168, ` +
	`"intermediate_size": 18432,
"num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 384, ` +
	`"num_experts_per_tok": 8,
"moe_intermediate_size": 2048, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 163840, ` +
	`"tie_word_embeddings": false, "torch_dtype": "bfloat16"}`

// speeds are jobs with the CPU time that their plans may take on a fast core.
func speeds(t testing.TB) map[string]struct {
	request job.Request
	limit   time.Duration
} {
	file := filestest.InNewFolder(t)
	config := file("config.json", trillion)
	zero := func(name, section string) job.Request {
		path := file(name, `{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1, `+
			`"gradient_accumulation_steps": 4, "zero_optimization": {`+section+`}}`)
		return job.Request{Model: config, DeepSpeed: path, GPUs: 8, Nodes: 128, Sequence: 4096, Recompute: "full"}
	}
	return map[string]struct {
		request job.Request
		limit   time.Duration
	}{
		"typical": {job.Request{Model: "llama-3-8b", FSDP: "2", GPUs: 8, GPU: "H100-80GB",
			Precision: "bf16", Sequence: 4096, Recompute: "full"},
			50 * time.Millisecond},
		"a trillion parameters": {job.Request{Model: config, FSDP: "2", GPUs: 8, Nodes: 128, Precision: "bf16",
			Sequence: 4096, Recompute: "full"},
			time.Second},
		"a trillion parameters, ZeRO-2": {zero("2.json", `"stage": 2`), time.Second},
		"a trillion parameters, ZeRO-3": {zero("3.json", `"stage": 3`), time.Second},
		"a trillion parameters, ZeRO-3 with offload": {zero("offload.json", `"stage": 3, `+
			`"offload_optimizer": {"device": "cpu", "pin_memory": true},
			"offload_param": {"device": "cpu", "pin_memory": true}`), time.Second},
	}
}

// spent returns the CPU time of this process.
func spent(t testing.TB) time.Duration { return hosttest.CPUTime(t) }

// BenchmarkPlan limits the CPU time of a plan, garbage collection included, with a factor of 3 for busy machines, and
// more for slow ones.
func BenchmarkPlan(b *testing.B) {
	for name, s := range speeds(b) {
		b.Run(name, func(b *testing.B) {
			most := time.Duration(3 * hosttest.Slowness(b) * float64(s.limit))
			b.ReportAllocs()
			plans, begin := 0, spent(b)
			for b.Loop() {
				planned(b, s.request)
				plans++
			}
			if took := (spent(b) - begin) / time.Duration(plans); took > most {
				b.Errorf("a plan takes %v of CPU time, want at most %v", took, most)
			}
		})
	}
}

// BenchmarkVariants plans variants of a job from files that are read once. It
// counts CPU time, as other processes use the machine, too.
func BenchmarkVariants(b *testing.B) {
	file := filestest.InNewFolder(b)
	zero := file("zero.json", `{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1, `+
		`"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 3}}`)
	for name, q := range map[string]job.Request{
		"llama-3.1-8b on 8 ranks":    {Model: "llama-3.1-8b", GPUs: 8},
		"deepseek-v3 on 2,048 ranks": {Model: "deepseek-v3", GPUs: 8, Nodes: 256},
	} {
		q.DeepSpeed, q.Sequence, q.GPU, q.Recompute = zero, 4096, "H100-80GB", "full"
		b.Run(name, func(b *testing.B) {
			in, err := job.Read(q)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			planned, begin := 0, spent(b)
			for b.Loop() {
				j, err := job.Decide(in, job.Overrides{MicroBatch: 1 + planned%4, Sequence: 1024 << (planned % 3)})
				if err != nil {
					b.Fatal(err)
				}
				if _, err := New(j); err != nil {
					b.Fatal(err)
				}
				planned++
			}
			b.ReportMetric(float64(planned)/(spent(b)-begin).Seconds(), "plans/cpu-s")
		})
	}
}
