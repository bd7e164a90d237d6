package optim

import (
	"strings"
	"testing"

	"plimsoll/internal/state/optim/kernel"
)

// TestEveryAlgorithmHasARule: the table has all algorithms of the kernels, each name once, and rules that take their
// hyperparameters.
func TestEveryAlgorithmHasARule(t *testing.T) {
	found := map[kernel.Algorithm]bool{}
	for _, name := range RuleNames() {
		rule, err := ParseRule(name)
		if err != nil || rule.Name != name || rule.Algorithm() != rule.With(Hyperparameters{}).Algorithm() {
			t.Errorf("%s is the rule %s, %v", name, rule.Name, err)
		}
		found[rule.Algorithm()] = true
		if err := Check(rule.Typical, 1, 1); err != nil {
			t.Error(err)
		}
		// The name comes first in the text of an optimizer.
		if text := rule.With(Hyperparameters{}).String(); !strings.HasPrefix(strings.ToLower(text), name+"(") {
			t.Errorf("%s is %s", name, text)
		}
	}
	for _, name := range kernel.AlgorithmNames() {
		if a, _ := kernel.ParseAlgorithm(name); !found[a] {
			t.Errorf("no rule has the algorithm %s", name)
		}
	}
}

func TestRulesTakeTheirHyperparameters(t *testing.T) {
	h := Hyperparameters{
		LearningRate: 1, LearningRateDecay: 2, Beta1: 3, Beta2: 4, Epsilon: 5, WeightDecay: 6, Uncorrected: true,
		Momentum: 7, Dampening: 8, Nesterov: true,
	}
	for name, want := range map[string]Optimizer{
		"adamw": Adam{
			LearningRate: 1, Beta1: 3, Beta2: 4, Epsilon: 5, WeightDecay: 6, Uncorrected: true,
		},
		"adam": Adam{
			LearningRate: 1, Beta1: 3, Beta2: 4, Epsilon: 5, WeightDecay: 6, Uncorrected: true, L2: true,
		},
		"lion":    Lion{LearningRate: 1, Beta1: 3, Beta2: 4, WeightDecay: 6},
		"adagrad": Adagrad{LearningRate: 1, LearningRateDecay: 2, Epsilon: 5, WeightDecay: 6},
		"sgd":     SGD{LearningRate: 1, Momentum: 7, Dampening: 8, Nesterov: true, WeightDecay: 6},
	} {
		rule, err := ParseRule(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := rule.With(h); got != want {
			t.Errorf("%s is %#v, want %#v", name, got, want)
		}
	}
	if _, err := ParseRule("adan"); err == nil || !strings.HasSuffix(err.Error(), `did you mean "adam"?`) {
		t.Error(err)
	}
}
