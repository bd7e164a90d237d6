package forward

import (
	"cmp"
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// saving says what a unary operation saves for its gradient.
type saving int

const (
	saveNothing saving = iota
	saveInput
	saveOutput
)

// unary runs an elementwise operation.
func (p *pass) unary(x *autograd.Tensor, result dtype.Type, save saving) *autograd.Tensor {
	o := autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: result, Saved: save == saveOutput}}}
	if save == saveInput {
		o.Saved = o.Inputs
	}
	return p.Do(o)[0]
}

// cast returns x in a type. It returns x itself if it has that type.
func (p *pass) cast(x *autograd.Tensor, to dtype.Type) *autograd.Tensor {
	if x.DType == to {
		return x
	}
	return p.unary(x, to, saveNothing)
}

// promoted returns the type of an operation on two types.
func promoted(a, b dtype.Type) dtype.Type {
	if a == b {
		return a
	}
	return dtype.F32
}

func (p *pass) add(a, b *autograd.Tensor) *autograd.Tensor {
	result := promoted(a.DType, b.DType)
	n := max(a.Elements, b.Elements)
	return p.Do(autograd.Operation{
		Inputs:  []*autograd.Tensor{a, b},
		Shared:  []bool{a.DType == result && a.Elements == n, b.DType == result && b.Elements == n},
		Outputs: []autograd.Output{{Elements: n, DType: result}},
	})[0]
}

// multiply multiplies elementwise. It saves each factor for the gradient of the
// other.
func (p *pass) multiply(a, b *autograd.Tensor) *autograd.Tensor {
	return p.Do(p.products(a, b))[0]
}

// scale multiplies every row of x by a weight.
func (p *pass) scale(x, weight *autograd.Tensor) *autograd.Tensor {
	o := p.products(x, weight)
	o.GradientWorkspaces = []autograd.Workspace{{}, p.columnSums(x.Elements/weight.Elements, weight.Elements)}
	return p.Do(o)[0]
}

func (p *pass) products(a, b *autograd.Tensor) autograd.Operation {
	n, result := max(a.Elements, b.Elements), promoted(a.DType, b.DType)
	o := p.factors(a, b, n, result)
	o.Workspace, o.GradientWorkspaces = autograd.Workspace{}, nil
	// Every gradient is a product of all elements first. The engine then adds up what was broadcast, and converts what
	// was promoted (validate_outputs in torch/csrc/autograd/engine.cpp).
	for _, x := range o.Inputs {
		if x.NeedsGradient() && (x.Elements < n || x.DType != result) {
			o.BackwardScratch += n * result.Size()
		}
	}
	return o
}

// matmul multiplies two matrices, under autocast in autocast's type.
func (p *pass) matmul(a, b *autograd.Tensor, elements int64) *autograd.Tensor {
	result := promoted(a.DType, b.DType)
	if p.Autocast != dtype.Invalid {
		result = p.Autocast
	}
	ca, cb := p.cast(a, result), p.cast(b, result)
	y := p.product(ca, cb, elements, result)
	p.dropCasts(a, ca, b, cb)
	return y
}

// dropCasts drops the results of casts. Pairs are an input and its cast.
func (p *pass) dropCasts(pairs ...*autograd.Tensor) {
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i] != pairs[i+1] {
			p.Drop(pairs[i+1])
		}
	}
}

func (p *pass) product(a, b *autograd.Tensor, elements int64, result dtype.Type) *autograd.Tensor {
	return p.Do(p.factors(a, b, elements, result))[0]
}

func (p *pass) factors(a, b *autograd.Tensor, elements int64, result dtype.Type) autograd.Operation {
	o := autograd.Operation{Inputs: []*autograd.Tensor{a, b},
		Outputs: []autograd.Output{{Elements: elements, DType: result}}}
	if a.NeedsGradient() {
		o.Saved = append(o.Saved, b)
	}
	if b.NeedsGradient() {
		o.Saved = append(o.Saved, a)
	}
	p.works(&o, 0)
	return o
}

// dropout runs dropout and drops x. It saves a mask of one byte for each element.
func (p *pass) dropout(x *autograd.Tensor, probability float64) *autograd.Tensor {
	switch {
	case probability == 0 || p.NoDropout:
		return x
	case p.Compile: // the compiled backward pass makes the mask again from its seed
		return p.follow(x, p.unary(x, x.DType, saveNothing))
	}
	r := p.Do(autograd.Operation{
		Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType},
			{Elements: x.Elements, DType: dtype.Bool, Saved: true}},
	})
	p.Drop(r[1])
	return p.follow(x, r[0])
}

// softmax runs a softmax, under autocast in fp32.
func (p *pass) softmax(x *autograd.Tensor, result dtype.Type) *autograd.Tensor {
	if p.Autocast != dtype.Invalid {
		result = dtype.F32
	}
	if x.DType == dtype.BF16 && result == dtype.F32 { // one kernel does both for fp16 only
		wide := p.cast(x, result)
		y := p.softened(wide, result)
		p.Drop(wide)
		return y
	}
	return p.softened(x, result)
}

// softened runs the kernel of a softmax. On a GPU its backward pass holds the product of the gradient and the result
// (softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu).
func (p *pass) softened(x *autograd.Tensor, result dtype.Type) *autograd.Tensor {
	if p.Processors == 0 || p.SavesSoftmaxInput {
		return p.normalized(x, result)
	}
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: result, Saved: true}},
		GradientWorkspaces: []autograd.Workspace{{Bytes: x.Elements * result.Size(), Component: ledger.OperationScratch,
			Why: autograd.WhyScratch}}})[0]
}

// normalized runs a softmax or a log-softmax.
func (p *pass) normalized(x *autograd.Tensor, result dtype.Type) *autograd.Tensor {
	if !p.SavesSoftmaxInput {
		return p.unary(x, result, saveOutput)
	}
	input := p.cast(x, result)
	y := p.Do(autograd.Operation{
		Inputs: []*autograd.Tensor{input}, Saved: []*autograd.Tensor{input},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: result, Saved: true}},
	})[0]
	p.dropCasts(x, input)
	return y
}

// lookUp runs an embedding. The gradient of its table is dense.
func (p *pass) lookUp(path string, elements int64) *autograd.Tensor {
	return p.hooked(path, func() *autograd.Tensor {
		rows := p.rows(p.parameter(path+".weight"), elements)
		if adapter := p.parameters.Adapters[path]; adapter != nil {
			return p.adaptedRows(adapter, rows)
		}
		return rows
	})
}

// rows reads rows of a table.
func (p *pass) rows(table *autograd.Parameter, elements int64) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{table.Tensor()},
		Outputs: []autograd.Output{{Elements: elements, DType: table.DType}}})[0]
}

// parameter returns a parameter by its name, or nil.
func (p *pass) parameter(name string) *autograd.Parameter { return p.parameters.ByName[name] }

// weight returns a parameter as an operand, cast if autocast is on. Autocast keeps
// the casts of trainable fp32 parameters until it ends (the weight cache of
// torch.autocast).
func (p *pass) weight(w *autograd.Parameter) *autograd.Tensor {
	if p.Autocast == dtype.Invalid || w.DType == p.Autocast {
		return w.Tensor()
	}
	if x, ok := p.weights[w]; ok {
		return x
	}
	leave := p.In(ledger.AutocastWeights, p.whyCast)
	x := p.cast(w.Tensor(), p.Autocast)
	leave()
	if w.Trainable && w.DType == dtype.F32 {
		p.Hold(x)
		p.weights[w] = x
		p.cached = append(p.cached, w)
	}
	return x
}

func (p *pass) whyCast() string {
	return fmt.Sprintf("autocast keeps a %v copy of every fp32 weight until the forward pass ends, and the backward "+
		"pass needs it (torch/amp/autocast_mode.py)", p.Autocast)
}

// linear runs a linear module with its bias and its adapter.
func (p *pass) linear(path string, x *autograd.Tensor, out int64) *autograd.Tensor {
	return p.hooked(path, func() *autograd.Tensor {
		adapter := p.parameters.Adapters[path]
		if adapter == nil {
			return p.bare(path, x, out)
		}
		return p.adapted(adapter, path, x, out)
	})
}

// bare runs a linear module without its adapter.
func (p *pass) bare(path string, x *autograd.Tensor, out int64) *autograd.Tensor {
	w := p.parameter(path + ".weight")
	if p.fakes(w, out) {
		return p.fakeLinear(path, w, x, out)
	}
	if p.CastsInside && p.Autocast != dtype.Invalid && w.Quantized == autograd.Unquantized {
		return p.castInside(path, w, x, out)
	}
	compute := w.DType
	if p.Autocast != dtype.Invalid {
		compute = p.Autocast
	}
	input, weight := p.cast(x, compute), p.operand(w)
	weight = p.follow(weight, p.cast(weight, compute))
	o := autograd.Operation{
		Inputs:  []*autograd.Tensor{input, weight},
		Outputs: []autograd.Output{{Elements: input.Elements / (w.Elements / out) * out, DType: compute}},
		Product: true, Kept: true,
	}
	switch {
	case weight.NeedsGradient():
		o.Saved = append(o.Saved, input)
	case w.Quantized == autograd.EightBit, w.Quantized == autograd.FourBit && p.AttachesQuantizedInput:
		o.Attached = append(o.Attached, input) // bitsandbytes/autograd/_functions.py
	}
	if input.NeedsGradient() {
		o.Saved = append(o.Saved, o.Inputs[1])
	}
	switch w.Quantized {
	case autograd.Unquantized:
	case autograd.GPTQ: // codes, zero points and scales of weights are temporaries (dequantize_weight in GPTQModel)
		leave := p.In(ledger.OperationScratch, whyDequantized)
		weight := p.New(w.Elements, compute)
		leave()
		o.Inputs[1], o.Scratch = weight, gptqScratch*w.Elements
		if input.NeedsGradient() {
			o.Saved[len(o.Saved)-1] = weight
		}
		defer p.Drop(weight)
	case autograd.AWQ: // the backward pass copies the weight for each sequence (AwqGemmFn)
		o.Saved = append(o.Saved, input)
		o.Scratch, o.BackwardScratch = w.Elements*compute.Size(), (1+p.Batch)*w.Elements*compute.Size()
	case autograd.AQLM: // _QuantizedMatmul saves the input, and copies the result or its gradient to scale it
		o.Saved = append(o.Saved, input)
		o.Scratch = (w.Elements + o.Outputs[0].Elements) * compute.Size()
		o.BackwardScratch = o.Scratch
	default:
		// bitsandbytes dequantizes the weight in both passes.
		expanded := w.Elements * compute.Size()
		if p.FusedQKV {
			expanded *= 2
		}
		o.Scratch, o.BackwardScratch = expanded, expanded
	}
	if bias := p.parameter(path + ".bias"); bias != nil {
		o.Inputs = append(o.Inputs, bias.Tensor())
	}
	p.works(&o, out)
	y := p.Do(o)[0]
	p.dropCasts(x, input)
	if w.Quantized == autograd.FourBit || w.Quantized == autograd.EightBit {
		// bitsandbytes gives the result in the type of the input, also under autocast (Linear4bit.forward in
		// nn/modules.py, MatMul8bitLt in autograd/_functions.py).
		y = p.follow(y, p.cast(y, x.DType))
	}
	return y
}

func whyDequantized() string {
	return "weights of GPTQ in 16 bits, which the backward pass of their layer needs, and what kernels need beside"
}

// gptqScratch are the bytes that a weight of GPTQ takes beside its copy in 16 bits while that is made: scales, the
// difference of codes and zero points, and codes.
const gptqScratch = 4

// castInside runs a linear module as LinearFunctionForZeroStage3 does: it saves its input and weight as they are, and
// both passes cast them once more.
func (p *pass) castInside(path string, w *autograd.Parameter, x *autograd.Tensor, out int64) *autograd.Tensor {
	weight, casts := w.Tensor(), int64(0)
	for _, t := range []*autograd.Tensor{x, weight} {
		if t.DType != p.Autocast {
			casts += t.Elements * p.Autocast.Size()
		}
	}
	o := autograd.Operation{Inputs: []*autograd.Tensor{x, weight},
		Outputs: []autograd.Output{{Elements: x.Elements / (w.Elements / out) * out, DType: p.Autocast}},
		Product: true, Kept: true, Scratch: casts, BackwardScratch: casts}
	if w.Trainable {
		o.Saved = append(o.Saved, x)
		o.BackwardScratch += w.Elements * p.Autocast.Size() // the gradient, before it has the type of the weight
	}
	if x.NeedsGradient() {
		o.Saved = append(o.Saved, weight)
	}
	if bias := p.parameter(path + ".bias"); bias != nil {
		o.Inputs = append(o.Inputs, bias.Tensor())
	}
	p.works(&o, out)
	return p.Do(o)[0]
}

// norm runs a normalization, with the operations of transformers.
func (p *pass) norm(n model.Norm, x *autograd.Tensor) *autograd.Tensor {
	defer p.In(ledger.NormActivations, p.whyNorms)()
	return p.hooked(n.Path, func() *autograd.Tensor {
		return p.Scope(func() *autograd.Tensor {
			switch {
			case p.Compile:
				return p.fusedNorm(n, x)
			case p.Liger && n.Path != "" && n.Kind != model.LayerNorm && n.Kind != model.LayerNormF32 &&
				n.Kind != model.LayerNormWide:
				return p.fusedNorm(n, x) // the gradient replaces the incoming one (liger_kernel/ops/rms_norm.py)
			case n.Kind == model.LayerNorm:
				return p.layerNorm(n, x)
			case n.Kind == model.LayerNormF32:
				wide := p.cast(x, dtype.F32)
				y := p.layerNorm(n, wide)
				p.dropCasts(x, wide)
				return p.follow(y, p.cast(y, x.DType))
			case n.Kind == model.LayerNormWide:
				return p.wideNorm(n, x)
			default:
				return p.rmsNorm(n, x)
			}
		})
	})
}

// normForMatmuls runs a norm whose result only matmuls read.
func (p *pass) normForMatmuls(n model.Norm, x *autograd.Tensor) *autograd.Tensor {
	before := p.narrow
	p.narrow = true
	y := p.norm(n, x)
	p.narrow = before
	return y
}

func (p *pass) whyNorms() string {
	return fmt.Sprintf("%s x %d, input, upcast copy and result of every norm as its kind saves them (transformers' "+
		"modules)", p.batch(), p.network.Hidden)
}

// layerNorm is one kernel, which saves its input, the means and the deviations.
// Autocast runs it in fp32.
func (p *pass) layerNorm(n model.Norm, x *autograd.Tensor) *autograd.Tensor {
	if p.Autocast != dtype.Invalid {
		x = p.cast(x, dtype.F32)
	}
	return p.fusedNorm(n, x)
}

// fusedNorm is a norm in one kernel. Compiled, it also rounds its result for the
// matmuls that read it.
func (p *pass) fusedNorm(n model.Norm, x *autograd.Tensor) *autograd.Tensor {
	result := x.DType
	if p.Compile && p.narrow {
		result = p.compute()
	}
	inPlace := p.Liger && n.Kind != model.LayerNorm
	o := autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x}, Shared: []bool{inPlace}}
	width := cmp.Or(n.Width, p.network.Hidden)
	for _, name := range []string{n.Path + ".weight", n.Path + ".bias"} {
		if w := p.parameter(name); w != nil {
			o.Inputs, width = append(o.Inputs, w.Tensor()), w.Elements
		}
	}
	rows := x.Elements / width
	o.Outputs = []autograd.Output{{Elements: x.Elements, DType: result},
		{Elements: rows, DType: dtype.F32, Saved: true}, {Elements: rows, DType: dtype.F32, Saved: true}}
	r := p.Do(o)
	p.Drop(r[1], r[2])
	return r[0]
}

// rmsNorm runs the operations of transformers: squares, their mean, the inverse
// root, and two products.
func (p *pass) rmsNorm(n model.Norm, x *autograd.Tensor) *autograd.Tensor {
	w, width := p.parameter(n.Path+".weight"), n.Width
	if w != nil && width == 0 {
		width = w.Elements
	}
	wide := p.cast(x, dtype.F32)
	squares := p.squares(wide)
	deviations := p.reduce(squares, x.Elements/width)
	p.Drop(squares)
	operand := wide
	if n.Kind == model.RMSNormT5 {
		operand = x // promoted by the product
	}
	normed := p.multiply(operand, deviations)
	p.dropCasts(x, wide)
	switch {
	case w == nil:
		return p.follow(normed, p.cast(normed, x.DType))
	case n.Kind == model.RMSNormF32:
		factor := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{w.Tensor()},
			Outputs: []autograd.Output{{Elements: w.Elements, DType: dtype.F32}}})[0]
		scaled := p.scale(normed, factor)
		p.Drop(normed)
		return p.follow(scaled, p.cast(scaled, x.DType))
	default:
		rounded := p.cast(normed, x.DType)
		p.dropCasts(rounded, normed)
		return p.scale(rounded, w.Tensor())
	}
}

// wideNorm runs Cohere's norm: it subtracts the mean twice, and each difference is
// saved.
func (p *pass) wideNorm(n model.Norm, x *autograd.Tensor) *autograd.Tensor {
	w := p.parameter(n.Path + ".weight")
	wide := p.cast(x, dtype.F32)
	differences := p.unary(wide, dtype.F32, saveNothing)
	squares := p.squares(differences)
	p.Drop(differences)
	width := w.Elements
	if n.Width > 0 {
		width = n.Width
	}
	deviations := p.reduce(squares, x.Elements/width)
	p.Drop(squares)
	again := p.unary(wide, dtype.F32, saveNothing)
	p.dropCasts(x, wide)
	normed := p.multiply(again, deviations)
	p.Drop(again)
	scaled := p.scale(normed, p.cast(w.Tensor(), dtype.F32))
	p.Drop(normed)
	return p.follow(scaled, p.cast(scaled, x.DType))
}

// squares runs pow(2). Its gradient holds the power and the product with the exponent (pow_backward in
// torch/csrc/autograd/FunctionsManual.cpp).
func (p *pass) squares(x *autograd.Tensor) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}}, BackwardScratch: 2 * x.Bytes()})[0]
}

// reduce runs a mean over rows and the root after it, which saves its result.
func (p *pass) reduce(x *autograd.Tensor, rows int64) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: rows, DType: dtype.F32, Saved: true}}})[0]
}
