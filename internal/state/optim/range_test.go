package optim_test

import (
	"math"
	"strings"
	"testing"

	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
)

// TestStepsThatBinary32CannotHold tries finite hyperparameters and gradient scales from
// which a kernel would make infinities, NaN, or a zero from another number.
func TestStepsThatBinary32CannotHold(t *testing.T) {
	adamW := func(change func(*optim.Adam)) optim.Adam {
		o := optim.DefaultAdamW()
		change(&o)
		return o
	}
	sgd := optim.SGD{LearningRate: 0.1, Momentum: 0.9}
	for _, c := range []struct {
		name  string
		o     optim.Optimizer
		step  int64
		scale float64
		want  string // "" where nothing is refused
	}{
		{"a large rate", adamW(func(o *optim.Adam) { o.LearningRate = 1e39 }), 1, 1, "learning rate"},
		{"a rate that the first step makes too large", adamW(func(o *optim.Adam) { o.LearningRate = 1e38 }), 1, 1,
			"learning rate"},
		{"the same rate at a later step", adamW(func(o *optim.Adam) { o.LearningRate = 1e38 }), 1000, 1, ""},
		{"a large decoupled decay", adamW(func(o *optim.Adam) { o.WeightDecay = 1e308 }), 1, 1, "weight decay"},
		{"a large penalty", adamW(func(o *optim.Adam) { o.WeightDecay, o.L2 = 1e39, true }), 1, 1, "weight decay"},
		{"a large epsilon", adamW(func(o *optim.Adam) { o.Epsilon = 1e39 }), 1, 1, "epsilon"},
		{"an epsilon that would be zero", adamW(func(o *optim.Adam) { o.Epsilon = 1e-39 }), 1, 1, "epsilon"},
		{"no epsilon", adamW(func(o *optim.Adam) { o.Epsilon = 0 }), 1, 1, ""},
		{"betas that are 1 in binary32",
			adamW(func(o *optim.Adam) { o.Beta1, o.Beta2 = 1-0x1p-53, 1-0x1p-53 }), 1, 1, ""},
		{"a rate that is almost 0", adamW(func(o *optim.Adam) { o.LearningRate = 1e-60 }), 1, 1, ""},
		{"Lion's rate", optim.Lion{LearningRate: 1e39}, 1, 1, "learning rate"},
		{"Lion's decay", optim.Lion{LearningRate: 1e30, WeightDecay: 1e30}, 1, 1, "weight decay"},
		{"Adagrad's rate", optim.Adagrad{LearningRate: 1e39}, 1, 1, "learning rate"},
		{"Adagrad's epsilon", optim.Adagrad{LearningRate: 1, Epsilon: 1e-300}, 1, 1, "epsilon"},
		{"SGD's momentum", optim.SGD{LearningRate: 1, Momentum: 1e39}, 1, 1, "momentum"},
		{"SGD's dampening", optim.SGD{LearningRate: 1, Momentum: 1, Dampening: -1e39}, 2, 1, "dampening"},
		{"SGD's dampening at the first step", optim.SGD{LearningRate: 1, Momentum: 1, Dampening: math.NaN()}, 1, 1,
			"dampening"},
		{"an infinite dampening", optim.SGD{LearningRate: 1, Momentum: 1, Dampening: math.Inf(1)}, 1, 1, "dampening"},
		{"the largest factor", sgd, 1, math.MaxFloat32, ""},
		{"a larger factor", sgd, 1, 1e39, "factor"},
		{"a factor that is no number", sgd, 1, math.NaN(), "factor"},
		{"the smallest factor", sgd, 1, 0x1p-126, ""},
		{"a factor that would be zero", sgd, 1, 0x1p-127, "factor"},
		{"a factor of zero", sgd, 1, 0, ""},
		{"a negative factor", sgd, 1, -1, ""},
		{"a negative factor that is too large", sgd, 1, -1e39, "factor"},
	} {
		err := optim.Check(c.o, c.step, c.scale)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s is refused: %v", c.name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: got %v: expected an error that names the %s", c.name, err, c.want)
		}
	}
}

func TestLossScalesThatCanBeUndone(t *testing.T) {
	for _, scale := range []float64{0x1p-127, 1, 0x1p126} {
		l := optim.LossScaler{Static: scale}
		if err := l.Validate(); err != nil {
			t.Errorf("a loss scale of %g is refused: %v", scale, err)
		}
		if err := optim.Check(optim.DefaultAdamW(), 1, optim.GradScale(1, scale, 0)); err != nil {
			t.Errorf("gradients of a loss scale of %g cannot be unscaled: %v", scale, err)
		}
	}
	for _, scale := range []float64{0x1p-128, 0x1p127} {
		l := optim.LossScaler{Static: scale}
		if l.Validate() == nil {
			t.Errorf("a loss scale of %g is accepted, and 1 / %g is no normal binary32 number", scale, scale)
		}
	}
}

func TestCheckingAStepAllocatesNothing(t *testing.T) {
	var o optim.Optimizer = optim.DefaultAdamW()
	var constants kernel.Constants
	if n := testing.AllocsPerRun(20, func() {
		if err := o.Constants(&constants, 1, 1); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%g allocations for the constants of a step", n)
	}
}
