package recipe

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/fault"
)

// TrainerOptimizer is the optimizer of TrainingArguments.
type TrainerOptimizer struct {
	Name string // as in TrainingArguments: "adamw_torch_fused"
	// Algorithm is "adamw", "adafactor", "ademamix", "sgd", "adagrad", "lion",
	// "rmsprop", "lomo", "adalomo", "grokadamw", "schedule_free_adamw",
	// "schedule_free_radam", "schedule_free_sgd" or "stable_adamw".
	Algorithm string
	StateBits int    // per element of a moment: 32, 8 or 4
	Paged     bool   // the state is in unified memory
	Projected string // "galore" or "apollo": gradients are projected to a low rank
	Layerwise bool   // each layer is updated in the backward pass
	Library   string // of its kernels: "torch", "bitsandbytes", ...

	LR            float64
	Beta1, Beta2  float64
	Epsilon       float64
	WeightDecay   float64
	Arguments     map[string]string // optim_args
	TargetModules []string          // optim_target_modules
}

// trainerOptimizers are the members of OptimizerNames (training_args.py) of
// transformers 4.40, 4.57 and 5.23. transformers builds them in
// trainer_optimizer.py.
var trainerOptimizers = func() map[string]TrainerOptimizer {
	byName := map[string]TrainerOptimizer{}
	add := func(o TrainerOptimizer, names string) {
		for name := range strings.FieldsSeq(names) {
			o.Name = name
			byName[name] = o
		}
	}
	of := func(algorithm, library string) TrainerOptimizer {
		return TrainerOptimizer{Algorithm: algorithm, Library: library, StateBits: 32}
	}
	add(of("adamw", "torch"), "adamw_torch adamw_torch_fused")
	add(of("adamw", "transformers"), "adamw_hf") // until 4.4x
	add(of("adamw", "apex"), "adamw_apex_fused") // until 4.5x
	add(of("adamw", "torch_xla"), "adamw_torch_xla")
	add(of("adamw", "torch_npu"), "adamw_torch_npu_fused")
	add(of("adamw", "torchdistx"), "adamw_anyprecision")
	add(of("adafactor", "transformers"), "adafactor")
	add(of("sgd", "torch"), "sgd")
	add(of("adagrad", "torch"), "adagrad")
	add(of("rmsprop", "torch"), "rmsprop")
	add(of("lomo", "lomo_optim"), "lomo")
	add(of("adalomo", "lomo_optim"), "adalomo")
	add(of("grokadamw", "grokadamw"), "grokadamw")
	add(of("stable_adamw", "optimi"), "stable_adamw")
	for _, name := range []string{"schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"} {
		add(of(name, "schedulefree"), name)
	}
	for bits, name := range map[int]string{4: "adamw_torch_4bit", 8: "adamw_torch_8bit"} {
		o := of("adamw", "torchao")
		o.StateBits = bits
		add(o, name)
	}
	for algorithm, names := range map[string][2]string{ // with 32 bits and with 8
		"adamw":    {"paged_adamw_32bit", "adamw_bnb_8bit adamw_8bit paged_adamw_8bit"},
		"ademamix": {"ademamix paged_ademamix_32bit", "ademamix_8bit paged_ademamix_8bit"},
		"lion":     {"lion_32bit paged_lion_32bit", "lion_8bit paged_lion_8bit"},
		"rmsprop":  {"rmsprop_bnb rmsprop_bnb_32bit", "rmsprop_bnb_8bit"},
	} {
		for i, list := range names {
			for name := range strings.FieldsSeq(list) {
				o := of(algorithm, "bitsandbytes")
				o.StateBits, o.Paged = [2]int{32, 8}[i], strings.HasPrefix(name, "paged_")
				add(o, name)
			}
		}
	}
	for _, name := range strings.Fields("galore_adamw galore_adamw_8bit galore_adafactor apollo_adamw") {
		library, algorithm, _ := strings.Cut(name, "_")
		o := of(strings.TrimSuffix(algorithm, "_8bit"), library+"_torch")
		o.Projected = library
		if strings.HasSuffix(name, "_8bit") {
			o.StateBits = 8
		}
		add(o, name)
		o.Layerwise = true
		add(o, name+"_layerwise")
	}
	return byName
}()

// trainerOptimizer returns the optimizer with its hyperparameters.
func (c *checking) trainerOptimizer() (TrainerOptimizer, error) {
	name := c.word("adamw_torch_fused", "optim") // the default since PyTorch 2.8
	if c.truth(false, "adafactor") {
		name = "adafactor" // the flag of 4.x
	}
	o, known := trainerOptimizers[name]
	if !known {
		in := &fault.Input{
			Where: c.position(c.root.find("optim").at),
			What:  fmt.Sprintf("optim is %q, which transformers does not know", name),
		}
		names := slices.Sorted(maps.Keys(trainerOptimizers))
		if near := fault.Nearest(name, names); near != "" {
			in.Hint = fmt.Sprintf("did you mean %q?", near)
		} else {
			in.Hint = "it knows " + strings.Join(names, ", ")
		}
		return o, in
	}
	o.LR = c.number(5e-5, "learning_rate")
	o.Beta1, o.Beta2 = c.number(0.9, "adam_beta1"), c.number(0.999, "adam_beta2")
	o.Epsilon, o.WeightDecay = c.number(1e-8, "adam_epsilon"), c.number(0, "weight_decay")
	o.TargetModules = c.list("optim_target_modules")
	if list := strings.ReplaceAll(c.word("", "optim_args"), " ", ""); list != "" {
		o.Arguments = map[string]string{}
		for pair := range strings.SplitSeq(list, ",") {
			key, is, found := strings.Cut(pair, "=")
			if !found || key == "" || strings.Contains(is, "=") {
				return o, &fault.Input{
					Where: c.position(c.root.find("optim_args").at),
					What:  fmt.Sprintf("optim_args is %s, expected key=value, key=value", c.root.find("optim_args")),
				}
			}
			o.Arguments[key] = is
		}
	}
	return o, c.refuse([]conflict{
		{o.Projected != "" && o.TargetModules == nil, "optim",
			fmt.Sprintf("is %q, which needs optim_target_modules", name), `add "optim_target_modules": "all-linear"`},
		{o.Layerwise && c.integer(1, accumulationKey) > 1, accumulationKey,
			fmt.Sprintf("is more than 1, but %s updates each layer in the backward pass", name),
			"set it to 1, or use the optimizer without _layerwise"},
	})
}
