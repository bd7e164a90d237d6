package model

import "cmp"

// experts is a mixture of experts by its differences from Qwen3-MoE's. Zero
// values are those of Qwen3-MoE.
type experts struct {
	module, held       string    // of the mixture, in checkpoints and in transformers 5
	router, heldRouter string    // inside of it
	names              [3]string // of an expert's projections: gate, up and down
	count              []string  // the field with the number of experts
	perToken           string    // the field with the number of chosen experts
	chosen             int64     // its default
	inner              string    // the field with the width of an expert
	routing            Routing
	normalized         setting
	wideRouter         bool
	auxiliary          bool // the class can add the loss of the load of experts
	wideLogits         bool // the router upcasts its logits
	narrowSoftmax      bool // the scores of the router stay in the type of its logits
	wideMatrix         bool // the weight of the router stays in fp32
	ignoresAutocast    bool
	rescaled           bool
	wideWeights        bool
	stacked            func(mixture scope, m *Mixture, experts, inner int64) // the weights of all experts
	corrected          string                                                // a parameter beside the router
	shared             func(block scope) FeedForward
	sharedFirst        bool
	afterNorms         bool                            // the mixture is the last module of a block
	sparse             func(s scope, index int64) bool // the layers with experts; nil is all
}

// describe adds a router and its experts to a block.
func (e experts) describe(block scope) FeedForward {
	module, held := cmp.Or(e.module, "mlp"), cmp.Or(e.held, "mlp")
	s := block.in(module)
	if e.auxiliary {
		s.network.RouterLoss = s.flagOr(false, "output_router_logits")
	} else {
		s.refuseRouterLoss()
	}
	fields := e.count
	if fields == nil {
		fields = []string{"num_experts"}
	}
	hidden, count, inner := s.size("hidden_size"), s.size(fields...), s.size(cmp.Or(e.inner, "moe_intermediate_size"))
	m := &Mixture{
		Path:    block.module(held),
		Routing: e.routing, WideRouter: e.wideRouter, Rescaled: e.rescaled, WideWeights: e.wideWeights,
		IgnoresAutocast: e.ignoresAutocast, NarrowSoftmax: e.narrowSoftmax, Auxiliary: e.auxiliary,
		WideLogits: e.wideLogits, Normalized: s.is(e.normalized), SharedFirst: e.sharedFirst,
		Chosen: min(count, s.sizeOr(e.chosen, cmp.Or(e.perToken, "num_experts_per_tok"))),
	}
	m.Router = s.linear(cmp.Or(e.router, "gate"), hidden, count, false)
	if e.wideMatrix {
		s.wide()
	}
	m.HeldRouter = block.in(held).module(cmp.Or(e.heldRouter, "gate"))
	if e.corrected != "" {
		m.Correction = s.module(e.corrected)
		s.frozen(e.corrected, 1, count)
		s.wide()
	}
	if e.stacked != nil {
		m.Experts = make([]FeedForward, count)
		e.stacked(s, m, count, inner)
		for i := range m.Experts {
			m.Experts[i] = FeedForward{Inner: inner, Activation: s.activation("silu")}
		}
	} else {
		e.separate(s, m, count, inner)
	}
	if e.shared != nil {
		if shared := e.shared(block); shared.Inner > 0 {
			m.Shared = &shared
		}
	}
	block.mixtures = append(block.mixtures, m)
	return FeedForward{Mixture: m}
}

// refuseRouterLoss refuses a class that keeps the logits of all routers and adds no
// loss of them, or one whose operations are unknown.
func (s scope) refuseRouterLoss() {
	if s.flagOr(false, "output_router_logits") {
		s.fail(s.fields["output_router_logits"].Value.At, "set it to false, and expect a training with it to take "+
			"more memory: for each token, layer and expert a logit and what is made of it",
			"output_router_logits is true: the logits of all routers are not planned for this architecture")
	}
}

// separate adds the experts as modules of their own.
func (e experts) separate(s scope, m *Mixture, count, inner int64) {
	hidden := s.size("hidden_size")
	names := e.names
	if names[0] == "" {
		names = [3]string{"gate_proj", "up_proj", "down_proj"}
	}
	s.repeat("experts", count, func(expert scope, _ int64) {
		m.Experts = append(m.Experts, FeedForward{
			Gate:  expert.linear(names[0], hidden, inner, false),
			Up:    expert.linear(names[1], hidden, inner, false),
			Down:  expert.linear(names[2], inner, hidden, false),
			Inner: inner, Activation: s.activation("silu"),
		})
	})
}

var mixtralNames = [3]string{"w1", "w3", "w2"}

var mixtralExperts = experts{
	module: "block_sparse_moe", names: mixtralNames, count: []string{"num_local_experts", "num_experts"},
	chosen: 2, inner: "intermediate_size", normalized: setting{otherwise: true}, wideWeights: true, auxiliary: true,
}

// deepseekExperts are those of DeepSeek-V3 and its descendants.
var deepseekExperts = experts{
	count: []string{"n_routed_experts", "num_local_experts"}, chosen: 8, routing: SigmoidOfAll,
	normalized: setting{"norm_topk_prob", true}, wideRouter: true, rescaled: true, wideWeights: true,
	shared: sharedExperts("n_shared_experts"), sparse: afterDense(1),
}

// with returns the experts with changes.
func (e experts) with(change func(e *experts)) *experts {
	change(&e)
	return &e
}

// afterDense returns the layers after the dense ones at the beginning.
func afterDense(otherwise int64) func(s scope, index int64) bool {
	return func(s scope, index int64) bool { return index >= s.countOr(otherwise, "first_k_dense_replace") }
}

// sharedExperts returns a feed-forward network as wide as so many experts.
func sharedExperts(field string) func(block scope) FeedForward {
	return func(block scope) FeedForward {
		count := block.countOr(1, field)
		if count == 0 {
			return FeedForward{}
		}
		return gated(block.in("mlp").in("shared_experts"), count*block.size("moe_intermediate_size"), false)
	}
}

// listedSparse returns the layers that mlp_layer_types calls sparse.
func listedSparse(s scope, index int64) bool {
	types := s.list("mlp_layer_types")
	switch {
	case types == nil:
		return afterDense(1)(s, index)
	case index >= int64(len(types)):
		s.fail(s.fields["mlp_layer_types"].Value.At, "", "mlp_layer_types has %d elements: expected one for each layer",
			len(types))
	}
	name := types[index].Text
	if name != "dense" && name != "sparse" {
		s.fail(types[index].At, "", `mlp_layer_types has %s: expected "dense" or "sparse"`, types[index])
	}
	return name == "sparse"
}

// graniteStacks adds the weights of all experts as two parameters.
func graniteStacks(s scope, m *Mixture, count, inner int64) {
	hidden := s.size("hidden_size")
	s.tensor("input_linear.weight", count, 2*inner, hidden)
	s.tensor("output_linear.weight", count, hidden, inner)
	m.GateUp, m.Down = s.module("input_linear.weight"), s.module("output_linear.weight")
}

// fusedStacks adds the weights of all experts as transformers 5 holds them.
func fusedStacks(s scope, m *Mixture, count, inner int64) {
	e, hidden := s.in("experts"), s.size("hidden_size")
	e.tensor("gate_up_proj", count, 2*inner, hidden)
	e.tensor("down_proj", count, hidden, inner)
	m.GateUp, m.Down = e.module("gate_up_proj"), e.module("down_proj")
}

// gptOSSStacks adds the weights and biases of all experts. The weights have a row
// for each input.
func gptOSSStacks(s scope, m *Mixture, count, inner int64) {
	hidden := s.size("hidden_size")
	s.tensor("router.bias", count)
	e := s.in("experts")
	e.tensor("gate_up_proj", count, hidden, 2*inner)
	e.tensor("gate_up_proj_bias", count, 2*inner)
	e.tensor("down_proj", count, inner, hidden)
	e.tensor("down_proj_bias", count, hidden)
	m.GateUp, m.Down = e.module("gate_up_proj"), e.module("down_proj")
	m.GateUpBias, m.DownBias, m.Clamped = e.module("gate_up_proj_bias"), e.module("down_proj_bias"), true
}

var graniteExperts = experts{
	module: "block_sparse_moe", held: "block_sparse_moe", router: "router.layer", heldRouter: "router",
	count: []string{"num_local_experts"}, chosen: 2, inner: "intermediate_size", routing: SoftmaxOfChosen,
	stacked: graniteStacks, afterNorms: true, auxiliary: true, wideLogits: true,
}

// graniteShared is a feed-forward network beside the experts.
func graniteShared(block scope) FeedForward {
	hidden, inner := block.size("hidden_size"), block.countOr(1024, "shared_intermediate_size")
	if inner == 0 {
		return FeedForward{}
	}
	s := block.in("shared_mlp")
	return FeedForward{
		GateUp: s.linear("input_linear", hidden, 2*inner, false), Down: s.linear("output_linear", inner, hidden, false),
		Inner: inner, Activation: block.activation("silu"),
	}
}

// Decoders with a mixture of experts.

var dots1 = variant{
	keyValueHeads: 32, inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms,
	windows: fromLast, window: 4096,
	experts: deepseekExperts.with(func(e *experts) {
		e.normalized, e.sparse = setting{field: "norm_topk_prob"}, afterDense(0)
	}),
}

var ernieMoE = variant{
	tied: true, inputBias: useBias, outputBias: useBias, innerBias: useBias, keyValueHeads: 4, wideRotary: true,
	ownAngles: true,
	experts: &experts{
		count: []string{"moe_num_experts", "num_experts"}, perToken: "moe_k", chosen: 6, routing: SoftmaxCorrected,
		normalized: setting{otherwise: true}, wideRouter: true, wideMatrix: true, ignoresAutocast: true,
		corrected: "moe_statics.e_score_correction_bias",
		shared:    sharedExperts("moe_num_shared_experts"), sharedFirst: true, sparse: ernieSparse, auxiliary: true,
	},
}

func ernieSparse(s scope, index int64) bool {
	last := s.size("num_hidden_layers") - 1
	if v, ok := s.find("moe_layer_end_index"); ok && v.Text != "-1" {
		last = s.countOr(0, "moe_layer_end_index")
	}
	return (index+1)%s.sizeOr(1, "moe_layer_interval") == 0 && index >= s.countOr(1, "moe_layer_start_index") &&
		index <= last
}

var exaoneMoE = variant{
	keyValueHeads: 32, heads: qkNorms, windows: 4, window: 4096, rotates: inWindows,
	experts: deepseekExperts.with(func(e *experts) {
		e.count, e.shared, e.sparse = []string{"num_experts"}, sharedExperts("num_shared_experts"), listedSparse
	}),
}

var flexOlmo = variant{
	inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms, wholeNorms: true, norms: laterNorms,
	kind: RMSNormF32,
	experts: &experts{chosen: 5, inner: "intermediate_size", normalized: setting{field: "norm_topk_prob"},
		auxiliary: true},
}

var glm4MoE = variant{
	keyValueHeads: 8, inputBias: attentionBias, heads: qkNorms, optionalNorm: "use_qk_norm", rotary: 0.5, joined: true,
	experts: &deepseekExperts,
}

// glm4VMoEText is the language model of GLM-4.5V.
var glm4VMoEText = variant{
	keyValueHeads: 8, inputBias: setting{"attention_bias", true}, rotary: 0.5, joined: true, experts: &deepseekExperts,
}

var glm4MoELite = variant{
	latent: true, experts: deepseekExperts.with(func(e *experts) { e.sparse = listedSparse }),
}

var gptOSS = variant{
	keyValueHeads: 8, width: 64, inputBias: setting{"attention_bias", true},
	outputBias: setting{"attention_bias", true}, kind: RMSNormF32, windows: 2, window: 128, sinks: true,
	experts: &experts{
		router: "router", heldRouter: "router", count: []string{"num_local_experts"}, chosen: 4,
		inner: "intermediate_size", routing: SoftmaxOfChosen, stacked: gptOSSStacks, auxiliary: true,
	},
}

var graniteMoE = variant{
	inputBias: attentionBias, outputBias: attentionBias, scalesEmbedding: true, scalesResidual: true,
	scalesLogits: true,
	experts:      &graniteExperts,
}

var graniteMoEShared = variant{
	inputBias: attentionBias, outputBias: attentionBias, scalesEmbedding: true, scalesResidual: true,
	scalesLogits: true,
	experts:      graniteExperts.with(func(e *experts) { e.shared = graniteShared }),
}

var hunyuanMoE = variant{
	inputBias: attentionBias, outputBias: attentionBias, heads: [2]string{"query_layernorm", "key_layernorm"},
	late: true,
	experts: &experts{
		router: "gate.wg", heldRouter: "gate.wg", perToken: "moe_topk", chosen: 1, inner: "intermediate_size",
		normalized: setting{otherwise: true}, wideRouter: true, wideMatrix: true, wideWeights: true, sharedFirst: true,
		shared: func(block scope) FeedForward {
			return gated(block.in("mlp").in("shared_mlp"), block.size("intermediate_size"), false)
		},
	},
}

var miniMaxM2 = variant{
	keyValueHeads: 8, heads: qkNorms, wholeNorms: true, rotary: 1, rotaryWidth: "rotary_dim", joined: true,
	experts: &experts{
		module: "block_sparse_moe", names: mixtralNames, count: []string{"num_local_experts", "num_experts"}, chosen: 8,
		inner: "intermediate_size", routing: SigmoidOfAll, normalized: setting{otherwise: true}, wideWeights: true,
		auxiliary: true,
	},
}

var mistral4 = variant{
	latent: true, scalesQueries: true,
	experts: deepseekExperts.with(func(e *experts) {
		e.chosen, e.routing, e.wideRouter, e.narrowSoftmax, e.sparse = 4, SoftmaxOfAll, false, true, afterDense(0)
		e.wideWeights, e.stacked = false, fusedStacks
	}),
}

var olmoe = variant{
	inputBias: attentionBias, outputBias: attentionBias, heads: qkNorms, wholeNorms: true, clips: "clip_qkv",
	experts: &experts{chosen: 8, inner: "intermediate_size", normalized: setting{field: "norm_topk_prob"},
		auxiliary: true},
}

var solarOpen = variant{
	keyValueHeads: 8, width: 128, inputBias: attentionBias,
	experts: deepseekExperts.with(func(e *experts) { e.sparse = nil }),
}
