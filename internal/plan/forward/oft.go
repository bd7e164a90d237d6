package forward

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// turned runs a linear module on its input, whose blocks OFT has rotated (tuners/oft/layer.py of PEFT 0.21).
func (p *pass) turned(a *Adapter, path string, x *autograd.Tensor, out int64) *autograd.Tensor {
	wide := p.cast(x, a.A.DType)
	rotation := p.rotation(a)
	if shared := wide.Elements / p.rowsOf(path, out, wide) / a.Block; shared > a.Rank { // all blocks are one: repeat
		rotation = p.follow(rotation, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{rotation},
			Outputs: []autograd.Output{{Elements: shared * a.Block * a.Block, DType: rotation.DType}}})[0])
	}
	blocks := p.matmul(wide, rotation, wide.Elements)
	p.Drop(rotation)
	p.dropCasts(x, wide)
	blocks = p.follow(blocks, p.unary(blocks, blocks.DType, saveNothing)) // side by side again
	input := p.follow(blocks, p.cast(blocks, x.DType))
	defer p.In(ledger.AttentionActivations, p.whyAttention)()
	y := p.bare(path, input, out)
	p.Drop(input)
	return p.follow(y, p.cast(y, x.DType))
}

// rowsOf returns the number of rows of the input of a module.
func (p *pass) rowsOf(path string, out int64, x *autograd.Tensor) int64 {
	return x.Elements / (p.parameter(path+".weight").Elements / out)
}

// rotation makes orthogonal blocks of a parameter: skew-symmetric ones, and the first powers of these, or the solution
// of a system of equations.
func (p *pass) rotation(a *Adapter) *autograd.Tensor {
	elements := a.Rank * a.Block * a.Block
	of := func(save []*autograd.Tensor, inputs ...*autograd.Tensor) *autograd.Tensor {
		return p.Do(autograd.Operation{Inputs: inputs, Saved: save,
			Outputs: []autograd.Output{{Elements: elements, DType: a.A.DType}}})[0]
	}
	upper := of(nil, a.A.Tensor())
	skew := of(nil, upper)
	p.Drop(upper)
	if a.Terms == 0 {
		left, right := of(nil, skew), of(nil, skew)
		p.Drop(skew)
		factors := p.New(elements, a.A.DType) // of the system, and its solution
		made := of([]*autograd.Tensor{left, factors}, left, right)
		p.Drop(left, right, factors)
		return made
	}
	if a.Terms < 3 {
		made := of(nil, skew)
		p.Drop(skew)
		return made
	}
	power := p.matmul(skew, skew, elements)
	terms := []*autograd.Tensor{skew, power}
	for range max(0, a.Terms-4) {
		power = p.matmul(power, skew, elements)
		terms = append(terms, power)
	}
	terms = append(terms, p.matmul(power, skew, elements))
	made := p.Do(autograd.Operation{Inputs: terms, // sums in place
		Outputs: []autograd.Output{{Elements: elements, DType: a.A.DType}}})[0]
	p.Drop(terms...)
	return made
}
