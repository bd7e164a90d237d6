// Package forward runs the forward pass of a transformer on a tape, with the
// operations of the modules of Hugging Face transformers. The tape then knows
// what every operation keeps for its gradient.
package forward

import (
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/autograd"
)

// AttentionKind is an implementation of attention.
type AttentionKind string

// The kinds, as transformers' attn_implementation names them.
const (
	Eager AttentionKind = "eager" // materializes the scores
	SDPA  AttentionKind = "sdpa"  // torch's scaled_dot_product_attention
	Flash AttentionKind = "flash" // the flash-attn package
)

// LossKind is an implementation of the loss.
type LossKind int

// The losses.
const (
	// ShiftLabels is the loss of transformers since 4.46: it upcasts the logits
	// and shifts the labels.
	ShiftLabels LossKind = iota
	// ShiftLogits is the loss of transformers before 4.46: it copies all logits
	// but the last.
	ShiftLogits
	// CompiledLoss is ShiftLabels compiled. It materializes neither the upcast
	// logits nor the log-probabilities.
	CompiledLoss
	// ChunkedLoss computes the loss of 128 tokens at a time (litgpt's
	// chunked_cross_entropy). The logits are cast to fp32 when the model returns
	// them (Lightning's precision plugins).
	ChunkedLoss
	// NativeLoss is the loss of a training loop of its own: the logits stay in the
	// type of the model, and none are copied.
	NativeLoss
	// FusedLoss materializes the logits of some tokens at a time (Liger's fused
	// linear cross entropy).
	FusedLoss
	// InPlaceLoss writes the gradient of the logits over their fp32 copy (Liger's cross entropy).
	InPlaceLoss
	// LogProbabilities are those of the tokens of answers, from the logarithms of all
	// entries in fp32 (get_batch_logps in LLaMA-Factory's train/trainer_utils.py).
	LogProbabilities
	// SelectedLogProbabilities are the same, sequence by sequence: TRL since 0.12
	// (selective_log_softmax in trl/trainer/utils.py).
	SelectedLogProbabilities
	// NoLoss ends with the logits.
	NoLoss
	// DivergentLoss is ASFT: behind the model's own loss the program computes another, and the divergence from the
	// logits of a frozen model (asft_loss_func in LLaMA-Factory's train/trainer_utils.py).
	DivergentLoss
)

// Hooks are called around every use of a module, in both passes and in the second
// run of a checkpoint. Modules are blocks, linear modules, norms and embeddings.
type Hooks interface {
	BeforeForward(path string)
	AfterForward(path string)
	BeforeBackward(path string)
	AfterBackward(path string)
}

// Options are the settings of a forward pass.
type Options struct {
	Batch, Sequence int64 // sequences of a micro batch, tokens of a sequence
	Attention       AttentionKind
	// FusesBias uses SDPA also for attention with a bias on its scores, which is
	// then materialized: transformers since 5.0.
	FusesBias bool
	// WeightType is the type of the weights, which matmuls compute in without
	// autocast.
	WeightType dtype.Type
	// Autocast is the type that torch.autocast computes matmuls in. It is Invalid
	// if autocast is off.
	Autocast dtype.Type
	// FusedActivations computes every activation function in one kernel, whatever
	// its name in the configuration.
	FusedActivations bool
	// FusedQKV is litgpt's attention. Queries, keys and values are one
	// tensor (fused QKV), and the values stay a view of it. Keys and values are
	// copied for all heads, and the heads are then put side by side. 4-bit
	// weights are dequantized to fp16 before they are cast.
	FusedQKV bool
	// RepeatsKeys copies keys and values for all heads that share them, also
	// before SDPA without a mask: transformers 4.36 to 4.53, and torch before 2.5.
	RepeatsKeys bool
	// ContiguousHeads makes queries, keys and values contiguous before SDPA, so
	// that its output is not in the order of tokens and is copied once more:
	// transformers 4.48 to 4.55 (integrations/sdpa_attention.py).
	ContiguousHeads bool
	// CompilesLogits means that a compiled graph computes the loss and returns the logits beside it.
	CompilesLogits bool
	// MasksCausally means that SDPA gets a mask, which one tensor holds for all
	// blocks: transformers makes it while torch.compile traces a model.
	MasksCausally bool
	// SharesWindow means that one tensor holds the mask of the window for all blocks,
	// in the type of the weights: transformers before 4.53, whose models with a window
	// have it in every block.
	SharesWindow bool
	// FusesPointwise fuses the operations between matmuls (torch.compile). What
	// they keep is what the min-cut partitioner keeps: the inputs of norms and of
	// matmuls, which it does not recompute from matrices
	// (ban_recompute_materialized_backward in torch/_functorch/partitioners.py).
	FusesPointwise bool
	// Liger replaces norms, rotary positions and gated activations by the kernels
	// of liger-kernel (use_liger_kernel).
	Liger bool
	// Tiles is the number of tiles of a sequence that feed-forward networks run on, one after the other; 0 is none.
	Tiles int64
	// ScattersExperts runs experts by axolotl's kernels of ScatterMoE.
	ScattersExperts bool
	// HostRanks is the number of ranks whose tokens KTransformers' experts on the host take, 0 without such experts.
	HostRanks int64
	// RoutersTogether is the loss of the load of experts before transformers 5.23: the
	// logits of all routers are joined, with a number for each token, chosen expert and
	// expert.
	RoutersTogether bool
	// ClampsScores takes the maximum of masked scores and the least number of their
	// type, in eager attention. It saves the scores once more.
	ClampsScores bool
	// SavesSoftmaxInput is torch before 1.11: softmax and log_softmax save their
	// input, too, for _softmax_backward_data.
	SavesSoftmaxInput bool
	// RecomputeEvery recomputes one of so many blocks; 0 and 1 mean all. It is
	// the last of them, as in torchtitan, or the first with RecomputeFirst, as in
	// transformers.
	RecomputeEvery int
	RecomputeFirst bool
	// AttachesQuantizedInput is bitsandbytes before 0.43.2: matmuls with 4-bit
	// weights keep their input, which nothing needs, in an attribute of their
	// context. Those with 8-bit weights do so to this day.
	AttachesQuantizedInput bool
	// WideLogits means that the program casts the outputs of the model to fp32
	// (convert_outputs_to_fp32 in accelerate).
	WideLogits bool
	// Compares means that answers are compared by their log-probabilities.
	Compares bool
	// HalfLoss adds the cross entropy of the first half of the sequences, the chosen
	// answers, to a loss of log-probabilities.
	HalfLoss bool
	// LossTwice means that the program computes its own loss, from a copy of all logits but the last in fp32, once the
	// model has computed its loss. The outputs hold what that one saved.
	LossTwice bool
	// JudgedType is the type of the logits of a frozen model that DivergentLoss compares with.
	JudgedType dtype.Type
	// WeighsEntropy means that the loss of every token is weighted by an entropy, for which the program copies the
	// logits of all tokens with labels (eaft_loss_func).
	WeighsEntropy bool
	// NoDropout means that the program has turned dropout off.
	NoDropout bool
	// KeepsHidden means that the model returns the hidden states behind all blocks.
	KeepsHidden bool
	// Recompute is the checkpoint of recomputed blocks, nil without.
	Recompute *autograd.Checkpoint
	// Offload moves what operations save to the host, nil if it stays.
	Offload       *autograd.Offload
	OffloadMemory autograd.OffloadMemory
	// QAT fake-quantizes linear modules, nil for none.
	QAT  *FakeQuantization
	Loss LossKind
	// ChunksHead makes the logits of 128 tokens of every sequence at a time, for ChunkedLoss: litgpt's adapters
	// (lm_head_chunk_size in finetune/lora.py).
	ChunksHead bool
	// Images of the micro batch, for models with an encoder of images.
	Images Images
	// HoldsCache means that the language model behind an encoder of images keeps keys
	// and values for a generation, until the outputs are released: text_config has a
	// use_cache of its own, which the Trainer leaves on.
	HoldsCache bool
	// HooksImages is InputGradients for the patches of images, too.
	HooksImages bool
	// InputGradients makes the output of the embeddings need a gradient, as
	// enable_input_require_grads does.
	InputGradients bool
	// CastsInside means that linear modules under autocast save their input and weight before the casts, and keep no
	// cast weight: ZeRO-3 with memory_efficient_linear (zero/linear.py).
	CastsInside bool
	// ContextParallel and TensorParallel are the degrees of context and of tensor
	// parallelism; 1 is none.
	ContextParallel, TensorParallel int64
	// DeepSpeedUlysses means that the ranks of ContextParallel exchange their part of the sequences of all heads for
	// full sequences of some heads before attention, and back (UlyssesSPAttentionHF of DeepSpeed).
	DeepSpeedUlysses bool
	// Receives means that the hidden states come from the pipeline stage before, Sends that they go to the stage
	// behind instead of to the head. Result.Loss is then the tensor that is sent.
	Receives, Sends bool
	// DividesBackward means that the backward pass runs in two halves. What was received is then Result.Received.
	DividesBackward bool
	// ExchangesHeads means that ranks of a sequence exchange its parts for heads around attention (Ulysses).
	ExchangesHeads bool
	Hooks          Hooks // nil: none
	// HasLogits is called when the program replaces the logits of the step before
	// by the new ones. It must be set.
	HasLogits func()
}

// Parameters are the parameters and adapters of modules.
type Parameters struct {
	ByName   map[string]*autograd.Parameter
	Adapters map[string]*Adapter // by the path of the module
	Experts  map[*model.Mixture]Experts
}

// Experts are a rank's weights of the experts of a mixture, in the order of the
// experts. Fused experts have one GateUp and one Down.
type Experts struct{ Gate, Up, GateUp, Down []*autograd.Parameter }

// Result is the output of the forward pass, which the training loop holds.
type Result struct {
	Loss   *autograd.Tensor
	Logits *autograd.Tensor // alive with the outputs of the model; nil for FusedLoss
	// RouterLogits are alive with the outputs, too: those of all routers.
	RouterLogits []*autograd.Tensor
	Received     *autograd.Tensor // by a stage whose backward pass is divided; otherwise nil
}

// pass is the state of one forward pass.
type pass struct {
	*autograd.Tape
	Options
	network    *model.Network
	parameters Parameters
	*casts
	length  int64            // of the sequences of tokens
	encoded *autograd.Tensor // output of the encoder
	receive *autograd.Tensor // what a stage with a divided backward pass received
	mask    *autograd.Tensor // of all blocks; nil if they share none
	narrow  bool             // the result of a norm goes to matmuls only
	// The last input of adapters that share a dropout, and the result of its dropout.
	droppedFrom, dropped *autograd.Tensor
	blocks               int                // blocks that have begun
	states               []*autograd.Tensor // behind blocks, with KeepsHidden
	trained              map[string]bool    // modules with trained parameters; nil until asked for
	routers              []*autograd.Tensor
	// What adapters add to the parameters of the experts that run, and the sums that are made.
	additions map[*autograd.Parameter]addition
	sums      map[*autograd.Parameter]*autograd.Tensor

	tower   *model.Tower       // whose network this is, or nil
	masked  bool               // every block makes a mask of the tokens of images
	masks   []*autograd.Tensor // of the tokens of images, if every block has a mask
	angles  *autograd.Tensor   // of an encoder of images
	outputs []*autograd.Tensor // what the outputs hold beside logits
	deep    []*autograd.Tensor // of images, for the first blocks
}

// casts are the weights that autocast has cast, of all stacks and encoders of a pass.
type casts struct {
	weights map[*autograd.Parameter]*autograd.Tensor
	cached  []*autograd.Parameter // keys of weights, in order
	ended   bool                  // the forward pass is over
}

// Run runs the forward pass of a micro batch up to the loss.
func Run(t *autograd.Tape, network *model.Network, parameters Parameters, options Options) Result {
	p := &pass{Tape: t, Options: options, network: network, parameters: parameters, length: options.Sequence,
		casts: &casts{weights: map[*autograd.Parameter]*autograd.Tensor{}}}
	defer p.In(ledger.ResidualActivations, p.whyResidual)() // the default component
	if p.Offload != nil {
		p.OffloadTo(p.OffloadMemory, *p.Offload)
	}
	if p.DividesBackward {
		p.DividesBackwardPass()
	}
	var result Result
	t.Scope(func() *autograd.Tensor {
		var hidden *autograd.Tensor
		if p.Attention == SDPA && (p.MasksCausally || p.sharesWindow()) && !p.DeepSpeedUlysses {
			p.mask = p.New(p.Batch*(p.Sequence/p.ContextParallel)*p.Sequence, p.compute())
		}
		if blocks := network.Blocks(); len(blocks) > 0 && blocks[0].Attention.SavesMask {
			p.mask = p.New(p.Batch*p.Sequence*p.Sequence, dtype.Bool)
		}
		for _, t := range network.Towers {
			p.masked = p.masked || t.MasksText && p.Images.Count > 0
		}
		var images *autograd.Tensor
		if network.Head.Contrast != nil {
			images = p.encode(network.Towers[0])
		}
		for i, stack := range network.Stacks {
			hidden = t.Scope(func() *autograd.Tensor { return p.reading(stack).stack(stack) })
			if i < len(network.Stacks)-1 {
				p.encoded = hidden
				t.Hold(hidden) // the outputs have it, too
				p.outputs = append(p.outputs, hidden)
			}
		}
		if network.OnlyImages() {
			hidden = p.encode(network.Towers[0])
		}
		switch {
		case p.Sends:
			result = Result{Loss: hidden}
		case images != nil:
			result = p.contrast(network.Head.Contrast, images, hidden)
		default:
			result = p.withRouterLoss(p.head(p.gather(hidden)))
		}
		p.Drop(p.states...)
		t.Hold(result.Loss)
		if result.Logits != nil {
			t.Hold(result.Logits)
		}
		return nil
	})
	p.end()
	p.widen(result.Logits)
	t.Drop(p.outputs...)
	p.ended, result.Received = true, p.receive
	return result
}

// sharesWindow reports whether one mask of the window is for all blocks. Under
// autocast every block converts it.
func (p *pass) sharesWindow() bool {
	blocks := p.network.Blocks()
	for i := range blocks {
		if w := blocks[i].Attention.Window; w == 0 || w >= p.Sequence || w != blocks[0].Attention.Window {
			return false
		}
	}
	return p.SharesWindow && p.Autocast == dtype.Invalid && len(blocks) > 0
}

// end drops the tensors that live until autocast ends: at the end of the forward
// pass, or of a recomputed block.
func (p *pass) end() {
	p.share(nil, nil)
	for _, w := range p.cached {
		p.Drop(p.weights[w])
	}
	p.cached = nil
	clear(p.weights)
}

// stack runs an encoder or a decoder.
func (p *pass) stack(s *model.Stack) *autograd.Tensor {
	if p.network.Opaque != nil {
		return p.opaqueStack(s)
	}
	var x *autograd.Tensor
	if p.Receives {
		x = p.New(p.tokens()*p.network.Hidden/p.TensorParallel, p.compute())
	} else {
		x = p.scatter(p.embed(s))
	}
	if p.Receives {
		p.RequireGradient(x)
	}
	if p.DividesBackward {
		p.receive = p.Escape(x)
	}
	p.makeMasks(s)
	for i := range s.Blocks {
		if p.KeepsHidden {
			p.Hold(x)
			p.states = append(p.states, x)
			x = p.block(s, &s.Blocks[i], x)
			continue
		}
		x = p.follow(x, p.block(s, &s.Blocks[i], x))
		x = p.follow(x, p.deepen(x, i))
	}
	p.Drop(p.masks...)
	p.Drop(p.deep...)
	if s.FinalNorm.Kind != model.NoNorm {
		x = p.follow(x, p.normForMatmuls(s.FinalNorm, x))
	}
	if s.ProjectOut != "" {
		x = p.follow(x, p.linear(s.ProjectOut, x, s.EmbeddingWidth))
	}
	return x
}

// follow drops a tensor that the program replaces by the next, and returns the
// next.
func (p *pass) follow(before, next *autograd.Tensor) *autograd.Tensor {
	if before != next {
		p.Drop(before)
	}
	return next
}

// embed looks up the embeddings of tokens, types and positions.
func (p *pass) embed(s *model.Stack) *autograd.Tensor {
	defer p.In(ledger.EmbeddingActivations, p.whyEmbeddings)()
	if s.Sound != nil {
		return p.dropout(p.listen(s.Sound), s.EmbeddingDropout)
	}
	width := s.EmbeddingWidth
	if width == 0 {
		width = p.network.Hidden
	}
	x := p.lookUp(s.TokenEmbedding, p.tokens()*width)
	if s.ScalesEmbedding {
		x = p.follow(x, p.unary(x, x.DType, saveNothing))
	}
	if p.InputGradients {
		p.RequireGradient(x)
	}
	x = p.withImages(x)
	project := func() { x = p.follow(x, p.linear(s.ProjectIn, x, p.network.Hidden)) }
	if s.ProjectIn != "" && !s.ProjectsLast {
		project()
		width = p.network.Hidden
	}
	for _, path := range []string{s.TypeEmbedding, s.PositionEmbedding} {
		if path != "" {
			rows := p.Sequence / p.ContextParallel
			if path == s.TypeEmbedding || s.OwnPositions || s.CopiesPositions {
				rows = p.tokens()
			}
			positions := p.lookUp(path, rows*width)
			x = p.follow(x, p.add(x, positions))
			p.Drop(positions)
		}
	}
	if s.EmbeddingNorm.Kind != model.NoNorm {
		x = p.follow(x, p.norm(s.EmbeddingNorm, x))
	}
	x = p.dropout(x, s.EmbeddingDropout)
	if s.ProjectIn != "" && s.ProjectsLast {
		project()
	}
	return x
}

func (p *pass) whyEmbeddings() string {
	if h := p.network.Sound(); h != nil {
		return fmt.Sprintf("the convolutions of %d spectra of %s frames x %d with their activations, and looked-up "+
			"embeddings of the labels", p.Batch, ledger.Count(h.Frames()), p.network.Hidden)
	}
	return fmt.Sprintf("looked-up embeddings: %s x %d", p.batch(), p.network.Hidden)
}

// batch describes a micro batch in a reason.
func (p *pass) batch() string {
	if h := p.network.Sound(); h != nil {
		return fmt.Sprintf("%d x %s rows of sound and %s tokens", p.Batch, ledger.Count(h.Rows), ledger.Count(p.length))
	}
	return fmt.Sprintf("%d x %s tokens", p.Batch, ledger.Count(p.Sequence))
}

// kept says in a reason how long the activations of blocks live.
func (p *pass) kept() string {
	if p.Recompute != nil {
		return "of the block that is recomputed"
	}
	return "kept for the backward pass"
}

// compute returns the type that matmuls compute in.
func (p *pass) compute() dtype.Type {
	if p.Autocast != dtype.Invalid {
		return p.Autocast
	}
	return p.WeightType
}

// tokens returns the number of the rank's tokens in a micro batch.
func (p *pass) tokens() int64 { return p.Batch * p.Sequence / p.ContextParallel }

// block runs a block, as a checkpoint if the backward pass recomputes it.
func (p *pass) block(s *model.Stack, b *model.Block, x *autograd.Tensor) *autograd.Tensor {
	body := func(x *autograd.Tensor) *autograd.Tensor {
		return p.Scope(func() *autograd.Tensor {
			if o := p.network.Opaque; o != nil {
				return p.opaque(o.Blocks[p.blockIndex(b)], p.unary(x, x.DType, saveNothing), 1)
			}
			switch b.Arrangement {
			case model.PostNorm:
				return p.postNorm(s, b, x)
			case model.Parallel:
				return p.parallel(s, b, x)
			default:
				return p.limited(b, p.preNorm(s, b, x))
			}
		})
	}
	return p.hooked(b.Path, func() *autograd.Tensor {
		p.blocks++
		wanted := 0
		if p.RecomputeFirst {
			wanted = 1
		}
		if p.Recompute == nil || p.RecomputeEvery > 1 && p.blocks%p.RecomputeEvery != wanted ||
			!x.NeedsGradient() && !p.trains(b) {
			return body(x)
		}
		defer p.In(ledger.ResidualActivations, p.whyResidual)()
		var others []*autograd.Tensor
		if b.Cross != nil {
			others = append(others, p.encoded)
		}
		for _, x := range []*autograd.Tensor{p.mask, p.angles} {
			if x != nil {
				others = append(others, x)
			}
		}
		others = append(others, p.masks...)
		return p.Checkpoint(*p.Recompute, x, func(x *autograd.Tensor) *autograd.Tensor {
			result := body(x)
			if p.ended {
				p.end()
			}
			return result
		}, others...)
	})
}

// trains reports whether a block has parameters that are trained. A checkpoint of one without, whose input needs no
// gradient, keeps nothing.
func (p *pass) trains(b *model.Block) bool {
	if p.trained == nil {
		p.trained = map[string]bool{}
		note := func(name string) {
			for at := range len(name) {
				if name[at] == '.' {
					p.trained[name[:at]] = true
				}
			}
		}
		for name, made := range p.parameters.ByName {
			if made.Trainable {
				note(name)
			}
		}
		for path := range p.parameters.Adapters {
			note(path)
		}
	}
	return p.trained[b.Path]
}

// limited limits a result in fp16 to its range, if the block does so.
func (p *pass) limited(b *model.Block, x *autograd.Tensor) *autograd.Tensor {
	if !b.ClampsHalf || x.DType != dtype.F16 {
		return x
	}
	return p.follow(x, p.unary(x, x.DType, saveInput))
}

func (p *pass) preNorm(s *model.Stack, b *model.Block, x *autograd.Tensor) *autograd.Tensor {
	h := p.half(b, b.AttentionNorm, b.AfterAttention, x, func(h *autograd.Tensor) *autograd.Tensor {
		return p.scaled(b.AttentionScale, p.attention(s, &b.Attention, h, h))
	})
	if b.Cross != nil {
		h = p.follow(h, p.half(b, b.CrossNorm, model.Norm{}, h, func(h *autograd.Tensor) *autograd.Tensor {
			return p.attention(s, b.Cross, h, p.encoded)
		}))
	}
	return p.half(b, b.FeedForwardNorm, b.AfterFeedForward, h, func(h *autograd.Tensor) *autograd.Tensor {
		return p.scaled(b.FeedForwardScale, p.feedForward(&b.FeedForward, h))
	})
}

// scaled multiplies the output of half a block by a parameter, if there is one.
func (p *pass) scaled(path string, x *autograd.Tensor) *autograd.Tensor {
	if path == "" {
		return x
	}
	return p.follow(x, p.multiply(p.parameter(path).Tensor(), x))
}

// half returns x + dropout(after(body(before(x)))), its second part scaled if the
// block scales it.
func (p *pass) half(b *model.Block, before, after model.Norm, x *autograd.Tensor,
	body func(*autograd.Tensor) *autograd.Tensor) *autograd.Tensor {
	h := x
	if before.Kind != model.NoNorm {
		h = p.normForMatmuls(before, x)
	}
	made := body(h)
	if h != x {
		p.Drop(h)
	}
	h = made
	if after.Kind != model.NoNorm {
		h = p.follow(h, p.norm(after, h))
	}
	h = p.dropout(h, b.Dropout)
	if b.ScalesHalves {
		h = p.follow(h, p.unary(h, h.DType, saveNothing))
	}
	return p.residual(x, h)
}

func (p *pass) postNorm(s *model.Stack, b *model.Block, x *autograd.Tensor) *autograd.Tensor {
	h := p.attention(s, &b.Attention, x, x)
	h = p.residual(x, p.dropout(h, b.Dropout))
	h = p.follow(h, p.norm(b.AttentionNorm, h))
	if b.Cross != nil {
		c := p.attention(s, b.Cross, h, p.encoded)
		c = p.follow(h, p.residual(h, p.dropout(c, b.Dropout)))
		h = p.follow(c, p.norm(b.CrossNorm, c))
	}
	f := p.feedForward(&b.FeedForward, h)
	if !b.UndroppedFeedForward {
		f = p.dropout(f, b.Dropout)
	}
	f = p.residual(h, p.dropout(f, b.FeedForward.OutputDropout))
	return p.follow(f, p.norm(b.FeedForwardNorm, f))
}

func (p *pass) parallel(s *model.Stack, b *model.Block, x *autograd.Tensor) *autograd.Tensor {
	h := p.normForMatmuls(b.AttentionNorm, x)
	a := p.dropout(p.attention(s, &b.Attention, h, h), b.Dropout)
	if b.FeedForwardNorm.Kind != model.NoNorm {
		h = p.follow(h, p.normForMatmuls(b.FeedForwardNorm, x))
	}
	f := p.dropout(p.feedForward(&b.FeedForward, h), b.Dropout)
	defer p.In(ledger.ResidualActivations, p.whyResidual)()
	return p.follow(f, p.add(p.residual(f, a), x))
}

// residual adds the result of half a block to x, and drops that result.
func (p *pass) residual(x, made *autograd.Tensor) *autograd.Tensor {
	defer p.In(ledger.ResidualActivations, p.whyResidual)()
	return p.follow(made, p.add(x, made))
}

func (p *pass) whyResidual() string {
	tokens := p.Batch * p.Sequence
	if h := p.network.Sound(); h != nil {
		tokens = p.Batch * (h.Rows + p.length)
	}
	return fmt.Sprintf("the residual stream: %s tokens x %d, for every block that keeps or recomputes from it",
		ledger.Count(tokens), p.network.Hidden)
}

// hooked runs body between the hooks of a module.
func (p *pass) hooked(path string, body func() *autograd.Tensor) *autograd.Tensor {
	if p.Hooks == nil {
		return body()
	}
	p.Hooks.BeforeForward(path)
	p.Mark(func() { p.Hooks.AfterBackward(path) })
	result := body()
	p.Mark(func() { p.Hooks.BeforeBackward(path) })
	p.Hooks.AfterForward(path)
	return result
}
