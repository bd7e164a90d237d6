package forward

import "plimsoll/internal/plan/autograd"

// lycoris adds the product with a weight as large as the module's, which LoHa and LoKr make of small matrices in every
// pass (tuners/loha/layer.py and tuners/lokr/layer.py of PEFT).
func (p *pass) lycoris(a *Adapter, path string, base, x *autograd.Tensor, out int64) *autograd.Tensor {
	weight := p.parameter(path + ".weight")
	var made *autograd.Tensor
	if a.Kind == LoHa {
		made = p.hadamard(a, weight.Elements)
	} else {
		made = p.kronecker(a, weight.Elements)
	}
	input := p.cast(x, made.DType)
	product := p.matrix(made, nil, input, weight.Elements/out, out)
	p.Drop(made)
	p.dropCasts(x, input)
	return p.ontoAs(base, product, x.DType) // not in the module's type, as with LoRA
}

// hadamard makes LoHa's weight, the product of all elements of two products of matrices. A function of its own saves
// the matrices alone, and makes both products again in the backward pass (HadaWeight).
func (p *pass) hadamard(a *Adapter, elements int64) *autograd.Tensor {
	result := a.A.DType
	if p.Autocast.Size() > 0 {
		result = p.Autocast
	}
	inputs := []*autograd.Tensor{a.A.Tensor(), a.B.Tensor(), a.Vectors[0].Tensor(), a.Vectors[1].Tensor()}
	size := elements * result.Size()
	return p.Do(autograd.Operation{Inputs: inputs, Outputs: []autograd.Output{{Elements: elements, DType: result}},
		Scratch: 2 * size, BackwardScratch: 4 * size})[0]
}

// kronecker makes LoKr's weight, and then scales it.
func (p *pass) kronecker(a *Adapter, elements int64) *autograd.Tensor {
	factor := func(left, right *autograd.Parameter) *autograd.Tensor {
		if right == nil {
			return left.Tensor()
		}
		return p.matrix(p.weight(right), nil, left.Tensor(), a.Rank, right.Elements/a.Rank)
	}
	first, second := factor(a.A, a.B), factor(a.Vectors[0], a.Vectors[1])
	result := promoted(first.DType, second.DType)
	size := elements * result.Size()
	made := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{first, second},
		Saved:   []*autograd.Tensor{first, second},
		Outputs: []autograd.Output{{Elements: elements, DType: result}}, BackwardScratch: size})[0]
	if a.B != nil {
		p.Drop(first)
	}
	if a.Vectors[1] != nil {
		p.Drop(second)
	}
	return p.follow(made, p.unary(made, made.DType, saveNothing))
}

// miss adds the product with a matrix of the sums of the input's groups (tuners/miss/layer.py of PEFT).
func (p *pass) miss(a *Adapter, path string, base, x *autograd.Tensor, out int64) *autograd.Tensor {
	rows := p.rowsOf(path, out, x)
	block := a.A.Tensor()
	matrix := block
	if a.A.Elements < a.Rank*out {
		matrix = p.Do(autograd.Operation{Inputs: []*autograd.Tensor{block},
			Outputs: []autograd.Output{{Elements: a.Rank * out, DType: matrix.DType}}})[0]
	}
	padded := x
	if width := x.Elements / rows; width%a.Rank != 0 {
		padded = p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
			Outputs: []autograd.Output{{Elements: rows * (width/a.Rank + 1) * a.Rank, DType: x.DType}}})[0]
	}
	wide := p.cast(padded, a.A.DType)
	dropped := wide
	if a.Dropout > 0 {
		p.Hold(wide)
		dropped = p.dropout(wide, a.Dropout)
	}
	sums := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{dropped},
		Outputs: []autograd.Output{{Elements: rows * a.Rank, DType: wide.DType}}})[0]
	p.dropCasts(wide, dropped, padded, wide, x, padded)
	product := p.matrix(matrix, nil, sums, a.Rank, out)
	p.Drop(sums)
	p.dropCasts(block, matrix)
	return p.ontoAs(base, product, x.DType) // not in the module's type, as with LoRA
}
