package simulate

import (
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// heads are the sizes of an attention on a rank.
type heads struct {
	count, query, value int64 // heads, and the sizes of one of queries and of values
	tokens              int64 // of queries, in all sequences
	keys                int64 // of a sequence
}

// attend runs attention and adds its result.
func (p *megatronPass) attend(x *autograd.Tensor) *autograd.Tensor {
	defer p.in(ledger.AttentionActivations, "queries, keys, values and results of attention")()
	return p.tape.Scope(func() *autograd.Tensor {
		y := p.norm(x, "input_layernorm")
		h := heads{p.QueryHeads(), p.HeadSize, p.HeadSize, p.full(), p.sequence}
		var context *autograd.Tensor
		if p.LatentAttention {
			h.query, h.value = p.LatentHead+p.LatentPosition, p.LatentValue
			if p.Recomputes("layernorm") { // a norm of its own
				p.discard(y)
			}
			context = p.latent(y, h)
		} else {
			width := (p.QueryHeads() + 2*p.KeyHeads()) * p.HeadSize
			qkv := p.linear(y, "self_attention.linear_qkv", width, true)
			p.tape.Drop(y)
			context = p.core(h, p.rotate(p.normHeads(qkv)))
			p.tape.Drop(qkv)
		}
		z := p.project(context, "self_attention.linear_proj")
		p.tape.Drop(context)
		return p.add(z, "self_attention.linear_proj.bias", x)
	})
}

// normHeads runs the norms of queries and keys, which save their inputs.
func (p *megatronPass) normHeads(qkv *autograd.Tensor) *autograd.Tensor {
	if p.weight("self_attention.q_layernorm.weight") == nil {
		return qkv
	}
	rows := qkv.Elements / p.HeadSize
	o := autograd.Operation{Inputs: with(qkv, p.weight("self_attention.q_layernorm.weight"),
		p.weight("self_attention.k_layernorm.weight")), Saved: with(qkv),
		Outputs: []autograd.Output{{Elements: 2 * rows, DType: dtype.F32, Saved: true}}}
	return p.do(o, qkv.Elements, false)
}

// rotates reports whether positions are rotations of queries and keys.
func (p *megatronPass) rotates() bool { return p.PositionType == "rope" || p.PositionType == "yarn" }

// rotate runs rotary embeddings: queries and keys are new tensors.
func (p *megatronPass) rotate(qkv *autograd.Tensor) *autograd.Tensor {
	if !p.rotates() {
		return qkv
	}
	return p.do(autograd.Operation{Inputs: with(qkv)}, qkv.Elements, false)
}

// latent runs DeepSeek's attention: it projects to narrow tensors and up again (multi_latent_attention.py).
func (p *megatronPass) latent(x *autograd.Tensor, h heads) *autograd.Tensor {
	queries := x
	name := "self_attention.linear_q_proj"
	if p.QueryRank > 0 {
		queries = p.norm(p.narrow(x, "self_attention.linear_q_down_proj", p.QueryRank), "self_attention.q_layernorm")
		name = "self_attention.linear_q_up_proj"
	}
	queries = p.linear(queries, name, h.count*h.query, false)
	both := p.narrow(x, "self_attention.linear_kv_down_proj", p.KeyRank+p.LatentPosition)
	keys := p.do(autograd.Operation{Inputs: with(both)}, both.Elements/(p.KeyRank+p.LatentPosition)*p.KeyRank, false)
	keys = p.norm(keys, "self_attention.kv_layernorm")
	keys = p.linear(keys, "self_attention.linear_kv_up_proj", h.count*(p.LatentHead+h.value), false)
	joined := p.do(autograd.Operation{Inputs: with(queries, keys, both)}, h.tokens*h.count*(2*h.query+h.value), false)
	p.tape.Drop(queries, keys, both)
	if p.Recomputes("mla_up_proj") {
		p.discard(joined)
	}
	return p.core(h, joined)
}

// discard has a result computed again by the backward pass (CheckpointWithoutOutput): no operation saves it.
func (p *megatronPass) discard(x *autograd.Tensor) { p.discarded[x] = true }

// saving has an operation save its inputs, except those that the backward pass computes again.
func (p *megatronPass) saving(o autograd.Operation, inputs ...*autograd.Tensor) autograd.Operation {
	for _, x := range inputs {
		if p.discarded[x] {
			o.BackwardScratch += x.Bytes()
		} else {
			o.Saved = append(o.Saved, x)
		}
	}
	return o
}

// narrow runs a linear layer that every rank has in full.
func (p *megatronPass) narrow(x *autograd.Tensor, name string, out int64) *autograd.Tensor {
	o, rows := autograd.Operation{Inputs: with(x, p.weight(name+".weight"))}, x.Elements/p.Hidden
	if !p.isFrozen(name) {
		o = p.savingInput(o, x)
	}
	return p.adapted(p.do(o, rows*out, false), x, name, func(x *autograd.Tensor, adapter string) *autograd.Tensor {
		return p.whole(x, adapter, rows)
	})
}

// crossAttend runs the attention of a decoder on the encoder's output.
func (p *megatronPass) crossAttend(x *autograd.Tensor) *autograd.Tensor {
	defer p.in(ledger.AttentionActivations, "queries, keys, values and results of attention")()
	return p.tape.Scope(func() *autograd.Tensor {
		width := p.QueryHeads() * p.HeadSize
		y := p.norm(x, "pre_cross_attn_layernorm")
		queries := p.linear(y, "cross_attention.linear_q", width, true)
		keys := p.linear(p.encoded, "cross_attention.linear_kv", 2*width, true)
		h := heads{p.QueryHeads(), p.HeadSize, p.HeadSize, p.full(), p.EncoderSequence / p.Degrees.Context}
		context := p.core(h, queries, keys)
		z := p.project(context, "cross_attention.linear_proj")
		return p.add(z, "cross_attention.linear_proj.bias", x)
	})
}

// core runs the attention proper on queries, keys and values, which may be one tensor, as a checkpoint if it is
// recomputed.
func (p *megatronPass) core(h heads, inputs ...*autograd.Tensor) *autograd.Tensor {
	body := func(first *autograd.Tensor) *autograd.Tensor {
		return p.tape.Scope(func() *autograd.Tensor {
			return p.scored(h, append([]*autograd.Tensor{first}, inputs[1:]...))
		})
	}
	return p.checkpoint("core_attn", body, inputs...)
}

// checkpoint runs a module on the first of its inputs, as a checkpoint if selective recomputation has the module.
func (p *megatronPass) checkpoint(module string, body func(*autograd.Tensor) *autograd.Tensor,
	inputs ...*autograd.Tensor) *autograd.Tensor {
	if !p.Recomputes(module) {
		return body(inputs[0])
	}
	prefix := p.prefix
	again := func(x *autograd.Tensor) *autograd.Tensor {
		before := p.prefix
		p.prefix = prefix
		defer func() { p.prefix = before }()
		return body(x)
	}
	if !slices.ContainsFunc(inputs, (*autograd.Tensor).NeedsGradient) {
		var y *autograd.Tensor // that needs none either, whatever is trained inside (CheckpointFunction)
		p.tape.WithoutGradients(func() { y = again(inputs[0]) })
		return y
	}
	return p.tape.Checkpoint(autograd.Checkpoint{Reentrant: true}, inputs[0], again, inputs[1:]...)
}

func (p *megatronPass) scored(h heads, inputs []*autograd.Tensor) *autograd.Tensor {
	out := h.tokens * h.count * h.value
	var elements int64
	for _, x := range inputs {
		elements += x.Elements
	}
	exchanged := int64(0)
	if p.Degrees.Context > 1 { // keys and values of a neighbour, and partial results
		exchanged = p.size(elements*4/3 + 2*out)
	}
	o := autograd.Operation{Scratch: exchanged, BackwardScratch: 4*out + exchanged,
		Outputs: []autograd.Output{{Elements: h.count * h.tokens, DType: dtype.F32, Saved: true}}}
	switch p.Attention {
	case "flash":
		if !p.rotates() { // queries, keys and values with the batch first
			for i, x := range inputs {
				inputs[i] = p.do(autograd.Operation{Inputs: with(x)}, x.Elements, false)
			}
		}
		o.Inputs = inputs
		z := p.do(p.saving(o, inputs...), out, true)
		return p.do(autograd.Operation{Inputs: with(z)}, out, false)
	case "fused":
		o.Inputs = inputs
		return p.do(p.saving(o, inputs...), out, true)
	}
	return p.unfused(h, inputs, out)
}

// unfused runs attention with its scores as tensors (UnfusedDotProductAttention, DotProductAttention).
func (p *megatronPass) unfused(h heads, inputs []*autograd.Tensor, out int64) *autograd.Tensor {
	defer p.in(ledger.AttentionScores, "scores of attention, their softmax, dropout and its mask")()
	n := h.count * h.tokens * h.keys
	scratch := p.size(n)
	if p.Attention == "local" {
		scratch = 0
		if n > p.scores {
			if p.scores > 0 {
				p.gpu.Free(p.scoresBuffer)
			}
			p.scores = n
			p.scoresBuffer = p.hold(p.size(n), ledger.AttentionScores,
				reasonOf("scores of attention, their softmax, dropout and its mask"))
		}
	}
	scores := p.do(p.saving(autograd.Operation{Inputs: inputs, Scratch: scratch}, inputs...), n, false)
	y := p.do(autograd.Operation{Inputs: with(scores)}, n, true)
	y = p.dropout(y, p.AttentionDrop)
	z := p.do(autograd.Operation{Inputs: append(with(y), inputs...), Saved: with(y)}, out, false)
	return p.do(autograd.Operation{Inputs: with(z)}, out, false)
}
