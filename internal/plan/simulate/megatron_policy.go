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
		o.Scratch = n + 4*n // the tokens that count, and logits without the others
	}
	if loss.TrainsEntropy {
		o.Saved, o.BackwardScratch = with(x), 4*n
	}
	o.Outputs = []autograd.Output{{Elements: rows, DType: dtype.F32}, {Elements: n, DType: dtype.F32, Saved: true},
		{Elements: rows, DType: dtype.F32}}
	return p.tape.Do(o)[0]
}
