package forward_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/goldentest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
)

// The sizes of the models below.
const (
	layers, hidden, inner, heads, keyHeads, vocabulary = 3, 64, 96, 4, 2, 1000
	batch, sequence                                    = 2, 128
)

const sizes = `"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
	"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512`

// configs are small models of several kinds.
var configs = map[string]string{
	"llama":   `"model_type": "llama", ` + sizes,
	"tied":    `"model_type": "llama", "tie_word_embeddings": true, ` + sizes,
	"qwen3":   `"model_type": "qwen3", "head_dim": 16, ` + sizes,
	"mixture": `"model_type": "qwen3_moe", "moe_intermediate_size": 48, "num_experts": 4, "head_dim": 16, ` + sizes,
	"gemma2":  `"model_type": "gemma2", "head_dim": 16, "sliding_window": 64, ` + sizes,
	"gpt2": `"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 3, "n_head": 4, ` +
		`"n_positions": 512`,
	"bert": `"model_type": "bert", "architectures": ["BertForMaskedLM"], ` + sizes,
}

// blocks is memory that tells what it holds, by component.
type blocks struct {
	t    *testing.T
	held map[int]block
	next int
	now  map[ledger.Component]int64
	most map[ledger.Component]int64
	sum  int64
	peak int64 // of the sum
}

type block struct {
	bytes     int64
	component ledger.Component
}

func newBlocks(t *testing.T) *blocks {
	return &blocks{t: t, held: map[int]block{}, now: map[ledger.Component]int64{}, most: map[ledger.Component]int64{}}
}

func (b *blocks) Allocate(bytes ledger.Bytes, component ledger.Component, why func() string) int {
	if bytes < 0 || why() == "" {
		b.t.Fatalf("%v of %s, because %q", bytes, component, why())
	}
	b.next++
	b.add(b.next, block{int64(bytes), component})
	return b.next
}

func (b *blocks) add(id int, of block) {
	b.held[id] = of
	b.now[of.component] += of.bytes
	b.most[of.component] = max(b.most[of.component], b.now[of.component])
	b.sum += of.bytes
	b.peak = max(b.peak, b.sum)
}

func (b *blocks) Relabel(id int, component ledger.Component, _ func() string) {
	of := b.held[id]
	b.Free(id)
	b.add(id, block{of.bytes, component})
}

func (b *blocks) Free(id int) {
	of, ok := b.held[id]
	if !ok {
		b.t.Fatalf("block %d is freed, and not held", id)
	}
	delete(b.held, id)
	b.now[of.component] -= of.bytes
	b.sum -= of.bytes
}

// trial is a forward pass that a test runs.
type trial struct {
	memory     *blocks
	tape       *autograd.Tape
	model      *model.Model
	parameters forward.Parameters
	result     forward.Result
}

// usual are the options of a training in bf16.
func usual() forward.Options {
	o := forward.Options{Batch: batch, Sequence: sequence, WeightType: dtype.BF16,
		Parallel: forward.Degrees{Tensor: 1, Context: 1}, HasLogits: func() {}}
	o.Attention = forward.SDPA
	return o
}

// load makes a model of configs.
func load(t *testing.T, name string) *model.Model {
	t.Helper()
	m, err := model.Load(filestest.InNewFolder(t)("config.json", "{"+configs[name]+"}"))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// run runs the forward pass of a model.
func run(t *testing.T, m *model.Model, o forward.Options) *trial {
	t.Helper()
	r := &trial{memory: newBlocks(t), model: m, parameters: forward.Parameters{
		ByName:  map[string]*autograd.Parameter{},
		Experts: map[*model.Mixture]forward.Experts{}}}
	r.tape = autograd.NewTape(r.memory, func() string { return "gradients" })
	for _, p := range m.Parameters {
		if p.TiedTo != "" {
			continue
		}
		r.parameters.ByName[p.Name] = &autograd.Parameter{Name: p.Name, Elements: p.Elements(), DType: o.WeightType,
			Trainable: true}
	}
	for _, p := range m.Parameters {
		if p.TiedTo != "" {
			r.parameters.ByName[p.Name] = r.parameters.ByName[p.TiedTo]
		}
	}
	for _, b := range m.Network.Blocks() {
		if x := b.FeedForward.Mixture; x != nil {
			r.parameters.Experts[x] = r.expertsOf(x)
		}
	}
	r.result = forward.Run(r.tape, m.Network, r.parameters, o)
	return r
}

// expertsOf returns the weights of the experts of a mixture.
func (r *trial) expertsOf(x *model.Mixture) (e forward.Experts) {
	for _, p := range r.model.Parameters {
		made := r.parameters.ByName[p.Name]
		switch {
		case p.Name == x.GateUp:
			e.GateUp = append(e.GateUp, made)
		case p.Name == x.Down:
			e.Down = append(e.Down, made)
		}
	}
	return e
}

// backward runs the backward pass, and drops what the program holds.
func (r *trial) backward() {
	r.tape.Backward(r.result.Loss)
	r.tape.Drop(r.result.Loss)
	if r.result.Logits != nil {
		r.tape.Drop(r.result.Logits)
	}
	r.tape.Drop(r.result.RouterLogits...)
}

// TestOnlyGradientsStay runs both passes of all kinds of models under options that a seed picks. Nothing but the
// gradients of the parameters is left, and no block is freed twice.
func TestOnlyGradientsStay(t *testing.T) {
	for name := range configs {
		t.Run(name, func(t *testing.T) {
			m := load(t, name).FuseExperts()
			for seed := range uint64(60) {
				o, says := picked(rand.New(rand.NewPCG(seed, 1)))
				r := run(t, m, o)
				r.backward()
				var want int64
				for _, p := range m.Parameters {
					if made := r.parameters.ByName[p.Name]; p.TiedTo == "" && made.HasGradient() {
						want += made.Elements * o.WeightType.Size()
					}
				}
				if got := r.memory.sum; got != want || want == 0 {
					t.Errorf("seed %d, %s: %d bytes stay, want %d of gradients: %v", seed, says, got, want,
						r.memory.now)
				}
			}
		})
	}
}

// picked returns options that a source of random numbers picks, and their names.
func picked(r *rand.Rand) (o forward.Options, says string) {
	o = usual()
	var named []string
	one := func(name string, set func()) {
		if r.IntN(3) == 0 {
			set()
			named = append(named, name)
		}
	}
	one("eager", func() { o.Attention = forward.Eager })
	one("autocast", func() { o.WeightType, o.Autocast = dtype.F32, dtype.BF16 })
	one("checkpoints", func() { o.Recompute = &autograd.Checkpoint{} })
	one("every second block", func() { o.RecomputeEvery = 2 })
	one("repeated keys", func() { o.RepeatsKeys = true })
	one("contiguous heads", func() { o.ContiguousHeads = true })
	one("Liger", func() { o.Liger = true })
	one("compiled", func() { o.Compile = true })
	one("input gradients", func() { o.InputGradients = true })
	one("no dropout", func() { o.NoDropout = true })
	one("softmax's input", func() { o.SavesSoftmaxInput = true })
	losses := []forward.LossKind{forward.ShiftLabels, forward.ShiftLogits, forward.NativeLoss, forward.FusedLoss,
		forward.ChunkedLoss}
	o.Loss = losses[r.IntN(len(losses))]
	return o, fmt.Sprintf("loss %d, %s", o.Loss, strings.Join(named, ", "))
}

// TestPeaks holds what is kept after the forward pass, and the peaks of both passes, to testdata/peaks.golden. Tests
// of package plan hold the same code to PyTorch; this one names the model and the option that a change moves. -update
// writes the file.
func TestPeaks(t *testing.T) {
	var lines strings.Builder
	for _, name := range slices.Sorted(maps.Keys(configs)) {
		m := load(t, name).FuseExperts()
		for seed := range uint64(24) {
			o, says := picked(rand.New(rand.NewPCG(seed, 2)))
			r := run(t, m, o)
			kept, ahead := r.memory.sum, r.memory.peak
			r.memory.peak = 0
			r.backward()
			fmt.Fprintf(&lines, "%s, %s: %d kept, %d at the peak of the forward pass, %d of the backward pass\n", name,
				says, kept, ahead, r.memory.peak)
		}
	}
	goldentest.Compare(t, "testdata/peaks.golden", lines.String())
}

// after returns what a forward pass leaves for the backward pass.
func after(t *testing.T, m *model.Model, change func(*forward.Options)) int64 {
	t.Helper()
	o := usual()
	o.Loss = forward.NativeLoss
	change(&o)
	return run(t, m, o).memory.sum
}

// TestBatchIsLinear holds what is kept to grow by the same bytes with each sequence of a micro batch.
func TestBatchIsLinear(t *testing.T) {
	for name := range configs {
		m := load(t, name).FuseExperts()
		of := func(n int64) int64 { return after(t, m, func(o *forward.Options) { o.Batch = n }) }
		if first, second := of(2)-of(1), of(3)-of(2); first != second || first <= 0 {
			t.Errorf("%s: the second sequence adds %d bytes, the third %d", name, first, second)
		}
	}
}

// TestLossesInTheirOwnType holds the forward pass of losses that take logits in 16 bits: one that keeps the logits for
// their gradient, the copy that older classes make of several sequences, and what a compiled part saves.
func TestLossesInTheirOwnType(t *testing.T) {
	const logits = batch * sequence * vocabulary * 2
	m := load(t, "llama")
	of := func(loss forward.LossKind, change func(*forward.Options)) int64 {
		return after(t, m, func(o *forward.Options) {
			o.Loss = loss
			change(o)
		})
	}
	same := func(*forward.Options) {}
	if native, inPlace := of(forward.NativeLoss, same), of(forward.NarrowInPlaceLoss, same); native-inPlace != logits {
		t.Errorf("a loss in place keeps %d bytes less than one of logarithms, expected %d", native-inPlace, logits)
	}
	wide, narrow := of(forward.ShiftLogits, same), of(forward.ShiftNarrow, same)
	if wide-narrow < logits {
		t.Errorf("the loss of the logits' own type keeps %d bytes less than that of fp32, expected %d at least",
			wide-narrow, logits)
	}
	apart := of(forward.ChunkedOutputsLoss, same)
	compiled := of(forward.ChunkedOutputsLoss, func(o *forward.Options) { o.CompilesParts = true })
	if apart-compiled != logits { // logarithms in fp32, in place of which the logits are kept
		t.Errorf("compiled parts keep %d bytes less, expected %d", apart-compiled, logits)
	}
}

// TestWhatOptionsChange holds what options add to what is kept, in numbers that follow from shapes.
func TestWhatOptionsChange(t *testing.T) {
	const tokens = batch * sequence
	llama := load(t, "llama")
	base := after(t, llama, func(*forward.Options) {})
	for name, c := range map[string]struct {
		change func(*forward.Options)
		more   int64
	}{
		"flash keeps what SDPA keeps": {func(o *forward.Options) { o.Attention = forward.Flash }, 0},
		// Queries and keys are cut from repeated ones, which SDPA keeps in place of those that heads share.
		"repeated keys and values": {func(o *forward.Options) { o.RepeatsKeys = true },
			layers * 2 * tokens * (heads - keyHeads) * (hidden / heads) * 2},
		// fp32 parameters are not on the tape; their casts to bf16 are kept for the backward pass.
		"a checkpoint keeps the input of its block": {func(o *forward.Options) { o.Recompute = &autograd.Checkpoint{} },
			-layers * (perBlock(t) - tokens*hidden*2)},
	} {
		if got := after(t, llama, c.change) - base; got != c.more {
			t.Errorf("%s: %d bytes more, want %d", name, got, c.more)
		}
	}
}

// perBlock returns what a block of the Llama keeps: that of a model with one more, less that of the model.
func perBlock(t *testing.T) int64 {
	t.Helper()
	with := func(n int) int64 {
		text := strings.Replace(configs["llama"], `"num_hidden_layers": 3`,
			fmt.Sprintf(`"num_hidden_layers": %d`, n), 1)
		m, err := model.Load(filestest.InNewFolder(t)("config.json", "{"+text+"}"))
		if err != nil {
			t.Fatal(err)
		}
		return after(t, m, func(*forward.Options) {})
	}
	return with(4) - with(3)
}

// TestFusedLossHasNoLogits holds the peak of the loss far below the logits that other losses have.
func TestFusedLossHasNoLogits(t *testing.T) {
	m := load(t, "llama")
	logits := int64(batch * sequence * vocabulary * dtype.BF16.Size())
	peak := func(loss forward.LossKind) int64 {
		o := usual()
		o.Loss = loss
		r := run(t, m, o)
		r.backward()
		return r.memory.most[ledger.LogitsAndLoss]
	}
	if got := peak(forward.FusedLoss); got >= logits {
		t.Errorf("the fused loss takes %d bytes, the logits alone are %d", got, logits)
	}
	// transformers' loss holds the logits, their copy in fp32, its log-softmax, and the gradient of that.
	if got := peak(forward.ShiftLabels); got < 5*logits {
		t.Errorf("the loss of transformers takes %d bytes, the logits alone are %d", got, logits)
	}
}
