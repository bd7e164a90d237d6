package simulate

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
)

// megatronPass is the pass of one micro batch through one chunk.
type megatronPass struct {
	*megatronRank
	chunk      *modelChunk
	tape       *autograd.Tape
	parameters map[string]*autograd.Parameter
	prefix     string                    // of the parameters of the current layer
	sequence   int64                     // tokens of a sequence on the rank
	discarded  map[*autograd.Tensor]bool // that the backward pass computes again
	encoded    *autograd.Tensor          // by the encoder, for the decoder
}

func (s *megatronRank) newPass(c *modelChunk) *megatronPass {
	p := &megatronPass{megatronRank: s, chunk: c, parameters: map[string]*autograd.Parameter{},
		discarded: map[*autograd.Tensor]bool{},
		sequence:  s.Sequence / s.Degrees.Context}
	p.tape = autograd.NewTape(s.gpu, reasonOf("gradients of weights, until they are added to the gradient buffer"))
	for _, from := range c.parameters {
		p.parameters[from.Name] = &autograd.Parameter{Name: from.Name, Elements: from.Elements, DType: s.ParameterType,
			Trainable: !from.Frozen, OnGradient: func(x *autograd.Parameter) { x.DropGradient() }}
	}
	return p
}

// weight returns a parameter of the current layer as an input, or nil if the model has none of that name.
func (p *megatronPass) weight(name string) *autograd.Tensor {
	if x := p.parameters[p.prefix+name]; x != nil {
		return x.Tensor()
	}
	return nil
}

// trained returns the weight of a layer, or the copy that is trained in its place.
func (p *megatronPass) trained(name string) *autograd.Tensor {
	if w := p.weight(megatron.TrainedCopy(name)); w != nil {
		return w
	}
	return p.weight(name + ".weight")
}

// with returns the tensors that are not nil.
func with(tensors ...*autograd.Tensor) []*autograd.Tensor {
	var list []*autograd.Tensor
	for _, x := range tensors {
		if x != nil {
			list = append(list, x)
		}
	}
	return list
}

// full returns the tokens of a micro batch on a rank, local those between the parallel parts of layers.
func (p *megatronPass) full() int64 { return p.sequence * p.Sequences() }
func (p *megatronPass) local() int64 {
	if p.SequenceSplit {
		return p.full() / p.Degrees.Tensor
	}
	return p.full()
}

// size returns the bytes of elements in the type of the parameters.
func (p *megatronPass) size(elements int64) int64 { return elements * p.ParameterType.Size() }

// gathered returns the bytes of an activation that sequence parallelism gathers before a product.
func (p *megatronPass) gathered(width int64) int64 {
	if !p.SequenceSplit || p.Degrees.Tensor == 1 {
		return 0
	}
	return p.size(p.full() * width)
}

// do runs an operation with one result of the parameters' type.
func (p *megatronPass) do(o autograd.Operation, elements int64, saved bool) *autograd.Tensor {
	o.Outputs = append([]autograd.Output{{Elements: elements, DType: p.ParameterType, Saved: saved}}, o.Outputs...)
	return p.tape.Do(o)[0]
}

// in sets the component of the next results until the function that it returns is called.
func (p *megatronPass) in(component ledger.Component, what string) (leave func()) {
	return p.tape.In(component, reasonOf(what))
}

// forward runs the pass and returns its output: the loss, or what the next chunk gets.
func (p *megatronPass) forward() *autograd.Tensor {
	defer p.tape.In(ledger.ResidualActivations, whyResidual)()
	p.chunk.release(p.megatronRank)
	if (p.TransformerEngine() || p.Experts > 0) && !p.holdsEngine {
		p.holdsEngine = true
		p.engineWorkspaces()
	}
	if p.usesTorchProducts(p.chunk) {
		p.workspace(0)
	}
	var batch []int
	if p.chunk.Embedding || p.chunk.Loss {
		batch = p.loadBatch()
	}
	output := p.tape.Scope(func() *autograd.Tensor {
		var x *autograd.Tensor
		if p.chunk.Embedding {
			x = p.embed(p.full())
			if p.Adapter != nil && (p.Recompute == "full" || p.Adapter.Program == recipe.SwiftTuner) {
				// Checkpoints are run again if an input needs a gradient: maybe_enable_recompute_inputs_grad of
				// Megatron-Bridge, and GPTModel._preprocess of mcore-bridge.
				p.tape.RequireGradient(x)
			}
		} else {
			x = p.tape.New(p.local()*p.Hidden, p.ParameterType)
			p.tape.RequireGradient(x)
		}
		x = p.layers(x)
		if p.chunk.Loss {
			return p.head(x)
		}
		return x
	})
	for _, id := range batch {
		p.gpu.Free(id)
	}
	if !p.chunk.Loss {
		p.tape.Drop(output) // deallocate_pipeline_outputs
	}
	return output
}

// loadBatch allocates tokens, labels, positions, the mask of the loss and the mask of attention.
func (p *megatronPass) loadBatch() []int {
	why := reasonOf("token ids, labels, positions, the mask of the loss, and the attention mask of the data loader")
	n := p.Sequence * p.Sequences()
	var ids []int
	for _, bytes := range []int64{8 * n, 8 * n, 4 * n, 8 * n, p.maskBytes()} {
		if bytes > 0 {
			ids = append(ids, p.hold(bytes, ledger.Batch, why))
		}
	}
	return ids
}

// maskBytes returns the size of the attention mask, one byte for each pair of tokens.
func (p *megatronPass) maskBytes() int64 {
	if p.NoMask || p.MasksDocuments {
		return 0
	}
	if p.Kind == megatron.GPT || p.Attention == "unfused" || p.Attention == "local" {
		return p.Sequences() * p.Sequence * p.Sequence
	}
	return 0
}

// embed runs the embeddings.
func (p *megatronPass) embed(tokens int64) *autograd.Tensor {
	defer p.in(ledger.EmbeddingActivations, "embeddings of tokens and positions")()
	return p.tape.Scope(func() *autograd.Tensor {
		n := tokens * p.Hidden
		x := p.do(autograd.Operation{Inputs: with(p.trained("embedding.word_embeddings"))}, n, false)
		if at := p.weight("embedding.position_embeddings.weight"); at != nil {
			y := p.do(autograd.Operation{Inputs: with(x, at), Shared: []bool{true, false}}, n, false)
			p.tape.Drop(x)
			x = y
		}
		y := p.do(autograd.Operation{Inputs: with(x)}, n, false) // [s, b, h]
		p.tape.Drop(x)
		if x = y; p.gathered(1) > 0 {
			x = p.do(autograd.Operation{Inputs: with(x)}, n/p.Degrees.Tensor, false)
			p.tape.Drop(y)
		}
		return p.dropout(x, p.HiddenDrop)
	})
}

// dropout runs a dropout, which saves its mask of a byte an element.
func (p *megatronPass) dropout(x *autograd.Tensor, rate float64) *autograd.Tensor {
	if rate == 0 {
		return x
	}
	return p.do(autograd.Operation{Inputs: with(x), Outputs: []autograd.Output{{Elements: x.Elements,
		DType: dtype.Bool, Saved: true}}}, x.Elements, false)
}

// layers runs the layers of the chunk, some of them as checkpoints.
func (p *megatronPass) layers(x *autograd.Tensor) *autograd.Tensor {
	all := p.OnStage(p.chunk.Chunk)
	run := func(input *autograd.Tensor, first, n int) *autograd.Tensor {
		return p.tape.Scope(func() *autograd.Tensor {
			x := input
			for i := first; i < first+n; i++ {
				if i > 0 && all[i-1].Encoder && !all[i].Encoder {
					x = p.decode(x)
				}
				p.prefix = fmt.Sprintf("layers.%d.", i)
				y := p.layer(all[i], x)
				if x != input { // which the caller holds
					p.tape.Drop(x)
				}
				x = y
			}
			p.prefix = ""
			return x
		})
	}
	if p.Recompute != "full" {
		return run(x, 0, len(all))
	}
	each := int(max(p.RecomputeLayers, 1))
	for first := 0; first < len(all); {
		n := min(each, len(all)-first)
		if p.RecomputeMethod == "block" {
			if n = 1; first >= each {
				return run(x, first, len(all)-first)
			}
		}
		start := first
		y := p.tape.Checkpoint(autograd.Checkpoint{Reentrant: true}, x, func(x *autograd.Tensor) *autograd.Tensor {
			return run(x, start, n)
		})
		p.tape.Drop(x)
		x = y
		first += n
	}
	return x
}

// decode ends the encoder and begins the decoder: its tokens have embeddings of their own.
func (p *megatronPass) decode(x *autograd.Tensor) *autograd.Tensor {
	p.prefix = ""
	p.encoded = p.norm(x, "encoder.final_layernorm")
	p.tape.Drop(x)
	p.sequence = p.DecoderSequence / p.Degrees.Context
	return p.embed(p.full())
}

// head runs the last norm, the output layer and the loss. Layers that predict further tokens have each a loss, too.
func (p *megatronPass) head(x *autograd.Tensor) *autograd.Tensor {
	defer p.in(ledger.LogitsAndLoss, "logits, their softmax in fp32 and the loss")()
	var losses []*autograd.Tensor
	y := p.norm(x, "final_layernorm")
	for i := range p.Predictions {
		x = p.predict(x, fmt.Sprintf("mtp.%d.", i))
		losses = append(losses, p.loss(x))
	}
	if p.Kind == megatron.BERT {
		y = p.transform(y)
	}
	losses = append(losses, p.loss(y))
	if len(losses) == 1 {
		return losses[0]
	}
	return p.tape.Do(autograd.Operation{Inputs: losses, Outputs: []autograd.Output{{Elements: losses[0].Elements,
		DType: dtype.F32}}})[0]
}

// predict runs a layer of multi-token prediction (multi_token_prediction.py): it joins the hidden states with the
// embeddings of the next tokens.
func (p *megatronPass) predict(x *autograd.Tensor, prefix string) *autograd.Tensor {
	defer p.in(ledger.Activations, "layers that predict further tokens")()
	return p.tape.Scope(func() *autograd.Tensor {
		next := p.embed(p.full())
		p.prefix = prefix
		a, b := p.norm(next, "enorm"), p.norm(x, "hnorm")
		both := p.do(autograd.Operation{Inputs: with(a, b)}, 2*x.Elements, false)
		y := p.linear(both, "eh_proj", p.Hidden/p.Degrees.Tensor, false)
		y = p.do(autograd.Operation{Inputs: with(y)}, x.Elements, false)
		y = p.layer(p.Layers[len(p.Layers)-1], y)
		y = p.norm(y, "final_layernorm")
		p.prefix = ""
		return y
	})
}

// transform runs the dense layer of BERT's head.
func (p *megatronPass) transform(x *autograd.Tensor) *autograd.Tensor {
	y := p.linear(x, "lm_head.dense", p.Hidden, true)
	z := p.do(autograd.Operation{Inputs: with(y), Saved: with(y)}, y.Elements, false)
	return p.norm(z, "lm_head.layer_norm")
}

// loss runs the output layer and the cross entropy over the rank's part of the vocabulary (cross_entropy.py).
func (p *megatronPass) loss(x *autograd.Tensor) *autograd.Tensor {
	rows := x.Elements / p.Hidden
	if p.gathered(1) > 0 {
		rows *= p.Degrees.Tensor
	}
	width := p.Vocabulary / p.Degrees.Tensor
	weight := p.trained("output_layer")
	if weight == nil {
		weight = p.weight("embedding.word_embeddings.weight")
	}
	o := autograd.Operation{Inputs: with(x, weight)}
	if weight.NeedsGradient() {
		o.Saved = with(x)
		p.gather(p.gathered(p.Hidden))
	} else { // linear_with_frozen_weight
		o.Scratch, o.BackwardScratch = p.gathered(p.Hidden), p.gathered(p.Hidden)
	}
	if p.Policy != nil && p.Policy.Loss.Fused > 0 {
		return p.lossOfHidden(x, weight, rows)
	}
	logits := p.do(o, rows*width, false)
	if bias := p.outputBias(); bias != nil {
		o := autograd.Operation{Inputs: with(logits, bias), Shared: []bool{true, false}}
		biased := p.do(o, logits.Elements, false)
		p.tape.Drop(logits)
		logits = biased
	}
	if p.Policy != nil {
		return p.policyLoss(logits, rows)
	}
	if p.FusesLoss && p.LossFusion == "te" {
		// The kernel replaces the logits by their gradient.
		return p.tape.Do(autograd.Operation{Inputs: with(logits), Saved: with(logits), Shared: []bool{false},
			Replaces: true, Outputs: []autograd.Output{{Elements: rows, DType: dtype.F32}}})[0]
	}
	scratch := int64(0)
	if p.FusesLoss { // torch.compile makes no operation in place
		scratch = 4 * rows * width
	}
	float := p.tape.Do(autograd.Operation{Inputs: with(logits),
		Outputs: []autograd.Output{{Elements: rows * width, DType: dtype.F32}}})[0]
	loss := p.tape.Do(autograd.Operation{Inputs: with(float), Saved: with(float), Scratch: scratch, Replaces: true,
		Outputs: []autograd.Output{{Elements: rows, DType: dtype.F32}, {Elements: rows, DType: dtype.I64, Saved: true},
			{Elements: rows, DType: dtype.Bool, Saved: true}}})[0]
	return loss
}

func (p *megatronPass) outputBias() *autograd.Tensor {
	if x := p.weight("output_layer.bias"); x != nil {
		return x
	}
	return p.weight("lm_head.output_layer.bias")
}
