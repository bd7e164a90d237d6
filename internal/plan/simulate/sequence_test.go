package simulate

import (
	"fmt"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/plan/forward"
)

// TestExchangedHeads holds ranks that share a sequence against UlyssesSPAttentionHF of DeepSpeed 0.19.8. On two gloo
// ranks with a Llama of transformers 5.23, every layer keeps one hidden state more than without: what attention
// returned, beside what the output projection reads. Where two ranks share one head of keys, it keeps the copies of
// keys and values, too.
func TestExchangedHeads(t *testing.T) {
	m := catalog(t, "llama-3.2-1b")
	kept := func(ranks int64, exchanges bool) int64 {
		j := onRanks(16, deepSpeedJob(t, m, zero(1, ""), "0.19.6"))
		j.Sequence, j.Attention = 1024*ranks, forward.SDPA
		j.Versions.Transformers = version.Version{Major: 5, Minor: 23}
		j.Parallel.Context, j.Parallel.DeepSpeedUlysses = ranks, exchanges
		s := simulated(j)
		if s.gpu.failed != nil {
			t.Fatal(s.gpu.failed)
		}
		return total(ends(t, s.gpu, ledger.Forward, ledger.First), ledger.Batch)
	}
	n := m.Network
	layers := int64(len(n.Blocks()))
	a := n.Blocks()[0].Attention
	state := 1024 * n.Hidden * dtype.BF16.Size()
	if got, want := kept(2, true)-kept(2, false), layers*state; got != want {
		t.Errorf("2 ranks: %d bytes more, want %d", got, want)
	}
	copies := 1024 * a.KeyValueHeads * 2 * a.Width * dtype.BF16.Size()
	if got, want := kept(16, true)-kept(16, false), layers*(state+copies); got != want {
		t.Errorf("16 ranks with 8 heads of keys: %d bytes more, want %d", got, want)
	}
}

// TestAutocastZeRO3 holds autocast over fp32 weights against DeepSpeed 0.19.8 on two gloo ranks with a Llama of 15.8
// million parameters and 8 tokens: after the forward pass ZeRO-2 holds 2.08 bytes a parameter more than before, as
// every weight is cast once, and ZeRO-3 holds 0.08, as its linear modules keep no cast.
func TestAutocastZeRO3(t *testing.T) {
	m := catalog(t, "llama-3.2-1b")
	casts := func(stage int, extra string) int64 {
		config := fmt.Sprintf(`{"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": true, `+
			`"dtype": "bfloat16"}, "zero_optimization": {"stage": %d%s}}`, stage, extra)
		j := onRanks(2, deepSpeedJob(t, m, config, "0.19.6"))
		j.AutocastType, j.Sequence = j.DeepSpeed.Autocast, 8
		s := simulated(j)
		if s.gpu.failed != nil {
			t.Fatal(s.gpu.failed)
		}
		return ends(t, s.gpu, ledger.Forward, ledger.First)[ledger.AutocastWeights]
	}
	if got := casts(2, ""); got < 2*m.Elements()*9/10 {
		t.Errorf("ZeRO-2 keeps %d bytes of cast weights, want two for most of %d parameters", got, m.Elements())
	}
	if got := casts(3, ""); got != 0 {
		t.Errorf("ZeRO-3 keeps %d bytes of cast weights, want none", got)
	}
	if got := casts(3, `, "memory_efficient_linear": false`); got == 0 {
		t.Error("ZeRO-3 without memory_efficient_linear keeps no cast weights")
	}
}

// TestReducedTypes holds the types of reduce buckets against DeepSpeed 0.19.8, as its ZeRO optimizers make them on two
// gloo ranks with a Llama: ipg_buckets has a tensor for each type of communication.
func TestReducedTypes(t *testing.T) {
	const size = `, "reduce_bucket_size": 20000`
	autocast := `{"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}, ` +
		`"zero_optimization": {"stage": 3` + size + `}}`
	for _, test := range []struct {
		name, config, release string
		want                  int64 // bytes for each element of a bucket
	}{
		{"bf16", zero(3, size), "0.19.6", 2},
		{"communication_data_type", `{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, ` +
			`"communication_data_type": "fp32", "zero_optimization": {"stage": 3` + size + `}}`, "0.19.6", 4},
		{"before 0.17.2", `{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, ` +
			`"communication_data_type": "fp32", "zero_optimization": {"stage": 3` + size + `}}`, "0.17.1", 2},
		{"torch_autocast of fp32 weights", autocast, "0.19.6", 6},
	} {
		j := onRanks(2, deepSpeedJob(t, catalog(t, "qwen2.5-0.5b"), test.config, test.release))
		j.AutocastType = j.DeepSpeed.Autocast
		s := simulated(j)
		if got := ends(t, s.gpu, ledger.Initialize, ledger.Once)[ledger.CommunicationBuckets]; got != 20000*test.want {
			t.Errorf("%s: buckets of %d bytes, want %d", test.name, got, 20000*test.want)
		}
	}
}
