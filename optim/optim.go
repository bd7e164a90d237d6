// Package optim holds the optimizers: their hyperparameters, with PyTorch's
// names, defaults and semantics, and how gradients are scaled before an update.
package optim

import (
	"fmt"
	"math"

	"plimsoll/optim/kernel"
)

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

// DefaultAdamW are the defaults of torch.optim.AdamW.
func DefaultAdamW() Adam {
	return Adam{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, WeightDecay: 1e-2}
}

// Validate refuses what torch.optim refuses.
func (a Adam) Validate() error {
	switch {
	case !(a.LearningRate >= 0) || math.IsInf(a.LearningRate, 0):
		return fmt.Errorf("learning rate %g: expected a number of 0 or more", a.LearningRate)
	case !(a.Beta1 >= 0 && a.Beta1 < 1):
		return fmt.Errorf("beta1 is %g: expected 0 <= beta1 < 1", a.Beta1)
	case !(a.Beta2 >= 0 && a.Beta2 < 1):
		return fmt.Errorf("beta2 is %g: expected 0 <= beta2 < 1", a.Beta2)
	case !(a.Epsilon >= 0) || math.IsInf(a.Epsilon, 0):
		return fmt.Errorf("epsilon %g: expected a number of 0 or more", a.Epsilon)
	case !(a.WeightDecay >= 0) || math.IsInf(a.WeightDecay, 0):
		return fmt.Errorf("weight decay %g: expected a number of 0 or more", a.WeightDecay)
	}
	return nil
}

// String is the optimizer as one would write it in Python.
func (a Adam) String() string {
	name := "AdamW"
	if a.L2 {
		name = "Adam"
	}
	return fmt.Sprintf("%s(lr=%g, betas=(%g, %g), eps=%g, weight_decay=%g)", name, a.LearningRate, a.Beta1, a.Beta2, a.Epsilon, a.WeightDecay)
}

// Step is what the kernels need for one step; steps count from 1.
func (a Adam) Step(step int64, gradientScale float64) kernel.AdamStep {
	return kernel.AdamStep{
		LearningRate: a.LearningRate, Beta1: a.Beta1, Beta2: a.Beta2, Epsilon: a.Epsilon, WeightDecay: a.WeightDecay,
		L2: a.L2, Uncorrected: a.Uncorrected, Step: step, GradientScale: gradientScale,
	}
}

// GradientScale is the factor that unscales gradients and clips them to a
// global norm, as torch.nn.utils.clip_grad_norm_ does: with norm the L2 norm of
// the unscaled gradients, min(1, clip / (norm + 1e-6)) / lossScale. A clip of 0
// means none.
func GradientScale(norm, lossScale, clip float64) float64 {
	scale := 1 / lossScale
	if clip > 0 {
		scale *= min(1, clip/(norm+1e-6))
	}
	return scale
}
