package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// FakeQuantization rounds inputs and weights of linear modules to a grid and back, as torchao's modules for
// quantization-aware training do (torchao/quantization/qat).
type FakeQuantization struct {
	// Group is the number of inputs that share a scale of the weight. Modules whose width is no multiple are left
	// alone.
	Group       int64
	Activations bool // inputs are rounded, too, with a scale for each token
	// Learned means that the gradient goes through the scales of the weight: Int4WeightFakeQuantizer.
	Learned bool
	// Packed means that inputs and weights are in MXFP4 until the backward pass: MXFakeQuantizedLinear.
	Packed bool
}

// fakes reports whether the inputs of a linear module are fake-quantized.
func (p *pass) fakes(w *autograd.Parameter, out int64) bool {
	return p.QAT != nil && w.Elements/out%p.QAT.Group == 0
}

// fakeLinear runs FakeQuantizedLinear.
func (p *pass) fakeLinear(path string, w *autograd.Parameter, x *autograd.Tensor, out int64) *autograd.Tensor {
	if p.QAT.Packed {
		return p.packedLinear(path, w, x, out)
	}
	return p.Scope(func() *autograd.Tensor {
		input := x
		if p.QAT.Activations {
			input = p.rounded(x, x.Elements/(w.Elements/out))
		}
		leave := p.In(ledger.FakeQuantizedWeights, whyFakeQuantized)
		var weight *autograd.Tensor
		if p.QAT.Learned {
			weight = p.roundedByRange(w)
		} else {
			weight = p.rounded(w.Tensor(), w.Elements/p.QAT.Group)
		}
		leave()
		var bias *autograd.Tensor
		if b := p.parameter(path + ".bias"); b != nil {
			bias = b.Tensor()
		}
		return p.matrix(weight, bias, input, w.Elements/out, out)
	})
}

// packedLinear runs MXFakeQuantizedLinear (torchao/prototype/qat/mx.py). It saves the input and the weight in 4 bits,
// with a scale of a byte for each group. Both passes take them apart before they multiply, with 30 bytes of
// temporaries for each element, of the input first.
func (p *pass) packedLinear(path string, w *autograd.Parameter, x *autograd.Tensor, out int64) *autograd.Tensor {
	const temporaries = 30
	packed := func(elements int64) autograd.Output {
		return autograd.Output{Elements: elements/2 + elements/p.QAT.Group, DType: dtype.U8, Saved: true}
	}
	most := max(temporaries*x.Elements, x.Bytes()+temporaries*w.Elements)
	apart := x.Bytes() + w.Elements*x.DType.Size()
	y := x.Elements / (w.Elements / out) * out
	// Results are made after the temporaries are gone.
	o := autograd.Operation{Inputs: []*autograd.Tensor{x, w.Tensor()},
		Scratch: max(apart, most-y*x.DType.Size()), BackwardScratch: max(apart, most-apart),
		Outputs: []autograd.Output{{Elements: y, DType: x.DType}, packed(x.Elements), packed(w.Elements)}}
	if b := p.parameter(path + ".bias"); b != nil {
		o.Inputs = append(o.Inputs, b.Tensor())
	}
	results := p.Do(o)
	p.Drop(results[1:]...)
	return results[0]
}

func whyFakeQuantized() string {
	return "weights rounded to the grid they will have: the rounded weight, and in fp32 what the gradient of the " +
		"rounding needs, of every module whose backward pass is to come (torchao/quantization/qat/fake_quantizer.py)"
}

// rounded runs IntxFakeQuantizer with scales in fp32: _fake_quantize_affine in quant_primitives.py. The gradient needs
// what is clamped.
func (p *pass) rounded(x *autograd.Tensor, groups int64) *autograd.Tensor {
	scaled := p.rescaled(x, groups)
	shifted := p.follow(scaled, p.passed(scaled)) // rounded
	shifted = p.follow(shifted, p.passed(shifted))
	clamped := p.clippedToGrid(shifted)
	p.Drop(shifted)
	narrow := p.unary(clamped, x.DType, saveNothing)
	centred := p.passed(narrow)
	wide := p.rescaled(p.follow(narrow, centred), groups)
	p.Drop(centred)
	result := p.follow(wide, p.cast(wide, x.DType))
	p.Drop(clamped)
	return result
}

// rescaled multiplies by scales in fp32, which have no gradient. The gradient of a narrow factor is made in fp32.
func (p *pass) rescaled(x *autograd.Tensor, groups int64) *autograd.Tensor {
	var scratch int64
	if x.DType != dtype.F32 {
		scratch = x.Elements * dtype.F32.Size()
	}
	r := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, BackwardScratch: scratch,
		Outputs: []autograd.Output{{Elements: x.Elements, DType: dtype.F32},
			{Elements: groups, DType: dtype.F32, Saved: true}}})
	p.Drop(r[1])
	return r[0]
}

// passed runs an operation whose gradient is the incoming one: rounding, or the addition of a constant.
func (p *pass) passed(x *autograd.Tensor) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Shared: []bool{true},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}}})[0]
}

// clippedToGrid saves its input. Its gradient needs two masks.
func (p *pass) clippedToGrid(x *autograd.Tensor) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x},
		BackwardScratch: 2 * x.Elements, Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}}})[0]
}

// roundedByRange runs Int4WeightFakeQuantizer for activations in bf16: the greatest and the least weight of every group
// make its scale, and the gradient goes through both.
func (p *pass) roundedByRange(w *autograd.Parameter) *autograd.Tensor {
	wide := p.cast(w.Tensor(), dtype.F32)
	groups := w.Elements / p.QAT.Group
	most, least := p.extreme(wide, groups), p.extreme(wide, groups)
	scale := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{most, least}, Saved: []*autograd.Tensor{most},
		Outputs: []autograd.Output{{Elements: groups, DType: dtype.F32}}})[0]
	above := p.withConstant(wide, least, false)
	p.dropCasts(w.Tensor(), wide)
	grid := p.withConstant(above, scale, true)
	p.Drop(above)
	grid = p.follow(grid, p.passed(grid))
	clamped := p.clippedToGrid(grid)
	p.Drop(grid)
	centred := p.follow(clamped, p.passed(clamped))
	back := p.follow(centred, p.withConstant(centred, scale, true))
	moved := p.follow(back, p.withConstant(back, least, false))
	return p.follow(moved, p.cast(moved, w.DType))
}

// extreme returns the greatest or least element of every group. Its gradient needs a mask, and the gradient in full.
func (p *pass) extreme(x *autograd.Tensor, groups int64) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x},
		BackwardScratch: x.Elements, Outputs: []autograd.Output{{Elements: groups, DType: x.DType}}})[0]
}

// withConstant adds a value of every group, or scales by it, which saves x. The gradient of the value is a sum over a
// product of the size of x.
func (p *pass) withConstant(x, value *autograd.Tensor, scales bool) *autograd.Tensor {
	o := autograd.Operation{Inputs: []*autograd.Tensor{x, value}, Shared: []bool{!scales, false},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}}}
	if value.NeedsGradient() && scales {
		o.Saved, o.BackwardScratch = []*autograd.Tensor{x, value}, x.Bytes()
	}
	return p.Do(o)[0]
}
