package forward

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// attention runs the attention of x to source. The two are the same, except in a
// decoder's attention to its encoder.
func (p *pass) attention(s *model.Stack, a *model.Attention, x, source *autograd.Tensor) *autograd.Tensor {
	defer p.In(ledger.AttentionActivations, p.whyAttention)()
	return p.Scope(func() *autograd.Tensor {
		whole := p.gather(x)
		of := whole
		if source != x {
			of = p.gather(source)
		}
		switch {
		case a.Delta != nil:
			return p.scatter(p.delta(a, whole))
		case a.Scan != nil:
			return p.scatter(p.scanned(a, whole))
		case a.Short != nil:
			return p.scatter(p.shortConvolution(a, whole))
		}
		q, k, v, gate := p.project(a, whole, of)
		// A cache of latents is as large as they are, and holds nothing more.
		if p.HoldsCache && p.tower == nil && a.Latent == nil {
			k, v = p.cache(k), p.cache(v)
		}
		if p.Parallel.DeepSpeedUlysses {
			q, k, v = p.byHeads(a, q, k, v)
		}
		mixed := p.mix(s, a, q, k, v)
		if p.Parallel.DeepSpeedUlysses {
			mixed = p.byTokens(mixed)
		}
		if a.Divided && p.Attention != Flash { // the parts are put together
			mixed = p.follow(mixed, p.unary(mixed, mixed.DType, saveNothing))
		}
		if gate != nil {
			gated := p.multiply(mixed, p.unary(gate, gate.DType, saveOutput))
			p.Drop(mixed)
			mixed = gated
		}
		return p.dropout(p.scatter(p.linear(a.Output, mixed, p.network.Hidden)), a.OutputDropout)
	})
}

// cache copies keys or values into the cache of a generation.
func (p *pass) cache(x *autograd.Tensor) *autograd.Tensor {
	copied := p.follow(x, p.unary(x, x.DType, saveNothing))
	held := p.view(copied, copied.Elements)
	p.Hold(held)
	p.outputs = append(p.outputs, held)
	return copied
}

func (p *pass) whyAttention() string {
	what := fmt.Sprintf("queries, keys, values and outputs of %d blocks in %v: %s, %s", len(p.network.Blocks()),
		p.compute(), p.batch(), p.kept())
	if p.network.Recurrent() {
		what += "; what recurrent layers make of chunks of tokens, mostly in fp32, as transformers computes it in " +
			"PyTorch"
	}
	return what
}

// byHeads exchanges queries, keys and values. The caller holds those of its part of the sequences until
// attention returns. Every one is copied by rank, received, and copied by head. Ranks beyond the heads of keys get
// copies of them.
func (p *pass) byHeads(a *model.Attention, q, k, v *autograd.Tensor) (_, _, _ *autograd.Tensor) {
	times := max(1, p.Parallel.Context/p.heads(a.KeyValueHeads))
	one := func(x *autograd.Tensor, times int64) *autograd.Tensor {
		r := x
		if times > 1 {
			r = p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
				Outputs: []autograd.Output{{Elements: x.Elements * times, DType: x.DType}}})[0]
		}
		return p.received(r, x)
	}
	return one(q, 1), one(k, times), one(v, times)
}

// received sends a tensor to the ranks of the group and returns what comes from them, contiguous. It drops the tensor
// unless it is the one to keep.
func (p *pass) received(x, keep *autograd.Tensor) *autograd.Tensor {
	sent := p.unary(x, x.DType, saveNothing)
	if x != keep {
		p.Drop(x)
	}
	got := p.follow(sent, p.unary(sent, x.DType, saveNothing))
	return p.follow(got, p.unary(got, x.DType, saveNothing))
}

// byTokens exchanges the result of attention. What attention has saved of it stays beside the copy.
func (p *pass) byTokens(x *autograd.Tensor) *autograd.Tensor {
	if p.Batch > 1 { // its sequences do not lie one behind the other
		x = p.follow(x, p.unary(x, x.DType, saveNothing))
	}
	got := p.follow(x, p.unary(x, x.DType, saveNothing))
	return p.follow(got, p.unary(got, got.DType, saveNothing))
}

// heads returns a rank's number of heads under tensor parallelism.
func (p *pass) heads(n int64) int64 { return max(1, n/p.Parallel.Tensor) }

// project computes queries, keys and values, with norms and rotary positions.
func (p *pass) project(a *model.Attention, x, source *autograd.Tensor) (q, k, v, gate *autograd.Tensor) {
	heads, groups := p.heads(a.Heads), p.heads(a.KeyValueHeads)
	queries, keys, values := heads*a.Width, groups*a.Width, groups*a.ValueWidth
	switch {
	case a.Latent != nil:
		q, k, v = p.latent(a, x)
	case a.Fused != "":
		whole := p.linear(a.Fused, x, queries+keys+values)
		if a.Clips {
			whole = p.clipped(whole)
		}
		parts := p.split(whole, queries, keys, values)
		q, k, v = parts[0], parts[1], parts[2]
		p.Drop(whole)
	default:
		width := queries
		if a.Gated {
			width *= 2
		}
		q = p.linear(a.Query, x, width)
		if a.Gated {
			parts := p.split(q, queries, queries)
			p.Drop(q)
			q, gate = parts[0], parts[1]
		}
		k = p.linear(a.Key, source, keys)
		if a.ScalesKeys {
			k = p.follow(k, p.unary(k, k.DType, saveNothing))
		}
		v = p.linear(a.Value, source, values)
		if p.FusedQKV {
			q, k, v = p.join(q, k, v)
		}
	}
	if !a.NormsRotated {
		q, k = p.normed(a, q, k)
	}
	if a.Clips && a.Fused == "" {
		q, k, v = p.clipped(q), p.clipped(k), p.clipped(v)
	}
	if a.Rotary > 0 {
		q, k = p.rotated(a, q, k)
	}
	if a.NormsRotated {
		q, k = p.normed(a, q, k)
	}
	if a.ScalesQueries {
		q = p.follow(q, p.unary(q, q.DType, saveNothing))
	}
	if a.ByHead {
		q, k, v = p.copied(q), p.copied(k), p.copied(v)
	}
	return q, k, v, gate
}

// clipped limits a tensor to a range and drops it. The backward pass needs what it was: clamp_, which works in place,
// saves a copy.
func (p *pass) clipped(x *autograd.Tensor) *autograd.Tensor {
	return p.follow(x, p.unary(x, x.DType, saveInput))
}

// copied copies a tensor into another order and drops it.
func (p *pass) copied(x *autograd.Tensor) *autograd.Tensor {
	return p.follow(x, p.unary(x, x.DType, saveNothing))
}

// normed runs the norms of queries and keys, if there are any.
func (p *pass) normed(a *model.Attention, q, k *autograd.Tensor) (_, _ *autograd.Tensor) {
	if a.QueryNorm.Kind == model.NoNorm {
		return q, k
	}
	return p.follow(q, p.norm(a.QueryNorm, q)), p.follow(k, p.norm(a.KeyNorm, k))
}

// join copies queries, keys and values into one tensor and returns views of it.
func (p *pass) join(q, k, v *autograd.Tensor) (_, _, _ *autograd.Tensor) {
	whole := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{q, k, v},
		Outputs: []autograd.Output{{Elements: q.Elements + k.Elements + v.Elements, DType: v.DType}}})[0]
	parts := p.split(whole, q.Elements, k.Elements, v.Elements)
	p.Drop(q, k, v, whole)
	return parts[0], parts[1], parts[2]
}

// split returns views of a tensor. Their gradients are concatenated.
func (p *pass) split(x *autograd.Tensor, widths ...int64) []*autograd.Tensor {
	var sum int64
	for _, w := range widths {
		sum += w
	}
	outputs := make([]autograd.Output, len(widths))
	for i, w := range widths {
		outputs[i] = autograd.Output{Elements: x.Elements / sum * w, DType: x.DType, View: true}
	}
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Outputs: outputs})
}

// rotated applies rotary positions to queries and keys.
func (p *pass) rotated(a *model.Attention, q, k *autograd.Tensor) (_, _ *autograd.Tensor) {
	angles := p.angles
	if a.OwnAngles && !p.SharedAttention {
		t := q.DType
		if a.WideRotary || p.Autocast != dtype.Invalid {
			t = dtype.F32
		}
		angles = p.New(2*p.Sequence/p.Parallel.Context*int64(a.Rotary*float64(a.Width)), t)
		defer p.Drop(angles)
	}
	return p.follow(q, p.rotate(a, q, angles)), p.follow(k, p.rotate(a, k, angles))
}

// rotate applies rotary positions: two products and a sum. They save the cosines
// and sines only. All blocks share them, unless there are angles of the block.
// Under autocast they are in fp32.
func (p *pass) rotate(a *model.Attention, x, angles *autograd.Tensor) *autograd.Tensor {
	switch {
	case p.Compile:
		return p.unary(x, p.compute(), saveNothing)
	case p.Liger: // in place, in both passes (liger_kernel/ops/rope.py)
		return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Shared: []bool{true},
			Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType, View: true}}})[0]
	}
	if a.WideRotary && x.DType != dtype.F32 {
		wide := p.cast(x, dtype.F32)
		rotated := p.follow(wide, p.rotate(a, wide, angles))
		return p.follow(rotated, p.cast(rotated, x.DType))
	}
	result := x.DType
	if p.Autocast != dtype.Invalid {
		result = dtype.F32
	}
	bytes := x.Elements * result.Size()
	o := autograd.Operation{
		Inputs: []*autograd.Tensor{x}, Outputs: []autograd.Output{{Elements: x.Elements, DType: result}},
		Scratch: 2 * bytes, BackwardScratch: 2 * bytes,
	}
	if angles != nil {
		o.Saved = append(o.Saved, angles)
	}
	return p.Do(o)[0]
}

// mix runs the attention between the projections.
func (p *pass) mix(s *model.Stack, a *model.Attention, q, k, v *autograd.Tensor) *autograd.Tensor {
	heads, groups := p.heads(a.Heads), p.heads(a.KeyValueHeads)
	biased := a.Biased && p.FusesBias
	if p.Parallel.DeepSpeedUlysses {
		groups = max(groups, p.Parallel.Context) // ranks beyond the heads of keys have copies
	}
	if p.isEager(a) {
		k, v = p.repeat(k, heads/groups), p.repeat(v, heads/groups)
		return p.scores(a, q, k, v)
	}
	// A window shorter than the sequence needs a mask. With a mask torch does not
	// share keys among queries.
	masked := p.Attention == SDPA && (p.masked || a.Window > 0 && p.Sequence > a.Window && !p.sharesWindow()) &&
		!p.Parallel.DeepSpeedUlysses // it drops masks
	contiguous := p.Attention == SDPA && p.ContiguousHeads
	if contiguous {
		q = p.follow(q, p.unary(q, q.DType, saveNothing))
	}
	if masked || p.mask != nil || p.FusedQKV || p.Attention == SDPA && p.RepeatsKeys {
		k, v = p.repeat(k, heads/groups), p.repeat(v, heads/groups)
	}
	if p.Parallel.Ulysses {
		q, k, v = p.exchanged(q), p.exchanged(k), p.exchanged(v)
	}
	compute := promoted(promoted(q.DType, k.DType), v.DType)
	if p.Autocast != dtype.Invalid {
		compute = p.Autocast
	}
	q, k, v = p.cast(q, compute), p.cast(k, compute), p.cast(v, compute)
	tokens := q.Elements / (heads * a.Width)
	elements := tokens * heads * a.ValueWidth
	o := autograd.Operation{
		Inputs: []*autograd.Tensor{q, k, v}, Saved: []*autograd.Tensor{q, k, v},
		Outputs: []autograd.Output{{Elements: elements, DType: compute, Saved: true},
			{Elements: tokens * heads, DType: dtype.F32, Saved: true}},
		// The backward pass keeps the sum of the queries' gradient in fp32, and
		// for each row the product of gradient and output.
		BackwardScratch: 4*q.Elements + 4*tokens*heads,
		Kept:            true,
	}
	if p.mask != nil {
		o.Saved = append(o.Saved, p.mask)
	}
	if masked { // every layer converts the mask of the window to the type of the scores
		mask := p.New(p.Batch*(p.Sequence/p.Parallel.Context)*p.Sequence, compute)
		o.Saved = append(o.Saved, mask)
		defer p.Drop(mask)
	}
	if biased {
		bias := p.New(heads*p.Sequence/p.Parallel.Context*p.Sequence, compute)
		o.Saved = append(o.Saved, bias)
		defer p.Drop(bias)
	}
	if groups < heads {
		o.BackwardScratch += (k.Elements + v.Elements) * (heads / groups) * compute.Size()
	}
	r := p.Do(o)
	p.Drop(r[1])
	// The memory-efficient kernel stores its output by token. The flash kernel and cuDNN's store
	// it as the queries are stored.
	efficient := p.Attention == SDPA && !p.usesCuDNN(a, compute) && (masked || p.mask != nil || biased ||
		a.Width != a.ValueWidth || compute == dtype.F32)
	byHead := a.Joined && !p.SharedAttention || a.ByHead || contiguous ||
		p.Parallel.DeepSpeedUlysses && p.Attention == SDPA
	if p.Parallel.Ulysses {
		return p.exchanged(r[0])
	}
	if byHead && !efficient || p.FusedQKV {
		return p.follow(r[0], p.unary(r[0], compute, saveNothing))
	}
	return r[0]
}

// isEager is whether attention makes the scores of all pairs of tokens.
func (p *pass) isEager(a *model.Attention) bool {
	return p.Attention == Eager || a.Biased && !p.FusesBias || a.Soft && p.Attention != Flash ||
		(a.Sinks != "" || a.NoSDPA && !p.SharedAttention) && p.Attention == SDPA
}

// eagerMasks returns the masks that eager attention adds to scores: one for all blocks that see the same tokens. The
// model makes them once, and has them until it returns.
func (p *pass) eagerMasks(s *model.Stack) []*autograd.Tensor {
	if p.Compile || !s.Causal {
		return nil
	}
	windows := map[int64]bool{}
	for i := range s.Blocks {
		if a := &s.Blocks[i].Attention; a.Heads > 0 && !a.Recurrent() && p.isEager(a) {
			windows[a.Window] = true
		}
	}
	defer p.In(ledger.AttentionScores, p.whyScores)()
	var masks []*autograd.Tensor
	for range windows {
		masks = append(masks, p.New(p.Batch*p.Sequence*p.Sequence, p.WeightType))
	}
	return masks
}

// usesCuDNN is whether scaled dot product attention is cuDNN's. The widths of heads are those that PyTorch 2.15 gives
// to it on a GPU of capability 9.0 or 10.0.
func (p *pass) usesCuDNN(a *model.Attention, compute dtype.Type) bool {
	width, of := a.Width, a.ValueWidth
	fits := width <= 128 && of <= 128 || width == 192 && of == 128 || width == 256 && of == 256
	return p.PrefersCuDNN && compute != dtype.F32 && a.Dropout == 0 && fits && width%8 == 0 && of%8 == 0
}

// exchanged is the all-to-all of Ulysses (SeqAllToAll4D): what a rank sends is copied together, and what it gets is put
// together, in both passes.
func (p *pass) exchanged(x *autograd.Tensor) *autograd.Tensor {
	r := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Outputs: []autograd.Output{{Elements: x.Elements,
		DType: x.DType}}, Scratch: 2 * x.Bytes(), BackwardScratch: 2 * x.Bytes(), Kept: true})[0]
	p.Drop(x)
	return r
}

// repeat copies keys or values for all heads that share them.
func (p *pass) repeat(x *autograd.Tensor, times int64) *autograd.Tensor {
	if times == 1 {
		return x
	}
	r := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs:         []autograd.Output{{Elements: x.Elements * times, DType: x.DType}},
		BackwardScratch: x.Elements * times * x.DType.Size()})[0]
	p.Drop(x)
	return r
}

func (p *pass) whyScores() string {
	tokens := p.Sequence
	if h := p.network.Sound(); h != nil {
		tokens = h.Rows
	}
	return fmt.Sprintf("scores of every pair of %s tokens for every head, %s: eager attention", ledger.Count(tokens),
		p.kept())
}

// scores runs attention that materializes the scores of all pairs of tokens.
func (p *pass) scores(a *model.Attention, q, k, v *autograd.Tensor) *autograd.Tensor {
	heads := p.heads(a.Heads)
	rows := q.Elements / a.Width // of all heads
	keys := k.Elements / a.Width / heads / p.Batch
	switch {
	case a.Parts > 0:
		keys = min(keys, a.Parts)
	case a.Divided:
		keys /= p.Images.Count
	}
	pairs := rows * keys
	leave := p.In(ledger.AttentionScores, p.whyScores)
	x := p.Scope(func() *autograd.Tensor {
		if a.WideScores {
			return p.matmul(p.cast(q, dtype.F32), p.cast(k, dtype.F32), pairs)
		}
		return p.matmul(q, k, pairs)
	})
	x = p.follow(x, p.unary(x, x.DType, saveNothing)) // scaled
	if a.Soft {
		x = p.follow(x, p.unary(x, x.DType, saveNothing))
		x = p.follow(x, p.unary(x, x.DType, saveOutput)) // the hyperbolic tangent
		x = p.follow(x, p.unary(x, x.DType, saveNothing))
	}
	masked := autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: x.Elements, DType: x.DType}}}
	if a.SavesMask {
		masked.Saved = []*autograd.Tensor{p.mask}
	}
	x = p.follow(x, p.Do(masked)[0])
	if p.ClampsScores {
		x = p.follow(x, p.unary(x, x.DType, saveInput))
	}
	result := x.DType
	if a.WideSoftmax && a.Sinks == "" {
		result = dtype.F32
	}
	before := x
	if a.Sinks != "" { // the program holds the scores until it returns
		x = p.withSinks(a, x, rows)
		defer p.Drop(x)
		x = p.softmax(x, result)
		p.Drop(before)
	} else {
		x = p.softmax(x, result)
	}
	if result != q.DType {
		x = p.follow(x, p.cast(x, q.DType))
	}
	if a.Sinks == "" { // the name stands for the scores until it stands for what was made of them
		p.Drop(before)
	}
	x = p.dropout(x, a.Dropout)
	leave()
	mixed := p.matmul(x, v, rows*a.ValueWidth)
	p.Drop(x)
	return p.follow(mixed, p.unary(mixed, mixed.DType, saveNothing)) // the heads side by side
}

// withSinks appends the sinks to the scores and subtracts the greatest score of each
// row, whose index it saves.
func (p *pass) withSinks(a *model.Attention, x *autograd.Tensor, rows int64) *autograd.Tensor {
	sinks := p.parameter(a.Sinks).Tensor()
	joined := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x, sinks},
		Outputs: []autograd.Output{{Elements: x.Elements + rows, DType: x.DType}}})[0]
	greatest := p.indexed(joined, p.New(rows, dtype.I64), rows)
	return p.follow(joined, p.follow(greatest, p.add(joined, greatest)))
}

// latent computes DeepSeek's queries, keys and values.
func (p *pass) latent(a *model.Attention, x *autograd.Tensor) (q, k, v *autograd.Tensor) {
	l, heads := a.Latent, p.heads(a.Heads)
	if l.QueryDown == "" {
		q = p.linear(a.Query, x, heads*a.Width)
	} else {
		down := p.linear(l.QueryDown, x, l.QueryRank)
		down = p.follow(down, p.norm(l.QueryNorm, down))
		q = p.linear(l.QueryUp, down, heads*a.Width)
		p.Drop(down)
	}
	plain := a.Width - l.Rotated
	parts := p.split(p.linear(l.Down, x, l.Rank+l.Rotated), l.Rank, l.Rotated)
	normed := p.norm(l.Norm, parts[0])
	up := p.linear(l.Up, normed, heads*(plain+a.ValueWidth))
	p.Drop(normed)
	keyValue := p.split(up, heads*plain, heads*a.ValueWidth)
	// Every head concatenates its plain part and the rotated part.
	tokens := x.Elements / p.network.Hidden
	wide := func(inputs ...*autograd.Tensor) *autograd.Tensor {
		return p.Do(autograd.Operation{Inputs: inputs,
			Outputs: []autograd.Output{{Elements: tokens * heads * a.Width, DType: up.DType}}})[0]
	}
	k = wide(keyValue[0], parts[1])
	q = p.follow(q, wide(q))
	p.Drop(parts...)
	p.Drop(up, keyValue[0])
	return q, k, keyValue[1]
}

// together runs a linear module whose outputs are sharded among ranks, and gathers
// the outputs.
func (p *pass) together(path string, x *autograd.Tensor, out int64) *autograd.Tensor {
	part := p.linear(path, x, max(1, out/p.Parallel.Tensor))
	return p.follow(part, p.resized(part, p.Parallel.Tensor))
}

// gather gathers the sequence, which tensor parallelism shards between the halves
// of a block. Scatter shards it again.
func (p *pass) gather(x *autograd.Tensor) *autograd.Tensor { return p.resized(x, p.Parallel.Tensor) }

func (p *pass) scatter(x *autograd.Tensor) *autograd.Tensor {
	if p.Parallel.Tensor == 1 {
		return x
	}
	r := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: x.Elements / p.Parallel.Tensor, DType: x.DType}}, Kept: true})[0]
	p.Drop(x)
	return r
}

func (p *pass) resized(x *autograd.Tensor, times int64) *autograd.Tensor {
	if times == 1 {
		return x
	}
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: x.Elements * times, DType: x.DType}}})[0]
}
