package deepspeed

import (
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/input/recipe/rule"
	"plimsoll/internal/input/recipe/strict"
)

// Optimizer is the optimizer section of a file. Missing values are zero for
// types whose defaults are not in the variable optimizers.
type Optimizer struct {
	Type           string  // the name of its class: "AdamW", "Adam", "Lion", ...
	LR             float64 `key:"lr"`
	Beta1, Beta2   float64
	Epsilon        float64 `key:"eps"`
	WeightDecay    float64 `key:"weight_decay"`
	AdamW          bool    // weight decay is decoupled from the gradient
	BiasCorrection bool
	TorchAdam      bool // torch.optim's Adam instead of DeepSpeed's fused one
	// LowPrecisionState keeps the moments in the type of the parameters
	// (fp32_optimizer_states false; on the CPU only).
	LowPrecisionState bool
	// Defaulted lists those keys among lr, betas, eps and weight_decay that are
	// missing or "auto".
	Defaulted []string
}

// optimizerType is an optimizer that DeepSpeed builds from a file.
type optimizerType struct {
	name   string
	params strict.Rule // of optimizer.params
	zero   bool        // DeepSpeed has tested it with ZeRO
	never  bool        // the optimizer refuses ZeRO
}

// optimizers are the types by their names. Most names are in lower case, as
// DeepSpeed ignores case: _configure_basic_optimizer in engine.py, and the
// constructors that it calls. Names of torch.optim are case-sensitive, and
// PyTorch checks their parameters.
var optimizers = func() map[string]optimizerType {
	adam := commonParams(1e-3, []float64{.9, .999}, 1e-8)
	biased := rule.Boolean.Default(true).For("bias_correction")
	state := rule.Boolean.Default(true).For("fp32_optimizer_states")
	adamRule := strict.Object(adam, biased, state, rule.Boolean.OrNull().For("foreach fused"),
		rule.Boolean.For("torch_adam amsgrad set_grad_none maximize capturable differentiable"),
		rule.Boolean.Default(true).For("adam_w_mode"))
	oneBit := strict.Object(rule.Boolean.For("eps_inside_sqrt amsgrad cuda_aware"),
		rule.Text.For("comm_backend_name")).Keys()
	byName := map[string]optimizerType{}
	for _, t := range []optimizerType{
		{name: "Adam", params: adamRule, zero: true},
		{name: "AdamW", params: adamRule, zero: true},
		{name: "Lion", params: strict.Object(commonParams(1e-3, []float64{.9, .999}, 0), state,
			rule.Boolean.For("set_grad_none")), zero: true},
		{name: "Adagrad", params: strict.Object(commonParams(1e-2, nil, 1e-10), state,
			rule.Boolean.For("amsgrad")).AndOthers(), zero: true},
		{name: "Lamb", params: strict.Object(adam, biased, rule.Boolean.For("eps_inside_sqrt amsgrad"),
			rule.Number.For("max_coeff min_coeff"))},
		{name: "OneBitAdam", params: strict.Object(adam, biased, oneBit, rule.Integer.For("freeze_step")), never: true},
		{name: "ZeroOneAdam", params: strict.Object(adam, biased, oneBit, rule.Integer.For(
			"var_freeze_step var_update_scaler local_step_scaler local_step_clipper")), never: true},
		{name: "OneBitLamb", params: strict.Object(adam, biased, oneBit, rule.Integer.For("freeze_step"),
			rule.Number.For("max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold")), never: true},
		{name: "Muon", params: strict.Object(commonParams(0, nil, 0), rule.Number.For("momentum"),
			rule.Amount.For("muon_lr adam_lr"),
			rule.Text.For("ns_method")), zero: true},
	} {
		byName[strings.ToLower(t.name)] = t
	}
	open := strict.Object(commonParams(0, nil, 0)).AndOthers()
	for _, name := range []string{"MuAdam", "MuAdamW", "MuSGD"} {
		byName[strings.ToLower(name)] = optimizerType{name: name, params: open}
	}
	for name := range strings.FieldsSeq(
		"Adadelta Adafactor Adamax ASGD LBFGS NAdam RAdam RMSprop Rprop SGD SparseAdam") {
		byName[name] = optimizerType{name: name, params: open}
	}
	return byName
}()

// commonParams returns the parameters that nearly every optimizer accepts, with
// the defaults of one.
func commonParams(lr float64, betas []float64, eps float64) strict.Keys {
	pair := strict.List(rule.Number.From(0).Under(1)).OfLength(2).OrAuto()
	if betas != nil {
		pair = pair.Default(betas)
	}
	return strict.Keys{"lr": rule.Amount.OrAuto().Default(lr), "betas": pair, "eps": rule.Amount.OrAuto().Default(eps),
		"weight_decay": rule.Amount.OrAuto()}
}

// optimizerNamed returns the type with that name. Its name is empty if there
// is none.
func optimizerNamed(name string) optimizerType {
	if t, known := optimizers[strings.ToLower(name)]; known {
		return t
	}
	return optimizers[name]
}

// isAdam reports whether DeepSpeed has Adam kernels of its own for the type.
func (o *Optimizer) isAdam() bool { return o.Type == "Adam" || o.Type == "AdamW" }

// IsFusedAdam reports whether DeepSpeed runs its own kernel: FusedAdam on the
// GPU, or DeepSpeedCPUAdam if the optimizer is offloaded. It returns false for
// nil.
func (o *Optimizer) IsFusedAdam() bool { return o != nil && o.isAdam() && !o.TorchAdam }

// optimizer returns the optimizer section.
func (r *reader) optimizer() (*Optimizer, error) {
	if !r.Gives("optimizer") {
		return nil, nil
	}
	name := r.Find("optimizer.type")
	if name == nil {
		return nil, r.Place("optimizer").Inputf(`optimizer has no "type": DeepSpeed would ignore it`).
			WithHint(`add "type": "AdamW", or remove the section`)
	}
	t := optimizerNamed(name.Text)
	if t.name == "" {
		return nil, r.Unknown("optimizer.type", "DeepSpeed", optimizerNames())
	}
	if given := r.Find("optimizer.params"); given != nil && given.Member("max_grad_norm") != nil {
		return nil, r.Inputf(given.Member("max_grad_norm").At, "DeepSpeed takes no max_grad_norm in optimizer.params").
			WithHint(`use "gradient_clipping" at the top level`)
	}
	params, err := r.Under("optimizer.params", t.params)
	if err != nil {
		return nil, err
	}
	r.params = params
	o := &Optimizer{Type: t.name, AdamW: t.name == "Lion"}
	params.Fill(o)
	if betas := params.Value("betas"); betas != nil {
		o.Beta1, o.Beta2 = betas.Elements[0].Number, betas.Elements[1].Number
	}
	if o.isAdam() {
		o.AdamW = t.name == "AdamW" || params.Truth("adam_w_mode")
		o.TorchAdam = params.Truth("torch_adam")
		if o.AdamW && o.TorchAdam && !params.Gives("weight_decay") {
			o.WeightDecay = 0.01 // the default of torch.optim.AdamW
		}
	}
	o.BiasCorrection = params.Knows("bias_correction") && params.Truth("bias_correction")
	o.LowPrecisionState = params.Knows("fp32_optimizer_states") && !params.Truth("fp32_optimizer_states")
	for _, key := range []string{"lr", "betas", "eps", "weight_decay"} {
		if !params.Gives(key) {
			o.Defaulted = append(o.Defaulted, key)
		}
	}
	return o, nil
}

func optimizerNames() []string {
	var names []string
	for _, t := range optimizers {
		names = append(names, t.name)
	}
	return slices.Sorted(slices.Values(names))
}

// schedulers are the learning rate schedules of DeepSpeed's lr_schedules.py
// with their parameters. Hugging Face's integration replaces "auto" in warm-up
// schedules.
var schedulers = func() map[string]strict.Rule {
	rate := rule.Number.Or(strict.List(rule.Number)).OrAuto().OrNull()
	last := rule.Integer.For("last_batch_iteration")
	warmup := strict.Object(rule.Size.OrAuto().For("warmup_num_steps"), strict.Text("log", "linear").For("warmup_type"),
		last).Keys()
	total := rule.Size.OrAuto().For("total_num_steps")
	return map[string]strict.Rule{
		"LRRangeTest": strict.Object(rate.For("lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate"),
			rule.Boolean.For("lr_range_test_staircase"), last),
		"OneCycle": strict.Object(rate.For(`cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size
			cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_min_mom
			cycle_max_mom decay_mom_rate`), rule.Boolean.For("cycle_momentum"), last),
		"WarmupLR":       strict.Object(rate.For("warmup_min_lr warmup_max_lr"), warmup),
		"WarmupDecayLR":  strict.Object(rate.For("warmup_min_lr warmup_max_lr"), warmup, total),
		"WarmupCosineLR": strict.Object(rate.For("warmup_min_ratio cos_min_ratio"), warmup, total),
	}
}()

// torchSchedulers are the schedules of torch.optim.lr_scheduler.
var torchSchedulers = []string{
	"ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
	"LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
	"SequentialLR", "StepLR",
}

// scheduler checks the scheduler section. No schedule takes memory.
func (r *reader) scheduler() error {
	name := r.Word("scheduler.type")
	if name == "" && !r.Gives("scheduler.type") {
		return nil
	}
	rule, known := schedulers[name]
	if !known && !slices.Contains(torchSchedulers, name) {
		return r.Unknown("scheduler.type", "DeepSpeed",
			slices.Concat(slices.Sorted(maps.Keys(schedulers)), torchSchedulers))
	}
	if !known {
		return nil
	}
	_, err := r.Under("scheduler.params", rule)
	return err
}

// Rules returns the rules of a file and of the parameters of each optimizer.
func Rules() []strict.Rule {
	list := []strict.Rule{Rule}
	for _, t := range optimizers {
		list = append(list, t.params)
	}
	return list
}
