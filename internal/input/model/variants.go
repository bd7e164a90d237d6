package model

import (
	"slices"
	"strconv"
)

// variant is a decoder by its differences from Llama. Zero values are Llama's.
type variant struct {
	tied          bool  // the class's default for tie_word_embeddings
	latent        bool  // DeepSeek's attention
	keyValueHeads int64 // the defaults of attention
	width         int64
	inputBias     setting // of the projections to queries, keys and values
	outputBias    setting
	innerBias     setting // of the feed-forward network
	dropout       string  // the field with the dropout of both halves
	// heads, if it is set, names norms of queries and keys; whole norms go over
	// all heads at once, and shared ones have a weight for each head.
	heads        [2]string
	wholeNorms   bool
	sharedNorms  bool
	optionalNorm string // the field that turns these norms on
	late         bool   // the norms of queries and keys come after the rotation
	// norms are those of the block in the order of the modules. Nil is Llama's.
	norms []blockNorm
	kind  NormKind
	// bare norms have no weight.
	bare        bool
	parallel    bool
	feedForward func(s scope, inner int64, bias bool) FeedForward
	activation  string
	// windows says which layers attend to a window: 0 none, 1 all, n all but
	// every n-th. layer_types goes before it.
	windows     int64
	fullFirst   bool                                           // every n-th layer is the first of n
	window      int64                                          // the default for sliding_window
	rotary      float64                                        // the default for partial_rotary_factor
	rotaryWidth string                                         // the field with the rotated width of a head
	joined      bool                                           // queries and keys are concatenated of two parts
	rotates     func(s scope, index int64, windowed bool) bool // nil: in every layer
	// wideRotary upcasts queries and keys for the rotation.
	wideRotary                                    bool
	ownAngles                                     bool // every block makes cosines and sines of its own
	scalesQueries                                 bool // queries are multiplied by numbers of their positions
	scalesEmbedding, scalesResidual, scalesLogits bool
	softLogits                                    string   // the field with the limit of the logits
	clips                                         string   // the field with the limit of queries, keys and values
	sinks                                         bool     // a parameter for each head takes part in the softmax
	experts                                       *experts // nil: a dense network in every layer
	unsupported                                   []string // fields that change the operations
}

// setting is a field that is true or false. Without a name it is a constant.
type setting struct {
	field     string
	otherwise bool
}

func (s scope) is(b setting) bool {
	if b.field == "" {
		return b.otherwise
	}
	return s.flagOr(b.otherwise, b.field)
}

// blockNorm is a norm of a block by its name and its place.
type blockNorm struct {
	name     string
	place    func(*Block) *Norm
	optional string // the field that turns the norm off
}

func beforeAttention(b *Block) *Norm   { return &b.AttentionNorm }
func afterAttention(b *Block) *Norm    { return &b.AfterAttention }
func beforeFeedForward(b *Block) *Norm { return &b.FeedForwardNorm }
func afterFeedForward(b *Block) *Norm  { return &b.AfterFeedForward }

var (
	llamaNorms = []blockNorm{{name: "input_layernorm", place: beforeAttention},
		{name: "post_attention_layernorm", place: beforeFeedForward}}
	gemmaNorms = []blockNorm{{name: "input_layernorm", place: beforeAttention},
		{name: "post_attention_layernorm", place: afterAttention},
		{name: "pre_feedforward_layernorm", place: beforeFeedForward},
		{name: "post_feedforward_layernorm", place: afterFeedForward}}
	// laterNorms come after both halves only.
	laterNorms = []blockNorm{{name: "post_attention_layernorm", place: afterAttention},
		{name: "post_feedforward_layernorm", place: afterFeedForward}}
)

var (
	qkNorms       = [2]string{"q_norm", "k_norm"}
	attentionBias = setting{field: "attention_bias"}
	mlpBias       = setting{field: "mlp_bias"}
	useBias       = setting{field: "use_bias"}
)

var apertus = variant{
	inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms,
	norms: []blockNorm{{name: "attention_layernorm", place: beforeAttention},
		{name: "feedforward_layernorm", place: beforeFeedForward}},
	feedForward: withAlphas, activation: "xielu",
}

var arcee = variant{
	inputBias: attentionBias, outputBias: attentionBias, innerBias: mlpBias,
	feedForward: upAndDown("up_proj", "down_proj"), activation: "relu2",
}

var cohere = variant{
	tied: true, inputBias: attentionBias, outputBias: attentionBias,
	heads: qkNorms, sharedNorms: true, optionalNorm: "use_qk_norm",
	norms: llamaNorms[:1], kind: LayerNormWide, parallel: true, wideRotary: true, scalesLogits: true,
}

var cohere2 = variant{
	tied: true, inputBias: attentionBias, outputBias: attentionBias, windows: 4, window: 4096,
	rotates: inWindows, norms: llamaNorms[:1], kind: LayerNormWide, parallel: true, wideRotary: true,
	scalesLogits: true,
}

var cwm = variant{keyValueHeads: 8, width: 128, windows: 4, fullFirst: true, window: 8192}

var ernie = variant{tied: true, width: 128, inputBias: useBias, outputBias: useBias, innerBias: useBias,
	keyValueHeads: 2, wideRotary: true, ownAngles: true}

var exaone4 = variant{
	keyValueHeads: 32, heads: qkNorms, norms: laterNorms, windows: 4, window: 4096, rotates: inWindows,
}

var gemma3 = variant{
	tied: true, keyValueHeads: 4, width: 256, inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms,
	norms: gemmaNorms, kind: RMSNormF32, activation: "gelu_pytorch_tanh", windows: 6, window: 4096,
	scalesEmbedding: true, softLogits: "final_logit_softcapping",
	unsupported: []string{"attn_logit_softcapping", "use_bidirectional_attention"},
}

var glm = variant{
	keyValueHeads: 2, width: 128, inputBias: setting{"attention_bias", true}, rotary: 0.5, joined: true,
	ownAngles: true, feedForward: gateUp,
}

var glm4 = variant{
	keyValueHeads: 2, width: 128, inputBias: setting{"attention_bias", true}, rotary: 0.5, joined: true,
	ownAngles: true, feedForward: gateUp, norms: slices.Concat(llamaNorms, []blockNorm{
		{name: "post_self_attn_layernorm", place: afterAttention},
		{name: "post_mlp_layernorm", place: afterFeedForward}}),
}

// glm4VText is the language model of GLM-4V.
var glm4VText = variant{
	keyValueHeads: 2, inputBias: setting{otherwise: true}, rotary: 1, joined: true, feedForward: gateUp,
	norms: glm4.norms,
}

var granite = variant{
	inputBias: attentionBias, outputBias: attentionBias, innerBias: mlpBias,
	scalesEmbedding: true, scalesResidual: true, scalesLogits: true,
}

var helium = variant{keyValueHeads: 20, width: 128, inputBias: attentionBias, innerBias: mlpBias, kind: RMSNormF32,
	ownAngles: true}

var hunyuan = variant{
	inputBias: attentionBias, outputBias: attentionBias, heads: [2]string{"query_layernorm", "key_layernorm"},
	late: true,
}

var hyperCLOVAX = variant{
	inputBias: attentionBias, outputBias: attentionBias, innerBias: mlpBias,
	scalesEmbedding: true, scalesResidual: true, scalesLogits: true, norms: slices.Concat(llamaNorms, []blockNorm{
		{"post_norm1", afterAttention, "use_post_norm"}, {"post_norm2", afterFeedForward, "use_post_norm"}}),
}

var jais2 = variant{
	inputBias: setting{"attention_bias", true}, outputBias: setting{"attention_bias", true},
	innerBias: setting{"mlp_bias", true}, feedForward: upAndDown("up_proj", "down_proj"), activation: "relu2",
	kind: LayerNorm,
}

var ministral = variant{keyValueHeads: 8, windows: 1, window: 4096}

var ministral3 = variant{keyValueHeads: 8, width: 128, windows: 1}

var nemotron = variant{
	inputBias: attentionBias, outputBias: attentionBias, innerBias: mlpBias, rotary: 0.5, joined: true,
	feedForward: upAndDown("up_proj", "down_proj"), activation: "relu2", kind: LayerNorm,
}

var olmo = variant{
	inputBias: attentionBias, outputBias: attentionBias, kind: LayerNormF32, bare: true, clips: "clip_qkv",
}

var olmo2 = variant{
	inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms, wholeNorms: true, norms: laterNorms,
	kind: RMSNormF32,
}

var olmo3 = variant{
	inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms, wholeNorms: true, norms: laterNorms,
	kind: RMSNormF32, windows: 4, window: 4096,
}

var seedOSS = variant{
	keyValueHeads: 8, width: 128, inputBias: setting{"attention_bias", true},
	outputBias: setting{field: "attention_out_bias"}, innerBias: mlpBias, dropout: "residual_dropout",
}

var smolLM3 = variant{
	tied: true, keyValueHeads: 4, inputBias: attentionBias, outputBias: attentionBias, innerBias: mlpBias,
	rotates: listed, unsupported: []string{"use_sliding_window"},
}

var stableLM = variant{
	keyValueHeads: 32, inputBias: setting{field: "use_qkv_bias"}, kind: LayerNorm, rotary: 0.25, joined: true,
	unsupported: []string{"qk_layernorm", "use_parallel_residual", "hidden_dropout"},
}

var starcoder2 = variant{
	tied: true, keyValueHeads: 2, inputBias: setting{"use_bias", true}, outputBias: setting{"use_bias", true},
	innerBias: setting{"use_bias", true}, feedForward: upAndDown("c_fc", "c_proj"),
	activation: "gelu_pytorch_tanh", dropout: "residual_dropout", kind: LayerNorm, windows: 1,
	unsupported: []string{"embedding_dropout"},
}

var youtu = variant{tied: true, latent: true}

// inWindows rotates in layers with a window only, if there are windows at all.
func inWindows(s scope, _ int64, windowed bool) bool { return windowed || s.isNull("sliding_window") }

// listed rotates in the layers that no_rope_layers has a 1 for, or in all but
// every no_rope_layer_interval-th.
func listed(s scope, index int64, _ bool) bool {
	layers := s.list("no_rope_layers")
	if layers == nil {
		return (index+1)%s.sizeOr(4, "no_rope_layer_interval") != 0
	}
	if index >= int64(len(layers)) {
		s.fail(s.fields["no_rope_layers"].Value.At, "", "no_rope_layers has %d elements: expected one for each layer",
			len(layers))
		return false
	}
	return layers[index].Text != "0"
}

// upAndDown returns a feed-forward network of two projections.
func upAndDown(up, down string) func(s scope, inner int64, bias bool) FeedForward {
	return func(s scope, inner int64, bias bool) FeedForward {
		hidden := s.size("hidden_size")
		return FeedForward{Up: s.linear(up, hidden, inner, bias), Down: s.linear(down, inner, hidden, bias),
			Inner: inner}
	}
}

// withAlphas is a feed-forward network of two projections whose activation has
// parameters.
func withAlphas(s scope, inner int64, bias bool) FeedForward {
	f := upAndDown("up_proj", "down_proj")(s, inner, bias)
	if s.activation("xielu") == "xielu" {
		s.tensor("act_fn.alpha_p", 1)
		s.tensor("act_fn.alpha_n", 1)
		f.Alphas = s.module("act_fn")
	}
	return f
}

// gateUp is a feed-forward network whose first two projections are one.
func gateUp(s scope, inner int64, bias bool) FeedForward {
	hidden := s.size("hidden_size")
	return FeedForward{
		GateUp: s.linear("gate_up_proj", hidden, 2*inner, bias),
		Down:   s.linear("down_proj", inner, hidden, bias),
		Inner:  inner,
	}
}

// describe describes the model.
func (v variant) describe(s scope) {
	for _, name := range v.unsupported {
		s.refuseSet(name)
	}
	vocabulary, hidden := s.size("vocab_size"), s.size("hidden_size")
	body := s.in(s.body)
	stack := s.stack(hidden, Stack{
		TokenEmbedding:  body.embedding("embed_tokens", vocabulary, hidden),
		ScalesEmbedding: v.scalesEmbedding,
		Causal:          true,
	})
	body.blocks(stack, "layers", s.size("num_hidden_layers"), v.block)
	stack.FinalNorm = v.norm(body, "norm", hidden)
	s.head("lm_head", hidden, vocabulary, v.tied, s.in(s.body).module("embed_tokens.weight"))
	s.network.Head.Scaled = v.scalesLogits
	if v.softLogits != "" {
		_, s.network.Head.Soft = s.find(v.softLogits)
	}
}

// refuseSet reports a field that is neither absent, null, false nor zero.
func (s scope) refuseSet(name string) {
	v, ok := s.find(name)
	if ok && v.Kind != 'f' && v.Text != "0" && v.Text != "0.0" {
		s.fail(v.At, Documented, "%s is %s, which is not supported", name, v)
	}
}

// norm adds a norm of the kind that all norms of the model have.
func (v variant) norm(s scope, name string, width ...int64) Norm {
	kind := v.kind
	if kind == NoNorm {
		kind = RMSNorm
	}
	norm := Norm{Path: s.module(name), Kind: kind}
	if v.bare {
		norm.Width = width[len(width)-1]
		return norm
	}
	s.tensor(name+".weight", width...)
	if kind == LayerNorm {
		s.tensor(name+".bias", width...)
	}
	return norm
}

func (v variant) block(s scope, index int64, b *Block) {
	if v.latent {
		b.Attention = latentAttention(s.in("self_attn"))
		b.Attention.ScalesQueries = v.scalesQueries
	} else {
		b.Attention = v.attention(s.in("self_attn"), index)
	}
	feedForward := v.feedForward
	if feedForward == nil {
		feedForward = gated
	}
	sparse := v.experts != nil && (v.experts.sparse == nil || v.experts.sparse(s, index))
	if sparse && !v.experts.afterNorms {
		b.FeedForward = v.experts.describe(s)
	}
	if !sparse {
		b.FeedForward = feedForward(s.in("mlp"), s.size("intermediate_size"), s.is(v.innerBias))
	}
	if v.activation != "" {
		b.FeedForward.Activation = s.activation(v.activation)
	}
	if v.parallel {
		b.Arrangement = Parallel
	}
	if v.dropout != "" {
		b.Dropout = s.shareOr(0, v.dropout)
	}
	b.ScalesHalves = v.scalesResidual
	norms := v.norms
	if norms == nil {
		norms = llamaNorms
	}
	for _, n := range norms {
		if n.optional != "" && !s.flagOr(true, n.optional) {
			continue
		}
		*n.place(b) = v.norm(s, n.name, s.size("hidden_size"))
	}
	if sparse && v.experts.afterNorms {
		b.FeedForward = v.experts.describe(s)
	}
}

func (v variant) attention(s scope, index int64) Attention {
	a := attention{
		keyValueHeads: v.keyValueHeads, width: v.width, inputBias: s.is(v.inputBias), outputBias: s.is(v.outputBias),
	}.describe(s)
	if v.heads[0] != "" && (v.optionalNorm == "" || s.flagOr(false, v.optionalNorm)) {
		queries, keys := []int64{a.Width}, []int64{a.Width}
		switch {
		case v.wholeNorms:
			queries, keys = []int64{a.Heads * a.Width}, []int64{a.KeyValueHeads * a.Width}
		case v.sharedNorms:
			queries, keys = []int64{a.Heads, a.Width}, []int64{a.KeyValueHeads, a.Width}
		}
		a.QueryNorm, a.KeyNorm = v.norm(s, v.heads[0], queries...), v.norm(s, v.heads[1], keys...)
		if v.sharedNorms {
			a.QueryNorm.Width, a.KeyNorm.Width = a.Width, a.Width
		}
		a.NormsRotated = v.late
	}
	if v.sinks {
		s.tensor("sinks", a.Heads)
		a.Sinks = s.module("sinks")
	}
	windowed := v.windowed(s, index)
	if a.Window = 0; windowed {
		a.Window = s.countOr(v.window, "sliding_window")
		if s.isNull("sliding_window") {
			a.Window = 0
		}
	}
	a.Joined, a.WideRotary, a.OwnAngles = v.joined, v.wideRotary, v.ownAngles
	a.Clips = v.clips != "" && s.isSet(v.clips)
	if v.rotary > 0 {
		rotary := v.rotary
		if v.rotaryWidth != "" {
			rotary = min(1, float64(s.countOr(a.Width, v.rotaryWidth))/float64(a.Width))
		}
		a.Rotary = s.rotary(rotary)
	}
	if v.rotates != nil && !v.rotates(s, index, windowed) {
		a.Rotary = 0
	}
	return a
}

// rotary returns the share of a head that is rotated. transformers 5 writes it
// with the other parameters of the rotation.
func (s scope) rotary(otherwise float64) float64 {
	if parameters, ok := s.find("rope_parameters", "rope_scaling"); ok {
		if inner := parameters.Find("partial_rotary_factor"); inner != nil && inner.Kind == '0' {
			if share, err := strconv.ParseFloat(inner.Text, 64); err == nil {
				otherwise = share
			}
		}
	}
	return s.shareOr(otherwise, "partial_rotary_factor")
}

// fromLast are windows in the layers from max_window_layers on.
const fromLast = -1

// windowed reports whether a layer attends to a window.
func (v variant) windowed(s scope, index int64) bool {
	if v.windows == 0 || s.isNull("sliding_window") {
		return false
	}
	types := s.list("layer_types")
	switch {
	case types == nil && v.windows == 1:
		return true
	case types == nil && v.fullFirst:
		return index%v.windows != 0
	case types == nil && v.windows == fromLast:
		return index >= s.countOr(s.size("num_hidden_layers"), "max_window_layers")
	case types == nil:
		return (index+1)%s.sizeOr(v.windows, "sliding_window_pattern", "_sliding_window_pattern") != 0
	case index >= int64(len(types)):
		s.fail(s.fields["layer_types"].Value.At, "", "layer_types has %d elements: expected one for each layer",
			len(types))
		return false
	}
	switch name := types[index].Text; name {
	case "full_attention", "sliding_attention":
		return name == "sliding_attention"
	default:
		s.fail(types[index].At, "", `layer_types has %s: expected "full_attention" or "sliding_attention"`,
			types[index])
		return false
	}
}

// nanoChat's norms have no weights. One comes before the first block, too.
func nanoChat(s scope) {
	variant{
		inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms, late: true, kind: RMSNormF32, bare: true,
		feedForward: upAndDown("fc1", "fc2"), activation: "relu2",
	}.describe(s)
	stack := s.network.Stacks[0]
	stack.EmbeddingNorm = stack.FinalNorm
	s.network.Head.Soft = !s.isNull("final_logit_softcapping")
}

// vaultGemma is Gemma 2 without norms behind the halves of a block.
func vaultGemma(s scope) {
	variant{
		tied: true, keyValueHeads: 4, width: 256, inputBias: attentionBias, outputBias: attentionBias,
		norms: []blockNorm{{name: "input_layernorm", place: beforeAttention},
			{name: "pre_feedforward_layernorm", place: beforeFeedForward}},
		kind: RMSNormF32, activation: "gelu_pytorch_tanh", windows: 2, window: 4096, scalesEmbedding: true,
	}.describe(s)
	for i := range s.network.Stacks[0].Blocks {
		a := &s.network.Stacks[0].Blocks[i].Attention
		a.Soft, a.NoSDPA = !s.isNull("attn_logit_softcapping"), true
	}
	s.network.Head.Soft = !s.isNull("final_logit_softcapping")
}
