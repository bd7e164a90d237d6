package simulate

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
)

// isAdapted reports whether a layer has an adapter.
func (p *megatronPass) isAdapted(name string) bool {
	return p.Adapter != nil && p.weight(name+"."+p.AdapterParts(name)[0]+".A") != nil
}

// isFrozen reports whether a layer's weight gets no gradient. Such a layer saves no input: linear_with_frozen_weight in
// megatron/core/tensor_parallel/layers.py, and transformer_engine/pytorch/module/linear.py and grouped_linear.py.
func (p *megatronPass) isFrozen(name string) bool {
	w := p.weight(name + ".weight")
	return w != nil && !w.NeedsGradient()
}

// adapted adds the products of a layer's adapters to its result, if it has some. X is what they get.
func (p *megatronPass) adapted(base, x *autograd.Tensor, name string,
	product func(x *autograd.Tensor, adapter string) *autograd.Tensor) *autograd.Tensor {
	if !p.isAdapted(name) {
		return base
	}
	defer p.in(ledger.AdapterActivations, whyAdapters)()
	return p.tape.Scope(func() *autograd.Tensor {
		var made []*autograd.Tensor
		for _, part := range p.AdapterParts(name) {
			made = append(made, p.tape.Scope(func() *autograd.Tensor { return product(x, name+"."+part) }))
		}
		sum := made[0]
		if len(made) > 1 { // the projections of a layer are joined
			sum = p.do(autograd.Operation{Inputs: made}, base.Elements, false)
			p.tape.Drop(made...)
		}
		y := p.do(autograd.Operation{Inputs: with(base, sum), Shared: []bool{true, true}}, base.Elements, false)
		p.tape.Drop(base)
		return y
	})
}

// gatherForAdapter gathers the tokens of sequence parallel ranks for an adapter.
func (p *megatronPass) gatherForAdapter(x *autograd.Tensor, elements int64) *autograd.Tensor {
	defer p.in(ledger.AdapterActivations, whyAdapters)()
	return p.do(autograd.Operation{Inputs: with(x)}, elements, false)
}

const whyAdapters = "inputs of the adapters, masks of their dropout, and products"

// times multiplies by a matrix of an adapter, which is trained: it saves its input. Gathered are the bytes of an input
// or a result that ranks gather or reduce beside it.
func (p *megatronPass) times(x *autograd.Tensor, matrix string, elements, gathered int64) *autograd.Tensor {
	return p.do(autograd.Operation{Inputs: with(x, p.weight(matrix)), Saved: with(x), Scratch: gathered,
		BackwardScratch: gathered}, elements, false)
}

// scale multiplies the product of an adapter by its factor, with the dropout behind it.
func (p *megatronPass) scale(y *autograd.Tensor) *autograd.Tensor {
	if p.Adapter.DropsAfter {
		y = p.dropout(y, p.Adapter.Dropout)
	}
	z := p.do(autograd.Operation{Inputs: with(y)}, y.Elements, false)
	p.tape.Drop(y)
	return z
}

// dropBefore runs the dropout of an adapter, unless it is behind the product.
func (p *megatronPass) dropBefore(x *autograd.Tensor) *autograd.Tensor {
	if p.Adapter.DropsAfter {
		return x
	}
	return p.dropout(x, p.Adapter.Dropout)
}

// beside runs the adapter of a layer whose outputs are divided among tensor parallel ranks, or that every rank has in
// full. Rows are those of the layer's result. Of sequence parallel ranks ms-swift's first matrix gets their own tokens,
// and the second one gathers its products. Megatron-Bridge's first matrix gets all tokens, and saves them.
func (p *megatronPass) beside(x *autograd.Tensor, adapter string, in, rows, tensor int64) *autograd.Tensor {
	a, b := adapter+".A", adapter+".B"
	rank, own := p.Adapter.Rank, x.Elements/in
	second := p.weight(b).Elements / rank // outputs on the rank
	if p.Adapter.Program == recipe.SwiftTuner {
		gathered := int64(0)
		if rows > own {
			gathered = p.size(rows * rank)
		}
		low := p.times(p.dropBefore(x), a, own*rank, 0)
		return p.scale(p.times(low, b, rows*second, gathered))
	}
	dropped := p.dropBefore(x)
	if own < rows { // the layer has not gathered them for its adapter
		all := p.do(autograd.Operation{Inputs: with(dropped)}, rows*in, false)
		if dropped != x {
			p.tape.Drop(dropped)
		}
		dropped = all
	}
	low := p.times(dropped, a, rows*p.weight(a).Elements/in, 0)
	if tensor > 1 {
		low = p.pass(low, rows*rank)
	}
	high := p.times(low, b, rows*second, 0)
	return p.scale(high)
}

// behind runs the adapter of a layer whose inputs are divided among tensor parallel ranks. Rows are those of its input,
// and own those of its result.
func (p *megatronPass) behind(x *autograd.Tensor, adapter string, rows, own, tensor int64) *autograd.Tensor {
	a, b, rank := adapter+".A", adapter+".B", p.Adapter.Rank
	if p.Adapter.Program == recipe.SwiftTuner {
		reduced := int64(0)
		if own < rows {
			reduced = p.size(rows * rank)
		}
		low := p.times(p.dropBefore(x), a, own*rank, reduced)
		return p.scale(p.times(low, b, own*p.weight(b).Elements/rank, 0))
	}
	low := p.times(p.dropBefore(x), a, rows*rank, 0)
	high := p.times(low, b, rows*p.weight(b).Elements/rank, 0)
	if tensor > 1 && !(p.Adapter.AllToAll && own < rows) {
		high = p.pass(high, high.Elements*tensor)
	}
	if own < rows {
		high = p.pass(high, own*p.weight(b).Elements/rank*tensor)
	}
	return p.scale(high)
}

// whole runs the adapter of a layer that every rank has in full. Megatron-Bridge divides both of its matrices.
func (p *megatronPass) whole(x *autograd.Tensor, adapter string, rows int64) *autograd.Tensor {
	a, b, rank := adapter+".A", adapter+".B", p.Adapter.Rank
	low := p.times(p.dropBefore(x), a, p.weight(a).Elements/(x.Elements/rows)*rows, 0)
	if low.Elements < rows*rank {
		low = p.pass(low, rows*rank)
	}
	high := p.times(low, b, rows*p.weight(b).Elements/rank, 0)
	if p.Adapter.Program == recipe.BridgeTuner && p.Degrees.Tensor > 1 {
		high = p.pass(high, high.Elements*p.Degrees.Tensor)
	}
	return p.scale(high)
}

// besideExperts runs the adapters of the first or the second layer of the rank's experts, as one with so many tokens:
// one that they share, or one of each.
func (p *megatronPass) besideExperts(base, x *autograd.Tensor, layer string, tokens int64) *autograd.Tensor {
	var first, second []*autograd.Tensor
	for i := range p.Experts / p.Degrees.Expert {
		name := fmt.Sprintf("mlp.experts.%d.%s.adapter.", i, layer)
		first = append(first, with(p.weight(name+"A"))...)
		second = append(second, with(p.weight(name+"B"))...)
	}
	if len(first) == 0 {
		return base
	}
	defer p.in(ledger.AdapterActivations, whyAdapters)()
	return p.tape.Scope(func() *autograd.Tensor {
		x := p.dropBefore(x)
		in, rank := x.Elements/tokens, p.Adapter.Rank
		product := func(x *autograd.Tensor, weights []*autograd.Tensor, elements int64) *autograd.Tensor {
			return p.do(autograd.Operation{Inputs: append(with(x), weights...), Saved: with(x)}, elements, false)
		}
		low := product(x, first, tokens*first[0].Elements/in)
		if low.Elements < tokens*rank {
			low = p.pass(low, tokens*rank)
		}
		high := product(low, second, tokens*second[0].Elements/rank)
		if high.Elements < base.Elements {
			high = p.pass(high, base.Elements)
		}
		sum := p.scale(high)
		y := p.do(autograd.Operation{Inputs: with(base, sum), Shared: []bool{true, true}}, base.Elements, false)
		p.tape.Drop(base)
		return y
	})
}
