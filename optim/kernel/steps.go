package kernel

import (
	"math"

	"plimsoll/optim/kernel/abi"
)

// Constants are what an update needs of one step's hyperparameters. They are
// rounded to fp32 only after everything that depends on several of them has
// been computed in float64. Setting them allocates nothing.
type Constants struct {
	table abi.Table
	// dither is that of element 0, for stochastic rounding, and stride is the
	// part that the step has in the dither of int8 moments.
	dither, stride uint32
}

// set takes the rows of the table, and the step that dithers depend on.
func (c *Constants) set(step int64, rows [abi.Rows]float64) {
	// The output function of SplitMix64 (G. Steele, D. Lea and C. Flood, "Fast
	// splittable pseudorandom number generators", OOPSLA 2014).
	x := uint64(step) * 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	c.dither = uint32((x ^ x>>31) >> 32)
	c.stride = uint32(step) * abi.StepStride
	for row, value := range rows {
		for lane := range c.table[row] {
			c.table[row][lane] = float32(value)
		}
	}
}

// AdamStep are the hyperparameters of a step of [Adam], as torch.optim.AdamW
// names them.
type AdamStep struct {
	LearningRate  float64
	Beta1, Beta2  float64
	Epsilon       float64
	WeightDecay   float64
	L2            bool  // weight decay as an L2 penalty on the gradient (torch.optim.Adam), not decoupled (AdamW)
	Uncorrected   bool  // leave out the bias correction
	Step          int64 // counts from 1
	GradientScale float64
}

// Constants sets the constants of the step.
func (s AdamStep) Constants(c *Constants) {
	bias1, bias2 := 1.0, 1.0
	if !s.Uncorrected {
		bias1 = 1 - math.Pow(s.Beta1, float64(s.Step))
		bias2 = 1 - math.Pow(s.Beta2, float64(s.Step))
	}
	penalty, decoupled := 0.0, s.WeightDecay
	if s.L2 {
		penalty, decoupled = s.WeightDecay, 0
	}
	c.set(s.Step, [abi.Rows]float64{
		abi.GradientScale:    s.GradientScale,
		abi.L2Penalty:        penalty,
		abi.Beta1:            s.Beta1,
		abi.OneMinusBeta1:    1 - s.Beta1,
		abi.Beta2:            s.Beta2,
		abi.OneMinusBeta2:    1 - s.Beta2,
		abi.InverseRootBias2: 1 / math.Sqrt(bias2),
		abi.Epsilon:          s.Epsilon,
		abi.Decay:            -s.LearningRate * decoupled,
		abi.StepSize:         -s.LearningRate / bias1,
	})
}

// LionStep are the hyperparameters of a step of [Lion].
type LionStep struct {
	LearningRate  float64
	Beta1, Beta2  float64
	WeightDecay   float64
	GradientScale float64
}

// Constants sets the constants of the step.
func (s LionStep) Constants(c *Constants) {
	c.set(0, [abi.Rows]float64{
		abi.GradientScale: s.GradientScale,
		abi.Beta1:         s.Beta1,
		abi.OneMinusBeta1: 1 - s.Beta1,
		abi.Beta2:         s.Beta2,
		abi.OneMinusBeta2: 1 - s.Beta2,
		abi.Decay:         -s.LearningRate * s.WeightDecay,
		abi.StepSize:      -s.LearningRate,
	})
}

// AdagradStep are the hyperparameters of a step of [Adagrad], as
// torch.optim.Adagrad names them.
type AdagradStep struct {
	LearningRate      float64
	LearningRateDecay float64
	Epsilon           float64
	WeightDecay       float64 // an L2 penalty
	Step              int64   // counts from 1
	GradientScale     float64
}

// Constants sets the constants of the step.
func (s AdagradStep) Constants(c *Constants) {
	c.set(s.Step, [abi.Rows]float64{
		abi.GradientScale: s.GradientScale,
		abi.L2Penalty:     s.WeightDecay,
		abi.Epsilon:       s.Epsilon,
		abi.StepSize:      -s.LearningRate / (1 + float64(s.Step-1)*s.LearningRateDecay),
	})
}

// SGDStep are the hyperparameters of a step of [SGD], as torch.optim.SGD names
// them.
type SGDStep struct {
	LearningRate  float64
	Momentum      float64
	Dampening     float64
	Nesterov      bool
	WeightDecay   float64 // an L2 penalty
	Step          int64   // counts from 1: the first step is not dampened
	GradientScale float64
}

// Constants sets the constants of the step.
func (s SGDStep) Constants(c *Constants) {
	rows := [abi.Rows]float64{
		abi.GradientScale: s.GradientScale,
		abi.L2Penalty:     s.WeightDecay,
		abi.Beta1:         s.Momentum,
		abi.OneMinusBeta1: 1 - s.Dampening,
		abi.MomentumShare: 1,
		abi.StepSize:      -s.LearningRate,
	}
	if s.Step == 1 {
		rows[abi.OneMinusBeta1] = 1
	}
	switch {
	case s.Nesterov:
		rows[abi.MomentumShare], rows[abi.GradientShare] = s.Momentum, 1
	case s.Momentum == 0: // what is there stays for later steps that have one
		rows[abi.Beta1], rows[abi.OneMinusBeta1] = 1, 0
		rows[abi.MomentumShare], rows[abi.GradientShare] = 0, 1
	}
	c.set(s.Step, rows)
}
