package model

import (
	"cmp"
	"slices"
)

// Network is how a model computes, as far as it affects the memory of
// activations. Modules are named by their paths: the weight of a linear module
// "lm_head" is the parameter "lm_head.weight". An empty path means that there
// is no such module.
type Network struct {
	Hidden int64 // width of the residual stream
	Stacks []*Stack
	Head   Head
	// Towers encode images for the language model, which the stacks are.
	Towers []*Tower
	// HoldsEmbeddings reports whether the program holds the embeddings, with those of
	// images, until it has the loss.
	HoldsEmbeddings bool
	// InputFirst reports whether the weights of the blocks' linear modules have
	// a row per input, as in GPT-2, and not per output.
	InputFirst bool
	// RouterLoss reports whether the loss of the load of experts is added, for which
	// the logits of all routers are kept (output_router_logits).
	RouterLoss bool
	// Masks are the bytes of the masks that modules keep, one for each pair of positions that the model knows.
	Masks int64
	// Body is the module of everything but the head, and HeldBody its name in transformers 5, if that is another.
	Body, HeldBody string
	// Opaque stands for operations that are unknown; nil if they are known.
	Opaque *Opaque
}

// Stack is an encoder or a decoder: embeddings, blocks and a norm.
type Stack struct {
	TokenEmbedding    string
	PositionEmbedding string // learned positions
	TypeEmbedding     string // BERT's segments
	OwnPositions      bool   // every sequence looks up positions of its own
	EmbeddingWidth    int64  // if it is not Hidden
	EmbeddingNorm     Norm
	EmbeddingDropout  float64
	ScalesEmbedding   bool   // Gemma multiplies by the square root of the width
	ProjectIn         string // from EmbeddingWidth to Hidden
	ProjectsLast      bool   // after positions, norm and dropout
	ProjectOut        string
	Blocks            []Block
	FinalNorm         Norm
	Causal            bool
	// Sound is what an encoder of sound reads instead of tokens; nil for tokens.
	Sound *Sound
	// CopiesPositions reports whether the positions of every sequence are looked up, though all are alike.
	CopiesPositions bool
}

// Sound is the spectrum that an encoder reads, and the two convolutions and the positions that make rows of it. Every
// sequence has one of this size: what is shorter is padded.
type Sound struct {
	First, Second string // convolutions
	Positions     string // a table that no gradient trains
	Bins          int64  // of a frame of the spectrum
	Rows          int64  // that the blocks read: a row for two frames
}

// Frames returns the number of frames of the spectrum.
func (s *Sound) Frames() int64 { return 2 * s.Rows }

// Head is the part of the network after the last stack.
type Head struct {
	Projection string // to the vocabulary or to labels
	Outputs    int64  // of the projection
	// Dense and Norm come before BERT's projection, Dense alone before RoBERTa's
	// classifier of sequences.
	Dense string
	Norm  Norm
	// Pooler is BERT's pooler, which reads the first token only.
	Pooler string
	// Width is that of Dense's outputs if it is not Hidden.
	Width int64
	// Activation is the function after Dense or Pooler. Empty means a hyperbolic
	// tangent for a head per sequence, and GELU for others.
	Activation string
	// Spans reports whether the two outputs are the logits of the first and of the
	// last token of an answer.
	Spans bool
	// Soft reports whether a hyperbolic tangent limits the logits.
	Soft bool
	// Scaled reports whether the logits are multiplied by a constant.
	Scaled bool
	// Wide reports whether the class upcasts the logits itself, and keeps no others.
	Wide bool
	// AddsBuffer reports whether a buffer in the type of the weights is added to the
	// logits.
	AddsBuffer bool
	// NarrowLoss reports whether logits are not upcast for the loss.
	NarrowLoss bool
	// Classes reports whether the outputs are classes and not the vocabulary.
	// Tensor parallelism leaves them whole.
	Classes bool
	// PerSequence reports whether there is one output per sequence, not per
	// token.
	PerSequence bool
	// Average reports whether a head per sequence reads the average of the rows behind the first, too.
	Average bool
	// EveryToken reports whether a head per sequence computes the outputs of all
	// tokens and takes those of the last.
	EveryToken bool
	Dropout    float64 // before the projection
	// Contrast compares images with texts. It is nil for other heads.
	Contrast *Contrast
	// Value is a linear module with one output for every token, beside the projection, or "".
	Value string
}

// Norm is a normalisation module.
type Norm struct {
	Path  string
	Kind  NormKind
	Width int64 // of a row, if it is not that of the weight
}

// NormKind is how a normalisation is computed.
type NormKind int

// The kinds differ in what they save for the backward pass.
const (
	NoNorm        NormKind = iota
	LayerNorm              // one fused kernel
	RMSNorm                // in fp32, rounded, then times the weight (Llama)
	RMSNormF32             // in fp32 with the weight, then rounded (Gemma)
	RMSNormT5              // only the variance is certainly in fp32
	LayerNormF32           // one kernel in fp32, between casts (OLMo)
	LayerNormWide          // operation by operation in fp32, without bias (Cohere)
)

// Arrangement is the order of the norms and the two halves of a block.
type Arrangement int

// The arrangements.
const (
	PreNorm  Arrangement = iota // x + f(norm(x))
	PostNorm                    // norm(x + f(x))
	Parallel                    // x + attention(norm(x)) + feedForward(norm(x))
)

// Block is one transformer block.
type Block struct {
	Path             string
	Arrangement      Arrangement
	AttentionNorm    Norm
	CrossNorm        Norm
	FeedForwardNorm  Norm // unused by a parallel block with one norm
	AfterAttention   Norm // Gemma 2 also normalises the outputs of both halves
	AfterFeedForward Norm
	Attention        Attention
	Beside           *Attention // of the same input; the outputs of both are added
	Cross            *Attention // to the encoder's output
	FeedForward      FeedForward
	Dropout          float64 // of the outputs of both halves
	ScalesHalves     bool    // the outputs of both halves are multiplied by a constant
	// AttentionScale and FeedForwardScale are parameters that the outputs of the
	// halves are multiplied by.
	AttentionScale, FeedForwardScale string
	// UndroppedFeedForward reports whether Dropout is that of the attention only.
	UndroppedFeedForward bool
	// ClampsHalf reports whether the result is limited to a range if it is in fp16.
	ClampsHalf bool
}

// Attention is the first half of a block.
type Attention struct {
	Query, Key, Value string
	Fused             string // one module instead of the three
	Output            string
	Heads             int64
	KeyValueHeads     int64
	Width             int64   // of a head of queries and keys
	ValueWidth        int64   // of a head of values
	Rotary            float64 // the share of Width that is rotated
	QueryNorm         Norm    // of every head
	KeyNorm           Norm
	NormsRotated      bool    // these norms come after the rotation
	WideRotary        bool    // the rotation is in fp32
	OwnAngles         bool    // the block makes cosines and sines of its own
	Gated             bool    // the query projection also computes an output gate
	Dropout           float64 // of the probabilities
	OutputDropout     float64
	// Biased reports whether more than a mask is added to the scores (ALiBi,
	// T5's relative positions), or a hyperbolic tangent limits them. Fused
	// kernels then need a mask in memory, or cannot be used.
	Biased bool
	Soft   bool
	// Sinks is a parameter with a score for each head that takes part in the
	// softmax. Only eager and flash attention know it.
	Sinks string
	// Clips reports whether queries, keys and values are limited to a range.
	Clips bool
	// WideScores reports whether queries and keys are upcast to fp32 for scores.
	WideScores bool
	// SavesMask reports whether the masked scores save the mask, which has a byte for
	// each pair of tokens and is one for all blocks.
	SavesMask bool
	// NoSDPA and NoFlash report whether transformers has no such kernel for the
	// model. Without a name it then takes eager attention.
	NoSDPA, NoFlash bool
	// ScalesQueries reports whether queries are multiplied by numbers of their
	// positions.
	ScalesQueries bool
	// ScalesKeys reports whether a constant multiplies keys (Falcon-H1, which multiplies the input and the output of
	// the attention, too).
	ScalesKeys bool
	// ByHead reports whether queries, keys and values are copied so that the numbers of a head lie together. So does
	// the output of a fused kernel, which is copied back.
	ByHead bool
	// Joined reports whether queries and keys are concatenated from a rotated
	// and a plain part. They are then stored by head, not by token, and so is
	// the output of a fused kernel. It is copied for the projection.
	Joined bool
	// WideSoftmax reports whether scores are upcast to fp32 for the softmax.
	WideSoftmax bool
	// Parts is the number of patches that attend to each other, apart from others;
	// 0 is all of an image. Divided reports that a call of the kernel is for one
	// such part, and that the results are put together.
	Parts   int64
	Divided bool
	Window  int64 // tokens that a token attends to; 0 = all before it
	Latent  *Latent
	Delta   *Delta
	Scan    *Scan
	Short   *ShortConvolution
}

// Computes reports whether there is such a half of the block.
func (a *Attention) Computes() bool { return a.Output != "" }

// Recurrent reports whether a state goes from token to token, instead of scores of pairs of tokens.
func (a *Attention) Recurrent() bool { return a.Delta != nil || a.Scan != nil || a.Short != nil }

// Latent is DeepSeek's replacement for Query, Key and Value.
type Latent struct {
	QueryDown string // empty: Query is one projection
	QueryNorm Norm
	QueryUp   string
	QueryRank int64
	Down      string // to keys and values, and the rotated part of keys
	Norm      Norm
	Up        string
	Rank      int64
	Rotated   int64
}

// Delta is linear attention with the gated delta rule (Qwen3-Next).
type Delta struct {
	Project              string // to queries, keys and values, and the output gate
	OutputGate           string // a projection of its own (Qwen3.5), or empty
	Gates                []string
	Path                 string // the module with the decay and the bias of its steps
	Convolution          Convolution
	Norm                 Norm
	KeyHeads, ValueHeads int64
	KeyWidth, ValueWidth int64
}

// Convolution is one of every channel along the sequence. A token sees itself and those before it.
type Convolution struct {
	Path             string
	Channels, Kernel int64
}

// Scan is a selective state space (Mamba 2).
type Scan struct {
	Path        string // the module with the decay, the skip and the bias of the steps
	Project     string // to the gate, the channels of the convolution and the steps
	Convolution Convolution
	Activation  string // after the convolution
	Norm        Norm   // by groups, of the gated result
	GatesLast   bool   // the gate comes after the norm
	// ScalesInput reports whether constants multiply the input and the projection.
	ScalesInput                        bool
	Heads, Width, Groups, State, Chunk int64
}

// ShortConvolution is a convolution between two gates (LFM2).
type ShortConvolution struct {
	Project     string // to both gates and the channels
	Convolution Convolution
}

// FeedForward is the second half of a block.
type FeedForward struct {
	Gate       string // empty: Up and Down only
	Up         string
	GateUp     string // one module instead of the two
	Down       string
	Inner      int64
	Activation string  // as in transformers: "silu", "gelu", "gelu_new", "relu", ...
	Width      int64   // of the result, if it is not that of the network
	Dropout    float64 // after the activation (T5)
	Alphas     string  // the module with the activation's parameters (xIELU)
	// OutputDropout comes after the network, if the block has none.
	OutputDropout float64
	// Scales reports whether constants multiply the gate and the result.
	Scales  bool
	Mixture *Mixture
}

// Computes reports whether there is such a half of the block.
func (f *FeedForward) Computes() bool { return f.Down != "" || f.Mixture != nil }

// Mixture is a mixture of experts. Every token passes Chosen of the experts and
// the shared ones.
type Mixture struct {
	Path   string // of the module, in transformers 5
	Router string
	// HeldRouter is Router in transformers 5, if that is not Path + ".gate".
	HeldRouter string
	Routing    Routing
	// WideRouter reports whether the router computes in fp32.
	WideRouter bool
	// IgnoresAutocast reports whether it does so under autocast, too.
	IgnoresAutocast bool
	// Auxiliary reports whether the class adds the loss of the load of experts if the
	// configuration asks for it.
	Auxiliary bool
	// WideLogits reports whether the router upcasts its logits before it returns them.
	WideLogits bool
	// NarrowSoftmax reports whether the softmax over all experts stays in the type
	// of the logits.
	NarrowSoftmax bool
	// Normalized reports whether the weights of the chosen experts are divided by
	// their sum.
	Normalized bool
	// Rescaled reports whether these weights are multiplied by a constant.
	Rescaled bool
	// WideWeights reports whether these weights stay in fp32 in transformers 5.
	WideWeights bool
	Experts     []FeedForward
	Chosen      int64
	Shared      *FeedForward
	// SharedFirst reports whether the shared experts run before the others.
	SharedFirst bool
	// SharedGate weights the shared experts.
	SharedGate string
	// GateUp and Down are the parameters with the stacked weights of all
	// experts. They are empty if every expert has modules of its own.
	GateUp, Down         string
	GateUpBias, DownBias string
	// Separate means that every expert has modules in transformers 5, too: axolotl's linearized experts.
	Separate bool
	// Hosted means that KTransformers runs the experts on the host.
	Hosted bool
	// Correction is a parameter that is added to the scores before the choice. No
	// gradient trains it.
	Correction string
	// Ungated reports whether experts have two projections: GateUp is then the first of them.
	Ungated bool
	// Narrow and Widen are projections before and after the experts, which compute in a width of their own.
	Narrow, Widen string
	// Clamped reports whether the two halves of the product are limited, and the
	// gate multiplied before its sigmoid (gpt-oss).
	Clamped bool
}

// Routing is how a router makes weights of its logits.
type Routing int

// The ways of routing.
const (
	SoftmaxOfAll     Routing = iota // a softmax over all experts, of which some are chosen
	SoftmaxOfChosen                 // a softmax over the logits of the chosen experts
	SigmoidOfAll                    // a sigmoid of every logit; a correction takes part in the choice
	SoftmaxCorrected                // SoftmaxOfAll with a correction that takes part in the choice
	SigmoidOfChosen                 // a sigmoid of every logit, of which the others are none; all experts compute
)

// Width returns the width of the experts' inputs and results.
func (m *Mixture) Width(hidden int64) int64 { return cmp.Or(m.Experts[0].Width, hidden) }

// Fused reports whether the experts share parameters and have no modules of
// their own.
func (m *Mixture) Fused() bool { return m.GateUp != "" }

// ExpertsPath returns the path of the module of the fused experts.
func (m *Mixture) ExpertsPath() string { return m.Path + ".experts" }

// Blocks returns the blocks of all stacks. They belong to the network, and callers do not change them.
func (n *Network) Blocks() []Block {
	if len(n.Stacks) == 1 {
		return slices.Clip(n.Stacks[0].Blocks)
	}
	var blocks []Block
	for _, s := range n.Stacks {
		blocks = append(blocks, s.Blocks...)
	}
	return blocks
}

// Recurrent reports whether there are layers that pass a state from token to token.
func (n *Network) Recurrent() bool {
	return slices.ContainsFunc(n.Blocks(), func(b Block) bool { return b.Attention.Recurrent() })
}

// Sound returns what the encoder of a network hears, or nil if it reads no sound.
func (n *Network) Sound() *Sound {
	if len(n.Stacks) == 0 {
		return nil
	}
	return n.Stacks[0].Sound
}

// Generates reports whether a language model behind an encoder of images generates text.
func (n *Network) Generates() bool {
	return len(n.Towers) > 0 && len(n.Stacks) > 0 && n.Head.Contrast == nil
}

// OnlyImages reports whether the model reads images and no tokens.
func (n *Network) OnlyImages() bool { return len(n.Stacks) == 0 && len(n.Towers) > 0 }

// Linears returns the paths of the linear modules without the head's
// projection, in the order of the forward pass.
func (n *Network) Linears() []string {
	if n.Opaque != nil {
		return n.Opaque.linears()
	}
	var paths []string
	add := func(more ...string) {
		for _, path := range more {
			if path != "" {
				paths = append(paths, path)
			}
		}
	}
	feedForward := func(f *FeedForward) { add(f.Gate, f.Up, f.GateUp, f.Down) }
	attention := func(a *Attention) {
		add(a.Query, a.Key, a.Value, a.Fused)
		if l := a.Latent; l != nil {
			add(l.QueryDown, l.QueryUp, l.Down, l.Up)
		}
		if d := a.Delta; d != nil {
			add(d.Project, d.OutputGate)
			add(d.Gates...)
		}
		if a.Scan != nil {
			add(a.Scan.Project)
		}
		if a.Short != nil {
			add(a.Short.Project)
		}
		add(a.Output)
	}
	block := func(b *Block) {
		attention(&b.Attention)
		for _, a := range []*Attention{b.Beside, b.Cross} {
			if a != nil {
				attention(a)
			}
		}
		feedForward(&b.FeedForward)
		if m := b.FeedForward.Mixture; m != nil {
			if !m.Fused() && !m.Separate { // the router of fused experts is no linear module
				add(m.Router)
			}
			for i := range m.Experts {
				feedForward(&m.Experts[i])
			}
			add(m.Narrow, m.Widen)
			if m.Shared != nil {
				feedForward(m.Shared)
				add(m.SharedGate)
			}
		}
	}
	for _, t := range n.Towers {
		add(t.linears()...)
	}
	for _, s := range n.Stacks {
		add(s.ProjectIn)
		for i := range s.Blocks {
			block(&s.Blocks[i])
		}
		add(s.ProjectOut)
	}
	add(n.Head.Dense, n.Head.Pooler)
	if c := n.Head.Contrast; c != nil {
		add(c.Projection)
	}
	return slices.Clip(paths)
}

// Undivided returns the paths of the linear modules that are replicated on
// every rank under tensor parallelism: routers, the gates of shared experts,
// the projections to DeepSeek's latent spaces, the head with one output per
// sequence, encoders of images, and all linear modules outside of the blocks. The plans of
// torchtitan and of transformers (base_model_tp_plan) say so.
func (n *Network) Undivided() map[string]bool {
	whole := map[string]bool{}
	attention := func(a *Attention) {
		if l := a.Latent; l != nil {
			whole[l.QueryDown], whole[l.Down] = true, true
		}
		if a.Scan != nil {
			whole[a.Scan.Project], whole[a.Output] = true, true
		}
		if a.Short != nil {
			whole[a.Short.Project], whole[a.Output] = true, true
		}
	}
	for _, b := range n.Blocks() {
		attention(&b.Attention)
		if b.Cross != nil {
			attention(b.Cross)
		}
		if m := b.FeedForward.Mixture; m != nil {
			whole[m.Router], whole[m.SharedGate], whole[m.Narrow], whole[m.Widen] = true, true, true, true
		}
	}
	for _, t := range n.Towers {
		for _, path := range t.linears() {
			whole[path] = true
		}
	}
	for _, s := range n.Stacks {
		whole[s.ProjectIn], whole[s.ProjectOut] = true, true
	}
	whole[n.Head.Dense], whole[n.Head.Pooler] = true, true
	if n.Head.Classes {
		whole[n.Head.Projection] = true
	}
	return whole
}

// The methods of scope below describe the network beside the parameters.

// stack starts a stack of this width. The caller may complete it through the
// pointer.
func (s scope) stack(hidden int64, stack Stack) *Stack {
	s.network.Hidden = hidden
	s.network.Stacks = append(s.network.Stacks, &stack)
	return &stack
}

// blocks is like repeat, for the blocks of a stack.
func (s scope) blocks(stack *Stack, name string, count int64, describe func(s scope, index int64, b *Block)) {
	s.repeat(name, count, func(s scope, index int64) {
		b := Block{Path: s.module("")}
		describe(s, index, &b)
		stack.Blocks = append(stack.Blocks, b)
	})
}

// module returns the path of a module in this scope, or of the scope itself.
func (s scope) module(name string) string {
	if name == "" && s.path != "" {
		return s.path[:len(s.path)-1]
	}
	return s.path + name
}
