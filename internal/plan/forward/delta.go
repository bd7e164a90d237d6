package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// delta runs linear attention with the gated delta rule, as transformers does without the kernels of
// flash-linear-attention. Tensor parallelism shards the projections only and gathers their outputs
// (colwise_gather_output in transformers' tensor-parallel plan).
func (p *pass) delta(a *model.Attention, x *autograd.Tensor) *autograd.Tensor {
	d := a.Delta
	keys, values := d.KeyHeads*d.KeyWidth, d.ValueHeads*d.ValueWidth
	joined, outputGate, gates := p.deltaInputs(d, x)
	narrow := joined.DType
	mixed := p.convolution1D(&d.Convolution, joined)
	p.Drop(joined)
	mixed = p.follow(mixed, p.unary(mixed, mixed.DType, saveInput))
	mixed = p.follow(mixed, p.cast(mixed, narrow))
	beta := p.unary(gates[0], gates[0].DType, saveOutput)
	path := d.Path + "."
	step := p.add(p.cast(gates[1], dtype.F32), p.parameter(path+"dt_bias").Tensor())
	step = p.follow(step, p.unary(step, dtype.F32, saveInput))
	decay := p.unary(p.cast(p.parameter(path+"A_log").Tensor(), dtype.F32), dtype.F32, saveOutput)
	decay = p.follow(step, p.multiply(decay, step))
	of := p.split(mixed, keys, keys, values)
	y := p.follow(of[0], p.deltaRule(d, of[0], of[1], of[2], beta, decay))
	y = p.follow(y, p.cast(y, narrow))
	normed := p.follow(y, p.norm(d.Norm, y))
	wide := p.cast(outputGate, dtype.F32)
	gate := p.unary(wide, dtype.F32, saveInput)
	p.dropCasts(outputGate, wide)
	gated := p.follow(normed, p.multiply(normed, gate))
	p.Drop(gate)
	gated = p.follow(gated, p.cast(gated, narrow))
	return p.together(a.Output, gated, p.network.Hidden)
}

// deltaInputs returns queries, keys and values together, the output gate, and both gates of the rule.
func (p *pass) deltaInputs(d *model.Delta, x *autograd.Tensor) (joined, gate *autograd.Tensor,
	gates []*autograd.Tensor) {
	keys, values := d.KeyHeads*d.KeyWidth, d.ValueHeads*d.ValueWidth
	if d.OutputGate != "" {
		joined, gate = p.together(d.Project, x, 2*keys+values), p.together(d.OutputGate, x, values)
		for _, path := range d.Gates {
			gates = append(gates, p.together(path, x, d.ValueHeads))
		}
		return joined, gate, gates
	}
	projected, both := p.together(d.Project, x, 2*keys+2*values), p.together(d.Gates[0], x, 2*d.ValueHeads)
	parts := p.split(projected, keys, keys, values, values)
	gates = p.split(both, d.ValueHeads, d.ValueHeads)
	ordered := []**autograd.Tensor{&parts[0], &parts[1]} // heads of keys lie between those of values
	if d.ValueHeads > d.KeyHeads {
		ordered = append(ordered, &parts[2], &parts[3], &gates[0], &gates[1])
	}
	for _, x := range ordered {
		*x = p.follow(*x, p.unary(*x, (*x).DType, saveNothing))
	}
	joined = p.Do(autograd.Operation{Inputs: parts[:3],
		Outputs: []autograd.Output{{Elements: parts[0].Elements + parts[1].Elements + parts[2].Elements,
			DType: projected.DType}}})[0]
	p.Drop(parts[:3]...)
	return joined, parts[3], gates
}

// deltaChunk is the number of tokens that the gated delta rule takes at a time.
const deltaChunk = 64

// deltaRule runs the gated delta rule in fp32: the pairs of tokens of every chunk, and then one chunk after another,
// from which a state goes to the next (torch_chunk_gated_delta_rule in
// transformers/models/qwen3_next/modeling_qwen3_next.py).
func (p *pass) deltaRule(d *model.Delta, query, key, value, beta, decay *autograd.Tensor) *autograd.Tensor {
	tokens := value.Elements / (d.ValueHeads * d.ValueWidth)
	length := tokens / p.Batch
	chunks := (length + deltaChunk - 1) / deltaChunk
	rows := p.Batch * chunks * deltaChunk * d.ValueHeads // of all heads, with padding
	made := func(elements int64, x ...*autograd.Tensor) *autograd.Tensor {
		return p.Do(autograd.Operation{Inputs: x,
			Outputs: []autograd.Output{{Elements: elements, DType: x[0].DType}}})[0]
	}
	y := p.Scope(func() *autograd.Tensor {
		q, k := p.wideHeads(d, query), p.wideHeads(d, key)
		v, b := p.cast(value, dtype.F32), p.cast(beta, dtype.F32)
		q, k = p.follow(q, p.l2(q, d.KeyWidth)), p.follow(k, p.l2(k, d.KeyWidth))
		q = p.follow(q, p.unary(q, dtype.F32, saveNothing))
		before := []*autograd.Tensor{q, k}
		if v != value {
			before = append(before, v)
		}
		q, k, v = made(rows*d.KeyWidth, q), made(rows*d.KeyWidth, k), made(rows*d.ValueWidth, v)
		p.Drop(before...)
		b = p.follow(b, made(rows, b))
		vBeta, kBeta := p.multiply(v, b), p.multiply(k, b)
		sums := made(rows, decay)

		mask := p.New(deltaChunk*deltaChunk, dtype.Bool)
		differences := made(rows*deltaChunk, sums)
		masked := p.follow(differences, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{differences},
			Saved:   []*autograd.Tensor{mask},
			Outputs: []autograd.Output{{Elements: rows * deltaChunk, DType: dtype.F32}}})[0])
		pairwise := p.follow(masked, p.unary(masked, dtype.F32, saveOutput))
		// Neither a cast to fp32 nor padding has copied these: then they lie token by token.
		apart := value.DType == dtype.F32 && length%deltaChunk == 0
		times := func(a, b, c *autograd.Tensor, elements int64) *autograd.Tensor {
			of, with := a, b
			if apart {
				of, with = p.unary(a, dtype.F32, saveNothing), p.unary(b, dtype.F32, saveNothing)
			}
			y := p.matmul(of, with, elements)
			p.dropCasts(a, of, b, with)
			return p.follow(y, p.multiply(y, c))
		}
		system, scores := times(kBeta, k, pairwise, rows*deltaChunk), times(q, k, pairwise, rows*deltaChunk)
		decayed := p.multiply(kBeta, p.unary(sums, dtype.F32, saveOutput))
		solved := func(x *autograd.Tensor) *autograd.Tensor {
			return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{system, x}, Saved: []*autograd.Tensor{system},
				Outputs: []autograd.Output{{Elements: x.Elements, DType: dtype.F32, Saved: true}}})[0]
		}
		values, read := solved(vBeta), solved(decayed)
		state := p.New(p.Batch*d.ValueHeads*d.KeyWidth*d.ValueWidth, dtype.F32)
		result := p.New(values.Elements, dtype.F32)
		q = p.follow(q, p.multiply(q, p.unary(sums, dtype.F32, saveOutput)))
		left := p.unary(sums, dtype.F32, saveNothing)
		k = p.follow(k, p.multiply(k, p.follow(left, p.unary(left, dtype.F32, saveOutput))))
		ends := p.unary(p.view(sums, p.Batch*chunks*d.ValueHeads), dtype.F32, saveOutput)
		for range chunks {
			result, state = p.deltaStep(deltaStep{q, k, read, values, scores, ends, state, result}, chunks)
		}
		return result
	})
	return p.follow(y, p.view(y, tokens*d.ValueHeads*d.ValueWidth))
}

// deltaStep is what a chunk of the gated delta rule reads.
type deltaStep struct {
	query, key, read, values, scores, ends, state, result *autograd.Tensor
}

// deltaStep runs the gated delta rule for a chunk. It writes a part of the result, and makes the state for the next.
func (p *pass) deltaStep(s deltaStep, chunks int64) (result, state *autograd.Tensor) {
	at := func(x *autograd.Tensor) *autograd.Tensor { return p.view(x, x.Elements/chunks) }
	old := p.matmul(at(s.read), s.state, s.values.Elements/chunks)
	added := p.add(at(s.values), old)
	p.Drop(old)
	across := p.matmul(at(s.query), s.state, added.Elements)
	within := p.matmul(at(s.scores), added, added.Elements)
	sum := p.add(across, within)
	p.Drop(within)
	result = p.Do(autograd.Operation{Inputs: []*autograd.Tensor{s.result, sum}, Shared: []bool{true, true},
		BackwardScratch: s.result.Bytes(),
		Outputs:         []autograd.Output{{Elements: s.result.Elements, DType: s.result.DType, View: true}}})[0]
	p.Drop(sum, s.result)
	kept := p.multiply(s.state, at(s.ends))
	update := p.matmul(at(s.key), added, s.state.Elements)
	state = p.add(kept, update)
	p.Drop(kept, update, s.state, across, added)
	return result, state
}

// wideHeads repeats queries or keys for the heads of values that share them, in fp32.
func (p *pass) wideHeads(d *model.Delta, x *autograd.Tensor) *autograd.Tensor {
	repeated := x
	if d.ValueHeads > d.KeyHeads {
		repeated = p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
			Outputs: []autograd.Output{{Elements: x.Elements / d.KeyHeads * d.ValueHeads, DType: x.DType}}})[0]
	}
	wide := p.cast(repeated, dtype.F32)
	if repeated != x {
		p.dropCasts(wide, repeated)
	}
	return wide
}

// l2 divides every row by its length.
func (p *pass) l2(x *autograd.Tensor, width int64) *autograd.Tensor {
	squares := p.multiply(x, x)
	lengths := p.reduce(squares, x.Elements/width)
	p.Drop(squares)
	y := p.multiply(x, lengths)
	p.Drop(lengths)
	return y
}
