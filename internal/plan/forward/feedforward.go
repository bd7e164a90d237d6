package forward

import (
	"cmp"
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// feedForward runs the second half of a block.
func (p *pass) feedForward(f *model.FeedForward, x *autograd.Tensor) *autograd.Tensor {
	defer p.In(ledger.FeedForwardActivations, p.whyFeedForward)()
	return p.Scope(func() *autograd.Tensor {
		x := p.gather(x)
		if f.Mixture != nil {
			if f.Mixture.Routing == model.SigmoidOfChosen {
				return p.scatter(p.everyExpert(f.Mixture, x))
			}
			return p.scatter(p.mixture(f.Mixture, x))
		}
		return p.scatter(p.tiled(f, x))
	})
}

func (p *pass) whyFeedForward() string {
	return fmt.Sprintf("projections, activation and product of the feed-forward networks of %d blocks in %v: %s, %s",
		len(p.network.Blocks()), p.compute(), p.batch(), p.kept())
}

// inner returns a rank's width between the projections.
func (p *pass) inner(f *model.FeedForward) int64 { return max(1, f.Inner/p.Parallel.Tensor) }

// dense runs a feed-forward network on every token.
func (p *pass) dense(f *model.FeedForward, x *autograd.Tensor) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		inner := p.inner(f)
		var h *autograd.Tensor
		switch {
		case f.GateUp != "":
			both := p.linear(f.GateUp, x, 2*inner)
			parts := p.split(both, inner, inner)
			p.Drop(both)
			h = p.gated(f.Activation, parts[0], parts[1])
			p.Drop(parts...)
		case f.Gate != "":
			if f.Scales {
				return p.scaledGate(f, x, inner)
			}
			gate := p.linear(f.Gate, x, inner)
			if p.Compile || p.Liger {
				up := p.linear(f.Up, x, inner)
				h = p.gated(f.Activation, gate, up)
				p.Drop(gate, up)
				break
			}
			active := p.follow(gate, p.activate(f.Activation, gate))
			up := p.linear(f.Up, x, inner)
			h = p.multiply(active, up)
			p.Drop(active, up)
		default:
			up := p.linear(f.Up, x, inner)
			if f.Alphas != "" {
				h = p.follow(up, p.xielu(f, up))
				break
			}
			h = p.follow(up, p.activate(f.Activation, up))
		}
		h = p.dropout(h, f.Dropout)
		return p.linear(f.Down, h, cmp.Or(f.Width, p.network.Hidden))
	})
}

// scaledGate runs a gated network whose gate and result are multiplied by constants. Values come first.
func (p *pass) scaledGate(f *model.FeedForward, x *autograd.Tensor, inner int64) *autograd.Tensor {
	up, gate := p.linear(f.Up, x, inner), p.linear(f.Gate, x, inner)
	gate = p.follow(gate, p.unary(gate, gate.DType, saveNothing))
	active := p.follow(gate, p.activate(f.Activation, gate))
	h := p.multiply(up, active)
	p.Drop(up, active)
	y := p.follow(h, p.linear(f.Down, h, p.network.Hidden))
	return p.follow(y, p.unary(y, y.DType, saveNothing))
}

// gated multiplies the activated gate with the values. Fused, it saves only the
// two. Liger's gradients of the two replace them (liger_kernel/ops/swiglu.py).
func (p *pass) gated(activation string, gate, up *autograd.Tensor) *autograd.Tensor {
	if p.Compile || p.Liger {
		both := []*autograd.Tensor{gate, up}
		return p.Do(autograd.Operation{Inputs: both, Saved: both, Replaces: p.Liger,
			Outputs: []autograd.Output{{Elements: gate.Elements, DType: gate.DType}}})[0]
	}
	active := p.activate(activation, gate)
	h := p.multiply(active, up)
	p.Drop(active)
	return h
}

// activate runs an activation function. Most save their input. A function whose
// gradient depends on its result saves the result. Functions that transformers
// writes out in several operations save intermediate results, too.
func (p *pass) activate(name string, x *autograd.Tensor) *autograd.Tensor {
	if p.FusedActivations || p.Compile {
		return p.unary(x, x.DType, saveInput)
	}
	switch name {
	case "relu", "tanh", "sigmoid":
		return p.unary(x, x.DType, saveOutput)
	case "relu2": // the square saves the result of the function
		return p.Scope(func() *autograd.Tensor {
			positive := p.unary(x, x.DType, saveOutput)
			return p.unary(positive, positive.DType, saveInput)
		})
	case "bloom_gelu": // a Function with formulas of its own for both passes, which saves its input
		return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x},
			Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}},
			Scratch: 2 * x.Bytes(), BackwardScratch: 4 * x.Bytes()})[0]
	case "gelu_new", "gelu_fast":
		// 0.5 x (1 + tanh(...)): the power saves x, which autocast casts for it, tanh its
		// result, and the last product both of its factors.
		return p.Scope(func() *autograd.Tensor {
			half := p.unary(x, x.DType, saveNothing)
			wide := p.cast(x, p.wide(x))
			cubed := p.unary(wide, wide.DType, saveInput)
			p.dropCasts(x, wide)
			inside := p.follow(cubed, p.add(x, cubed))
			inside = p.follow(inside, p.unary(inside, inside.DType, saveNothing))
			bent := p.follow(inside, p.unary(inside, inside.DType, saveOutput))
			bent = p.follow(bent, p.unary(bent, bent.DType, saveNothing))
			return p.multiply(half, bent)
		})
	case "quick_gelu": // x times the sigmoid of a multiple
		return p.Scope(func() *autograd.Tensor {
			more := p.unary(x, x.DType, saveNothing)
			return p.multiply(x, p.follow(more, p.unary(more, more.DType, saveOutput)))
		})
	default: // silu, gelu, gelu_pytorch_tanh: one kernel
		return p.unary(x, x.DType, saveInput)
	}
}

// xielu runs the activation xIELU, which has two parameters, as transformers does
// without the kernel of its authors: a product of three factors where x is
// positive, and an exponential elsewhere.
func (p *pass) xielu(f *model.FeedForward, x *autograd.Tensor) *autograd.Tensor {
	positive, negative := p.parameter(f.Alphas+".alpha_p").Tensor(), p.parameter(f.Alphas+".alpha_n").Tensor()
	if p.Compile {
		return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x, positive, negative}, Saved: []*autograd.Tensor{x},
			Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}}})[0]
	}
	return p.Scope(func() *autograd.Tensor {
		chosen := p.New(x.Elements, dtype.Bool)
		above := p.multiply(positive, x)
		above = p.follow(above, p.multiply(above, x))
		linear := p.unary(x, x.DType, saveNothing)
		above = p.follow(above, p.add(above, linear))
		p.Drop(linear)
		below := p.unary(x, x.DType, saveInput) // the lesser of x and a constant
		below = p.follow(below, p.unary(below, p.wide(below), saveOutput))
		below = p.follow(below, p.add(below, x))
		below = p.follow(below, p.multiply(below, negative))
		linear = p.unary(x, x.DType, saveNothing)
		below = p.follow(below, p.add(below, linear))
		p.Drop(linear)
		return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{above, below}, Saved: []*autograd.Tensor{chosen},
			Outputs: []autograd.Output{{Elements: x.Elements, DType: above.DType}}})[0]
	})
}

// wide returns the type of operations that autocast runs in fp32.
func (p *pass) wide(x *autograd.Tensor) dtype.Type {
	if p.Autocast != dtype.Invalid {
		return dtype.F32
	}
	return x.DType
}

// mixture runs every token through the experts that the router chooses. The plan
// assumes that all experts have the same number of tokens. It computes them
// together: the tokens of an expert follow those of the expert before.
func (p *pass) mixture(m *model.Mixture, x *autograd.Tensor) *autograd.Tensor {
	var shared *autograd.Tensor
	if m.Shared != nil && m.SharedFirst {
		shared = p.shared(m, x)
	}
	weights := p.route(m, x)
	input, y := x, (*autograd.Tensor)(nil)
	if m.Narrow != "" {
		x = p.linear(m.Narrow, x, m.Width(p.network.Hidden))
	}
	if m.Hosted {
		y = p.hostedExperts(m, x, weights)
		p.Drop(weights)
	} else if p.ScattersExperts && m.Fused() {
		y = p.Scope(func() *autograd.Tensor { return p.scattered(m, x, weights) })
		p.Drop(weights)
	} else {
		y = p.wrapped(m, func() *autograd.Tensor {
			return p.Scope(func() *autograd.Tensor { return p.weighed(m, x, weights) })
		})
	}
	y = p.follow(y, p.cast(y, x.DType))
	if m.Widen != "" {
		p.Drop(x)
		y = p.follow(y, p.linear(m.Widen, y, p.network.Hidden))
	}
	x = input
	if m.Shared != nil {
		if shared == nil {
			shared = p.shared(m, x)
		}
		sum := p.add(y, shared)
		p.Drop(y, shared)
		y = sum
	}
	return y
}

// weighed runs the module of the experts: each on its tokens, and the sum of their weighed results for each token.
func (p *pass) weighed(m *model.Mixture, x, weights *autograd.Tensor) *autograd.Tensor {
	hidden := m.Width(p.network.Hidden)
	chosen := x.Elements / hidden * m.Chosen
	var order, rows, back *autograd.Tensor
	if m.Fused() { // sorted by expert, and back
		order, rows, back = p.New(chosen, dtype.I64), p.New(chosen, dtype.I64), p.New(chosen, dtype.I64)
		weights = p.follow(weights, p.indexed(weights, order, chosen))
	}
	taken := p.indexed(x, rows, chosen*hidden)
	down := p.hooked(m.ExpertsPath(), func() *autograd.Tensor { return p.experts(m, taken, order) })
	weighed := p.multiply(down, weights)
	if m.Fused() { // grouped_mm_experts_forward holds its variables until it returns
		weighed = p.indexed(weighed, back, weighed.Elements)
	} else {
		p.Drop(down, weights)
	}
	y := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{weighed},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: weighed.DType}}})[0]
	p.Drop(weighed, weights)
	return y
}

// everyExpert runs every token through every expert, as Llama 4 does. A sigmoid of
// the router's logits scales their inputs: zero for experts that are not chosen.
func (p *pass) everyExpert(m *model.Mixture, x *autograd.Tensor) *autograd.Tensor {
	hidden, count, inner := p.network.Hidden, int64(len(m.Experts)), p.inner(&m.Experts[0])
	tokens := x.Elements / hidden
	logits := p.routerLogits(m, x)
	chosen := p.New(tokens*m.Chosen, dtype.I64)
	best := p.follow(logits, p.indexed(logits, chosen, chosen.Elements))
	scores := p.follow(best, p.indexed(best, chosen, tokens*count))
	p.Drop(chosen)
	wide := p.follow(scores, p.cast(scores, dtype.F32))
	weights := p.follow(wide, p.unary(wide, dtype.F32, saveOutput))
	weights = p.follow(weights, p.cast(weights, x.DType))
	taken := p.resized(x, count)
	turned := p.follow(weights, p.unary(weights, weights.DType, saveNothing))
	weighed := p.follow(taken, p.multiply(taken, turned))
	p.Drop(turned)
	down := p.hooked(m.ExpertsPath(), func() *autograd.Tensor {
		if !m.Fused() {
			return p.oneByOne(m, weighed, inner)
		}
		return p.wrapped(m, func() *autograd.Tensor {
			w := p.parameters.Experts[m]
			both := p.matrix(p.operand(w.GateUp[0]), nil, weighed, hidden, 2*inner)
			parts := p.split(both, inner, inner)
			active := p.activate(m.Experts[0].Activation, parts[0])
			h := p.multiply(parts[1], active)
			p.Drop(both, active)
			p.Drop(parts...)
			return p.follow(h, p.matrix(p.operand(w.Down[0]), nil, h, inner, hidden))
		})
	})
	shared := p.shared(m, x)
	sum := p.follow(down, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{down},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: down.DType}}})[0])
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{shared, sum}, Shared: []bool{true, true},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: shared.DType, View: true}}})[0]
}

// oneByOne runs axolotl's linearized experts of Llama 4, each on its slice of the inputs. Their results are written
// into slices of a tensor. The gradient of a slice is as large as all slices.
func (p *pass) oneByOne(m *model.Mixture, weighed *autograd.Tensor, inner int64) *autograd.Tensor {
	all := p.New(weighed.Elements, weighed.DType)
	for i := range m.Experts {
		e := &m.Experts[i]
		x := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{weighed},
			Outputs: []autograd.Output{{Elements: weighed.Elements / int64(len(m.Experts)), DType: weighed.DType,
				View: true}}})[0]
		gate, up := p.linear(e.Gate, x, inner), p.linear(e.Up, x, inner)
		active := p.follow(gate, p.activate(e.Activation, gate))
		h := p.multiply(up, active)
		p.Drop(x, up, active)
		y := p.follow(h, p.linear(e.Down, h, p.network.Hidden))
		next := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{all, y}, Shared: []bool{true, true},
			BackwardScratch: all.Bytes(),
			Outputs:         []autograd.Output{{Elements: all.Elements, DType: all.DType, View: true}}})[0]
		p.Drop(all, y)
		all = next
	}
	return all
}

// indexed takes elements of a tensor by an index, which it saves.
func (p *pass) indexed(x, index *autograd.Tensor, elements int64) *autograd.Tensor {
	o := autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: elements, DType: x.DType}}}
	if index != nil {
		o.Saved = []*autograd.Tensor{index}
	}
	return p.Do(o)[0]
}

// shared runs the experts that every token passes.
func (p *pass) shared(m *model.Mixture, x *autograd.Tensor) *autograd.Tensor {
	shared := p.dense(m.Shared, x)
	if m.SharedGate == "" {
		return shared
	}
	gate := p.linear(m.SharedGate, x, 1)
	gate = p.follow(gate, p.unary(gate, gate.DType, saveOutput))
	shared = p.follow(shared, p.multiply(shared, gate))
	p.Drop(gate)
	return shared
}

// route returns the weights of the experts that the router chooses for each token.
func (p *pass) route(m *model.Mixture, x *autograd.Tensor) *autograd.Tensor {
	tokens := x.Elements / p.network.Hidden
	chosen := tokens * m.Chosen
	logits := p.routerLogits(m, x)
	if m.WideLogits {
		logits = p.follow(logits, p.cast(logits, dtype.F32))
	}
	if p.network.RouterLoss {
		if seen := p.Escape(logits); seen != nil {
			p.routers = append(p.routers, seen)
		}
	}
	best := func(scores *autograd.Tensor) *autograd.Tensor {
		return p.follow(scores, p.indexed(scores, p.New(chosen, dtype.I64), chosen))
	}
	var weights *autograd.Tensor
	switch m.Routing {
	case model.SoftmaxOfChosen:
		weights = best(p.follow(logits, p.cast(logits, dtype.F32)))
		weights = p.follow(weights, p.softmax(weights, weights.DType))
	case model.SigmoidOfAll:
		wide := p.follow(logits, p.cast(logits, dtype.F32))
		weights = best(p.follow(wide, p.unary(wide, dtype.F32, saveOutput)))
	default:
		scores := dtype.F32
		if m.NarrowSoftmax {
			scores = logits.DType
		}
		weights = best(p.follow(logits, p.softmax(logits, scores)))
	}
	if m.Normalized { // in place: the division saves a copy of the weights and their sums
		copied, sums := p.New(chosen, weights.DType), p.New(tokens, weights.DType)
		divided := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{weights}, Saved: []*autograd.Tensor{copied, sums},
			Outputs: []autograd.Output{{Elements: chosen, DType: weights.DType}}})[0]
		p.Drop(copied, sums)
		weights = p.follow(weights, divided)
	}
	if m.Rescaled {
		weights = p.follow(weights, p.unary(weights, weights.DType, saveNothing))
	}
	if m.WideWeights && m.Fused() {
		return weights
	}
	return p.follow(weights, p.cast(weights, x.DType))
}

// routerLogits runs the projection of a router.
func (p *pass) routerLogits(m *model.Mixture, x *autograd.Tensor) *autograd.Tensor {
	count := int64(len(m.Experts))
	w := p.parameter(m.Router + ".weight")
	if m.Hosted && m.WideRouter && p.parameters.Adapters[m.Router] != nil { // _DeepseekRouterLinear, which PEFT adapts
		wide := p.cast(x, dtype.F32)
		defer p.dropCasts(x, wide)
		return p.linear(m.Router, x, count)
	}
	if !m.WideRouter || p.Autocast != dtype.Invalid && !m.IgnoresAutocast || w.Quantized != autograd.Unquantized {
		return p.linear(m.Router, x, count)
	}
	return p.hooked(m.Router, func() *autograd.Tensor {
		held := w.Tensor()
		if p.parameters.Adapters[w.Name] != nil {
			held = p.operand(w)
		}
		wide, weight := p.cast(x, dtype.F32), p.cast(held, dtype.F32)
		logits := p.product(wide, weight, x.Elements/p.network.Hidden*count, dtype.F32)
		p.dropCasts(x, wide, held, weight)
		return logits
	})
}

// experts runs the networks of all experts, each on its tokens, and drops the
// tokens.
func (p *pass) experts(m *model.Mixture, taken, order *autograd.Tensor) *autograd.Tensor {
	inner, weights := p.inner(&m.Experts[0]), p.parameters.Experts[m]
	if m.Clamped {
		return p.clamped(m, taken, order, inner)
	}
	width := m.Width(p.network.Hidden)
	if m.Ungated {
		up := weights.Up
		if m.Fused() {
			up = weights.GateUp
		}
		h := p.grouped(up, taken, width, inner)
		h = p.follow(h, p.activate(m.Experts[0].Activation, h))
		return p.follow(h, p.grouped(weights.Down, h, inner, width))
	}
	gate, up := p.gateAndUp(m, taken, inner)
	if !m.Fused() {
		p.Drop(taken)
	}
	active := p.follow(gate, p.activate(m.Experts[0].Activation, gate))
	h := p.multiply(active, up)
	p.Drop(active, up)
	return p.follow(h, p.grouped(weights.Down, h, inner, width))
}

func (p *pass) gateAndUp(m *model.Mixture, taken *autograd.Tensor, inner int64) (gate, up *autograd.Tensor) {
	weights, hidden := p.parameters.Experts[m], p.network.Hidden
	if !m.Fused() {
		return p.grouped(weights.Gate, taken, hidden, inner), p.grouped(weights.Up, taken, hidden, inner)
	}
	both := p.grouped(weights.GateUp, taken, hidden, 2*inner)
	parts := p.split(both, inner, inner)
	p.Drop(both)
	return parts[0], parts[1]
}

// grouped runs the same linear module of all experts, each on its tokens.
func (p *pass) grouped(weights []*autograd.Parameter, x *autograd.Tensor, in, out int64) *autograd.Tensor {
	compute, weight := weights[0].DType, p.weight
	switch {
	case weights[0].Matrices > 0: // autocast does not know torch's grouped_mm
		if weights[0].Quantized == autograd.EightBit { // bitsandbytes' int8_vectorwise_dequant
			compute = dtype.F32
		}
		weight = func(w *autograd.Parameter) *autograd.Tensor { return p.stacked(w, compute) }
	case p.Autocast != dtype.Invalid:
		compute = p.Autocast
	}
	input := p.cast(x, compute)
	o := autograd.Operation{
		Inputs: make([]*autograd.Tensor, 1, 1+len(weights)), Saved: make([]*autograd.Tensor, 0, 1+len(weights)),
		Outputs: []autograd.Output{{Elements: input.Elements / in * out, DType: compute}}, Product: true, Kept: true,
	}
	o.Inputs[0] = input
	for _, w := range weights {
		x := weight(w)
		o.Inputs = append(o.Inputs, x)
		if input.NeedsGradient() {
			o.Saved = append(o.Saved, x)
		}
		if w.Matrices == 0 && w.Quantized != autograd.Unquantized { // dequantized one expert at a time
			o.Scratch, o.BackwardScratch = w.Elements*compute.Size(), w.Elements*compute.Size()
		}
	}
	if o.Inputs[1].NeedsGradient() {
		o.Saved = append(o.Saved, input)
	}
	if weights[0].Matrices == 0 { // grouped_mm is no product of cuBLAS
		p.works(&o, 0)
	}
	y := p.Do(o)[0]
	p.dropCasts(x, input)
	return y
}

// dequantized returns the weights of all experts of a layer, which a parametrization makes of their quantized form. The
// parametrization has no gradient, so the product saves what it has made (bitsandbytes/nn/parametrize.py).
func (p *pass) dequantized(w *autograd.Parameter, compute dtype.Type) *autograd.Tensor {
	defer p.In(ledger.DequantizedWeights, func() string {
		return "the quantized experts of a layer in full, for every product whose backward pass is to come"
	})()
	return p.New(w.Elements, compute)
}

// clamped runs the experts of gpt-oss, whose projections have biases. The limits
// save both halves, and the gate's product with its sigmoid three tensors.
func (p *pass) clamped(m *model.Mixture, taken, order *autograd.Tensor, inner int64) *autograd.Tensor {
	weights, hidden := p.parameters.Experts[m], p.network.Hidden
	both := p.biased(weights.GateUp, p.parameter(m.GateUpBias), taken, order, hidden, 2*inner)
	parts := p.split(both, inner, inner)
	p.Drop(both)
	gate, up := p.unary(parts[0], both.DType, saveInput), p.unary(parts[1], both.DType, saveInput)
	p.Drop(parts...)
	sigmoid := p.unary(gate, gate.DType, saveNothing)
	sigmoid = p.follow(sigmoid, p.unary(sigmoid, gate.DType, saveOutput))
	glu := p.multiply(gate, sigmoid)
	p.Drop(gate, sigmoid)
	up = p.follow(up, p.unary(up, up.DType, saveNothing))
	h := p.multiply(up, glu)
	p.Drop(up, glu)
	return p.follow(h, p.biased(weights.Down, p.parameter(m.DownBias), h, order, inner, hidden))
}

// biased is grouped with a bias for each expert, which is added in place.
func (p *pass) biased(weights []*autograd.Parameter, bias *autograd.Parameter, x, order *autograd.Tensor,
	in, out int64) *autograd.Tensor {
	rows := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{bias.Tensor()}, Saved: []*autograd.Tensor{order},
		Outputs: []autograd.Output{{Elements: x.Elements / in * out, DType: bias.DType}}})[0]
	y := p.grouped(weights, x, in, out)
	sum := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{y, rows}, Shared: []bool{true, true},
		Outputs: []autograd.Output{{Elements: y.Elements, DType: y.DType, View: true}}})[0]
	p.Drop(y, rows)
	return sum
}
