package recipe

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/fault"
)

// Optimizer is the optimizer section of a file. Missing values are zero for
// types whose defaults are not in the variable optimizers.
type Optimizer struct {
	Type           string // the name of its class: "AdamW", "Adam", "Lion", ...
	LR             float64
	Beta1, Beta2   float64
	Epsilon        float64
	WeightDecay    float64
	AdamW          bool // weight decay is decoupled from the gradient
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
	Optimizer                 // the defaults
	keys      map[string]rule // of optimizer.params, besides the common ones
	open      bool            // other keys go to its constructor unchecked
	zero      bool            // DeepSpeed has tested it with ZeRO
	never     bool            // the optimizer refuses ZeRO
}

// optimizers are the types by their names. Most names are in lower case, as
// DeepSpeed ignores case: _configure_basic_optimizer in engine.py, and the
// constructors that it calls. Names of torch.optim are case-sensitive, and
// PyTorch checks their parameters.
var optimizers = func() map[string]optimizerType {
	adam := Optimizer{LR: 1e-3, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, BiasCorrection: true}
	adamKeys := map[string]rule{
		"bias_correction": isBoolean(), "adam_w_mode": isBoolean(), "torch_adam": isBoolean(),
		"amsgrad": isBoolean(), "set_grad_none": isBoolean(), "fp32_optimizer_states": isBoolean(),
		"foreach": isBoolean().orNull(), "fused": isBoolean().orNull(), "maximize": isBoolean(),
		"capturable": isBoolean(), "differentiable": isBoolean(),
	}
	lambKeys := map[string]rule{
		"bias_correction": isBoolean(), "eps_inside_sqrt": isBoolean(), "amsgrad": isBoolean(),
		"max_coeff": isNumber(), "min_coeff": isNumber(),
	}
	oneBitKeys := map[string]rule{
		"bias_correction": isBoolean(), "eps_inside_sqrt": isBoolean(), "amsgrad": isBoolean(),
		"cuda_aware": isBoolean(), "comm_backend_name": isText(), "freeze_step": isInteger(),
	}
	zeroOneKeys := maps.Clone(oneBitKeys)
	delete(zeroOneKeys, "freeze_step")
	for _, key := range []string{"var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"} {
		zeroOneKeys[key] = isInteger()
	}
	oneBitLambKeys := maps.Clone(oneBitKeys)
	for _, key := range []string{"max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min",
		"factor_threshold"} {
		oneBitLambKeys[key] = isNumber()
	}
	lion := Optimizer{LR: 1e-3, Beta1: 0.9, Beta2: 0.999, AdamW: true}
	known := map[string]optimizerType{
		"Adam":  {Optimizer: adam, keys: adamKeys, zero: true},
		"AdamW": {Optimizer: adam, keys: adamKeys, zero: true},
		"Lion": {
			Optimizer: lion,
			keys:      map[string]rule{"set_grad_none": isBoolean(), "fp32_optimizer_states": isBoolean()},
			zero:      true,
		},
		"Adagrad": {
			Optimizer: Optimizer{LR: 1e-2, Epsilon: 1e-10},
			keys:      map[string]rule{"amsgrad": isBoolean(), "fp32_optimizer_states": isBoolean()},
			open:      true,
			zero:      true,
		},
		"Lamb":        {Optimizer: adam, keys: lambKeys},
		"OneBitAdam":  {Optimizer: adam, keys: oneBitKeys, never: true},
		"ZeroOneAdam": {Optimizer: adam, keys: zeroOneKeys, never: true},
		"OneBitLamb":  {Optimizer: adam, keys: oneBitLambKeys, never: true},
		"Muon": {keys: map[string]rule{
			"momentum": isNumber(), "muon_lr": isNumber().from(0), "adam_lr": isNumber().from(0), "ns_method": isText(),
		}, zero: true},
		"MuAdam": {open: true}, "MuAdamW": {open: true}, "MuSGD": {open: true},
	}
	byName := map[string]optimizerType{}
	for name, t := range known {
		t.Type = name
		byName[strings.ToLower(name)] = t
	}
	for _, name := range []string{"Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop",
		"Rprop", "SGD", "SparseAdam"} {
		byName[name] = optimizerType{Optimizer: Optimizer{Type: name}, open: true}
	}
	return byName
}()

// optimizerNamed returns the type with that name. Its field Type is empty if
// there is none.
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

// commonKeys are the parameters that nearly every optimizer accepts.
var commonKeys = map[string]rule{
	"lr":           isNumber().from(0).orAuto(),
	"betas":        isList(isNumber().from(0).under(1)).ofLength(2).orAuto(),
	"eps":          isNumber().from(0).orAuto(),
	"weight_decay": isNumber().from(0).orAuto(),
}

// optimizer returns the optimizer section.
func (c *checking) optimizer() (*Optimizer, error) {
	const params = "optimizer.params"
	if c.root.find("optimizer") == nil {
		return nil, nil
	}
	name := c.root.find("optimizer.type")
	if name == nil {
		return nil, &fault.Input{
			Where: c.place("optimizer"),
			What:  `optimizer has no "type": DeepSpeed would ignore it`,
			Hint:  `add "type": "AdamW", or remove the section`,
		}
	}
	t := optimizerNamed(name.text)
	if t.Type == "" {
		return nil, c.unknownType("optimizer.type", name, optimizerNames())
	}
	given := c.root.find(params)
	if given == nil {
		given = &value{kind: '{'}
	}
	if m := given.member("max_grad_norm"); m != nil {
		return nil, &fault.Input{
			Where: c.position(m.at),
			What:  "DeepSpeed takes no max_grad_norm in optimizer.params",
			Hint:  `use "gradient_clipping" at the top level`,
		}
	}
	keys := maps.Clone(commonKeys)
	maps.Copy(keys, t.keys)
	if err := c.check(rule{form: objectForm, keys: keys, open: t.open}, params, given); err != nil {
		return nil, err
	}

	o := t.Optimizer
	if o.isAdam() {
		o.AdamW = o.Type == "AdamW" || c.truth(true, params+".adam_w_mode")
		o.TorchAdam = c.truth(false, params+".torch_adam")
		if o.AdamW && o.TorchAdam {
			o.WeightDecay = 0.01 // the default of torch.optim.AdamW
		}
	}
	o.LR = c.number(o.LR, params+".lr")
	o.Epsilon = c.number(o.Epsilon, params+".eps")
	o.WeightDecay = c.number(o.WeightDecay, params+".weight_decay")
	if betas := c.root.find(params + ".betas"); betas != nil {
		o.Beta1, o.Beta2 = betas.elements[0].number, betas.elements[1].number
	}
	if _, checked := keys["bias_correction"]; checked {
		o.BiasCorrection = c.truth(o.BiasCorrection, params+".bias_correction")
	}
	if _, checked := keys["fp32_optimizer_states"]; checked {
		o.LowPrecisionState = !c.truth(true, params+".fp32_optimizer_states")
	}
	for _, key := range []string{"lr", "betas", "eps", "weight_decay"} {
		if c.root.find(params+"."+key) == nil {
			o.Defaulted = append(o.Defaulted, key)
		}
	}
	return &o, nil
}

func (c *checking) unknownType(path string, name *value, candidates []string) error {
	in := &fault.Input{
		Where: c.position(name.at),
		What:  fmt.Sprintf("%s is %s, which DeepSpeed does not know", path, name),
	}
	if near := fault.Nearest(name.text, candidates); near != "" {
		in.Hint = fmt.Sprintf("did you mean %q?", near)
	} else {
		in.Hint = "it knows " + strings.Join(candidates, ", ")
	}
	return in
}

func optimizerNames() []string {
	var names []string
	for _, t := range optimizers {
		names = append(names, t.Type)
	}
	return slices.Sorted(slices.Values(names))
}

// schedulers are the learning rate schedules of DeepSpeed's lr_schedules.py
// with their parameters. Hugging Face's integration replaces "auto" in warm-up
// schedules.
var schedulers = func() map[string]map[string]rule {
	schedules := map[string]string{
		"LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate " +
			"lr_range_test_staircase",
		"OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size " +
			"cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum " +
			"cycle_min_mom cycle_max_mom decay_mom_rate",
		"WarmupLR":       "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
		"WarmupDecayLR":  "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
		"WarmupCosineLR": "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type",
	}
	special := map[string]rule{
		"lr_range_test_staircase": isBoolean(),
		"cycle_momentum":          isBoolean(),
		"warmup_type":             isText("log", "linear"),
		"warmup_num_steps":        isInteger().from(1).orAuto(),
		"total_num_steps":         isInteger().from(1).orAuto(),
		"last_batch_iteration":    isInteger(),
	}
	keys := map[string]map[string]rule{}
	for name, parameters := range schedules {
		keys[name] = map[string]rule{}
		for parameter := range strings.FieldsSeq(parameters + " last_batch_iteration") {
			r, is := special[parameter]
			if !is {
				r = isNumber().or(isList(isNumber())).orAuto().orNull()
			}
			keys[name][parameter] = r
		}
	}
	return keys
}()

// torchSchedulers are the schedules of torch.optim.lr_scheduler.
var torchSchedulers = []string{
	"ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
	"LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
	"SequentialLR", "StepLR",
}

// scheduler checks the scheduler section. No schedule takes memory.
func (c *checking) scheduler() error {
	name := c.root.find("scheduler.type")
	if name == nil {
		return nil
	}
	keys, known := schedulers[name.text]
	if !known && !slices.Contains(torchSchedulers, name.text) {
		return c.unknownType("scheduler.type", name,
			slices.Concat(slices.Sorted(maps.Keys(schedulers)), torchSchedulers))
	}
	params := c.root.find("scheduler.params")
	if !known || params == nil {
		return nil
	}
	return c.check(isObject(keys), "scheduler.params", params)
}
