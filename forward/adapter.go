package forward

import (
	"slices"

	"plimsoll/autograd"
	"plimsoll/dtype"
)

// Adapter is what PEFT adds to a linear module or, LoRA only, to an embedding.
type Adapter struct {
	Kind AdapterKind
	Rank int64
	// A and B are LoRA's matrices, which VeRA shares among modules and freezes.
	A, B *autograd.Parameter
	Bias *autograd.Parameter // of B; nil without
	// Vectors scale: IA3's activations, DoRA's columns, VeRA's two products.
	Vectors []*autograd.Parameter
	Dropout float64
	// Padded says that the product is put into a larger tensor by an operation
	// that saves it (litgpt's LoRAQKVLinear).
	Padded bool
	// ScalesInput is IA3 on a feed-forward module.
	ScalesInput bool
}

// AdapterKind is a method of PEFT.
type AdapterKind string

// The methods, as peft_type names them; DoRA is LORA with use_dora.
const (
	LoRA AdapterKind = "LORA"
	DoRA AdapterKind = "DORA"
	IA3  AdapterKind = "IA3"
	VeRA AdapterKind = "VERA"
)

// adapted is a linear module with its adapter (peft/tuners/*/layer.py).
func (p *pass) adapted(a *Adapter, path string, x *autograd.Tensor, out int64) *autograd.Tensor {
	defer p.SetComponent(p.SetComponent(Adapters))
	return p.Scope(func() *autograd.Tensor {
		switch a.Kind {
		case IA3:
			return p.ia3(a, path, x, out)
		default:
			component := p.SetComponent(Attention)
			base := p.bare(path, x, out)
			p.SetComponent(component)
			return p.lora(a, path, base, x, out)
		}
	})
}

func (p *pass) ia3(a *Adapter, path string, x *autograd.Tensor, out int64) *autograd.Tensor {
	vector := a.Vectors[0].Tensor()
	if a.ScalesInput {
		scaled := p.multiply(x, vector)
		rounded := p.cast(scaled, x.DType)
		return p.bare(path, rounded, out)
	}
	y := p.bare(path, x, out)
	scaled := p.multiply(y, vector)
	return p.cast(scaled, y.DType)
}

// lora adds the product with the two small matrices. PEFT computes it in the
// type of the matrices, which is fp32 unless they were cast.
func (p *pass) lora(a *Adapter, path string, base, x *autograd.Tensor, out int64) *autograd.Tensor {
	input := p.cast(x, a.A.DType)
	dropped := input
	switch {
	case a.Dropout == 0:
	case a.Padded && p.droppedFrom == x: // one for queries, keys and values
		dropped = p.dropped
	default:
		r := p.Do(autograd.Operation{
			Inputs:  []*autograd.Tensor{input},
			Outputs: []autograd.Output{{Elements: input.Elements, DType: input.DType}, {Elements: input.Elements, DType: dtype.Bool, Saved: true}},
		})
		p.Drop(r[1])
		dropped = r[0]
		if a.Padded {
			p.share(x, dropped)
		}
	}
	low := p.small(a.A, nil, dropped, p.parameter(path+".weight").Elements/out, a.Rank)
	if a.Kind == VeRA {
		low = p.follow(low, p.multiply(low, a.Vectors[0].Tensor()))
	}
	high := p.small(a.B, a.Bias, low, a.Rank, out)
	if a.Kind == VeRA {
		high = p.follow(high, p.multiply(high, a.Vectors[1].Tensor()))
	}
	save := saveNothing
	if a.Padded {
		save = saveInput
	}
	scaled := p.follow(high, p.unary(high, high.DType, save))
	if a.Kind == DoRA {
		scaled = p.dora(a, path, base, scaled, out)
	}
	sum := p.add(base, scaled)
	p.Drop(base, scaled)
	return p.follow(sum, p.cast(sum, base.DType))
}

// adaptedRows adds the product of rows of A, of which an embedding has one for
// every token, with B.
func (p *pass) adaptedRows(a *Adapter, base *autograd.Tensor) *autograd.Tensor {
	defer p.SetComponent(p.SetComponent(Adapters))
	return p.Scope(func() *autograd.Tensor {
		low := p.rows(a.A, base.Elements/a.B.Rows*a.Rank)
		high := p.small(a.B, nil, low, a.Rank, a.B.Rows)
		p.Drop(low)
		scaled := p.follow(high, p.unary(high, high.DType, saveNothing))
		sum := p.add(base, scaled)
		p.Drop(base, scaled)
		return p.follow(sum, p.cast(sum, base.DType))
	})
}

// share keeps what dropout made of a tensor, until it is asked for another.
func (p *pass) share(x, dropped *autograd.Tensor) {
	if p.dropped != nil {
		p.Drop(p.dropped)
	}
	if dropped != nil {
		p.Hold(dropped)
	}
	p.droppedFrom, p.dropped = x, dropped
}

// Parameters are those that there are.
func (a *Adapter) Parameters() []*autograd.Parameter {
	return slices.DeleteFunc(append([]*autograd.Parameter{a.A, a.B, a.Bias}, a.Vectors...), func(p *autograd.Parameter) bool { return p == nil })
}

// small is a product with a matrix of the adapter, and its bias if there is one.
func (p *pass) small(w, bias *autograd.Parameter, x *autograd.Tensor, in, out int64) *autograd.Tensor {
	compute := w.DType
	if p.Autocast != dtype.Invalid {
		compute = p.Autocast
	}
	input := p.cast(x, compute)
	o := autograd.Operation{Inputs: []*autograd.Tensor{input, p.weight(w)}, Outputs: []autograd.Output{{Elements: input.Elements / in * out, DType: compute}}, Product: true, Kept: true}
	if w.Trainable {
		o.Saved = append(o.Saved, input)
	}
	if input.NeedsGradient() {
		o.Saved = append(o.Saved, o.Inputs[1])
	}
	if bias != nil {
		o.Inputs = append(o.Inputs, bias.Tensor())
	}
	y := p.Do(o)[0]
	p.dropCasts(x, input)
	return y
}

// dora divides by the norms of the columns of the adapted weight, for which it
// makes that weight (peft/tuners/lora/dora.py).
func (p *pass) dora(a *Adapter, path string, base, scaled *autograd.Tensor, out int64) *autograd.Tensor {
	w := p.parameter(path + ".weight")
	magnitude := a.Vectors[0].Tensor()
	norms := p.Do(autograd.Operation{
		Inputs: []*autograd.Tensor{magnitude}, Outputs: []autograd.Output{{Elements: out, DType: dtype.F32, Saved: true}},
		Scratch: w.Elements * (4 + 4 + w.DType.Size()),
	})[0]
	product := p.multiply(base, norms)
	other := p.multiply(scaled, norms)
	p.Drop(scaled)
	sum := p.add(product, other)
	p.Drop(product, other)
	return sum
}
