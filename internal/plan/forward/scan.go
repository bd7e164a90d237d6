package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// Layers that carry a state along the sequence, as transformers runs them without the kernels of mamba-ssm and
// causal-conv1d: operation by operation, in fp32.

// convolution1D runs a convolution of every channel along the sequence. The sequence is padded at both ends, and cut to
// its length.
func (p *pass) convolution1D(c *model.Convolution, x *autograd.Tensor) *autograd.Tensor {
	return p.hooked(c.Path, func() *autograd.Tensor {
		w := p.parameter(c.Path + ".weight")
		weight := p.weight(w)
		input := p.cast(x, w.DType)
		input = p.follow(input, p.cast(input, weight.DType))
		o := autograd.Operation{Inputs: []*autograd.Tensor{input, weight}, Scratch: input.Bytes(),
			BackwardScratch: input.Bytes(), // a copy, channel by channel
			Outputs: []autograd.Output{{Elements: input.Elements + p.Batch*(c.Kernel-1)*c.Channels,
				DType: input.DType}}}
		if weight.NeedsGradient() {
			o.Saved = append(o.Saved, input)
		}
		if input.NeedsGradient() {
			o.Saved = append(o.Saved, weight)
		}
		if bias := p.parameter(c.Path + ".bias"); bias != nil {
			o.Inputs = append(o.Inputs, p.weight(bias))
		}
		padded := p.Do(o)[0]
		p.dropCasts(x, input)
		return p.follow(padded, p.view(padded, x.Elements))
	})
}

// shortConvolution runs the gated convolution of LFM2.
func (p *pass) shortConvolution(a *model.Attention, x *autograd.Tensor) *autograd.Tensor {
	c, width := a.Short, a.Short.Convolution.Channels
	parts := p.split(p.linear(c.Project, x, 3*width), width, width, width)
	mixed := p.convolution1D(&c.Convolution, p.multiply(parts[0], parts[2]))
	return p.linear(a.Output, p.multiply(parts[1], mixed), p.network.Hidden)
}

// scanned runs a layer of Mamba 2.
func (p *pass) scanned(a *model.Attention, x *autograd.Tensor) *autograd.Tensor {
	s := a.Scan
	inner, states := s.Heads*s.Width, s.Groups*s.State
	return p.hooked(s.Path, func() *autograd.Tensor {
		if s.ScalesInput {
			x = p.unary(x, x.DType, saveNothing)
		}
		projected := p.linear(s.Project, x, inner+s.Convolution.Channels+s.Heads)
		if s.ScalesInput {
			scaled := p.unary(projected, promoted(projected.DType, p.WeightType), saveNothing)
			projected = p.follow(projected, scaled)
		}
		parts := p.split(projected, inner, s.Convolution.Channels, s.Heads)
		p.Drop(projected)
		gate, steps := parts[0], parts[2]
		decay := p.unary(p.cast(p.parameter(s.Path+".A_log").Tensor(), dtype.F32), dtype.F32, saveOutput)
		mixed := p.convolution1D(&s.Convolution, parts[1])
		mixed = p.follow(mixed, p.activate(s.Activation, mixed))
		mixed = p.follow(mixed, p.cast(mixed, projected.DType))
		of := p.split(mixed, inner, states, states)
		y := p.scan(s, of[0], of[1], of[2], steps, decay)
		if s.Norm.Kind == model.NoNorm {
			y = p.follow(y, p.multiply(y, p.activate("silu", gate)))
		} else {
			y = p.follow(y, p.gatedNorm(s, y, gate))
		}
		y = p.follow(y, p.cast(y, x.DType))
		return p.linear(a.Output, y, p.network.Hidden)
	})
}

// gatedNorm multiplies x by its gate and normalizes the product by groups; or the other way round.
func (p *pass) gatedNorm(s *model.Scan, x, gate *autograd.Tensor) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		gated := func(x *autograd.Tensor) *autograd.Tensor {
			return p.multiply(x, p.activate("silu", p.cast(gate, dtype.F32)))
		}
		if s.GatesLast {
			return gated(p.norm(s.Norm, x))
		}
		return p.norm(s.Norm, gated(x))
	})
}

// scan runs the selective state space: within chunks of tokens by the scores of all pairs, and from chunk to chunk by
// a state for each head (mamba2_chunk_scan in transformers/models/mamba2/modeling_mamba2.py).
func (p *pass) scan(s *model.Scan, x, b, c, steps, decay *autograd.Tensor) *autograd.Tensor {
	length := x.Elements / (p.Batch * s.Heads * s.Width)
	chunks := (length + s.Chunk - 1) / s.Chunk
	rows := p.Batch * chunks * s.Chunk * s.Heads // of all heads, with padding
	wide := func(x *autograd.Tensor, elements int64) *autograd.Tensor {
		return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
			Outputs: []autograd.Output{{Elements: elements, DType: x.DType}}})[0]
	}
	copied := func(x *autograd.Tensor) *autograd.Tensor { return p.unary(x, x.DType, saveNothing) }
	// stack lays matrices of heads one behind the other, if it has to copy them for that.
	stack := func(x *autograd.Tensor, copies bool) *autograd.Tensor {
		if !copies {
			return x
		}
		return copied(x)
	}
	product := func(a, b *autograd.Tensor, elements int64, copiesA, copiesB bool) *autograd.Tensor {
		of, with := stack(a, copiesA), stack(b, copiesB)
		r := p.matmul(of, with, elements)
		p.dropCasts(a, of, b, with)
		return r
	}
	// Rows of b and c lie token by token, and values channel by channel.
	tokens, values := p.Batch*chunks > 1, chunks > 1
	y := p.Scope(func() *autograd.Tensor {
		dt := p.add(steps, p.cast(p.parameter(s.Path+".dt_bias").Tensor(), steps.DType))
		dt = p.follow(dt, p.unary(p.cast(dt, p.wide(dt)), p.wide(dt), saveInput))
		dt = p.follow(dt, p.unary(dt, dt.DType, saveInput)) // within its limits
		float := p.cast(x, dtype.F32)
		repeated := func(x *autograd.Tensor) *autograd.Tensor {
			narrow := p.cast(x, dtype.F32)
			defer p.dropCasts(x, narrow)
			return wide(narrow, x.Elements/s.Groups*s.Heads)
		}
		b, c := repeated(b), repeated(c)
		padded := wide(float, rows*s.Width)
		residual := p.multiply(p.parameter(s.Path+".D").Tensor(), padded)
		p.Drop(padded)
		timed := p.multiply(float, p.cast(dt, dtype.F32))
		decays := p.multiply(decay, p.cast(dt, dtype.F32))
		before := []*autograd.Tensor{timed, decays, b, c}
		timed, decays = wide(timed, rows*s.Width), wide(decays, rows)
		b, c = wide(b, rows*s.State), wide(c, rows*s.State)
		p.Drop(before...)

		sums := copied(decays) // cumulative
		within := p.pairs(decays, s.Chunk)
		scores := product(c, b, rows*s.Chunk, tokens, tokens)
		weights := p.multiply(scores, within)
		own := product(weights, timed, rows*s.Width, false, values)

		left := p.unary(copied(sums), dtype.F32, saveOutput)
		decayed := p.multiply(b, left)
		state := p.Batch * chunks * s.Heads * s.Width * s.State
		made := product(decayed, timed, state, tokens, values)
		first := p.New(state/chunks, made.DType)
		made = p.follow(made, wide(made, state+first.Elements))
		across := p.pairs(wide(sums, p.Batch*s.Heads*(chunks+1)), chunks+1)
		passed := product(across, made, state+first.Elements, false, p.Batch > 1)
		p.Drop(made)
		started := p.unary(sums, dtype.F32, saveOutput)
		last := p.view(passed, state)
		carried := product(c, last, rows*s.Width, tokens, chunks > 1)
		other := p.multiply(carried, started)
		sum := p.add(own, other)
		sum = p.follow(sum, copied(sum))
		return p.add(sum, residual)
	})
	return p.follow(y, p.view(y, x.Elements))
}

// pairs returns how much of a token is left at each later one of its chunk (segment_sum).
func (p *pass) pairs(x *autograd.Tensor, chunk int64) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		masked := func(x *autograd.Tensor) *autograd.Tensor {
			return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
				Saved:   []*autograd.Tensor{p.New(chunk*chunk, dtype.Bool)},
				Outputs: []autograd.Output{{Elements: x.Elements, DType: dtype.F32}}})[0]
		}
		above := masked(p.view(x, x.Elements*chunk))
		sums := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{above}, BackwardScratch: 2 * above.Bytes(),
			Outputs: []autograd.Output{{Elements: above.Elements, DType: dtype.F32}}})[0]
		sums = p.follow(sums, masked(sums))
		p.Drop(above)
		return p.unary(sums, dtype.F32, saveOutput)
	})
}
