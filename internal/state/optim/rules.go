package optim

import (
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/optim/kernel"
)

// Rule is an update rule by its name.
type Rule struct {
	Name    string    // in torch.optim or the paper, in lower case
	Typical Optimizer // with usual hyperparameters
	// With returns the optimizer with hyperparameters. It uses those that the rule has.
	With func(Hyperparameters) Optimizer
}

// Hyperparameters are those of all rules.
type Hyperparameters struct {
	LearningRate, LearningRateDecay float64
	Beta1, Beta2                    float64
	Epsilon                         float64
	WeightDecay                     float64
	Uncorrected                     bool // without bias correction
	Momentum, Dampening             float64
	Nesterov                        bool
}

// Rules are all update rules. AdamW and Adam differ in their constants alone.
var Rules = []Rule{
	{"adamw", DefaultAdamW(), func(h Hyperparameters) Optimizer { return h.adam(false) }},
	{
		"adam", Adam{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, L2: true},
		func(h Hyperparameters) Optimizer { return h.adam(true) },
	},
	{"lion", DefaultLion(), func(h Hyperparameters) Optimizer {
		return Lion{LearningRate: h.LearningRate, Beta1: h.Beta1, Beta2: h.Beta2, WeightDecay: h.WeightDecay}
	}},
	{"adagrad", DefaultAdagrad(), func(h Hyperparameters) Optimizer {
		return Adagrad{
			LearningRate: h.LearningRate, LearningRateDecay: h.LearningRateDecay,
			Epsilon: h.Epsilon, WeightDecay: h.WeightDecay,
		}
	}},
	{"sgd", SGD{LearningRate: 1e-3, Momentum: 0.9}, func(h Hyperparameters) Optimizer {
		return SGD{
			LearningRate: h.LearningRate, Momentum: h.Momentum, Dampening: h.Dampening,
			Nesterov: h.Nesterov, WeightDecay: h.WeightDecay,
		}
	}},
}

func (h Hyperparameters) adam(l2 bool) Adam {
	return Adam{
		LearningRate: h.LearningRate, Beta1: h.Beta1, Beta2: h.Beta2, Epsilon: h.Epsilon,
		WeightDecay: h.WeightDecay, L2: l2, Uncorrected: h.Uncorrected,
	}
}

// RuleNames returns the names of the rules.
func RuleNames() []string {
	names := make([]string, len(Rules))
	for i, r := range Rules {
		names[i] = r.Name
	}
	return names
}

// ParseRule returns the rule of a name.
func ParseRule(name string) (Rule, error) {
	i := slices.IndexFunc(Rules, func(r Rule) bool { return r.Name == name })
	if i < 0 {
		return Rule{}, fault.Unknown(name, RuleNames())
	}
	return Rules[i], nil
}

// Algorithm returns the algorithm of the kernels.
func (r Rule) Algorithm() kernel.Algorithm { return r.Typical.Algorithm() }
