package forward

import (
	"cmp"
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// head computes the logits from the last hidden states, and the loss.
func (p *pass) head(x *autograd.Tensor) Result {
	defer p.In(ledger.LogitsAndLoss, p.whyLogits)()
	h := &p.network.Head
	if h.Projection == "" {
		return Result{Loss: p.mean(x)}
	}
	if h.PerSequence {
		return p.classify(h, x)
	}
	if h.Dense != "" {
		x = p.linear(h.Dense, x, cmp.Or(h.Width, p.network.Hidden))
		x = p.follow(x, p.activate(cmp.Or(h.Activation, "gelu"), x))
		if h.Norm.Kind != model.NoNorm {
			x = p.follow(x, p.norm(h.Norm, x))
		}
	}
	x = p.dropout(x, h.Dropout)
	if p.Loss == FusedLoss {
		defer p.KeepLossHere()()
		return Result{Loss: p.fusedLoss(h, x)}
	}
	if h.Value != "" {
		return p.value(h, x)
	}
	if p.Loss == TiledLoss || p.Loss == RecomputedLoss {
		defer p.KeepLossHere()()
		if p.Loss == TiledLoss {
			return Result{Loss: p.tiledLoss(h, x)}
		}
		return Result{Loss: p.recomputedLoss(h, x)}
	}
	outputs := h.Outputs
	if !h.Classes {
		outputs /= p.Parallel.Tensor
	}
	if p.Loss == ChunkedLoss && p.ChunksHead {
		return p.chunkedHead(h, x, outputs)
	}
	if p.Loss == ChunkedOutputsLoss || p.Loss == LinearLoss {
		return Result{Loss: p.chunkedEntropy(h, x, outputs)}
	}
	logits := p.logits(h, x, outputs)
	defer p.KeepLossHere()()
	if len(p.network.Towers) > 0 { // the last hidden states are of the outputs
		p.Hold(x)
		p.outputs = append(p.outputs, x)
	} else {
		defer p.Drop(x) // the outputs of the body have it until the model returns
	}
	switch {
	case p.Loss == LogProbabilities || p.Loss == SelectedLogProbabilities:
		return p.answers(logits)
	case p.Loss == KernelLoss || p.Loss == WideKernelLoss:
		return p.kernelLoss(logits)
	case p.Loss == NoLoss:
		if p.WideLogits {
			logits = p.follow(logits, p.cast(logits, dtype.F32))
		}
		return Result{Loss: p.New(0, dtype.F32), Logits: logits}
	case p.Loss == DivergentLoss:
		return p.divergence(logits)
	case p.Loss == ChunkedLoss:
		logits = p.follow(logits, p.cast(logits, dtype.F32))
		p.HasLogits()
		return Result{Loss: p.chunkedLoss(logits), Logits: logits}
	}
	if p.LossTwice {
		return p.secondLoss(logits)
	}
	if p.Loss == SmoothedLoss {
		return p.smoothedLoss(logits)
	}
	if h.Spans { // copied apart; the two losses are computed like one
		logits = p.follow(logits, p.unary(logits, logits.DType, saveNothing))
	}
	loss := p.crossEntropy(logits)
	p.HasLogits()
	return Result{Loss: loss, Logits: logits}
}

// widen makes the fp32 copy of logits that accelerate returns (convert_outputs_to_fp32), once autocast has ended.
func (p *pass) widen(logits *autograd.Tensor) {
	narrow := p.network.Head.NarrowLoss || p.Loss == NarrowInPlaceLoss
	if narrow && p.Autocast != dtype.Invalid && logits != nil && logits.DType != dtype.F32 {
		defer p.In(ledger.LogitsAndLoss, p.whyLogits)()
		p.Drop(p.cast(logits, dtype.F32))
	}
}

// secondLoss computes the loss of a program beside that of the model (compute_log_probs in LLaMA-Factory's
// v1/core/base_trainer.py).
func (p *pass) secondLoss(logits *autograd.Tensor) Result {
	first := p.ownLoss(logits)
	loss := p.Scope(func() *autograd.Tensor {
		wide := p.cast(logits, dtype.F32)
		shifted := wide
		if !p.Parallel.Ulysses { // with it, labels are shifted in place of logits
			shifted = p.unary(wide, dtype.F32, saveNothing)
		}
		return p.mean(p.normalized(shifted, dtype.F32))
	})
	p.Drop(first)
	p.HasLogits()
	return Result{Loss: loss, Logits: logits}
}

// smoothedLoss computes the loss of labels that are smoothed. accelerate has cast the logits, which the outputs of the
// model hold. Of a decoder all but the last are copied. The mean over the vocabulary and the label's own logarithm each
// have a gradient of full size.
func (p *pass) smoothedLoss(logits *autograd.Tensor) Result {
	if p.Autocast != dtype.Invalid {
		logits = p.follow(logits, p.cast(logits, dtype.F32))
	}
	p.HasLogits()
	loss := p.Scope(func() *autograd.Tensor {
		x := logits
		if !p.network.Head.NarrowLoss {
			x = p.unary(x, x.DType, saveNothing)
		}
		logarithms := p.normalized(x, x.DType)
		negative := p.unary(logarithms, x.DType, saveNothing)
		return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{negative}, BackwardScratch: negative.Bytes(),
			Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
	})
	return Result{Loss: loss, Logits: logits}
}

// ownLoss returns what the loss of the model has saved. Nothing depends on it.
func (p *pass) ownLoss(logits *autograd.Tensor) (saved *autograd.Tensor) {
	p.WithoutGradients(func() {
		wide := p.cast(logits, dtype.F32)
		saved = p.normalized(wide, dtype.F32)
		p.dropCasts(logits, wide)
	})
	return saved
}

// divergence computes ASFT's loss: the cross entropy of a copy of the logits, and their divergence from a frozen
// model's, for which both are normalized once more.
func (p *pass) divergence(logits *autograd.Tensor) Result {
	first := p.ownLoss(logits)
	if p.WideLogits {
		logits = p.follow(logits, p.cast(logits, dtype.F32))
	}
	loss := p.Scope(func() *autograd.Tensor {
		wide := p.cast(logits, dtype.F32)
		shifted := p.unary(wide, dtype.F32, saveNothing)
		p.New(logits.Elements, p.JudgedType) // the frozen model's, without the last of each sequence
		entropy := p.mean(p.normalized(shifted, dtype.F32))
		logarithms := p.normalized(shifted, dtype.F32)
		judged := p.New(logits.Elements, p.JudgedType)
		divergence := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{logarithms}, Saved: []*autograd.Tensor{judged},
			Scratch: judged.Bytes() + logarithms.Bytes(),
			Outputs: []autograd.Output{{Elements: logits.Elements, DType: dtype.F32}}})[0]
		return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{entropy, divergence},
			Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
	})
	p.Drop(first)
	p.HasLogits()
	return Result{Loss: loss, Logits: logits}
}

// logits runs the projection of the head.
func (p *pass) logits(h *model.Head, x *autograd.Tensor, outputs int64) *autograd.Tensor {
	leave := p.KeepHere() // the hooks leave the head's own operation alone
	logits := p.linear(h.Projection, x, outputs)
	leave()
	defer p.KeepLossHere()()
	if h.Wide {
		logits = p.follow(logits, p.cast(logits, dtype.F32))
	}
	if h.Scaled {
		logits = p.follow(logits, p.unary(logits, logits.DType, saveNothing))
	}
	if h.AddsBuffer {
		result := promoted(logits.DType, p.parameter(h.Projection+".weight").DType)
		logits = p.follow(logits, p.unary(logits, result, saveNothing))
	}
	if h.Soft {
		logits = p.follow(logits, p.unary(logits, logits.DType, saveNothing))
		logits = p.follow(logits, p.unary(logits, logits.DType, saveOutput))
		logits = p.follow(logits, p.unary(logits, logits.DType, saveNothing))
	}
	return logits
}

// headChunk is the number of tokens of a sequence whose logits litgpt makes at a time.
const headChunk = 128

// chunkedHead runs the head once for every chunk of tokens. Every run casts or dequantizes the weight again. The
// program holds the list of logits, all of them upcast, until the next step. The losses of all chunks come after it.
func (p *pass) chunkedHead(h *model.Head, x *autograd.Tensor, outputs int64) Result {
	var tokens []int64
	for left := p.Sequence; left > 0; left -= headChunk {
		tokens = append(tokens, min(left, headChunk))
	}
	parts := p.split(x, tokens...)
	p.Drop(x)
	made, logits := make([]*autograd.Tensor, len(parts)), make([]*autograd.Tensor, len(parts))
	for i, part := range parts {
		made[i] = p.logits(h, part, outputs)
	}
	p.Drop(parts...)
	for i, narrow := range made {
		logits[i] = p.cast(narrow, dtype.F32)
	}
	for i, narrow := range made {
		p.dropCasts(logits[i], narrow)
	}
	p.HasLogits()
	loss := p.Scope(func() *autograd.Tensor {
		losses := make([]*autograd.Tensor, len(logits))
		var rows int64
		for i, chunk := range logits {
			logarithms := p.normalized(chunk, dtype.F32)
			losses[i] = p.Do(autograd.Operation{Inputs: []*autograd.Tensor{logarithms},
				Saved:   []*autograd.Tensor{logarithms},
				Outputs: []autograd.Output{{Elements: chunk.Elements / outputs, DType: dtype.F32}}})[0]
			p.Drop(logarithms)
			rows += losses[i].Elements
		}
		return p.mean(p.Do(autograd.Operation{Inputs: losses,
			Outputs: []autograd.Output{{Elements: rows, DType: dtype.F32}}})[0])
	})
	return Result{Loss: loss, Logits: p.List(logits...)}
}

// crossEntropy upcasts the logits and computes the loss. It saves the
// log-probabilities.
func (p *pass) crossEntropy(logits *autograd.Tensor) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		if p.Loss == CompiledLoss {
			return p.compiledMean(logits)
		}
		x, narrow := logits, p.network.Head.NarrowLoss
		if p.Loss == ShiftNarrow && p.Batch > 1 {
			shifted := p.unary(x, x.DType, saveNothing)
			x = shifted
		}
		inPlace := p.Loss == InPlaceLoss || p.Loss == NarrowInPlaceLoss
		ownType := p.Loss == NativeLoss || p.Loss == ShiftNarrow
		if !narrow && p.Loss != NarrowInPlaceLoss && (p.Autocast != dtype.Invalid || !ownType) {
			x = p.cast(x, dtype.F32)
		}
		if inPlace {
			return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x}, Replaces: true,
				Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
		}
		if p.Loss == ShiftLogits && p.Batch > 1 { // what is left of one sequence is contiguous, and a view
			shifted := p.unary(x, x.DType, saveNothing)
			x = shifted
		}
		if p.Parallel.Tensor > 1 && !p.network.Head.Classes {
			return p.parallelLoss(x)
		}
		logarithms := p.normalized(x, x.DType)
		if p.WeighsEntropy {
			p.Drop(p.New(x.Elements, x.DType))
		}
		if narrow && p.Autocast != dtype.Invalid { // cross_entropy names the type of log_softmax, and not of nll_loss
			logarithms = p.cast(logarithms, dtype.F32)
		}
		return p.mean(logarithms)
	})
}

// parallelLoss computes the loss of logits that are sharded among ranks. Its
// backward pass holds four tensors of the shard's size at once
// (torch/distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward).
func (p *pass) parallelLoss(x *autograd.Tensor) *autograd.Tensor {
	r := p.Do(autograd.Operation{
		Inputs: []*autograd.Tensor{x}, BackwardScratch: 2 * x.Bytes(),
		Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32},
			{Elements: x.Elements, DType: x.DType, Saved: true}},
	})
	return r[0]
}

// chunkedLoss computes the log-probabilities of 128 tokens at a time. In the
// backward pass the gradients replace them, chunk by chunk.
func (p *pass) chunkedLoss(logits *autograd.Tensor) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		r := p.Do(autograd.Operation{
			Inputs: []*autograd.Tensor{logits}, Replaces: true,
			Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32},
				{Elements: logits.Elements, DType: dtype.F32, Saved: true}},
		})
		return r[0]
	})
}

// mean is the last operation: the mean of the negative log-probabilities of the
// labels. Its gradient is as large as its input.
func (p *pass) mean(x *autograd.Tensor) *autograd.Tensor {
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x}, Saved: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
}

// compiledMean is the loss within a compiled graph. A graph that returns the logits beside the loss has a gradient of
// them among its inputs. Nobody gives one, so autograd makes zeros, in the type that accelerate returns logits in
// (torch.autograd.Function materializes gradients). The gradient of the logits is then written in their place.
func (p *pass) compiledMean(logits *autograd.Tensor) *autograd.Tensor {
	if !p.CompilesLogits {
		return p.mean(logits)
	}
	zeros := logits.Bytes()
	if p.Autocast != dtype.Invalid {
		zeros = logits.Elements * dtype.F32.Size()
	}
	return p.Do(autograd.Operation{Inputs: []*autograd.Tensor{logits}, Saved: []*autograd.Tensor{logits},
		Replaces: true, BackwardScratch: zeros, Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32}}})[0]
}

func (p *pass) whyLogits() string { return WhyLogits(&p.network.Head, p.Options) }

// WhyLogits is the reason for the logits and what a loss makes of them.
func WhyLogits(h *model.Head, o Options) string {
	rows, outputs := ledger.Count(o.Batch*o.Sequence)+" tokens", "vocabulary entries"
	if h.Classes {
		outputs = "classes"
	}
	if h.PerSequence && !h.EveryToken {
		rows = ledger.Count(o.Batch) + " sequences"
	}
	if o.Compares {
		return fmt.Sprintf("%s of answers x %s %s: logits, and what the log-probabilities of the answers take; "+
			"those of a reference come beside them", rows, ledger.Count(h.Outputs), outputs)
	}
	return fmt.Sprintf("%s x %s %s: logits, their fp32 copy, and the logarithms that the loss saves "+
		"(transformers/loss/loss_utils.py)", rows, ledger.Count(h.Outputs), outputs)
}

func (p *pass) classify(h *model.Head, x *autograd.Tensor) Result {
	rows := p.Batch
	if h.EveryToken {
		all := p.linear(h.Projection, x, h.Outputs)
		logits := p.follow(all, p.Do(autograd.Operation{Inputs: []*autograd.Tensor{all},
			Outputs: []autograd.Output{{Elements: rows * h.Outputs, DType: all.DType}}})[0])
		return Result{Loss: p.crossEntropy(logits), Logits: logits}
	}
	first := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: rows * p.network.Hidden, DType: x.DType, View: true}}})[0]
	if h.Average {
		first = p.withAverage(x, first)
	}
	p.Drop(x)
	dense := h.Pooler
	if h.Dense != "" {
		first, dense = p.dropout(first, h.Dropout), h.Dense
	}
	if dense != "" {
		first = p.follow(first, p.linear(dense, first, p.network.Hidden))
		first = p.follow(first, p.activate(cmp.Or(h.Activation, "tanh"), first))
	}
	first = p.dropout(first, h.Dropout)
	logits := p.linear(h.Projection, first, h.Outputs)
	return Result{Loss: p.crossEntropy(logits), Logits: logits}
}

// withAverage puts the average of all rows but the first beside the first.
func (p *pass) withAverage(x, first *autograd.Tensor) *autograd.Tensor {
	return p.Scope(func() *autograd.Tensor {
		others := p.view(x, x.Elements-first.Elements)
		average := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{others},
			Outputs: []autograd.Output{{Elements: first.Elements, DType: x.DType}}})[0]
		joined := p.Do(autograd.Operation{Inputs: []*autograd.Tensor{first, average},
			Outputs: []autograd.Output{{Elements: 2 * first.Elements, DType: x.DType}}})[0]
		p.Drop(first)
		return joined
	})
}

// fusedLoss computes logits, loss and gradients for a chunk of tokens at a time
// (Liger's fused_linear_cross_entropy_forward). It keeps the gradients of the
// hidden states and of the weight, which the backward pass returns. The number of
// chunks is the vocabulary divided by the width, rounded up, and the tokens of a
// chunk are a power of two.
func (p *pass) fusedLoss(h *model.Head, x *autograd.Tensor) *autograd.Tensor {
	w := p.parameter(h.Projection + ".weight")
	tokens := x.Elements / p.network.Hidden
	parts := (h.Outputs + p.network.Hidden - 1) / p.network.Hidden
	chunk := powerOfTwo((tokens + parts - 1) / parts)
	compute := x.DType
	if p.Autocast != dtype.Invalid {
		compute = p.Autocast
	}
	o := autograd.Operation{
		Inputs: []*autograd.Tensor{x},
		Outputs: []autograd.Output{{Elements: 1, DType: dtype.F32},
			{Elements: x.Elements, DType: compute, Saved: true}},
		Scratch: chunk * h.Outputs * (compute.Size() + 4), Replaces: true,
	}
	o.Inputs = append(o.Inputs, w.Tensor())
	if w.DType != compute { // autocast casts the weight for each chunk, beside the last chunk's gradient of it
		o.Scratch += w.Elements * compute.Size()
		if w.Trainable {
			o.Scratch += w.Elements * compute.Size()
		}
	}
	if w.Trainable {
		o.Outputs = append(o.Outputs, autograd.Output{Elements: w.Elements, DType: w.DType, Saved: true})
	}
	var loss *autograd.Tensor
	p.hooked(h.Projection, func() *autograd.Tensor {
		r := p.Do(o)
		p.Drop(r[1:]...)
		loss = r[0]
		return loss
	})
	return loss
}

func powerOfTwo(n int64) int64 {
	p := int64(1)
	for p < n {
		p *= 2
	}
	return p
}
