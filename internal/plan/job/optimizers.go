package job

import (
	"cmp"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// optimizerKind is a row of the table of optimizers: all that is special about one.
type optimizerKind struct {
	name string
	// aliases are its names in TrainingArguments, in DeepSpeed and in other programs.
	aliases aliases
	// variants are its implementations. It is nil for an optimizer with one.
	variants []Variant
	variant  Variant // of one implementation, "" for torch's default
	// states returns the states of a parameter. It is nil where choose sets them.
	states func(*autograd.Parameter) []State
	// choose sets what depends on the job.
	choose func(*resolver, *Optimizer) error
	// lists is the number of lists that a foreach step makes, each as large as all parameters. loopTensors is the
	// number of tensors that a step over single parameters makes, each as large as the largest parameter.
	lists, loopTensors int64
	wide               bool // these are in fp32
	// converts is the number of fp32 copies beside loopTensors of a parameter in 16 bits: its own and its gradient's.
	converts int64
	// passes returns the temporaries of each pass of a step, nil for one pass with lists and loopTensors.
	passes func(*Optimizer, []*autograd.Parameter) [][]ledger.Bytes
	why    string // of the temporaries
	// uncounted means that no parameter has a number of steps in its state.
	uncounted   bool
	together    bool // the update of a parameter depends on others
	full        bool // states depend on the full shape or the name of a parameter, or are of one block
	inBackward  bool // a parameter is updated as soon as its gradient is complete
	ofDeepSpeed bool // only DeepSpeed has it
	compresses  bool // it exchanges one bit for each number
}

// aliases are other names of a kind, with what they say beside it.
type aliases map[string]alias

type alias struct {
	variant Variant
	paged   bool
}

// Names that other parts of a plan ask for.
const (
	// The optimizers of DeepSpeed that exchange one bit for each number. Releases from 0.19.7 on do not have them.
	OneBitAdam  = "onebitadam"
	ZeroOneAdam = "zerooneadam"
	OneBitLamb  = "onebitlamb"
)

// ofTorch are the variants of most of torch's optimizers.
var ofTorch = []Variant{Foreach, Fused, Loop}

// optimizerKinds is the table of optimizers. Those with rules of their own have their row beside these.
var optimizerKinds = slices.Concat([]optimizerKind{
	{name: "adamw", variants: ofTorch, states: sameShape("exp_avg", "exp_avg_sq"), lists: 1, loopTensors: 2,
		aliases: aliases{"adamw_torch": {}, "adamw_torch_fused": {variant: Fused}, "adamw_hf": {variant: Loop},
			"adamw_anyprecision": {variant: Loop}, "fusedadam": {variant: Fused}, "fused_adam": {variant: Fused}},
		why: "torch.optim.AdamW(foreach=True) makes the list exp_avg_sq_sqrt = torch._foreach_sqrt(exp_avg_sqs): one " +
			"more copy of a moment of all parameters (torch/optim/adam.py, _multi_tensor_adam)"},
	{name: "adam", variants: ofTorch, states: sameShape("exp_avg", "exp_avg_sq"), lists: 1, loopTensors: 2,
		why: "torch.optim.Adam(foreach=True) makes the list exp_avg_sq_sqrt = torch._foreach_sqrt(exp_avg_sqs) " +
			"(torch/optim/adam.py, _multi_tensor_adam)"},
	{name: "sgd", variants: ofTorch, states: sameShape(), uncounted: true},
	{name: "sgd-momentum", variants: ofTorch, states: sameShape("momentum_buffer"), uncounted: true},
	{name: "adagrad", variants: []Variant{Foreach, Loop}, states: sameShape("sum"), lists: 2, loopTensors: 2,
		why: "torch.optim.Adagrad(foreach=True) makes the lists std and numerator (torch/optim/adagrad.py, " +
			"_multi_tensor_adagrad)"},
	{name: "rmsprop", variants: []Variant{Foreach, Loop}, states: sameShape("square_avg"), lists: 1, loopTensors: 1,
		aliases: aliases{"rmsprop_bnb": {variant: Fused}},
		why: "torch.optim.RMSprop(foreach=True) makes the list avg = torch._foreach_sqrt(square_avgs) " +
			"(torch/optim/rmsprop.py)"},
	{name: "lion", states: sameShape("exp_avg"), lists: 1, loopTensors: 1, uncounted: true,
		why: "the update is a list of its own"},
	{name: "lomo", states: sameShape(), uncounted: true, inBackward: true, aliases: aliases{"adalomo": {}}},
	{name: "adafactor", states: factored, loopTensors: 2, wide: true, converts: 2},

	{name: "lamb", states: sameShape("exp_avg", "exp_avg_sq"), ofDeepSpeed: true}, // its kernel
	{name: OneBitAdam, states: sameShape("exp_avg", "exp_avg_sq"), variant: Fused, ofDeepSpeed: true,
		compresses: true},
	{name: ZeroOneAdam, states: sameShape("exp_avg", "exp_avg_sq", "momentum_accumulator"), variant: Fused,
		ofDeepSpeed: true, compresses: true},
	{name: OneBitLamb, states: sameShape("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"), variant: Loop,
		ofDeepSpeed: true, compresses: true},

	{name: "schedule-free-adamw", states: sameShape("z", "exp_avg_sq"), lists: 1, loopTensors: 1, together: true,
		aliases: aliases{"schedule_free_adamw": {variant: Foreach}},
		why:     "the list denom of AdamWScheduleFree (schedulefree/adamw_schedulefree.py)"},
	{name: "schedule-free-radam", states: sameShape("z", "exp_avg_sq"), lists: 1, loopTensors: 1, together: true,
		aliases: aliases{"schedule_free_radam": {variant: Foreach}},
		why:     "the list denom of RAdamScheduleFree (schedulefree/radam_schedulefree.py)"},
	{name: "schedule-free-sgd", states: sameShape("z"), together: true,
		aliases: aliases{"schedule_free_sgd": {variant: Foreach}}},

	// These are of bitsandbytes, torchao and apex.
	{name: "adamw-8bit", states: blockwise("state1", "state2"),
		aliases: aliases{"adamw_torch_8bit": {variant: Loop}, "adamw_bnb_8bit": {variant: Fused},
			"adamw_8bit": {variant: Fused}, "paged_adamw_8bit": {Fused, true}, "adam8bit": {variant: Fused},
			"adamw8bit": {variant: Fused}}},
	{name: "adamw-32bit", states: inFP32("state1", "state2"),
		aliases: aliases{"paged_adamw_32bit": {Fused, true}, "paged_adamw": {Fused, true}}},
	{name: "lion-8bit", states: blockwise("state1"),
		aliases: aliases{"lion_8bit": {variant: Fused}, "paged_lion_8bit": {Fused, true}}},
	{name: "lion-32bit", states: inFP32("state1"),
		aliases: aliases{"lion_32bit": {variant: Fused}, "paged_lion_32bit": {Fused, true}}},
	{name: "ademamix-8bit", states: doubled(blockwise("state1", "state2")),
		aliases: aliases{"ademamix_8bit": {variant: Fused}, "paged_ademamix_8bit": {Fused, true}}},
	{name: "ademamix-32bit", states: doubled(inFP32("state1", "state2")),
		aliases: aliases{"ademamix": {variant: Fused}, "paged_ademamix_32bit": {Fused, true}}},
	{name: "adamw-4bit", states: nibbles, aliases: aliases{"adamw_torch_4bit": {variant: Loop}}},
	{name: "adamw-apex", states: inFP32("exp_avg", "exp_avg_sq"),
		aliases: aliases{"adamw_apex_fused": {variant: Fused}}},
}, muons, lowRankKinds, []optimizerKind{adamMiniKind, badamKind, soapKind})

// optimizerNames are the kinds and their aliases, by name.
var optimizerNames = func() map[string]Optimizer {
	named := map[string]Optimizer{}
	for i := range optimizerKinds {
		k := &optimizerKinds[i]
		of := Optimizer{Name: k.name, Variant: k.variant, States: k.states, kind: k}
		named[k.name] = of
		for name, says := range k.aliases {
			of.Variant, of.Managed = cmp.Or(says.variant, k.variant), says.paged
			named[name] = of
		}
	}
	return named
}()

// NewOptimizer returns the optimizer of a kind, one of Optimizers.
func NewOptimizer(kind string, variant Variant) Optimizer {
	o := optimizerNames[kind]
	o.Variant = cmp.Or(variant, o.Variant)
	return o
}

// Optimizers returns the sorted names of the optimizers that can be planned.
func Optimizers() []string {
	names := make([]string, len(optimizerKinds))
	for i, k := range optimizerKinds {
		names[i] = k.name
	}
	slices.Sort(names)
	return names
}
