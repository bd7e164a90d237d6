package simulate

import (
	"slices"
	"strings"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/ledger"
	"plimsoll/megatron"
)

// norm runs a norm, which saves its input and two sums of each row.
func (p *megatronPass) norm(x *autograd.Tensor, name string) *autograd.Tensor {
	defer p.in(ledger.NormActivations, "results of norms")()
	w := p.weight(name + ".weight")
	if w == nil {
		return x
	}
	rows := x.Elements / w.Elements
	return p.do(autograd.Operation{Inputs: with(x, w, p.weight(name+".bias")), Saved: with(x),
		Outputs: []autograd.Output{{Elements: 2 * rows, DType: dtype.F32, Saved: true}}}, x.Elements, false)
}

// linear runs a linear layer whose outputs are split among tensor parallel ranks: it gathers its input.
func (p *megatronPass) linear(x *autograd.Tensor, name string, out int64, adds bool) *autograd.Tensor {
	w := p.weight(name + ".weight")
	in := w.Elements / out
	rows := p.rows(x, in)
	bias := p.weight(name + ".bias")
	if !adds {
		bias = nil
	}
	gathered := int64(0)
	if rows*in > x.Elements {
		gathered = p.size(rows * in)
	}
	return p.do(autograd.Operation{Inputs: with(x, w, bias), Saved: with(x), Scratch: gathered,
		BackwardScratch: 2 * gathered}, rows*out, false)
}

// rows returns the rows of the input of a column parallel layer, gathered.
func (p *megatronPass) rows(x *autograd.Tensor, in int64) int64 {
	rows := x.Elements / in
	if p.gathered(1) > 0 && !strings.Contains(p.prefix, "experts") {
		rows *= p.Degrees.Tensor
	}
	return rows
}

// project runs a linear layer whose inputs are split among tensor parallel ranks: it reduces its output.
func (p *megatronPass) project(x *autograd.Tensor, name string) *autograd.Tensor {
	w := p.weight(name + ".weight")
	in := w.Elements / p.Hidden
	rows := x.Elements / in
	o := autograd.Operation{Inputs: with(x, w), Saved: with(x)}
	if p.gathered(1) > 0 {
		o.Scratch, o.BackwardScratch = p.size(rows*p.Hidden), p.size(rows*p.Hidden)
		rows /= p.Degrees.Tensor
	}
	return p.do(o, rows*p.Hidden, false)
}

// add adds bias and dropout to a result, and the result to the residual stream (fused_bias_dropout.py).
func (p *megatronPass) add(y *autograd.Tensor, bias string, residual *autograd.Tensor) *autograd.Tensor {
	defer p.in(ledger.ResidualActivations, "the residual stream between layers, and masks of dropout")()
	o := autograd.Operation{Inputs: with(y, residual, p.weight(bias)), Shared: []bool{p.HiddenDrop == 0, true}}
	if p.HiddenDrop > 0 {
		o.Outputs = []autograd.Output{{Elements: y.Elements, DType: dtype.Bool, Saved: true}}
	}
	return p.do(o, y.Elements, false)
}

// layer runs a transformer layer.
func (p *megatronPass) layer(layer megatron.Layer, x *autograd.Tensor) *autograd.Tensor {
	return p.tape.Scope(func() *autograd.Tensor {
		x = p.attend(layer, x)
		if layer.Cross {
			x = p.crossAttend(x)
		}
		return p.think(layer, x)
	})
}

// attend runs attention and adds its result.
func (p *megatronPass) attend(layer megatron.Layer, x *autograd.Tensor) *autograd.Tensor {
	defer p.in(ledger.AttentionActivations, "queries, keys, values and results of attention")()
	return p.tape.Scope(func() *autograd.Tensor {
		y := p.norm(x, "input_layernorm")
		var context *autograd.Tensor
		if p.LatentAttention {
			context = p.latentAttend(y)
		} else {
			width := (p.QueryHeads() + 2*p.KeyHeads()) * p.HeadSize
			qkv := p.linear(y, "self_attention.linear_qkv", width, true)
			p.tape.Drop(y)
			context = p.core(qkv, p.full(), p.sequence, p.QueryHeads(), p.HeadSize, p.HeadSize)
		}
		z := p.project(context, "self_attention.linear_proj")
		p.tape.Drop(context)
		return p.add(z, "self_attention.linear_proj.bias", x)
	})
}

// core runs the attention proper on one tensor of queries, keys and values, as a checkpoint if it is recomputed.
func (p *megatronPass) core(qkv *autograd.Tensor, tokens, keys, heads, head, value int64) *autograd.Tensor {
	body := func(qkv *autograd.Tensor) *autograd.Tensor {
		return p.tape.Scope(func() *autograd.Tensor { return p.scoresOf(qkv, tokens, keys, heads, head, value) })
	}
	if p.recomputes("core_attn") {
		return p.tape.Checkpoint(autograd.Checkpoint{Reentrant: true}, qkv, body)
	}
	return body(qkv)
}

// recomputes reports whether selective recomputation has a module. Without a list it is the attention proper.
func (p *megatronPass) recomputes(module string) bool {
	if p.Recompute != "selective" {
		return false
	}
	if len(p.RecomputeModules) == 0 {
		return module == "core_attn"
	}
	return slices.Contains(strings.Fields(strings.Join(p.RecomputeModules, " ")), module)
}

func (p *megatronPass) scoresOf(qkv *autograd.Tensor, tokens, keys, heads, head, value int64) *autograd.Tensor {
	rotates := p.PositionType == "rope" || p.PositionType == "yarn"
	if rotates { // fused: queries and keys are new tensors
		qkv = p.do(autograd.Operation{Inputs: with(qkv)}, qkv.Elements, false)
	}
	out := tokens * heads * value
	sums := autograd.Output{Elements: heads * tokens, DType: dtype.F32, Saved: true}
	switch p.Attention {
	case "flash":
		y := qkv
		if !rotates { // queries, keys and values with the batch first
			y = p.do(autograd.Operation{Inputs: with(qkv)}, qkv.Elements, false)
		}
		z := p.do(autograd.Operation{Inputs: with(y), Saved: with(y), Scratch: p.ring(qkv.Elements, out),
			BackwardScratch: 4*out + p.ring(qkv.Elements, out), Outputs: []autograd.Output{sums}}, out, true)
		return p.do(autograd.Operation{Inputs: with(z)}, out, false)
	case "fused":
		return p.do(autograd.Operation{Inputs: with(qkv), Saved: with(qkv), Scratch: p.ring(qkv.Elements, out),
			BackwardScratch: 4*out + p.ring(qkv.Elements, out), Outputs: []autograd.Output{sums}}, out, true)
	}
	return p.unfused(qkv, tokens, keys, heads, out)
}

// ring returns the bytes that context parallel ranks exchange: keys and values of every rank, and partial results.
func (p *megatronPass) ring(qkv, out int64) int64 {
	if p.Degrees.Context == 1 {
		return 0
	}
	return p.size(qkv*2/3*2 + out*2)
}

// unfused runs attention with its scores as tensors (UnfusedDotProductAttention, DotProductAttention).
func (p *megatronPass) unfused(qkv *autograd.Tensor, tokens, keys, heads, out int64) *autograd.Tensor {
	defer p.in(ledger.AttentionScores, "scores of attention, their softmax, dropout and its mask")()
	n := heads * tokens * keys
	scratch := p.size(n)
	if p.Attention == "local" {
		scratch = 0
		if !p.scores {
			p.scores = true
			p.hold(p.size(n), ledger.AttentionScores, reasonOf("Megatron-LM's global buffer of attention scores"))
		}
	}
	scores := p.do(autograd.Operation{Inputs: with(qkv), Saved: with(qkv), Scratch: scratch}, n, false)
	y := p.do(autograd.Operation{Inputs: with(scores)}, n, true)
	y = p.dropout(y, p.AttentionDrop)
	z := p.do(autograd.Operation{Inputs: with(y, qkv), Saved: with(y)}, out, false)
	return p.do(autograd.Operation{Inputs: with(z)}, out, false)
}

// think runs the feed-forward layer and adds its result.
func (p *megatronPass) think(layer megatron.Layer, x *autograd.Tensor) *autograd.Tensor {
	defer p.in(ledger.FeedForwardActivations, "results inside feed-forward layers")()
	return p.tape.Scope(func() *autograd.Tensor {
		y := p.norm(x, "pre_mlp_layernorm")
		if layer.Mixture {
			return p.add(p.mix(y), "", x)
		}
		z := p.feedForward(y, "mlp", p.FeedForward/p.Degrees.Tensor)
		return p.add(z, "mlp.linear_fc2.bias", x)
	})
}

// feedForward runs two linear layers and the activation between them.
func (p *megatronPass) feedForward(x *autograd.Tensor, name string, width int64) *autograd.Tensor {
	y := p.linear(x, name+".linear_fc1", width*p.Gates(), false)
	z := p.activate(y, name+".linear_fc1.bias")
	p.tape.Drop(y)
	return p.project(z, name+".linear_fc2")
}

// activate runs the activation function with the bias before it.
func (p *megatronPass) activate(x *autograd.Tensor, bias string) *autograd.Tensor {
	return p.do(autograd.Operation{Inputs: with(x, p.weight(bias)), Saved: with(x)}, x.Elements/p.Gates(), false)
}

// crossAttend runs the attention of a decoder on the encoder's output.
func (p *megatronPass) crossAttend(x *autograd.Tensor) *autograd.Tensor {
	return x
}

// latentAttend runs DeepSeek's attention.
func (p *megatronPass) latentAttend(x *autograd.Tensor) *autograd.Tensor {
	return x
}

// mix runs a mixture of experts.
func (p *megatronPass) mix(x *autograd.Tensor) *autograd.Tensor { return x }
