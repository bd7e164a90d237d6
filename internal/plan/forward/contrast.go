package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// contrast compares the images of a micro batch with its texts. Both losses are of all pairs.
func (p *pass) contrast(c *model.Contrast, images, x *autograd.Tensor) Result {
	pairs := p.Batch * p.Batch
	rows := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: p.Batch * p.network.Hidden, DType: x.DType, View: c.Sigmoid}}})[0]
	p.Hold(x) // the outputs have it
	p.outputs = append(p.outputs, x)
	texts := p.follow(rows, p.linear(c.Projection, rows, c.Width))
	images, texts = p.unit(images), p.follow(texts, p.unit(texts))
	logits := p.matmul(texts, images, pairs)
	scale := p.parameter(c.Scale).Tensor()
	result := logits.DType
	if c.Sigmoid { // the parameter is no scalar
		result = promoted(result, scale.DType)
	}
	scaled := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{logits, scale}, Saved: []*autograd.Tensor{logits},
		Outputs: []autograd.Output{{Elements: pairs, DType: result}}})[0]
	loss := p.Scope(func() *autograd.Tensor {
		if c.Sigmoid {
			signs := p.New(pairs, dtype.F32)
			signed := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{scaled}, Saved: []*autograd.Tensor{signs},
				Outputs: []autograd.Output{{Elements: pairs, DType: dtype.F32}}})[0]
			return p.mean(p.unary(signed, dtype.F32, saveInput))
		}
		wide := result
		if p.Autocast != dtype.Invalid {
			wide = dtype.F32
		}
		both := []*autograd.Tensor{p.normalized(scaled, wide), p.normalized(scaled, wide)}
		return p.Do(autograd.Operation{Inputs: both, Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
	})
	p.HasLogits()
	return Result{Loss: loss, Logits: scaled}
}

// unit divides rows by their lengths.
func (p *pass) unit(x *autograd.Tensor) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		wide := p.cast(x, p.wide(x))
		squares := p.squares(wide)
		length := p.reduce(squares, p.Batch)
		return p.multiply(x, length)
	})
}

// pool makes one row of the rows of an image: attention of a parameter to them (torch's MultiheadAttention, which
// wants images in the second dimension), and a feed-forward network.
func (p *pass) pool(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		hidden := p.network.Hidden
		mixed := p.hooked(s.Path+".attention", func() *autograd.Tensor {
			return p.Scope(func() *autograd.Tensor { return p.probe(s, x) })
		})
		out := p.linear(s.Path+".attention.out_proj", mixed, hidden)
		normed := p.norm(s.Norm, out)
		return p.add(out, p.dense(s.FeedForward, normed))
	})
}

// probe runs the attention of the pooling head.
func (p *pass) probe(s *model.Step, x *autograd.Tensor) *autograd.Tensor {
	hidden, name := p.network.Hidden, s.Path+".attention.in_proj_weight"
	weight := p.weight(p.parameter(name))
	probe := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{p.parameter(s.Path + ".probe").Tensor()},
		Outputs: []autograd.Output{{Elements: p.Batch * hidden, DType: weight.DType}}})[0]
	query := p.product(probe, weight, p.Batch*hidden, weight.DType)
	input := p.cast(x, weight.DType)
	turned := p.unary(input, weight.DType, saveNothing)
	p.dropCasts(x, input)
	both := p.product(turned, weight, 2*x.Elements, weight.DType)
	p.Drop(turned)
	both = p.follow(both, p.unary(both, weight.DType, saveNothing))
	parts := p.split(both, hidden, hidden)
	p.Drop(both)
	pairs := s.Rows * x.Elements / hidden
	scores := p.matmul(query, parts[0], pairs)
	scores = p.follow(scores, p.softmax(scores, scores.DType))
	mixed := p.matmul(scores, parts[1], p.Batch*hidden)
	p.Drop(scores)
	return p.follow(mixed, p.unary(mixed, mixed.DType, saveNothing))
}
