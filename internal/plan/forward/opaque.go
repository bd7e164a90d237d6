package forward

import (
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// opaqueStack uses every module of a network without known operations. Beside
// the inputs of the blocks it keeps nothing, unless activations are estimated.
func (p *pass) opaqueStack(s *model.Stack) *autograd.Tensor {
	o := p.network.Opaque
	if len(p.network.Stacks) > 1 && s == p.network.Stacks[0] {
		return p.opaqueEncoder(s)
	}
	var x *autograd.Tensor
	if s.TokenEmbedding == "" {
		x = p.New(p.tokens()*p.network.Hidden, p.compute())
	} else {
		x = p.embed(s)
	}
	if p.InputGradients {
		p.RequireGradient(x)
	}
	if p.encoded != nil {
		x = p.follow(x, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x, p.encoded}, Shared: []bool{true},
			Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType, View: true}}})[0])
		p.Drop(p.encoded)
	}
	x = p.follow(x, p.opaque(o.Before, x, 1))
	for i := range s.Blocks {
		x = p.follow(x, p.block(s, &s.Blocks[i], x))
	}
	return p.follow(x, p.opaque(o.After, x, logitsKept))
}

// opaqueEncoder uses the modules of the blocks of encoders. What they read is unknown, so that they keep nothing.
func (p *pass) opaqueEncoder(s *model.Stack) *autograd.Tensor {
	x := p.New(1, p.compute())
	if p.InputGradients {
		p.RequireGradient(x)
	}
	for i := range s.Blocks {
		x = p.follow(x, p.block(s, &s.Blocks[i], x))
	}
	return x
}

// blockIndex returns the place of a block among all.
func (p *pass) blockIndex(b *model.Block) int {
	return slices.IndexFunc(p.network.Blocks(), func(other model.Block) bool { return other.Path == b.Path })
}

// logitsKept is how often the loss keeps logits: twice in fp32, and in 16 bits.
const logitsKept = 3

// opaque uses modules, one after the other. The gradients of their parameters are
// complete when the backward pass is through with them.
func (p *pass) opaque(modules []model.OpaqueModule, x *autograd.Tensor, times int64) *autograd.Tensor {
	for i := range modules {
		m := &modules[i]
		x = p.follow(x, p.hooked(m.Path, func() *autograd.Tensor {
			o := autograd.Operation{Inputs: []*autograd.Tensor{x}, Shared: []bool{true},
				Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType, View: true}}}
			for _, name := range m.Parameters {
				o.Inputs = append(o.Inputs, p.parameter(name).Tensor())
			}
			if a := p.parameters.Adapters[m.Path]; a != nil {
				for _, parameter := range a.Parameters() {
					o.Inputs = append(o.Inputs, parameter.Tensor())
				}
			}
			if p.network.Opaque.Estimated && m.Width > 0 {
				kept := p.New(times*p.tokens()*m.Width, dtype.F32)
				o.Saved, o.BackwardScratch = append(o.Saved, kept), kept.Bytes()
				defer p.Drop(kept)
			}
			return p.Do(o)[0]
		}))
	}
	return x
}
