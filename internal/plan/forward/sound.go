package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// reading returns the pass for a stack. An encoder of sound has sequences of its own length.
func (p *pass) reading(s *model.Stack) *pass {
	if s.Sound == nil {
		return p
	}
	v := *p
	v.Sequence, v.mask = s.Sound.Rows, nil
	return &v
}

// listen runs the convolutions of an encoder of sound, and adds positions.
func (p *pass) listen(h *model.Sound) *autograd.Tensor {
	frames := p.New(p.spectrum(h), p.compute())
	x := p.convolveFrames(h.First, frames, h.Frames())
	p.Drop(frames)
	if p.HooksImages {
		p.RequireGradient(x)
	}
	x = p.follow(x, p.activate("gelu", x))
	x = p.follow(x, p.convolveFrames(h.Second, x, h.Rows))
	x = p.follow(x, p.activate("gelu", x))
	positions := p.lookUp(h.Positions, h.Rows*p.network.Hidden)
	sum := p.add(x, positions)
	p.Drop(x, positions)
	return sum
}

// spectrum returns the elements of the spectrum in the type that the convolutions compute in, or none where that is
// the type of the batch.
func (p *pass) spectrum(h *model.Sound) int64 {
	if p.compute() == dtype.F32 {
		return 0
	}
	return p.Batch * h.Bins * h.Frames()
}

// convolveFrames runs a convolution that makes so many rows of each sequence.
func (p *pass) convolveFrames(path string, x *autograd.Tensor, rows int64) *autograd.Tensor {
	return p.hooked(path, func() *autograd.Tensor {
		input := p.cast(x, p.compute())
		y := p.convolution(path, input, p.Batch*rows*p.network.Hidden)
		p.dropCasts(x, input)
		return y
	})
}

// convolution runs a convolution. It saves its input and its weight, whatever needs a gradient (convolution in
// tools/autograd/derivatives.yaml).
func (p *pass) convolution(path string, input *autograd.Tensor, elements int64) *autograd.Tensor {
	weight := p.weight(p.parameter(path + ".weight"))
	o := autograd.Operation{Inputs: []*autograd.Tensor{input, weight}, Saved: []*autograd.Tensor{input, weight},
		Outputs: []autograd.Output{{Elements: elements, DType: p.compute()}}}
	if bias := p.parameter(path + ".bias"); bias != nil {
		o.Inputs = append(o.Inputs, bias.Tensor())
	}
	return p.Do(o)[0]
}
