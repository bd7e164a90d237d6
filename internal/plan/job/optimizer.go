package job

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// Optimizer describes the states of an optimizer and the temporaries of its step.
// States have their names in torch.optim.
type Optimizer struct {
	Name    string
	Variant Variant
	// States returns the states of a parameter. They may differ for small tensors.
	States func(p *autograd.Parameter) []State
	// lists is the number of lists that a foreach step makes, each as large as all parameters. loopTensors is the
	// number of tensors that a step over single parameters makes, each as large as the largest parameter.
	lists, loopTensors int64
	listsWhy           string
	// Ranks are those that share a matrix under FSDP2, 0 without.
	Ranks int64
	// Managed means that states are in CUDA's managed memory (paged optimizers), outside torch's allocator.
	Managed bool
	lowRank *lowRank // of GaLore and APOLLO, nil for others
}

// State is one state tensor.
type State struct {
	Name  string
	Bytes int64
}

// Variant is the implementation of a step in torch.optim.
type Variant string

// The variants.
const (
	Foreach Variant = "foreach"
	Fused   Variant = "fused"
	Loop    Variant = "for-loop"
)

// optimizerName returns the name and the variant of the optimizer that the request and the files ask for, and the place
// of the name.
func (r *resolver) optimizerName() (name, variant string, where fault.Position) {
	name, variant, _ = strings.Cut(r.Optimizer, "/")
	if d := r.job.DeepSpeed; name == "" && d != nil && d.Optimizer != nil {
		name, where.File = strings.ToLower(d.Optimizer.Type), d.File
	}
	if f := r.Inputs.framework; name == "" && f != nil {
		name, where.File = f.Optimizer, f.File
	}
	if name == "" && r.training != nil { // the Trainer's, unless DeepSpeed has one
		name, where.File = r.training.Optimizer.Name, r.training.File
	}
	if name == dion && r.job.FSDP == nil && r.Request.FSDP == "" { // axolotl takes the one or the other
		name = moonlight
	}
	return name, variant, where
}

// optimizer sets the optimizer, its variant and the gradient clipping.
func (r *resolver) optimizer() (err error) {
	name, variant, where := r.optimizerName()
	if name == "" {
		name = "adamw"
		r.assume("AdamW: --optimizer was not given")
	}
	known, ok := optimizerNames[name]
	if !ok {
		return unplannedOptimizer(where, name)
	}
	o := known.optimizer()
	if variant != "" {
		if err := checkVariant(known.kind, Variant(variant)); err != nil {
			return err
		}
		o.Variant = Variant(variant)
	}
	if d := r.job.DeepSpeed; o.Variant == "" && d != nil && d.Optimizer.IsFusedAdam() &&
		strings.HasPrefix(known.kind, "adam") {
		o.Variant = Fused
	}
	if o.Variant == "" { // torch's defaults
		o.Variant = Foreach
		if r.job.OnCPU {
			o.Variant = Loop
		}
	}
	switch {
	case isLowRank(o.Name):
		err = r.projections(&o)
	case o.Name == adamMini:
		err = r.mini(&o)
	}
	r.job.Optimizer = o
	r.job.Clip = 1
	switch {
	case r.job.StepsInBackward: // no gradients are left to clip
		r.job.Clip = 0
	case r.Clip != nil:
		r.job.Clip = *r.Clip
	case r.training != nil:
		r.job.Clip = r.training.MaxGradNorm
	case r.job.DeepSpeed != nil:
		r.job.Clip = r.job.DeepSpeed.GradientClipping
	}
	return err
}

// variantsOf lists the variants of the optimizers in torch.optim.
var variantsOf = map[string][]Variant{
	"adamw":        {Foreach, Fused, Loop},
	"adam":         {Foreach, Fused, Loop},
	"sgd":          {Foreach, Fused, Loop},
	"sgd-momentum": {Foreach, Fused, Loop},
	"adagrad":      {Foreach, Loop},
	"rmsprop":      {Foreach, Loop},
	badam:          {Foreach, Fused},
	muon:           {Foreach, Fused, Loop}, // of AdamW, which has the parameters that Muon does not
}

// checkVariant refuses a variant that an optimizer does not have.
func checkVariant(name string, wanted Variant) error {
	known := []Variant{Foreach, Fused, Loop}
	hint := "leave it out: " + name + " has only one implementation"
	if has := variantsOf[name]; len(has) > 0 {
		hint = fmt.Sprintf("expected %v", joined(has))
	}
	switch {
	case !slices.Contains(known, wanted):
		return fault.Inputf("unknown variant %q of the optimizer %s", wanted, name).WithHint(hint)
	case !slices.Contains(variantsOf[name], wanted):
		return fault.Inputf("the optimizer %s has no variant %s", name, wanted).WithHint(hint)
	}
	return nil
}

func joined(variants []Variant) string {
	text := ""
	for i, v := range variants {
		if i > 0 {
			text += ", "
		}
		text += string(v)
	}
	return text
}

// optimizerText returns the optimizer as the user spelled it.
func (r *resolver) optimizerText() string {
	if r.Optimizer != "" {
		return r.Optimizer
	}
	return r.job.Optimizer.Name
}

// Optimizers returns the sorted names of the optimizers that can be planned.
func Optimizers() []string {
	names := make([]string, 0, len(optimizerKinds))
	for name := range optimizerKinds {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

var optimizerKinds = map[string]Optimizer{
	"adamw": {States: sameShape("exp_avg", "exp_avg_sq"), lists: 1, loopTensors: 2,
		listsWhy: "torch.optim.AdamW(foreach=True) makes the list exp_avg_sq_sqrt = " +
			"torch._foreach_sqrt(exp_avg_sqs): one more copy of a moment of all parameters (torch/optim/adam.py, " +
			"_multi_tensor_adam)"},
	"adam": {States: sameShape("exp_avg", "exp_avg_sq"), lists: 1, loopTensors: 2,
		listsWhy: "torch.optim.Adam(foreach=True) makes the list exp_avg_sq_sqrt = torch._foreach_sqrt(exp_avg_sqs) " +
			"(torch/optim/adam.py, _multi_tensor_adam)"},
	"sgd":          {States: sameShape()},
	"sgd-momentum": {States: sameShape("momentum_buffer")},
	"adagrad": {States: sameShape("sum"), lists: 2, loopTensors: 2,
		listsWhy: "torch.optim.Adagrad(foreach=True) makes the lists std and numerator (torch/optim/adagrad.py, " +
			"_multi_tensor_adagrad)"},
	"rmsprop": {States: sameShape("square_avg"), lists: 1, loopTensors: 1,
		listsWhy: "torch.optim.RMSprop(foreach=True) makes the list avg = torch._foreach_sqrt(square_avgs) " +
			"(torch/optim/rmsprop.py)"},
	"lion": {States: sameShape("exp_avg"), lists: 1, loopTensors: 1,
		listsWhy: "the update is a list of its own"},
	"lamb":      {States: sameShape("exp_avg", "exp_avg_sq")}, // DeepSpeed's kernel
	OneBitAdam:  {States: sameShape("exp_avg", "exp_avg_sq"), Variant: Fused},
	ZeroOneAdam: {States: sameShape("exp_avg", "exp_avg_sq", "momentum_accumulator"), Variant: Fused},
	OneBitLamb:  {States: sameShape("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"), Variant: Loop},
	"schedule-free-adamw": {States: sameShape("z", "exp_avg_sq"), lists: 1, loopTensors: 1,
		listsWhy: "the list denom of AdamWScheduleFree (schedulefree/adamw_schedulefree.py)"},
	"schedule-free-radam": {States: sameShape("z", "exp_avg_sq"), lists: 1, loopTensors: 1,
		listsWhy: "the list denom of RAdamScheduleFree (schedulefree/radam_schedulefree.py)"},
	"schedule-free-sgd": {States: sameShape("z")},
	"adafactor":         {States: factored, loopTensors: 3},
	"ademamix-8bit":     {States: doubled(blockwise("state1", "state2"))},
	"ademamix-32bit":    {States: doubled(inFP32("state1", "state2"))},
	"adamw-8bit":        {States: blockwise("state1", "state2")},
	"lion-8bit":         {States: blockwise("state1")},
	"adamw-32bit":       {States: inFP32("state1", "state2")},
	"adamw-apex":        {States: inFP32("exp_avg", "exp_avg_sq")},
	"lion-32bit":        {States: inFP32("state1")},
	"adamw-4bit":        {States: nibbles},
	"lomo":              {States: sameShape()},
	muon:                muonOptimizer,
	moonlight:           moonlightOptimizer,
	dion:                dionOptimizer,
	galore + "adamw":    {}, galore + "adamw-8bit": {}, galore + "adafactor": {}, apollo + "adamw": {},
	adamMini: {loopTensors: 2},
	badam:    {States: inFP32("master_weights", "exp_avg", "exp_avg_sq")},
}

// The optimizers of DeepSpeed that exchange one bit for each number. Releases from 0.19.7 on do not have them.
const (
	OneBitAdam  = "onebitadam"
	ZeroOneAdam = "zerooneadam"
	OneBitLamb  = "onebitlamb"
)

// Compresses reports whether the optimizer exchanges one bit for each number among ranks, beside errors.
func (o *Optimizer) Compresses() bool {
	return o.Name == OneBitAdam || o.Name == ZeroOneAdam || o.Name == OneBitLamb
}

// IsOfDeepSpeed reports whether only DeepSpeed has the optimizer.
func (o *Optimizer) IsOfDeepSpeed() bool { return o.Name == "lamb" || o.Compresses() }

// namedOptimizer is the optimizer that a name stands for.
type namedOptimizer struct {
	kind    string
	variant Variant
	paged   bool
}

// NewOptimizer returns the optimizer of a kind, one of Optimizers.
func NewOptimizer(kind string, variant Variant) Optimizer {
	return namedOptimizer{kind: kind, variant: variant}.optimizer()
}

func (n namedOptimizer) optimizer() Optimizer {
	o := optimizerKinds[n.kind]
	o.Name, o.Variant, o.Managed = n.kind, cmp.Or(n.variant, o.Variant), n.paged
	if isLowRank(n.kind) || n.kind == adamMini {
		o.Variant = Loop
	}
	return o
}

// optimizerNames maps the names of optimizers in Plimsoll, in TrainingArguments
// and in DeepSpeed.
var optimizerNames = func() map[string]namedOptimizer {
	m := map[string]namedOptimizer{}
	for _, kind := range Optimizers() {
		m[kind] = namedOptimizer{kind: kind}
	}
	for name, n := range map[string]namedOptimizer{
		"adamw_torch":        {kind: "adamw"},
		"adamw_torch_fused":  {kind: "adamw", variant: Fused},
		"adamw_hf":           {kind: "adamw", variant: Loop},
		"adamw_apex_fused":   {kind: "adamw-apex", variant: Fused},
		"adamw_anyprecision": {kind: "adamw", variant: Loop},
		"adamw_torch_8bit":   {kind: "adamw-8bit", variant: Loop},
		"adamw_torch_4bit":   {kind: "adamw-4bit", variant: Loop},
		"adamw_bnb_8bit":     {kind: "adamw-8bit", variant: Fused},
		"adamw_8bit":         {kind: "adamw-8bit", variant: Fused},
		"paged_adamw_8bit":   {kind: "adamw-8bit", variant: Fused, paged: true},
		"paged_adamw_32bit":  {kind: "adamw-32bit", variant: Fused, paged: true},
		"paged_adamw":        {kind: "adamw-32bit", variant: Fused, paged: true},
		"lion_8bit":          {kind: "lion-8bit", variant: Fused},
		"lion_32bit":         {kind: "lion-32bit", variant: Fused},
		"paged_lion_8bit":    {kind: "lion-8bit", variant: Fused, paged: true},
		"paged_lion_32bit":   {kind: "lion-32bit", variant: Fused, paged: true},
		"rmsprop_bnb":        {kind: "rmsprop", variant: Fused},

		"ademamix":             {kind: "ademamix-32bit", variant: Fused},
		"ademamix_8bit":        {kind: "ademamix-8bit", variant: Fused},
		"paged_ademamix_32bit": {kind: "ademamix-32bit", variant: Fused, paged: true},
		"paged_ademamix_8bit":  {kind: "ademamix-8bit", variant: Fused, paged: true},
		"schedule_free_adamw":  {kind: "schedule-free-adamw", variant: Foreach},
		"schedule_free_radam":  {kind: "schedule-free-radam", variant: Foreach},
		"schedule_free_sgd":    {kind: "schedule-free-sgd", variant: Foreach},

		"galore_adamw":                {kind: galore + "adamw"},
		"galore_adamw_layerwise":      {kind: galore + "adamw"},
		"galore_adamw_8bit":           {kind: galore + "adamw-8bit"},
		"galore_adamw_8bit_layerwise": {kind: galore + "adamw-8bit"},
		"galore_adafactor":            {kind: galore + "adafactor"},
		"galore_adafactor_layerwise":  {kind: galore + "adafactor"},
		"apollo_adamw":                {kind: apollo + "adamw"},
		"apollo_adamw_layerwise":      {kind: apollo + "adamw"},
		"galore":                      {kind: galore + "adamw"},
		"apollo":                      {kind: apollo + "adamw"},
		"adam_mini":                   {kind: adamMini},
		"adammini":                    {kind: adamMini},
		"badam_fused":                 {kind: badam, variant: Fused},

		"fusedadam":  {kind: "adamw", variant: Fused},
		"fused_adam": {kind: "adamw", variant: Fused},
		"adam8bit":   {kind: "adamw-8bit", variant: Fused},
		"adamw8bit":  {kind: "adamw-8bit", variant: Fused},
		"adalomo":    {kind: "lomo"},
	} {
		m[name] = n
	}
	return m
}()

// sameShape returns states with the shape and type of the parameter.
func sameShape(names ...string) func(*autograd.Parameter) []State {
	return func(p *autograd.Parameter) []State {
		states := make([]State, len(names))
		for i, name := range names {
			states[i] = State{name, p.Elements * p.DType.Size()}
		}
		return states
	}
}

// inFP32 returns states in fp32, for parameters of any type.
func inFP32(names ...string) func(*autograd.Parameter) []State {
	return func(p *autograd.Parameter) []State {
		states := make([]State, len(names))
		for i, name := range names {
			states[i] = State{name, p.Elements * 4}
		}
		return states
	}
}

// factored returns Adafactor's states: a row and a column for a matrix, and the
// full second moment for a vector.
func factored(p *autograd.Parameter) []State {
	if p.Rows == 0 {
		return []State{{"exp_avg_sq", p.Elements * 4}}
	}
	return []State{{"exp_avg_sq_row", p.Rows * max(1, p.Matrices) * 4}, {"exp_avg_sq_col", p.Elements / p.Rows * 4}}
}

// blockwise returns bitsandbytes' states: a byte for each element, and an fp32 scale for 256 of them. Tensors below
// 4096 elements have fp32 states. So have embeddings in transformers' Trainer.
func blockwise(names ...string) func(*autograd.Parameter) []State {
	return func(p *autograd.Parameter) []State {
		var states []State
		for i, name := range names {
			if p.Elements < 4096 || p.Embedding {
				states = append(states, State{name, p.Elements * 4})
				continue
			}
			scales := (p.Elements + 255) / 256 * 4
			states = append(states, State{name, p.Elements}, State{[]string{"absmax1", "absmax2"}[i], scales})
		}
		return states
	}
}

// doubled returns AdEMAMix's states of bitsandbytes: the first one holds two averages of the gradient.
func doubled(states func(*autograd.Parameter) []State) func(*autograd.Parameter) []State {
	return func(p *autograd.Parameter) []State {
		list := states(p)
		for i, s := range list {
			if strings.HasSuffix(s.Name, "1") {
				list[i].Bytes *= 2
			}
		}
		return list
	}
}

// nibbles returns torchao's 4-bit states: half a byte for each element, and an
// fp32 scale for 128 of them.
func nibbles(p *autograd.Parameter) []State {
	if p.Elements < 4096 {
		return inFP32("exp_avg", "exp_avg_sq")(p)
	}
	bytes := (p.Elements+1)/2 + (p.Elements+127)/128*4
	return []State{{"exp_avg", bytes}, {"exp_avg_sq", bytes}}
}

// CountsOnGPU reports whether the number of steps of a parameter is a tensor on the GPU.
func (o *Optimizer) CountsOnGPU(p *autograd.Parameter) bool {
	return o.Variant == Fused && !o.orthogonalizes(p)
}

// Counts reports whether a parameter's number of steps is a part of its state.
func (o *Optimizer) Counts(p *autograd.Parameter) bool {
	switch o.Name {
	case "sgd", "sgd-momentum", "lion", "lomo":
		return false
	case muon, moonlight, dion:
		return !p.Hidden && o.Name == muon
	}
	return true
}

// IsTogether reports whether the update of a parameter depends on others: schedule-free's counters are of a group.
func (o *Optimizer) IsTogether() bool { return strings.HasPrefix(o.Name, "schedule-free") }

// Passes returns the sizes of the temporaries at the peak of each pass of a step over the parameters. All optimizers
// but Muon make one pass.
func (o *Optimizer) Passes(parameters []*autograd.Parameter) [][]ledger.Bytes {
	switch {
	case o.IsMuon():
		return o.muonPasses(parameters)
	case o.Name == badam:
		return [][]ledger.Bytes{o.badamTemporaries(parameters)}
	case o.lowRank != nil:
		return [][]ledger.Bytes{o.lowRank.temporaries(parameters)}
	}
	return [][]ledger.Bytes{o.temporaries(parameters)}
}

// temporaries are as large as all parameters, or as the largest one.
func (o *Optimizer) temporaries(parameters []*autograd.Parameter) []ledger.Bytes {
	var list []ledger.Bytes
	var largest ledger.Bytes
	for _, p := range parameters {
		bytes := ledger.Bytes(p.Elements * p.DType.Size())
		if o.Name == "adafactor" {
			bytes = ledger.Bytes(p.Elements * dtype.F32.Size())
		}
		largest = max(largest, bytes)
		if o.Variant == Foreach {
			for range o.lists {
				list = append(list, bytes)
			}
		}
	}
	if o.Variant == Loop || o.Variant == Foreach && o.lists == 0 {
		for range o.loopTensors {
			list = append(list, largest)
		}
	}
	return list
}

// TemporariesWhy describes the temporaries of an optimizer step.
func (o *Optimizer) TemporariesWhy() string {
	switch {
	case o.Name == badam:
		return "BAdam's gradients in fp32 for a block, and the list of AdamW's step where it is foreach"
	case o.lowRank != nil:
		return fmt.Sprintf("the step over the matrix that makes the most for a moment: projections to rank %d, what "+
			"is projected back, and singular vectors", o.lowRank.Rank)
	case o.Variant == Foreach && o.lists > 0:
		return o.listsWhy
	}
	return fmt.Sprintf("temporaries of the step over one parameter at a time (%s)", o.Variant)
}
