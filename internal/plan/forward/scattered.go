package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// scattered runs the experts as axolotl's kernels of ScatterMoE do (scattermoe_experts_forward in
// src/axolotl/integrations/kernels/libs/scattermoe_lora/experts.py). The kernels read the tokens where they are, add
// what adapters of the experts' parameters add as they go, and weigh the results.
func (p *pass) scattered(m *model.Mixture, x, weights *autograd.Tensor) *autograd.Tensor {
	hidden, inner, experts := p.network.Hidden, p.inner(&m.Experts[0]), p.parameters.Experts[m]
	chosen := x.Elements / hidden * m.Chosen
	routing := p.cast(weights, x.DType)
	sorted, places := p.New(chosen, dtype.I64), p.New(chosen, dtype.I64)
	return p.hooked(m.ExpertsPath(), func() *autograd.Tensor {
		gateUp, down := p.denseExperts(experts.GateUp[0], x.DType), p.denseExperts(experts.Down[0], x.DType)
		o := p.expertProduct(experts.GateUp[0], gateUp, x)
		o.Saved = append(o.Saved, sorted, places)
		o.Outputs = []autograd.Output{{Elements: chosen * 2 * inner, DType: x.DType}}
		o.BackwardScratch += chosen * hidden * x.DType.Size() // the gradient of every chosen token
		both := p.Do(o)[0]
		parts := p.split(both, inner, inner)
		p.Drop(both)
		h := p.multiply(p.activate(m.Experts[0].Activation, parts[0]), parts[1])

		o = p.expertProduct(experts.Down[0], down, h)
		o.Inputs, o.Saved = append(o.Inputs, routing), append(o.Saved, sorted, places, routing)
		o.Outputs = []autograd.Output{{Elements: x.Elements, DType: x.DType},
			{Elements: chosen * hidden, DType: x.DType, Saved: true}}
		return p.Do(o)[0]
	})
}

// denseExperts returns the weights of all experts in the type of the kernels. Quantized ones are dequantized until the
// module is done, and once more for each product of the backward pass.
func (p *pass) denseExperts(w *autograd.Parameter, compute dtype.Type) *autograd.Tensor {
	if w.Quantized != autograd.Unquantized {
		return p.dequantized(w, compute)
	}
	return p.cast(w.Tensor(), compute)
}

// expertProduct returns the product of experts with their tokens: ParallelLinear or, with an adapter, ScatterMoELoRA.
func (p *pass) expertProduct(w *autograd.Parameter, dense, x *autograd.Tensor) autograd.Operation {
	o := autograd.Operation{Inputs: []*autograd.Tensor{x, dense}, Saved: []*autograd.Tensor{x}, Product: true,
		Kept: true}
	if w.Quantized != autograd.Unquantized {
		o.BackwardScratch = dense.Bytes()
	} else {
		o.Saved = append(o.Saved, dense)
	}
	if a := p.parameters.Adapters[w.Name]; a != nil {
		defer p.In(ledger.AdapterActivations, a.whyActivations)()
		for _, factor := range []*autograd.Parameter{a.A, a.B} { // in another layout
			copied := p.unary(factor.Tensor(), factor.DType, saveNothing)
			o.Inputs, o.Saved = append(o.Inputs, copied), append(o.Saved, copied)
		}
	}
	return o
}
