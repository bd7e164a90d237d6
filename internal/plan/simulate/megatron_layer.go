package simulate

import (
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
)

// norm runs a norm, which saves its input and two sums of each row.
func (p *megatronPass) norm(x *autograd.Tensor, name string) *autograd.Tensor {
	defer p.in(ledger.NormActivations, "results of norms")()
	w := p.weight(name + ".weight")
	if w == nil {
		return x
	}
	rows := x.Elements / w.Elements
	return p.do(autograd.Operation{Inputs: with(x, w, p.weight(name+".bias")), Saved: with(x),
		Outputs: []autograd.Output{{Elements: 2 * rows, DType: dtype.F32, Saved: true}}}, x.Elements, false)
}

// linear runs a linear layer whose outputs are split among tensor parallel ranks: it gathers its input.
func (p *megatronPass) linear(x *autograd.Tensor, name string, out int64, adds bool) *autograd.Tensor {
	w := p.weight(name + ".weight")
	in := w.Elements / out
	rows := p.rows(x, in)
	bias := p.weight(name + ".bias")
	if !adds {
		bias = nil
	}
	gathered := int64(0)
	if rows*in > x.Elements {
		gathered = p.size(rows * in)
	}
	if !p.TransformerEngine() && w.NeedsGradient() {
		p.gather(gathered)
		gathered = 0
	}
	o := autograd.Operation{Inputs: with(x, w, bias), Scratch: gathered, BackwardScratch: gathered}
	seen := x // by the adapter
	if gathered > 0 && p.isAdapted(name) && p.fusesNorm(name) && p.Adapter.Program == recipe.BridgeTuner {
		// return_layernorm_output_gathered: the layer gathers no tensor of its own.
		seen, o.Scratch = p.gatherForAdapter(x, rows*in), 0
	}
	switch {
	case !p.isFrozen(name):
		o = p.savingInput(o, x)
	case p.isAdapted(name) && p.fusesNorm(name): // return_layernorm_output keeps the norm's result
		o = p.saving(o, x)
	}
	y := p.adapted(p.do(o, rows*out, false), seen, name, func(x *autograd.Tensor, adapter string) *autograd.Tensor {
		return p.beside(x, adapter, in, rows, p.Degrees.Tensor)
	})
	if seen != x {
		p.tape.Drop(seen)
	}
	return y
}

// fusesNorm reports whether Transformer Engine has a linear layer and the norm before it in one module.
func (p *megatronPass) fusesNorm(name string) bool {
	switch name {
	case "self_attention.linear_qkv", "mlp.linear_fc1":
		return p.TransformerEngine()
	case "self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj":
		return p.TransformerEngine() && p.QKNorm
	}
	return false
}

// savingInput has a linear layer save its input, in fp8 if it computes in fp8.
func (p *megatronPass) savingInput(o autograd.Operation, x *autograd.Tensor) autograd.Operation {
	if p.FP8 == "" || p.discarded[x] {
		return p.saving(o, x)
	}
	o.Outputs = append(o.Outputs, autograd.Output{Elements: x.Elements, DType: dtype.U8, Saved: true})
	return o
}

// rows returns the rows of the input of a column parallel layer, gathered.
func (p *megatronPass) rows(x *autograd.Tensor, in int64) int64 {
	rows := x.Elements / in
	if p.gathered(1) > 0 && !strings.Contains(p.prefix, "experts") {
		rows *= p.Degrees.Tensor
	}
	return rows
}

// project runs a linear layer whose inputs are split among tensor parallel ranks: it reduces its output.
func (p *megatronPass) project(x *autograd.Tensor, name string) *autograd.Tensor {
	w := p.weight(name + ".weight")
	in := w.Elements / p.Hidden
	rows := x.Elements / in
	o := autograd.Operation{Inputs: with(x, w)}
	if !p.isFrozen(name) {
		o = p.savingInput(o, x)
	}
	own := rows
	if p.gathered(1) > 0 {
		o.Scratch, o.BackwardScratch = p.size(rows*p.Hidden), p.size(rows*p.Hidden)
		own /= p.Degrees.Tensor
	}
	return p.adapted(p.do(o, own*p.Hidden, false), x, name, func(x *autograd.Tensor, adapter string) *autograd.Tensor {
		return p.behind(x, adapter, rows, own, p.Degrees.Tensor)
	})
}

// add adds bias and dropout to a result, and the result to the residual stream (fused_bias_dropout.py).
func (p *megatronPass) add(y *autograd.Tensor, bias string, residual *autograd.Tensor) *autograd.Tensor {
	defer p.tape.In(ledger.ResidualActivations, whyResidual)()
	o := autograd.Operation{Inputs: with(y, residual, p.weight(bias)), Shared: []bool{p.HiddenDrop == 0, true}}
	if p.HiddenDrop > 0 {
		o.Outputs = []autograd.Output{{Elements: y.Elements, DType: dtype.Bool, Saved: true}}
	}
	return p.do(o, y.Elements, false)
}

// layer runs a transformer layer.
func (p *megatronPass) layer(layer megatron.Layer, x *autograd.Tensor) *autograd.Tensor {
	return p.tape.Scope(func() *autograd.Tensor {
		x = p.attend(x)
		if layer.Cross {
			x = p.crossAttend(x)
		}
		return p.think(layer, x)
	})
}
