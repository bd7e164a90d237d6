// Package optim holds the optimizers: their hyperparameters, with PyTorch's
// names, defaults and semantics, and how gradients are scaled before an update.
package optim

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"plimsoll/internal/state/optim/kernel"
)

// Optimizer is an update rule with its hyperparameters. They may change from
// step to step; the rule may not.
type Optimizer interface {
	Algorithm() kernel.Algorithm
	// Validate refuses hyperparameters that PyTorch refuses.
	Validate() error
	// Constants sets the constants of the kernels for a step; steps count from 1.
	// It reports a constant that binary32 cannot hold: such a step makes NaN.
	Constants(c *kernel.Constants, step int64, gradScale float64) error
	// String returns the optimizer as one would write it in Python.
	String() string
}

// Check refuses hyperparameters that PyTorch refuses. It also refuses those with
// which an update in binary32 would make NaN at a step whose gradients are
// multiplied by gradScale.
func Check(o Optimizer, step int64, gradScale float64) error {
	if err := o.Validate(); err != nil {
		return err
	}
	return o.Constants(new(kernel.Constants), step, gradScale)
}

// Adam is torch.optim.AdamW or, with L2, torch.optim.Adam.
type Adam struct {
	LearningRate float64
	Beta1, Beta2 float64
	Epsilon      float64
	WeightDecay  float64
	// L2 adds the weight decay to the gradient, as torch.optim.Adam does,
	// instead of shrinking the weights.
	L2 bool
	// Uncorrected leaves out the bias correction.
	Uncorrected bool
}

// DefaultAdamW returns the defaults of torch.optim.AdamW.
func DefaultAdamW() Adam {
	return Adam{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, WeightDecay: 1e-2}
}

// Algorithm implements [Optimizer].
func (Adam) Algorithm() kernel.Algorithm { return kernel.Adam }

// Validate implements [Optimizer].
func (a Adam) Validate() error {
	return errors.Join(
		atLeastZero("learning rate", a.LearningRate),
		fraction("beta1", a.Beta1), fraction("beta2", a.Beta2),
		atLeastZero("epsilon", a.Epsilon), atLeastZero("weight decay", a.WeightDecay),
	)
}

// Constants implements [Optimizer].
func (a Adam) Constants(c *kernel.Constants, step int64, gradScale float64) error {
	return kernel.AdamStep{
		LearningRate: a.LearningRate, Beta1: a.Beta1, Beta2: a.Beta2,
		Epsilon: a.Epsilon, WeightDecay: a.WeightDecay,
		L2: a.L2, Uncorrected: a.Uncorrected,
		Step: step, GradScale: gradScale,
	}.Constants(c)
}

func (a Adam) String() string {
	name := "AdamW"
	if a.L2 {
		name = "Adam"
	}
	return fmt.Sprintf("%s(lr=%v, betas=(%v, %v), eps=%v, weight_decay=%v)", name,
		number(a.LearningRate), number(a.Beta1), number(a.Beta2), number(a.Epsilon), number(a.WeightDecay))
}

// Lion is the optimizer of X. Chen et al., "Symbolic Discovery of Optimization
// Algorithms" (arXiv 2302.06675), with decoupled weight decay.
type Lion struct {
	LearningRate float64
	Beta1, Beta2 float64
	WeightDecay  float64
}

// DefaultLion returns the defaults of the paper.
func DefaultLion() Lion { return Lion{LearningRate: 1e-4, Beta1: 0.9, Beta2: 0.99} }

// Algorithm implements [Optimizer].
func (Lion) Algorithm() kernel.Algorithm { return kernel.Lion }

// Validate implements [Optimizer].
func (l Lion) Validate() error {
	return errors.Join(
		atLeastZero("learning rate", l.LearningRate),
		fraction("beta1", l.Beta1), fraction("beta2", l.Beta2),
		atLeastZero("weight decay", l.WeightDecay),
	)
}

// Constants implements [Optimizer].
func (l Lion) Constants(c *kernel.Constants, step int64, gradScale float64) error {
	return kernel.LionStep{
		LearningRate: l.LearningRate, Beta1: l.Beta1, Beta2: l.Beta2,
		WeightDecay: l.WeightDecay, Step: step, GradScale: gradScale,
	}.Constants(c)
}

func (l Lion) String() string {
	return fmt.Sprintf("Lion(lr=%v, betas=(%v, %v), weight_decay=%v)",
		number(l.LearningRate), number(l.Beta1), number(l.Beta2), number(l.WeightDecay))
}

// Adagrad is torch.optim.Adagrad. The caller stores an initial accumulator value in
// the state.
type Adagrad struct {
	LearningRate      float64
	LearningRateDecay float64
	Epsilon           float64
	WeightDecay       float64
}

// DefaultAdagrad returns the defaults of torch.optim.Adagrad.
func DefaultAdagrad() Adagrad { return Adagrad{LearningRate: 1e-2, Epsilon: 1e-10} }

// Algorithm implements [Optimizer].
func (Adagrad) Algorithm() kernel.Algorithm { return kernel.Adagrad }

// Validate implements [Optimizer].
func (a Adagrad) Validate() error {
	return errors.Join(
		atLeastZero("learning rate", a.LearningRate), atLeastZero("learning rate decay", a.LearningRateDecay),
		atLeastZero("epsilon", a.Epsilon), atLeastZero("weight decay", a.WeightDecay),
	)
}

// Constants implements [Optimizer].
func (a Adagrad) Constants(c *kernel.Constants, step int64, gradScale float64) error {
	return kernel.AdagradStep{
		LearningRate: a.LearningRate, LearningRateDecay: a.LearningRateDecay,
		Epsilon: a.Epsilon, WeightDecay: a.WeightDecay,
		Step: step, GradScale: gradScale,
	}.Constants(c)
}

func (a Adagrad) String() string {
	return fmt.Sprintf("Adagrad(lr=%v, lr_decay=%v, eps=%v, weight_decay=%v)",
		number(a.LearningRate), number(a.LearningRateDecay), number(a.Epsilon), number(a.WeightDecay))
}

// SGD is torch.optim.SGD with momentum.
type SGD struct {
	LearningRate float64
	Momentum     float64
	Dampening    float64
	Nesterov     bool
	WeightDecay  float64
}

// Algorithm implements [Optimizer].
func (SGD) Algorithm() kernel.Algorithm { return kernel.SGD }

// Validate implements [Optimizer].
func (s SGD) Validate() error {
	var err error
	if s.Nesterov && (s.Momentum <= 0 || s.Dampening != 0) {
		err = fmt.Errorf("the momentum of Nesterov needs a momentum above 0 (it is %g) and no dampening (it is %g)",
			s.Momentum, s.Dampening)
	}
	if math.IsNaN(s.Dampening) || math.IsInf(s.Dampening, 0) { // the first step would not notice
		err = errors.Join(err, fmt.Errorf("dampening is %g: expected a finite number", s.Dampening))
	}
	return errors.Join(
		atLeastZero("learning rate", s.LearningRate), atLeastZero("momentum", s.Momentum),
		atLeastZero("weight decay", s.WeightDecay), err,
	)
}

// Constants implements [Optimizer].
func (s SGD) Constants(c *kernel.Constants, step int64, gradScale float64) error {
	return kernel.SGDStep{
		LearningRate: s.LearningRate, Momentum: s.Momentum, Dampening: s.Dampening,
		Nesterov: s.Nesterov, WeightDecay: s.WeightDecay,
		Step: step, GradScale: gradScale,
	}.Constants(c)
}

func (s SGD) String() string {
	nesterov := "False"
	if s.Nesterov {
		nesterov = "True"
	}
	return fmt.Sprintf("SGD(lr=%v, momentum=%v, dampening=%v, nesterov=%s, weight_decay=%v)",
		number(s.LearningRate), number(s.Momentum), number(s.Dampening), nesterov, number(s.WeightDecay))
}

// number is a hyperparameter. Its text is a float in Python, as PyTorch refuses
// integers in some places.
type number float64

func (n number) String() string {
	text := strconv.FormatFloat(float64(n), 'g', -1, 64)
	if !strings.ContainsAny(text, ".eIN") {
		text += ".0"
	}
	return text
}

func atLeastZero(name string, x float64) error {
	if !(x >= 0) || math.IsInf(x, 0) {
		return fmt.Errorf("%s is %g: expected a number of 0 or more", name, x)
	}
	return nil
}

func fraction(name string, x float64) error {
	if !(x >= 0 && x < 1) {
		return fmt.Errorf("%s is %g: expected a number of 0 or more, below 1", name, x)
	}
	return nil
}

// GradScale returns the factor that unscales gradients and clips them to a global
// norm, as torch.nn.utils.clip_grad_norm_ does: min(1, clip / (norm + 1e-6)) /
// lossScale. norm is the L2 norm of the unscaled gradients. If clip is 0, gradients
// are not clipped.
func GradScale(norm, lossScale, clip float64) float64 {
	scale := 1 / lossScale
	if clip > 0 {
		scale *= min(1, clip/(norm+1e-6))
	}
	return scale
}
