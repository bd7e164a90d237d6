package forward

import (
	"fmt"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// Adapter is an adapter of PEFT on a linear module or, with LoRA, on an embedding.
type Adapter struct {
	Kind AdapterKind
	Rank int64
	// A and B are LoRA's matrices. VeRA freezes them and shares them among modules.
	A, B *autograd.Parameter
	Bias *autograd.Parameter // bias of B, or nil
	// Vectors are the scales of IA3's activations, of DoRA's columns, of VeRA's two
	// products or of AdaLoRA's rows of A. AdaLoRA's second is the rank, its divisor. Of LoHa and LoKr they are the
	// matrices of the second factor. LoKr's B, and its second vector, are nil where a factor has no low rank.
	Vectors []*autograd.Parameter
	Dropout float64
	// SharesDropout means that queries, keys and values have one dropout (litgpt's LoRAQKVLinear). Padded means that
	// not all three are adapted: an operation puts the product among zeros (index_copy), and saves it.
	SharesDropout, Padded bool
	// ScalesInput means that IA3 scales the input, as on feed-forward modules.
	ScalesInput bool
	// InFull means that the product of an adapter of a parameter is made in full before it is added.
	InFull bool
	// Block is the size of the blocks of OFT's rotation, of which A has Rank. Terms is the length of its Neumann
	// series, 0 for an inverse.
	Block, Terms int64
}

// AdapterKind is a kind of adapter.
type AdapterKind string

// The kinds, with their names in peft_type. DoRA is LORA with use_dora.
const (
	LoRA    AdapterKind = "LORA"
	DoRA    AdapterKind = "DORA"
	AdaLoRA AdapterKind = "ADALORA"
	IA3     AdapterKind = "IA3"
	VeRA    AdapterKind = "VERA"
	OFT     AdapterKind = "OFT"
	LoHa    AdapterKind = "LOHA"
	LoKr    AdapterKind = "LOKR"
	MiSS    AdapterKind = "MISS"
)

// adapted runs a linear module with its adapter (peft/tuners/*/layer.py).
func (p *pass) adapted(a *Adapter, path string, x *autograd.Tensor, out int64) *autograd.Tensor {
	defer p.In(ledger.AdapterActivations, a.whyActivations)()
	return p.Scope(func() *autograd.Tensor {
		switch a.Kind {
		case IA3:
			return p.ia3(a, path, x, out)
		case OFT:
			return p.turned(a, path, x, out)
		default:
			leave := p.In(ledger.AttentionActivations, p.whyAttention)
			base := p.bare(path, x, out)
			leave()
			switch a.Kind {
			case LoHa, LoKr:
				return p.lycoris(a, path, base, x, out)
			case MiSS:
				return p.miss(a, path, base, x, out)
			}
			return p.lora(a, path, base, x, out)
		}
	})
}

func (a *Adapter) whyActivations() string {
	return fmt.Sprintf("inputs of the adapters, cast to %v, dropout masks and products", a.Parameters()[0].DType)
}

func (p *pass) ia3(a *Adapter, path string, x *autograd.Tensor, out int64) *autograd.Tensor {
	vector := a.Vectors[0].Tensor()
	if a.ScalesInput {
		wide := p.cast(x, vector.DType)
		scaled := p.multiply(wide, vector)
		p.dropCasts(x, wide)
		rounded := p.cast(scaled, x.DType)
		return p.bare(path, rounded, out)
	}
	y := p.bare(path, x, out)
	scaled := p.multiply(y, vector)
	return p.cast(scaled, y.DType)
}

// lora adds the product with the two low-rank matrices. PEFT computes it in the
// type of the matrices, which is fp32 unless they were cast.
func (p *pass) lora(a *Adapter, path string, base, x *autograd.Tensor, out int64) *autograd.Tensor {
	input := p.cast(x, a.A.DType)
	dropped := input
	switch {
	case a.Dropout == 0:
	case a.SharesDropout && p.droppedFrom == x: // queries, keys and values share one dropout
		dropped = p.dropped
	default:
		r := p.Do(autograd.Operation{
			Inputs: []*autograd.Tensor{input},
			Outputs: []autograd.Output{{Elements: input.Elements, DType: input.DType},
				{Elements: input.Elements, DType: dtype.Bool, Saved: true}},
		})
		p.Drop(r[1])
		dropped = r[0]
		if a.SharesDropout {
			p.share(x, dropped)
		}
	}
	in := p.parameter(path+".weight").Elements / out
	switch a.Kind {
	case DoRA:
		return p.dora(a, path, base, dropped, in, out)
	case AdaLoRA:
		return p.adaLoRA(a, base, dropped, in, out)
	}
	low := p.small(a.A, nil, dropped, in, a.Rank)
	if a.Kind == VeRA {
		low = p.follow(low, p.multiply(low, a.Vectors[0].Tensor()))
	}
	width := out
	if a.SharesDropout { // of the parts that are adapted
		width = a.B.Rows
	}
	high := p.small(a.B, a.Bias, low, a.Rank, width)
	if a.Kind == VeRA {
		high = p.follow(high, p.multiply(high, a.Vectors[1].Tensor()))
	}
	if a.Padded {
		high = p.follow(high, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{high}, Saved: []*autograd.Tensor{high},
			Outputs: []autograd.Output{{Elements: base.Elements, DType: high.DType}}})[0])
	}
	return p.onto(base, p.follow(high, p.unary(high, high.DType, saveNothing)))
}

// onto adds the output of an adapter to that of the module, in the module's type.
func (p *pass) onto(base, made *autograd.Tensor) *autograd.Tensor {
	return p.ontoAs(base, made, base.DType)
}

// ontoAs does so in a type.
func (p *pass) ontoAs(base, made *autograd.Tensor, as dtype.Type) *autograd.Tensor {
	sum := p.add(base, made)
	p.Drop(base, made)
	return p.follow(sum, p.cast(sum, as))
}

// adaptedRows adds the adapter of an embedding: the rows of A for the tokens,
// times B.
func (p *pass) adaptedRows(a *Adapter, base *autograd.Tensor) *autograd.Tensor {
	defer p.In(ledger.AdapterActivations, a.whyActivations)()
	return p.Scope(func() *autograd.Tensor {
		low := p.rows(a.A, base.Elements/a.B.Rows*a.Rank)
		high := p.small(a.B, nil, low, a.Rank, a.B.Rows)
		p.Drop(low)
		return p.onto(base, p.follow(high, p.unary(high, high.DType, saveNothing)))
	})
}

// share keeps the result of a dropout for the adapters with the same input, until
// the next call.
func (p *pass) share(x, dropped *autograd.Tensor) {
	if p.dropped != nil {
		p.Drop(p.dropped)
	}
	if dropped != nil {
		p.Hold(dropped)
	}
	p.droppedFrom, p.dropped = x, dropped
}

// Parameters returns the parameters of the adapter.
func (a *Adapter) Parameters() []*autograd.Parameter {
	return slices.DeleteFunc(append([]*autograd.Parameter{a.A, a.B, a.Bias}, a.Vectors...),
		func(p *autograd.Parameter) bool { return p == nil })
}

// small multiplies x by a matrix of the adapter and adds the bias, if any.
func (p *pass) small(w, bias *autograd.Parameter, x *autograd.Tensor, in, out int64) *autograd.Tensor {
	var b *autograd.Tensor
	if bias != nil {
		b = bias.Tensor()
	}
	return p.matrix(p.weight(w), b, x, in, out)
}

// matrix multiplies x by a weight, which may be frozen, and adds the bias, if any.
func (p *pass) matrix(weight, bias, x *autograd.Tensor, in, out int64) *autograd.Tensor {
	compute := weight.DType
	if p.Autocast != dtype.Invalid {
		compute = p.Autocast
	}
	input, w := p.cast(x, compute), p.cast(weight, compute)
	o := autograd.Operation{Inputs: []*autograd.Tensor{input, w},
		Outputs: []autograd.Output{{Elements: input.Elements / in * out, DType: compute}}, Product: true, Kept: true}
	if w.NeedsGradient() {
		o.Saved = append(o.Saved, input)
	}
	if input.NeedsGradient() {
		o.Saved = append(o.Saved, w)
	}
	if bias != nil {
		o.Inputs = append(o.Inputs, bias)
	}
	p.works(&o, out)
	y := p.Do(o)[0]
	p.dropCasts(x, input, weight, w)
	return y
}

// adaLoRA scales the rows of A and divides by the rank, which is a parameter
// (peft/tuners/adalora/layer.py).
func (p *pass) adaLoRA(a *Adapter, base, x *autograd.Tensor, in, out int64) *autograd.Tensor {
	rows := p.multiply(a.A.Tensor(), a.Vectors[0].Tensor())
	low := p.matrix(rows, nil, x, in, a.Rank)
	p.Drop(rows)
	high := p.follow(low, p.small(a.B, nil, low, a.Rank, out))
	scaled := p.follow(high, p.unary(high, high.DType, saveNothing))
	return p.onto(base, p.follow(scaled, p.multiply(scaled, a.Vectors[1].Tensor())))
}

// dora divides by the norms of the rows of the adapted weight. For the norms it
// makes that weight: B(A(1)), with all that its gradient would need, and a copy of
// the weight in the adapter's type. With dropout it runs the module again
// (peft/tuners/lora/dora.py).
func (p *pass) dora(a *Adapter, path string, base, x *autograd.Tensor, in, out int64) *autograd.Tensor {
	w := p.parameter(path + ".weight")
	made := p.New(in*in+in*a.Rank+w.Elements, x.DType)
	weight := w.Tensor()
	if w.Quantized != autograd.Unquantized || w.DType != x.DType {
		weight = p.unary(weight, x.DType, saveNothing)
	}
	norms := p.Do(autograd.Operation{
		Inputs:  []*autograd.Tensor{a.Vectors[0].Tensor()},
		Outputs: []autograd.Output{{Elements: out, DType: x.DType, Saved: true}},
		Scratch: 2 * w.Elements * x.DType.Size(),
	})[0]
	low := p.small(a.A, nil, x, in, a.Rank)
	high := p.follow(low, p.small(a.B, a.Bias, low, a.Rank, out))
	plain := base
	if a.Dropout > 0 {
		plain = p.matrix(weight, nil, x, in, out)
	} else if bias := p.parameter(path + ".bias"); bias != nil {
		plain = p.unary(base, promoted(base.DType, bias.DType), saveNothing)
	}
	product := p.multiply(plain, norms)
	other := p.multiply(high, norms)
	other = p.follow(other, p.unary(other, other.DType, saveNothing))
	sum := p.add(product, other)
	p.Drop(product, other, high, made, weight)
	p.dropCasts(base, plain)
	return p.onto(base, sum)
}
