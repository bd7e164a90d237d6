package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
)

// A kernel is a module of a network that is measured by itself, with an input that needs a gradient. liger-kernel
// publishes such measurements (benchmark/scripts). The plan of a job consists of the same operations.
type kernel struct {
	Module string // one of modules
	Liger  bool   // liger-kernel runs
	GPU    string

	Batch, Sequence, Hidden, Inner, Vocabulary int64 // 0 for what the module does not depend on

	Float32 bool // weights and inputs; else bf16
}

// module is how a benchmark runs a kind of module.
type module struct {
	forward.Module
	parameters string // part of the names of its parameters; empty for none
	// retains means that the benchmark keeps the graph until the backward pass ends (retain_graph=True).
	retains bool
	// both means that the benchmark makes the module of each library, and runs one.
	both bool
	wide bool // the parameters stay in fp32
}

var modules = map[string]module{
	"norm":         {Module: forward.FirstNorm, parameters: "post_attention_layernorm", retains: true, wide: true},
	"feed-forward": {Module: forward.FirstFeedForward, parameters: ".mlp.", retains: true},
	"head":         {Module: forward.HeadWithLoss, parameters: "lm_head", both: true},
	"loss":         {Module: forward.LossAlone},
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

// model makes the model whose module the kernel is.
func (k *kernel) model(folder string) (*model.Model, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	const least = 32
	config, err := json.Marshal(map[string]any{"architectures": []string{"LlamaForCausalLM"}, "num_hidden_layers": 1,
		"num_attention_heads": 32, "hidden_size": max(k.Hidden, least), "intermediate_size": max(k.Inner, least),
		"vocab_size": max(k.Vocabulary, least), "torch_dtype": "float32"})
	if err != nil {
		return nil, err
	}
	path := filepath.Join(folder, "config.json")
	if err := os.WriteFile(path, config, 0o644); err != nil {
		return nil, err
	}
	return model.Load(path)
}

// options returns the options of the module's passes.
func (k *kernel) options(m module) forward.Options {
	o := forward.Options{Batch: max(1, k.Batch), Sequence: k.Sequence, WeightType: dtype.BF16,
		Parallel: forward.Degrees{Tensor: 1, Context: 1}, HasLogits: func() {}}
	o.Liger, o.Loss = k.Liger, forward.NativeLoss
	if k.Float32 {
		o.WeightType = dtype.F32
	}
	switch {
	case o.Liger && m.Module == forward.HeadWithLoss:
		o.Loss = forward.FusedLoss
	case o.Liger && m.Module == forward.LossAlone:
		o.Loss = forward.InPlaceLoss
	}
	return o
}

// peakOf returns the peak of the second run of a kernel, which adds its gradients to those of the first.
func (k *kernel) peakOf(folder string) (float64, error) {
	m, known := modules[k.Module]
	if !known {
		return 0, fmt.Errorf("the module %q is not known", k.Module)
	}
	of, err := k.model(folder)
	if err != nil {
		return 0, err
	}
	options, network, constant := k.options(m), of.Network, int64(0) // constant: parameters, input and workspaces
	parameters := forward.Parameters{ByName: map[string]*autograd.Parameter{}}
	for _, p := range of.Parameters {
		made := &autograd.Parameter{Name: p.Name, Elements: p.Elements(), DType: options.WeightType, Trainable: true}
		if m.wide {
			made.DType = dtype.F32
		}
		parameters.ByName[p.Name] = made
		if m.parameters != "" && strings.Contains(p.Name, m.parameters) {
			constant += made.Bytes()
		}
	}
	if m.both {
		constant *= 2
	}
	if g, err := gpu.Find(k.GPU); err == nil && m.parameters != "" && m.Module != forward.FirstNorm {
		constant += 2 * int64(g.Workspace()) // of matmuls, in the forward and in the backward pass
	}
	width := network.Hidden
	if m.Module == forward.LossAlone {
		width = network.Head.Outputs
	}
	input := &autograd.Parameter{Elements: options.Batch * options.Sequence * width, DType: options.WeightType,
		Trainable: true}
	if m.Module != forward.LossAlone {
		constant += input.Bytes()
	}
	memory := &counter{blocks: map[int]int64{}}
	tape := autograd.NewTape(memory, func() string { return "gradients of a module" })
	tape.RetainsGraph = m.retains
	for range 2 {
		memory.peak = memory.now
		x := input.Tensor()
		if m.Module == forward.LossAlone { // the gradient takes the place of the logits
			x = tape.New(input.Elements, input.DType)
			tape.RequireGradient(x)
		}
		y := forward.RunModule(tape, network, parameters, options, m.Module, x)
		tape.Backward(y)
		tape.Drop(y, x)
	}
	return float64(memory.peak + constant), nil
}
