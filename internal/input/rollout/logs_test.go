package rollout_test

import (
	"math"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/rollout"
)

// log is what an engine printed when it started. A figure of 0 is not in the log.
type log struct {
	source string // where it is published
	engine string // as --rollout has it
	model  string
	memory float64 // GiB: of the GPU, or for SGLang what is free before the weights
	before float64 // GiB: outside of torch
	tokens int64   // that the KV cache has room for, by the log
	// These are in GiB.
	weights, activations, cache float64
}

// logs are public. Every figure is in the text that its source names.
var logs = []log{
	{source: "vllm-project/vllm pull request 10511, 2024-12-14", engine: "vllm:0.9", model: "llama-3-8b",
		memory: 79.22, before: 1.79, weights: 14.96, cache: 53.29},
	{source: "the same, two GPUs", engine: "vllm:0.9,tp=2", model: "llama-3-8b", weights: 7.48},
	{source: "vllm-project/vllm pull request 17122", engine: "vllm:0.9", model: "llama-3.1-8b", weights: 14.9889},
	{source: "vllm-project/vllm issue 13061", engine: "vllm:0.98,tp=2", model: "qwen2.5-14b", weights: 13.9476},
	{source: "vllm-project/vllm issue 15039, rank 0", engine: "vllm:0.89,tp=4,max-batched-tokens=2048",
		model: "llama-3.1-70b", memory: 79.33, before: .28, weights: 32.95, cache: 36.07, tokens: 29547 * 16},
	{source: "mlcommons/inference issue 2267", engine: "vllm:0.9,tp=8", model: "llama-3.1-8b", weights: 1.9028},
	{source: "a public notebook with Qwen2.5-1.5B-Instruct on a T4, May 2025",
		engine: "vllm:0.5,max-batched-tokens=32768", model: "qwen2.5-1.5b", memory: 14.56, before: .01,
		weights: 2.8884, activations: 2.02, cache: 2.36, tokens: 5517 * 16},
	{source: "a public guide to llm-d on one small GPU, Qwen2.5-1.5B-Instruct", engine: "vllm:0.04",
		model: "qwen2.5-1.5b", weights: 2.89, cache: .56, tokens: 20992},
	{source: "a public benchmark of Llama 3.1 8B on an A100-SXM4-40GB, May 2026", engine: "vllm:0.9",
		model: "llama-3.1-8b", cache: 19.92, tokens: 163168},
	{source: "vllm-project/vllm issue 21348, vLLM", engine: "vllm:0.9,tp=4", model: "qwen3-235b-a22b", cache: 8.11,
		tokens: 178880},
	{source: "vllm-project/vllm issue 21348, SGLang", engine: "sglang:0.93,tp=4", model: "qwen3-235b-a22b",
		cache: 16.46, tokens: 367404},
	{source: "sgl-project/sglang pull request 18263", engine: "sglang:0.911", model: "qwen3-30b-a3b",
		memory: 287.18, weights: 56.98, cache: 204.63},
	{source: "sgl-project/sglang pull request 18263, by aiter", engine: "sglang:0.911", model: "qwen3-30b-a3b",
		cache: 152.88, tokens: 1669816},
	{source: "sgl-project/sglang pull request 15909", engine: "sglang:0.8,tp=4", model: "qwen3-30b-a3b",
		cache: 47.84, tokens: 2090351},
	{source: "a notebook of SGLang's documentation, February 2026", engine: "sglang:0.8",
		model: "qwen2.5-0.5b", cache: .24, tokens: 20480},
}

// TestStartupLogs holds the shares of engines within 3 % of what they printed.
func TestStartupLogs(t *testing.T) {
	for _, l := range logs {
		t.Run(l.source, func(t *testing.T) {
			e, err := rollout.Parse(l.engine, nil)
			if err != nil {
				t.Fatal(err)
			}
			m, err := model.Load(l.model)
			if err != nil {
				t.Fatal(err)
			}
			s, err := e.ShareOf(m, dtype.BF16, gib(l.memory), gib(l.before))
			if err != nil {
				t.Fatal(err)
			}
			near(t, "weights", float64(s.Weights), float64(gib(l.weights)))
			near(t, "activations", float64(s.Activations), float64(gib(l.activations)))
			if l.memory > 0 {
				near(t, "KV cache", float64(s.Cache), float64(gib(l.cache)))
			}
			if l.tokens > 0 {
				near(t, "bytes of a token", float64(s.TokenBytes), float64(gib(l.cache))/float64(l.tokens))
			}
		})
	}
}

func gib(n float64) ledger.Bytes { return ledger.Bytes(n * float64(ledger.GiB)) }

// near holds a planned figure within 3 % of the one in the log.
func near(t *testing.T, what string, planned, logged float64) {
	t.Helper()
	if off := planned/logged - 1; logged > 0 && math.Abs(off) > .03 {
		t.Errorf("%s: planned %v, the log has %v: %+.1f %%", what, ledger.Bytes(planned), ledger.Bytes(logged), 100*off)
	}
}
