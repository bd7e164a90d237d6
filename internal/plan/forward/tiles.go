package forward

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// The sizes of TRL's tiles: TOKEN_CHUNK_SIZE in trl/kernels/chunked_logprob.py, _CHUNKED_LOGPROB_CHUNK_SIZE in
// trl/trainer/utils.py and, before 1.15, _CHUNKED_LM_HEAD_CHUNK_SIZE in trl/trainer/sft_trainer.py.
const (
	tileTokens     = 4096
	tileOutputs    = 32768
	recomputedRows = 256
)

// tiledLoss computes the log-probability of each token from one tile of logits at a time (ChunkedLogProbFunction in
// trl/kernels/chunked_logprob.py). The backward pass makes the tiles again, and sums up gradients in fp32.
func (p *pass) tiledLoss(h *model.Head, x *autograd.Tensor) *autograd.Tensor {
	w := p.parameter(h.Projection + ".weight")
	hidden := p.picked(x)
	compute := p.computes(hidden)
	rows, outputs := min(hidden.Elements/p.network.Hidden, tileTokens), min(h.Outputs, tileOutputs)
	tile := rows * outputs * compute.Size()
	if w.DType != compute {
		tile += outputs * p.network.Hidden * compute.Size()
	}
	if hidden.DType != compute {
		tile += rows * p.network.Hidden * compute.Size()
	}
	sums := tile
	if w.DType != compute { // the name of a tile of the weight keeps it until the next one is cast
		sums += min(h.Outputs-outputs, tileOutputs) * p.network.Hidden * compute.Size()
	}
	if hidden.DType != dtype.F32 {
		sums += hidden.Elements * dtype.F32.Size()
	}
	if w.Trainable && w.DType != dtype.F32 {
		sums += w.Elements * dtype.F32.Size()
	}
	return p.mean(p.ofHead(h, autograd.Operation{Inputs: []*autograd.Tensor{hidden, w.Tensor()},
		Saved: []*autograd.Tensor{hidden}, Scratch: tile, BackwardScratch: sums,
		Outputs: []autograd.Output{{Elements: hidden.Elements / p.network.Hidden, DType: dtype.F32}}}))
}

// recomputedLoss computes the loss of 256 tokens at a time, each behind a checkpoint (_chunked_cross_entropy_loss in
// trl/trainer/sft_trainer.py of 1.7). Each run converts the weight to fp32, and autocast converts it back.
func (p *pass) recomputedLoss(h *model.Head, x *autograd.Tensor) *autograd.Tensor {
	w := p.parameter(h.Projection + ".weight")
	hidden := p.picked(x)
	compute, wide := p.computes(hidden), dtype.F32.Size()
	var weights int64
	if w.DType != dtype.F32 {
		weights += w.Elements * wide
	}
	if p.Autocast != dtype.Invalid && p.Autocast != dtype.F32 {
		weights += w.Elements * p.Autocast.Size()
	}
	logits := min(hidden.Elements/p.network.Hidden, recomputedRows) * h.Outputs
	// The logits with their logarithms, probabilities and products of the two; the product with the weight before.
	forward := max(weights, 3*logits*wide) + logits*compute.Size()
	backward := weights + 3*logits*wide
	if w.Trainable { // the gradient of a run in two types, beside the sum of those before
		backward = weights + logits*(compute.Size()+2*wide) + w.Elements*(compute.Size()+2*w.DType.Size())
	}
	if !w.Trainable { // temporaries of both passes take the same blocks
		forward = max(forward, backward)
	}
	return p.ofHead(h, autograd.Operation{Inputs: []*autograd.Tensor{hidden, w.Tensor()},
		Saved: []*autograd.Tensor{hidden}, Scratch: forward, BackwardScratch: backward,
		Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})
}

// picked copies the hidden states of the tokens that have a label: hidden_states[:, :-1][mask].
func (p *pass) picked(x *autograd.Tensor) *autograd.Tensor {
	view := p.slice(x, x.Elements)
	p.Drop(x)
	copied := p.unary(view, x.DType, saveNothing)
	p.Drop(view)
	return copied
}

// computes returns the type that products compute in.
func (p *pass) computes(x *autograd.Tensor) dtype.Type {
	if p.Autocast != dtype.Invalid {
		return p.Autocast
	}
	return x.DType
}

// ofHead runs an operation with the weight of the head, and lets go of its first input.
func (p *pass) ofHead(h *model.Head, o autograd.Operation) (result *autograd.Tensor) {
	p.hooked(h.Projection, func() *autograd.Tensor {
		result = p.Do(o)[0]
		p.Drop(o.Inputs[0])
		return result
	})
	return result
}

// outputChunks is the usual num_output_chunks of torchtune's losses.
const outputChunks = 8

// chunkedEntropy computes the cross entropy of an eighth of each sequence at a time. The logits of all parts are there
// at once (CEWithChunkedOutputLoss in torchtune/modules/loss), or each part has its own for itself
// (LinearCrossEntropyLoss). The backward pass needs the logarithms of all parts, or the logits where it is compiled.
func (p *pass) chunkedEntropy(h *model.Head, x *autograd.Tensor, outputs int64) *autograd.Tensor {
	var tokens []int64
	each := (p.Sequence + outputChunks - 1) / outputChunks
	for left := p.Sequence; left > 0; left -= each {
		tokens = append(tokens, min(left, each))
	}
	parts := p.split(x, tokens...)
	p.Drop(x)
	logits := make([]*autograd.Tensor, len(parts))
	project := func(i int) {
		logits[i] = p.logits(h, parts[i], outputs)
		p.Drop(parts[i])
	}
	for i := range parts {
		if p.Loss == ChunkedOutputsLoss {
			project(i)
		}
	}
	return p.Scope(func() *autograd.Tensor {
		var losses []*autograd.Tensor
		for i := range parts {
			if p.Loss == LinearLoss {
				project(i)
			}
			if p.CompilesParts { // the upcast logits and their logarithms are in registers only
				losses = append(losses, p.mean(logits[i]))
			} else {
				wide := p.cast(logits[i], dtype.F32)
				losses = append(losses, p.mean(p.follow(wide, p.normalized(wide, dtype.F32))))
			}
			if p.Loss == LinearLoss {
				p.Drop(logits[i])
			}
		}
		if p.Loss == ChunkedOutputsLoss {
			p.Drop(logits...)
		}
		return p.Do(autograd.Operation{Inputs: losses, Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
	})
}
