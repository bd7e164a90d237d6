package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// answers computes the log-probabilities of the tokens of answers from the logits. The program holds the logits in the
// type that it computes in.
func (p *pass) answers(logits *autograd.Tensor) Result {
	if p.WideLogits || p.Loss == LogProbabilities {
		logits = p.follow(logits, p.cast(logits, dtype.F32))
	}
	p.HasLogits()
	loss := p.Scope(func() *autograd.Tensor {
		var parts []*autograd.Tensor
		if p.HalfLoss { // logits[..., :-1, :].contiguous() of the chosen answers, and its logarithms
			half := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{logits},
				Outputs: []autograd.Output{{Elements: logits.Elements / 2, DType: logits.DType}}})[0]
			parts = append(parts, p.mean(p.follow(half, p.normalized(half, logits.DType))))
		}
		if p.Loss == LogProbabilities {
			parts = append(parts, p.mean(p.normalized(p.withoutLast(logits), logits.DType)))
		} else {
			parts = append(parts, p.selected(p.withoutLast(logits))...)
		}
		return p.Do(autograd.Operation{Inputs: parts, Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
	})
	return Result{Loss: loss, Logits: logits}
}

// kernelLoss has a kernel compute the log-probabilities of the tokens.
func (p *pass) kernelLoss(logits *autograd.Tensor) Result {
	held := p.Loss == WideKernelLoss
	if held {
		logits = p.follow(logits, p.cast(logits, dtype.F32))
		p.HasLogits()
	}
	loss := p.Scope(func() *autograd.Tensor {
		x := logits
		if !held {
			x = p.cooled(logits)
		}
		return p.mean(p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x},
			Replaces: !held, Outputs: []autograd.Output{{Elements: p.Batch * p.Sequence, DType: dtype.F32}}})[0])
	})
	if !held {
		p.Drop(logits)
		return Result{Loss: loss}
	}
	return Result{Loss: loss, Logits: logits}
}

// cooled divides logits by a temperature in place, through a view of them. The gradient then passes a copy for the
// view, and three for the division (CopySlices in torch/csrc/autograd/functions/tensor.cpp).
func (p *pass) cooled(logits *autograd.Tensor) *autograd.Tensor {
	divided := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{logits}, BackwardScratch: 2 * logits.Bytes(),
		Outputs: []autograd.Output{{Elements: logits.Elements, DType: logits.DType, View: true}}})[0]
	return p.slice(divided, logits.Elements)
}

// withoutLast is the view logits[:, :-1, :]. Its gradient is copied into zeros as large as the logits.
func (p *pass) withoutLast(logits *autograd.Tensor) *autograd.Tensor {
	return p.slice(logits, logits.Elements)
}

// slice returns a part of a tensor, as a view: the gradient of the rest is zero.
func (p *pass) slice(x *autograd.Tensor, elements int64) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: elements, DType: x.DType, View: true}}})[0]
}

// selected runs selective_log_softmax. In fp32 it subtracts the logarithm of a sequence's sum, and saves the logits. In
// 16 bits it saves the logarithms of a sequence.
func (p *pass) selected(logits *autograd.Tensor) []*autograd.Tensor {
	var parts []*autograd.Tensor
	if logits.DType == dtype.F32 {
		parts = append(parts, p.mean(logits)) // gather
	}
	row := logits.Elements / p.Batch
	views := make([]autograd.Output, p.Batch)
	for i := range views {
		views[i] = autograd.Output{Elements: row, DType: logits.DType, View: true}
	}
	for _, x := range p.Do(autograd.Operation{Inputs: []*autograd.Tensor{logits}, Outputs: views}) {
		if logits.DType != dtype.F32 {
			parts = append(parts, p.mean(p.normalized(x, x.DType)))
			continue
		}
		parts = append(parts, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x},
			Scratch: x.Bytes(), BackwardScratch: 2 * x.Bytes(),
			Outputs: []autograd.Output{{Elements: row / p.network.Head.Outputs, DType: x.DType, Saved: true}}})[0])
	}
	return parts
}

// value runs the head of a reward model that keeps its language model's head: a linear module with one output in fp32,
// behind dropout. The logits and their cross entropy are computed, and nobody reads them (LLaMA-Factory's
// train/rm/trainer.py, with TRL's AutoModelForCausalLMWithValueHead).
func (p *pass) value(h *model.Head, x *autograd.Tensor) Result {
	p.WithoutGradients(func() { // the graph ends with the pass
		logits := p.logits(h, x, h.Outputs/p.Parallel.Tensor)
		p.crossEntropy(logits)
		p.Drop(logits)
	})
	values := p.dropout(x, valueDropout)
	scores := p.linear(h.Value, values, 1)
	return Result{Loss: p.mean(scores)}
}

// valueDropout is the summary_dropout_prob of a value head.
const valueDropout = .1
