package optim_test

import (
	"math"

	"plimsoll/internal/state/optim"
)

// model is the update of an element in one step, in some order of operations. Steps count
// from 1.
type model func(a arithmetic, step int64, rate float64) func(x *element, gradient float64)

// element is a parameter and its moments.
type element [3]number

// Each optimizer has two models: in the order of package kernel, and in the order of
// torch's Python. The model of torch rounds every operation; a fused one is only better.
// Both combine hyperparameters in float64.

func number64(x float64) number { return number{value: x} }

// adamConstants are the constants that both models of Adam share.
type adamConstants struct {
	beta1, oneMinusBeta1, beta2, oneMinusBeta2, penalty, epsilon, stepSize number
	shrink, rootBias2                                                      number // not rounded yet
}

func newAdamConstants(o optim.Adam, a arithmetic, step int64, rate float64) adamConstants {
	// Two float64 libraries need not have the same last bit of a power.
	bias1 := number{1 - math.Pow(o.Beta1, float64(step)), 0x1p-53}
	bias2 := number{1 - math.Pow(o.Beta2, float64(step)), 0x1p-53}
	c := adamConstants{
		beta1: a.constant(o.Beta1), oneMinusBeta1: a.constant(1 - o.Beta1),
		beta2: a.constant(o.Beta2), oneMinusBeta2: a.constant(1 - o.Beta2),
		epsilon:   a.constant(o.Epsilon),
		stepSize:  a.round(binary64.div(number64(-rate), bias1)),
		shrink:    binary64.constant(-rate * o.WeightDecay),
		rootBias2: binary64.sqrt(bias2),
	}
	if o.L2 {
		c.penalty, c.shrink = a.constant(o.WeightDecay), number{}
	}
	return c
}

func adamOurs(o optim.Adam) model {
	return func(a arithmetic, step int64, rate float64) func(*element, float64) {
		c := newAdamConstants(o, a, step, rate)
		shrink := a.round(c.shrink)
		inverseRootBias2 := a.round(binary64.div(number64(1), c.rootBias2))
		return func(x *element, gradient float64) {
			p, m, v := &x[0], &x[1], &x[2]
			g := a.fma(c.penalty, *p, number64(gradient))
			*m = a.fma(c.oneMinusBeta1, g, a.mul(c.beta1, *m))
			*v = a.fma(c.oneMinusBeta2, a.mul(g, g), a.mul(c.beta2, *v))
			d := a.fma(a.sqrt(*v), inverseRootBias2, c.epsilon)
			*p = a.fma(shrink, *p, *p)
			*p = a.fma(c.stepSize, a.div(*m, d), *p)
		}
	}
}

// adamTorch is _single_tensor_adam of torch/optim/adam.py.
func adamTorch(o optim.Adam) model {
	return func(a arithmetic, step int64, rate float64) func(*element, float64) {
		c := newAdamConstants(o, a, step, rate)
		keep, rootBias2 := a.keep(c.shrink), a.round(c.rootBias2)
		return func(x *element, gradient float64) {
			p, m, v := &x[0], &x[1], &x[2]
			*p = a.mul(*p, keep)
			g := a.add(number64(gradient), a.mul(c.penalty, *p))
			*m = a.lerp(*m, g, c.oneMinusBeta1)
			*v = a.add(a.mul(*v, c.beta2), a.mul(a.mul(c.oneMinusBeta2, g), g))
			d := a.add(a.div(a.sqrt(*v), rootBias2), c.epsilon)
			*p = a.add(*p, a.div(a.mul(c.stepSize, *m), d))
		}
	}
}

func lionOurs(o optim.Lion) model {
	return func(a arithmetic, _ int64, rate float64) func(*element, float64) {
		beta1, oneMinusBeta1, beta2, oneMinusBeta2 := a.constant(o.Beta1), a.constant(1-o.Beta1),
			a.constant(o.Beta2), a.constant(1-o.Beta2)
		shrink, stepSize := a.constant(-rate*o.WeightDecay), a.constant(-rate)
		return func(x *element, gradient float64) {
			p, m, g := &x[0], &x[1], number64(gradient)
			u := a.fma(oneMinusBeta1, g, a.mul(beta1, *m))
			*m = a.fma(oneMinusBeta2, g, a.mul(beta2, *m))
			*p = a.fma(shrink, *p, *p)
			*p = a.fma(stepSize, sign(u), *p)
		}
	}
}

// lionTorch is Lion of testdata/trajectories.py.
func lionTorch(o optim.Lion) model {
	return func(a arithmetic, _ int64, rate float64) func(*element, float64) {
		beta1, oneMinusBeta1, beta2, oneMinusBeta2 := a.constant(o.Beta1), a.constant(1-o.Beta1),
			a.constant(o.Beta2), a.constant(1-o.Beta2)
		keep, stepSize := a.keep(binary64.constant(-rate*o.WeightDecay)), a.constant(-rate)
		return func(x *element, gradient float64) {
			p, m, g := &x[0], &x[1], number64(gradient)
			u := a.add(a.mul(*m, beta1), a.mul(g, oneMinusBeta1))
			*p = a.mul(*p, keep)
			*p = a.add(*p, a.mul(stepSize, sign(u)))
			*m = a.add(a.mul(*m, beta2), a.mul(oneMinusBeta2, g))
		}
	}
}

// adagradRate returns the rate that both models of Adagrad share.
func adagradRate(o optim.Adagrad, a arithmetic, step int64, rate float64) number {
	return a.round(binary64.constant(-rate / (1 + float64(step-1)*o.LearningRateDecay)))
}

func adagradOurs(o optim.Adagrad) model {
	return func(a arithmetic, step int64, rate float64) func(*element, float64) {
		penalty, epsilon, stepSize := a.constant(o.WeightDecay), a.constant(o.Epsilon), adagradRate(o, a, step, rate)
		return func(x *element, gradient float64) {
			p, sum := &x[0], &x[1]
			g := a.fma(penalty, *p, number64(gradient))
			*sum = a.fma(g, g, *sum)
			*p = a.fma(stepSize, a.div(g, a.add(a.sqrt(*sum), epsilon)), *p)
		}
	}
}

// adagradTorch is _single_tensor_adagrad of torch/optim/adagrad.py.
func adagradTorch(o optim.Adagrad) model {
	return func(a arithmetic, step int64, rate float64) func(*element, float64) {
		penalty, epsilon, stepSize := a.constant(o.WeightDecay), a.constant(o.Epsilon), adagradRate(o, a, step, rate)
		return func(x *element, gradient float64) {
			p, sum := &x[0], &x[1]
			g := a.add(number64(gradient), a.mul(penalty, *p))
			*sum = a.add(*sum, a.mul(g, g))
			*p = a.add(*p, a.div(a.mul(stepSize, g), a.add(a.sqrt(*sum), epsilon)))
		}
	}
}

func sgdOurs(o optim.SGD) model {
	return func(a arithmetic, step int64, rate float64) func(*element, float64) {
		penalty, momentum, stepSize := a.constant(o.WeightDecay), a.constant(o.Momentum), a.constant(-rate)
		share := a.constant(1 - o.Dampening)
		if step == 1 {
			share = number64(1)
		}
		ofMomentum, ofGradient := number64(1), number{}
		switch {
		case o.Nesterov:
			ofMomentum, ofGradient = momentum, number64(1)
		case o.Momentum == 0:
			momentum, share = number64(1), number{}
			ofMomentum, ofGradient = number{}, number64(1)
		}
		return func(x *element, gradient float64) {
			p, b := &x[0], &x[1]
			g := a.fma(penalty, *p, number64(gradient))
			*b = a.fma(share, g, a.mul(momentum, *b))
			u := a.fma(ofMomentum, *b, a.mul(ofGradient, g))
			*p = a.fma(stepSize, u, *p)
		}
	}
}

// sgdTorch is _single_tensor_sgd of torch/optim/sgd.py.
func sgdTorch(o optim.SGD) model {
	return func(a arithmetic, step int64, rate float64) func(*element, float64) {
		penalty, momentum, stepSize := a.constant(o.WeightDecay), a.constant(o.Momentum), a.constant(-rate)
		share := a.constant(1 - o.Dampening)
		return func(x *element, gradient float64) {
			p, b := &x[0], &x[1]
			g := a.add(number64(gradient), a.mul(penalty, *p))
			u := g
			if o.Momentum != 0 {
				if step == 1 {
					*b = g
				} else {
					*b = a.add(a.mul(*b, momentum), a.mul(share, g))
				}
				u = *b
				if o.Nesterov {
					u = a.add(g, a.mul(momentum, *b))
				}
			}
			*p = a.add(*p, a.mul(stepSize, u))
		}
	}
}
