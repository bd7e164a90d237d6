package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// addition is what an adapter of a parameter adds to it: two factors, or their product.
type addition struct{ left, right, product *autograd.Tensor }

// wrapped runs the module of fused experts inside of PEFT's wrappers of its parameters (ParamWrapper in
// peft/tuners/lora/layer.py). The wrapper of the gates is inside of the other one. Weights that they make live until
// the module is done (torch.nn.utils.parametrize.cached).
func (p *pass) wrapped(m *model.Mixture, body func() *autograd.Tensor) *autograd.Tensor {
	down, gateUp := p.parameters.Adapters[m.Down], p.parameters.Adapters[m.GateUp]
	if down == nil && gateUp == nil {
		return body()
	}
	return p.Scope(func() *autograd.Tensor {
		p.additions, p.sums = map[*autograd.Parameter]addition{}, map[*autograd.Parameter]*autograd.Tensor{}
		p.prepare(down, p.parameter(m.Down))
		p.prepare(gateUp, p.parameter(m.GateUp))
		result := body()
		p.additions, p.sums = nil, nil
		return result
	})
}

// prepare makes what an adapter adds to a parameter.
func (p *pass) prepare(a *Adapter, w *autograd.Parameter) {
	if a == nil {
		return
	}
	defer p.In(ledger.AdapterActivations, whyAdded)()
	if a.InFull {
		p.additions[w] = addition{product: p.inFull(a, w)}
		return
	}
	p.additions[w] = addition{left: p.cast(a.B.Tensor(), w.DType), right: p.cast(a.A.Tensor(), w.DType)}
}

// inFull returns the product of an adapter's factors in the type of its parameter.
func (p *pass) inFull(a *Adapter, w *autograd.Parameter) *autograd.Tensor {
	product := p.matmul(a.B.Tensor(), a.A.Tensor(), w.Elements)
	scaled := p.follow(product, p.unary(product, product.DType, saveNothing))
	return p.follow(scaled, p.cast(scaled, w.DType))
}

// stacked returns the weights of all experts of a layer as a product reads them: dequantized, and with what an adapter
// adds to them.
func (p *pass) stacked(w *autograd.Parameter, compute dtype.Type) *autograd.Tensor {
	if sum := p.sums[w]; sum != nil {
		return sum
	}
	base := w.Tensor()
	if w.Quantized != autograd.Unquantized {
		base = p.dequantized(w, compute)
	}
	a, adapted := p.additions[w]
	if !adapted {
		return base
	}
	defer p.In(ledger.AdapterActivations, whyAdded)()
	sum := p.withAddition(base, a)
	if w.Quantized != autograd.Unquantized {
		p.Drop(base)
	}
	p.sums[w] = sum
	return sum
}

func (p *pass) withAddition(base *autograd.Tensor, a addition) *autograd.Tensor {
	if a.product != nil {
		return p.add(base, a.product)
	}
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{base, a.left, a.right}, // torch.baddbmm
		Saved: []*autograd.Tensor{a.left, a.right}, BackwardScratch: max(a.left.Bytes(), a.right.Bytes()),
		Outputs: []autograd.Output{{Elements: base.Elements, DType: base.DType}}})[0]
}

// operand returns a parameter as an operand, with what an adapter of the parameter adds to it.
func (p *pass) operand(w *autograd.Parameter) *autograd.Tensor {
	a := p.parameters.Adapters[w.Name]
	switch {
	case a == nil:
		return p.weight(w)
	case w.Matrices > 0:
		return p.stacked(w, w.DType)
	}
	defer p.In(ledger.AdapterActivations, whyAdded)()
	product := p.inFull(a, w)
	return p.follow(product, p.add(w.Tensor(), product))
}

func whyAdded() string {
	return "what target_parameters adds to the weights of experts, and the sums: one for every product whose " +
		"backward pass is to come (ParamWrapper in peft/tuners/lora/layer.py)"
}
