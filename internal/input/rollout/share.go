package rollout

import (
	"cmp"
	"math"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
)

// Share is what an engine holds of a GPU.
type Share struct {
	Weights     ledger.Bytes
	Cache       ledger.Bytes // for keys and values of tokens
	Activations ledger.Bytes // at the peak of a pass
	Graphs      ledger.Bytes // CUDA graphs, which do not sleep
	TokenBytes  int64        // of the cache, for each token; 0 where it is unknown
	Blocks      []int64      // the weights, as the engine allocates them
}

// Tokens returns the number of tokens that the cache has room for.
func (s *Share) Tokens() int64 {
	if s.TokenBytes == 0 {
		return 0
	}
	return int64(s.Cache) / s.TokenBytes
}

// UsualGraphs is what CUDA graphs of an engine took where others logged it: from 0.07 to 1.93 GiB ("Graph capturing
// finished", "Capture cuda graph end"). With the context it is what vLLM still has asleep: 1.31 and 1.38 GiB.
const UsualGraphs = 768 * ledger.MiB

// samplerBytes is what a sampler holds for each logit of each sequence: logits in 16 and 32 bits, sorted logits and
// their indexes, probabilities and their sums (vllm/v1/sample, sglang/srt/layers/sampler.py).
const samplerBytes = 26

// ShareOf returns what the engine holds of a GPU with so much memory, of which others took some before the engine
// began. Weights are in the given type.
func (e *Engine) ShareOf(m *model.Model, weights dtype.Type, memory, before ledger.Bytes) (*Share, error) {
	s := &Share{Blocks: e.blocks(m, weights)}
	for _, bytes := range s.Blocks {
		s.Weights += ledger.Bytes(bytes)
	}
	if e.Graphs {
		s.Graphs = UsualGraphs
	}
	if m.Network != nil && m.Network.Opaque == nil {
		s.TokenBytes = e.tokenBytes(m.Network, weights)
		s.Activations = e.activations(m.Network, weights)
	}
	if memory == 0 {
		return s, nil
	}
	budget := ledger.Bytes(e.Fraction * float64(memory))
	taken := s.Weights
	if e.Name == VLLM {
		taken += s.Activations + before
	} else {
		budget = ledger.Bytes(e.Fraction * float64(memory-before))
	}
	s.Cache = budget - taken
	return s, e.check(s, memory, budget, taken)
}

// UsualFraction returns mem_fraction_static where nobody has set it: what SGLang does not reserve for activations, CUDA
// graphs and ranks (_handle_gpu_memory_settings in server_args.py of SGLang 0.5.9).
func (e *Engine) UsualFraction(memory ledger.Bytes) float64 {
	if memory == 0 {
		return 0
	}
	of := usualPasses[len(usualPasses)-1]
	for _, of = range usualPasses {
		if memory < of.under*ledger.GiB {
			break
		}
	}
	graphs := of.graphs
	if e.Tensor >= 4 {
		graphs = of.shared
	}
	reserved := 512 + 1.5*float64(of.prefill) + 2*float64(graphs) + 1024*float64(e.Tensor)/8
	if memory > 60*ledger.GiB {
		reserved = max(reserved, 10*1024)
	}
	all := float64(memory / ledger.MiB)
	return math.Round((all-reserved)/all*1000) / 1000
}

// usualPasses are the tokens of a prefill and the largest batches of CUDA graphs, on one GPU and shared among four or
// more, by the memory of GPUs.
var usualPasses = []struct {
	under                   ledger.Bytes // GiB
	prefill, graphs, shared int64
}{{20, 2048, 8, 8}, {35, 2048, 24, 80}, {60, 4096, 32, 160}, {160, 8192, 256, 512}, {1 << 20, 16384, 512, 512}}

// check refuses what the engine refuses when it starts.
func (e *Engine) check(s *Share, memory, budget, taken ledger.Bytes) error {
	if s.Cache <= 0 {
		return fault.Inputf("%s may take %v of a GPU with %v (its fraction is %.2g), and %v go before the KV cache, "+
			"%v of them weights: nothing is left for the cache", e.Label(), budget, memory, e.Fraction,
			taken, s.Weights).
			WithHint("give a larger fraction, or more GPUs that share the weights (tp); quantized weights of an " +
				"engine are not planned")
	}
	if e.Longest > 0 && s.TokenBytes > 0 && s.Tokens() < e.Longest {
		return fault.Inputf("the KV cache of %s has room for %s tokens, and one sequence may have %s (max-model-len)",
			e.Label(), ledger.Count(s.Tokens()), ledger.Count(e.Longest)).
			WithHint("give a larger fraction, or a shorter max-model-len")
	}
	return nil
}

// tokenBytes returns the bytes of keys and values of a token. A head of keys and values lies on one GPU at least.
func (e *Engine) tokenBytes(n *model.Network, weights dtype.Type) (sum int64) {
	size := cmp.Or(e.CacheType, weights).Size()
	for _, b := range n.Blocks() {
		a := &b.Attention
		if b.Beside != nil {
			a = b.Beside
		}
		switch {
		case a.Recurrent() || !a.Computes(): // a state for each sequence, or nothing
		case a.Latent != nil:
			sum += (a.Latent.Rank + a.Latent.Rotated) * size
		default:
			heads := cmp.Or(a.KeyValueHeads, a.Heads)
			sum += max(1, heads/e.Tensor) * (a.Width + cmp.Or(a.ValueWidth, a.Width)) * size
		}
	}
	return sum
}

// activations returns what a pass of the largest batch holds at its peak: in a feed-forward network, or in the sampler.
// A mixture holds each token once for each expert that it goes to (fused_moe.py).
func (e *Engine) activations(n *model.Network, weights dtype.Type) ledger.Bytes {
	var widest int64
	for _, b := range n.Blocks() {
		f := &b.FeedForward
		row := 3*f.Inner/e.Tensor + 4*n.Hidden
		if x := f.Mixture; x != nil && len(x.Experts) > 0 {
			row = x.Chosen*(3*x.Experts[0].Inner/e.Tensor+n.Hidden) + 4*n.Hidden
		}
		widest = max(widest, row)
	}
	return ledger.Bytes(max(e.BatchTokens*widest*weights.Size(), e.Sequences*n.Head.Outputs*samplerBytes))
}

// blocks returns the sizes of the weights as an engine allocates them: it fuses the projections to queries, keys and
// values, those to gate and up, and those of all experts of a layer.
func (e *Engine) blocks(m *model.Model, weights dtype.Type) (list []int64) {
	cut := e.cuts(m)
	at := map[string]int{}
	for _, p := range m.Parameters {
		if p.TiedTo != "" {
			continue
		}
		bytes := p.Elements() / cut(p) * weights.Size()
		name := fused(p.Name)
		i, known := at[name]
		if !known {
			i = len(list)
			at[name], list = i, append(list, 0)
		}
		list[i] += bytes
	}
	return list
}

// fusions are parts of names of projections that engines have in one parameter.
var fusions = strings.NewReplacer("q_proj", "qkv", "k_proj", "qkv", "v_proj", "qkv", "gate_proj", "gate_up", "up_proj",
	"gate_up", ".w1.", ".w13.", ".w3.", ".w13.")

// fused returns the name of a parameter in an engine. Experts of a layer have no number there.
func fused(name string) string {
	name = fusions.Replace(name)
	before, after, isExpert := strings.Cut(name, ".experts.")
	if !isExpert {
		return name
	}
	_, rest, _ := strings.Cut(after, ".")
	return before + ".experts." + rest
}

// leastMatrix is the number of elements from which on a parameter is a matrix that GPUs share, where names do not tell.
const leastMatrix = 1 << 17

// cuts returns a function with the number of GPUs that share a parameter.
func (e *Engine) cuts(m *model.Model) func(model.Parameter) int64 {
	if m.Network == nil || len(m.Network.Stacks) == 0 { // matrices by their size
		return func(p model.Parameter) int64 {
			if p.Elements() >= leastMatrix {
				return e.Tensor
			}
			return 1
		}
	}
	products := map[string]int64{m.Network.Head.Projection: e.Tensor}
	for _, path := range m.Network.Linears() {
		products[path] = e.Tensor
	}
	for path := range m.Network.Undivided() {
		products[path] = 1
	}
	for _, b := range m.Network.Blocks() {
		heads := cmp.Or(b.Attention.KeyValueHeads, b.Attention.Heads)
		for _, path := range []string{b.Attention.Key, b.Attention.Value} {
			if _, known := products[path]; known && heads > 0 {
				products[path] = min(e.Tensor, heads)
			}
		}
		if x := b.FeedForward.Mixture; x != nil && x.Fused() {
			products[x.GateUp], products[x.Down] = e.Tensor, e.Tensor
		}
	}
	return func(p model.Parameter) int64 {
		if n := products[p.Name]; n > 0 {
			return n
		}
		module, isWeight := strings.CutSuffix(p.Name, ".weight")
		switch n := products[module]; {
		case isWeight && n > 0:
			return n
		case p.IsEmbedding():
			return e.Tensor
		}
		return 1
	}
}
