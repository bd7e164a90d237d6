package main

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
)

// A kernel is a module of a network that is measured by itself, with an input that needs a gradient. liger-kernel
// publishes such measurements (benchmark/scripts). The plan of a job consists of the same operations.
type kernel struct {
	pattern    string // of the words that describe it
	module     forward.Module
	parameters string // pattern of the names of its parameters; empty for none
	// retains means that the benchmark keeps the graph until the backward pass ends (retain_graph=True).
	retains bool
	// both means that the benchmark makes the module of each library, and runs one.
	both bool
	wide bool // the parameters stay in fp32
}

// kernels are the benchmarks; the first match counts.
var kernels = []kernel{
	{pattern: "rmsnorm", module: forward.FirstNorm, parameters: "post_attention_layernorm", retains: true, wide: true},
	{pattern: "mlp|swiglu", module: forward.FirstFeedForward, parameters: `\.mlp\.`, retains: true},
	{pattern: "lm_head|fused linear", module: forward.HeadWithLoss, parameters: "^lm_head", both: true},
	{pattern: `\bCE\b`, module: forward.LossAlone},
}

// kernel returns the kernel that the row measures, or nil for the training of a model.
func (e *expression) kernel() *kernel {
	if e.Model.Name != "" {
		return nil
	}
	for i := range kernels {
		if e.Model.Note.has(kernels[i].pattern) {
			return &kernels[i]
		}
	}
	return nil
}

// byLiger reports whether liger-kernel runs. A point names the library where a row has both.
func (e *expression) byLiger() bool {
	if e.point.has("hf|huggingface|liger") {
		return e.point.has("liger")
	}
	return e.Model.Note.has("liger|fused")
}

// counter counts the bytes of a tape, in the blocks of PyTorch's allocator.
type counter struct {
	blocks    map[int]int64
	next      int
	now, peak int64
}

func (c *counter) Allocate(bytes ledger.Bytes, _ ledger.Component, _ func() string) int {
	c.next++
	c.blocks[c.next] = (int64(bytes) + 511) / 512 * 512
	c.now += c.blocks[c.next]
	c.peak = max(c.peak, c.now)
	return c.next
}

func (c *counter) Relabel(int, ledger.Component, func() string) {}

func (c *counter) Free(id int) { c.now -= c.blocks[id] }

// useKernel makes the model whose module the kernel is, and returns the options of its passes.
func (e *expression) useKernel(k *kernel) (o forward.Options, err error) {
	m := e.Model
	m.Name, m.Layers, m.Heads, m.Elements = "llama", 1, 32, 0
	m.Hidden, m.Inner, m.Vocabulary = max(m.Hidden, 32), max(m.Inner, 32), max(m.Vocabulary, 32)
	for size, pattern := range map[*number]string{&m.Hidden: `\bH=(\d+)`, &m.Vocabulary: `\bV=(\d+)`} {
		if found := e.point.find(pattern); found != "" {
			*size = numberIn(found)
		}
	}
	config, err := e.configOf(m)
	if err != nil {
		return o, err
	}
	if err := e.use(config); err != nil {
		return o, err
	}
	o = forward.Options{Batch: max(1, int64(e.MicroBatch)), Sequence: int64(e.Sequence), WeightType: dtype.BF16,
		Parallel: forward.Degrees{Tensor: 1, Context: 1}, HasLogits: func() {}}
	o.Liger, o.Loss = e.byLiger(), forward.NativeLoss
	if e.Precision.named() == "fp32" {
		o.WeightType = dtype.F32
	}
	if rows := e.Model.Note.find(`\bM=(\d+)`); rows != "" {
		o.Sequence = int64(numberIn(rows))
	}
	switch {
	case o.Liger && k.module == forward.HeadWithLoss:
		o.Loss = forward.FusedLoss
	case o.Liger && k.module == forward.LossAlone:
		o.Loss = forward.InPlaceLoss
	}
	return o, nil
}

// peakOf returns the peak of the second run of a kernel, which adds its gradients to those of the first.
func (e *expression) peakOf(k *kernel) (float64, error) {
	options, err := e.useKernel(k)
	if err != nil {
		return 0, err
	}
	network, constant := e.model.Network, int64(0) // constant: parameters, input and workspaces
	parameters := forward.Parameters{ByName: map[string]*autograd.Parameter{}}
	for _, p := range e.model.Parameters {
		made := &autograd.Parameter{Name: p.Name, Elements: p.Elements(), DType: options.WeightType, Trainable: true}
		if k.wide {
			made.DType = dtype.F32
		}
		parameters.ByName[p.Name] = made
		if k.parameters != "" && text(p.Name).has(k.parameters) {
			constant += made.Bytes()
		}
	}
	if k.both {
		constant *= 2
	}
	if g, err := gpu.Find(e.GPU.gpu()); err == nil && k.parameters != "" && k.module != forward.FirstNorm {
		constant += 2 * int64(g.Workspace()) // of matmuls, in the forward and in the backward pass
	}
	width := network.Hidden
	if k.module == forward.LossAlone {
		width = network.Head.Outputs
	}
	input := &autograd.Parameter{Elements: options.Batch * options.Sequence * width, DType: options.WeightType,
		Trainable: true}
	if k.module != forward.LossAlone {
		constant += input.Bytes()
	}
	memory := &counter{blocks: map[int]int64{}}
	tape := autograd.NewTape(memory, func() string { return "gradients of a module" })
	tape.RetainsGraph = k.retains
	for range 2 {
		memory.peak = memory.now
		x := input.Tensor()
		if k.module == forward.LossAlone { // the gradient takes the place of the logits
			x = tape.New(input.Elements, input.DType)
			tape.RequireGradient(x)
		}
		y := forward.RunModule(tape, network, parameters, options, k.module, x)
		tape.Backward(y)
		tape.Drop(y, x)
	}
	return float64(memory.peak + constant), nil
}
