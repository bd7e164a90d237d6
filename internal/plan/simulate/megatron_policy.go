package simulate

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/plan/autograd"
)

// policyLoss makes log-probabilities of logits over the rank's part of the vocabulary: _VocabParallelLogProbEntropy in
// slime/utils/ppo_utils.py. The module's wrapper converts the logits to fp32, and the schedule holds these until the
// loss is made. The backward pass turns the softmax into the gradient in place.
func (p *megatronPass) policyLoss(logits *autograd.Tensor, rows int64) *autograd.Tensor {
	loss, n := p.Policy.Loss, logits.Elements
	float := func(o autograd.Operation) *autograd.Tensor {
		o.Outputs = []autograd.Output{{Elements: n, DType: dtype.F32}}
		return p.tape.Do(o)[0]
	}
	if loss.InPlace {
		return p.lossInPlace(logits, rows)
	}
	x := float(autograd.Operation{Inputs: with(logits)})
	p.tape.Drop(logits)
	if loss.Scaled {
		x = float(autograd.Operation{Inputs: with(x)})
	}
	if loss.Chunk > 0 && loss.Chunk < rows { // gradients of chunks are joined
		x = p.tape.Do(autograd.Operation{Inputs: with(x), Outputs: []autograd.Output{{Elements: n, DType: dtype.F32,
			View: true}}})[0]
	}
	o := autograd.Operation{Inputs: with(x), Replaces: true}
	if loss.Masked {
		o.Scratch = 2*n + 4*n // the tokens that count, the others, and logits without these
	}
	if loss.TrainsEntropy {
		o.Saved, o.BackwardScratch = with(x), 4*n
	}
	o.Outputs = []autograd.Output{{Elements: rows, DType: dtype.F32}, {Elements: n, DType: dtype.F32, Saved: true},
		{Elements: rows, DType: dtype.F32}}
	return p.tape.Do(o)[0]
}

// lossInPlace makes log-probabilities by Megatron core's cross entropy, which writes over the logits in fp32. Entropies
// have the logits and their softmax, so that a copy goes to the cross entropy (_lm_head_logits_processor in
// verl/workers/engine/megatron/transformer_impl.py, vocab_parallel_entropy).
func (p *megatronPass) lossInPlace(logits *autograd.Tensor, rows int64) *autograd.Tensor {
	loss, n := p.Policy.Loss, logits.Elements
	number := []autograd.Output{{Elements: n, DType: dtype.F32}}
	float := p.tape.Do(autograd.Operation{Inputs: with(logits), Outputs: number})[0]
	p.tape.Drop(logits)
	// The temperature divides them in place, and their gradient as a copy.
	float = p.tape.Do(autograd.Operation{Inputs: with(float), Outputs: []autograd.Output{{Elements: n, DType: dtype.F32,
		View: true}}})[0]
	x, entropy := float, (*autograd.Tensor)(nil)
	if loss.TrainsEntropy || loss.JudgesEntropy && !p.tape.Recording() {
		x = p.tape.Do(autograd.Operation{Inputs: with(float), Shared: []bool{true}, Outputs: number})[0]
		entropy = p.tape.Do(autograd.Operation{Inputs: with(float), Saved: with(float), Replaces: true,
			Outputs: []autograd.Output{{Elements: rows, DType: dtype.F32}, {Elements: n, DType: dtype.F32,
				Saved: true}}})[0]
	}
	made := p.tape.Do(autograd.Operation{Inputs: with(x), Saved: with(x), Replaces: true,
		Outputs: []autograd.Output{{Elements: rows, DType: dtype.F32}, {Elements: rows, DType: dtype.I64, Saved: true},
			{Elements: rows, DType: dtype.Bool, Saved: true}}})[0]
	if entropy == nil {
		return made
	}
	return p.tape.Do(autograd.Operation{Inputs: with(made, entropy), Outputs: []autograd.Output{{Elements: rows,
		DType: dtype.F32}}})[0]
}

// lossOfHidden makes log-probabilities and entropies of hidden states by a kernel (LinearCrossEntropy in
// verl/utils/kernel/linear_cross_entropy.py).
func (p *megatronPass) lossOfHidden(x, weight *autograd.Tensor, rows int64) *autograd.Tensor {
	row := autograd.Output{Elements: rows, DType: dtype.F32}
	kept := autograd.Output{Elements: rows, DType: dtype.F32, Saved: true}
	return p.tape.Do(autograd.Operation{Inputs: with(x, weight), Saved: with(x),
		BackwardScratch: p.size(rows * p.Policy.Loss.Fused), Outputs: []autograd.Output{row, row, kept, kept, kept}})[0]
}
