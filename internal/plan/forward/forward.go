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

// Hooks are called around every use of a module, in both passes and in the second
// run of a checkpoint. Modules are blocks, linear modules, norms and embeddings.
type Hooks interface {
	BeforeForward(path string)
	AfterForward(path string)
	BeforeBackward(path string)
	AfterBackward(path string)
}

// Parameters are the parameters and adapters of modules.
type Parameters struct {
	ByName   map[string]*autograd.Parameter
	Adapters map[string]*Adapter // by the path of the module
	Experts  map[*model.Mixture]Experts
	Prompt   *Prompt // tokens that an adapter puts before every sequence, or nil
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
	eager   []*autograd.Tensor // masks that eager attention adds to scores
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
	if p.OffloadActivations != nil {
		p.OffloadTo(p.OffloadMemory, *p.OffloadActivations)
	}
	if p.DividesBackward {
		p.DividesBackwardPass()
	}
	var result Result
	t.Scope(func() *autograd.Tensor {
		var hidden *autograd.Tensor
		if p.Attention == SDPA && (p.MasksCausally || p.sharesWindow()) && !p.Parallel.DeepSpeedUlysses {
			p.mask = p.New(p.Batch*(p.Sequence/p.Parallel.Context)*p.Sequence, p.compute())
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
		x = p.New(p.tokens()*p.network.Hidden/p.Parallel.Tensor, p.compute())
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
	p.eager = p.eagerMasks(s)
	defer func() { p.Drop(p.eager...) }()
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
	x := p.prompted(p.lookUp(s.TokenEmbedding, (p.tokens()-p.virtual())*width), width)
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
			rows := p.Sequence / p.Parallel.Context
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
func (p *pass) tokens() int64 { return p.Batch * p.Sequence / p.Parallel.Context }

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
		others = append(append(others, p.masks...), p.eager...)
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
	h := x
	if b.Attention.Computes() {
		h = p.half(b, b.AttentionNorm, b.AfterAttention, x, func(h *autograd.Tensor) *autograd.Tensor {
			return p.scaled(b.AttentionScale, p.beside(b, h, p.attention(s, &b.Attention, h, h), s))
		})
	}
	if b.Cross != nil {
		h = p.follow(h, p.half(b, b.CrossNorm, model.Norm{}, h, func(h *autograd.Tensor) *autograd.Tensor {
			return p.attention(s, b.Cross, h, p.encoded)
		}))
	}
	if !b.FeedForward.Computes() {
		return h
	}
	return p.half(b, b.FeedForwardNorm, b.AfterFeedForward, h, func(h *autograd.Tensor) *autograd.Tensor {
		return p.scaled(b.FeedForwardScale, p.feedForward(&b.FeedForward, h))
	})
}

// beside adds what runs beside the attention, of the same input. Constants multiply both, and the input of the second.
func (p *pass) beside(b *model.Block, x, made *autograd.Tensor, s *model.Stack) *autograd.Tensor {
	if b.Beside == nil {
		return made
	}
	made = p.follow(made, p.unary(made, made.DType, saveNothing))
	scaled := p.unary(x, x.DType, saveNothing)
	other := p.attention(s, b.Beside, scaled, scaled)
	p.Drop(scaled)
	other = p.follow(other, p.unary(other, other.DType, saveNothing))
	sum := p.add(made, other)
	return sum
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
