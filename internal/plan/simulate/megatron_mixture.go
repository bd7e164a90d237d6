package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/plan/autograd"
)

// think runs the feed-forward layer and adds its result.
func (p *megatronPass) think(layer megatron.Layer, x *autograd.Tensor) *autograd.Tensor {
	defer p.in(ledger.FeedForwardActivations, "results inside feed-forward layers")()
	return p.tape.Scope(func() *autograd.Tensor {
		y := p.norm(x, "pre_mlp_layernorm")
		run, name := p.mix, "moe"
		if layer.Mixture && p.Recomputes("layernorm") { // a norm of its own
			p.discard(y)
		}
		if !layer.Mixture {
			run, name = func(y *autograd.Tensor) *autograd.Tensor {
				return p.feedForward(y, "mlp", p.FeedForward/p.Degrees.Tensor)
			}, "mlp"
		}
		return p.add(p.checkpoint(name, run, y), "mlp.linear_fc2.bias", x)
	})
}

// feedForward runs two linear layers and the activation between them.
func (p *megatronPass) feedForward(x *autograd.Tensor, name string, width int64) *autograd.Tensor {
	return p.tape.Scope(func() *autograd.Tensor {
		y := p.linear(x, name+".linear_fc1", width*p.Gates(), false)
		z := p.activate(y, name+".linear_fc1.bias")
		p.tape.Drop(y)
		return p.project(z, name+".linear_fc2")
	})
}

// activate runs the activation function with the bias before it.
func (p *megatronPass) activate(x *autograd.Tensor, bias string) *autograd.Tensor {
	n := x.Elements / p.Gates()
	if p.SwiGLU && p.NoBiasSwiGLU { // two operations: the product saves the result of the first
		y := p.do(autograd.Operation{Inputs: with(x, p.weight(bias)), Saved: with(x)}, n, true)
		return p.do(autograd.Operation{Inputs: with(y, x), Saved: with(y)}, n, false)
	}
	return p.do(autograd.Operation{Inputs: with(x, p.weight(bias)), Saved: with(x)}, n, false)
}

// routed returns the tokens that a rank sends to experts, and those that its experts get.
func (p *megatronPass) routed() (sent, received int64) {
	sent = p.local() * p.TopK
	share := p.Imbalance
	if p.Capacity > 0 {
		share = min(share, p.Capacity)
		if p.PadsToCapacity {
			share = p.Capacity
		}
	}
	return sent, int64(float64(sent*p.Degrees.ExpertTensor) * share)
}

// mix runs a mixture of experts: tokens go to the ranks of their experts and back (token_dispatcher.py).
func (p *megatronPass) mix(x *autograd.Tensor) *autograd.Tensor {
	return p.tape.Scope(func() *autograd.Tensor {
		sent, received := p.routed()
		p.tape.Do(p.saving(autograd.Operation{Inputs: with(x, p.weight("mlp.router.weight")),
			Outputs: []autograd.Output{{Elements: 3 * p.local() * p.Experts, DType: dtype.F32, Saved: true}}}, x))
		y := p.dispatch(x, sent, received)
		y = p.experts(y, received)
		y = p.combine(y, sent)
		if p.SharedExpert > 0 {
			shared := p.checkpoint("shared_experts", func(x *autograd.Tensor) *autograd.Tensor {
				return p.feedForward(x, "mlp.shared_experts", p.SharedExpert/p.Degrees.Tensor)
			}, x)
			y = p.do(autograd.Operation{Inputs: with(y, shared), Shared: []bool{true, true}}, y.Elements, false)
		}
		return y
	})
}

// pass runs an operation that keeps nothing, and drops its input.
func (p *megatronPass) pass(x *autograd.Tensor, elements int64) *autograd.Tensor {
	y := p.do(autograd.Operation{Inputs: with(x)}, elements, false)
	p.tape.Drop(x)
	return y
}

// dispatch sends tokens to their experts. All-gather gathers all tokens and takes those of the rank's experts.
func (p *megatronPass) dispatch(x *autograd.Tensor, sent, received int64) *autograd.Tensor {
	group := p.Degrees.Expert * p.Degrees.ExpertTensor
	if p.Dispatcher == "allgather" {
		scratch := int64(0)
		if group > 1 {
			scratch = p.size(x.Elements * group)
			p.gather(scratch)
		}
		return p.do(autograd.Operation{Inputs: with(x), BackwardScratch: scratch}, received*p.Hidden, false)
	}
	y := p.do(autograd.Operation{Inputs: with(x)}, sent*p.Hidden, false)
	if p.Degrees.Expert > 1 {
		y = p.pass(y, received/p.Degrees.ExpertTensor*p.Hidden)
	}
	if p.Degrees.ExpertTensor > 1 {
		y = p.pass(y, received*p.Hidden)
	}
	if p.Experts/p.Degrees.Expert > 1 { // sorted by expert
		y = p.pass(y, received*p.Hidden)
	}
	return y
}

// combine returns the results of experts to their tokens.
func (p *megatronPass) combine(y *autograd.Tensor, sent int64) *autograd.Tensor {
	group := p.Degrees.Expert * p.Degrees.ExpertTensor
	if p.Dispatcher == "allgather" {
		if group > 1 {
			y = p.pass(y, p.local()*group*p.Hidden)
		}
		return p.pass(y, p.local()*p.Hidden)
	}
	if p.Experts/p.Degrees.Expert > 1 {
		y = p.pass(y, y.Elements)
	}
	if p.Degrees.ExpertTensor > 1 {
		y = p.pass(y, y.Elements/p.Degrees.ExpertTensor)
	}
	if p.Degrees.Expert > 1 {
		y = p.pass(y, sent*p.Hidden)
	}
	return p.pass(y, p.local()*p.Hidden)
}

// experts runs the rank's experts, as one with so many tokens: grouped products, or one expert after the other.
func (p *megatronPass) experts(x *autograd.Tensor, tokens int64) *autograd.Tensor {
	width := p.ExpertHidden / p.Degrees.ExpertTensor
	var first, second, bias []*autograd.Tensor
	for i := range p.Experts / p.Degrees.Expert {
		name := fmt.Sprintf("mlp.experts.%d.", i)
		first = append(first, with(p.weight(name+"linear_fc1.weight"))...)
		second = append(second, with(p.weight(name+"linear_fc2.weight"))...)
		bias = append(bias, with(p.weight(name+"linear_fc1.bias"), p.weight(name+"linear_fc2.bias"))...)
	}
	product := func(x *autograd.Tensor, weights []*autograd.Tensor, layer string, elements int64) *autograd.Tensor {
		o := autograd.Operation{Inputs: append(with(x), weights...)}
		if weights[0].NeedsGradient() {
			o = p.savingInput(o, x)
		}
		return p.besideExperts(p.do(o, elements, false), x, layer, tokens)
	}
	y := product(x, first, "linear_fc1", tokens*width*p.Gates())
	p.tape.Drop(x)
	act := func(y *autograd.Tensor) *autograd.Tensor {
		return p.tape.Scope(func() *autograd.Tensor {
			z := p.do(autograd.Operation{Inputs: append(with(y), bias...), Saved: with(y)}, tokens*width, false)
			if p.Gates() > 1 { // fused with the probabilities
				return z
			}
			return p.do(autograd.Operation{Inputs: with(z), Saved: with(z), Scratch: 4 * z.Elements}, z.Elements, false)
		})
	}
	z := p.checkpoint("moe_act", act, y)
	if p.Recomputes("moe_act") {
		p.discard(z)
	}
	p.tape.Drop(y)
	y = product(z, second, "linear_fc2", tokens*p.Hidden)
	p.tape.Drop(z)
	if !p.GroupedGEMM && p.Experts/p.Degrees.Expert > 1 { // the results of experts are joined
		y = p.pass(y, y.Elements)
	}
	return y
}
