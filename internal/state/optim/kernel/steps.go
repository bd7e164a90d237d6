package kernel

import (
	"fmt"
	"math"

	"plimsoll/internal/state/optim/kernel/abi"
)

// Constants are the constants of one step, computed from its hyperparameters in
// float64 and then rounded to fp32. Setting them allocates nothing. A constant that
// binary32 cannot hold is set to the nearest value, and reported.
type Constants struct {
	table abi.Table
	// dither is the dither of element 0, for stochastic rounding of moments, and
	// masterDither that of masters. stride is the step's share of the dither of int8
	// moments.
	dither, masterDither, stride uint32
}

// set sets the rows of the table, and the dithers, which depend on the step.
func (c *Constants) set(step int64, rows [abi.Rows]float64) error {
	// The output function of SplitMix64 (G. Steele, D. Lea and C. Flood, "Fast
	// splittable pseudorandom number generators", OOPSLA 2014).
	x := uint64(step) * 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	c.dither, c.masterDither = uint32(x>>32), uint32(x)
	c.stride = uint32(step) * abi.StepStride
	var err error
	for row, value := range rows {
		for lane := range c.table[row] {
			c.table[row][lane] = float32(value)
		}
		if err == nil && !fits(row, value) {
			err = fmt.Errorf("%s is %.4g: %s", meanings[row], value, expected(row))
		}
	}
	return err
}

// meanings describe the rows in the words of the hyperparameters, for messages.
var meanings = [abi.Rows]string{
	abi.GradScale:        "the factor that unscales and clips gradients",
	abi.L2Penalty:        "the weight decay",
	abi.Beta1:            "the first beta (SGD: the momentum)",
	abi.OneMinusBeta1:    "1 minus the first beta (SGD: 1 minus the dampening)",
	abi.Beta2:            "the second beta",
	abi.OneMinusBeta2:    "1 minus the second beta",
	abi.InverseRootBias2: "the correction of the second beta's bias",
	abi.Epsilon:          "the epsilon",
	abi.Decay:            "the weight decay times the learning rate",
	abi.StepSize:         "the learning rate with the corrections of this step",
	abi.MomentumShare:    "the momentum",
	abi.GradientShare:    "the share of a gradient",
}

// smallestNormal is the least positive number that kernels tell from zero.
const smallestNormal = 0x1p-126

// fits reports whether binary32 can hold a constant. A step size or a decay may
// vanish: the update is then too small to matter. An epsilon may not vanish, as
// 0 / 0 is NaN. The gradient scale may not vanish, as all gradients would.
func fits(row int, value float64) bool {
	if single := float64(float32(value)); math.IsInf(single, 0) || math.IsNaN(single) {
		return false
	}
	return value == 0 || math.Abs(value) >= smallestNormal || !mustNotVanish(row)
}

func mustNotVanish(row int) bool { return row == abi.GradScale || row == abi.Epsilon }

func expected(row int) string {
	if mustNotVanish(row) {
		return fmt.Sprintf("updates are in binary32: expected 0, or a magnitude from %.3g to %.3g",
			smallestNormal, math.MaxFloat32)
	}
	return fmt.Sprintf("updates are in binary32: expected a magnitude of at most %.3g", math.MaxFloat32)
}

// AdamStep are the hyperparameters of a step of [Adam], as torch.optim.AdamW
// names them.
type AdamStep struct {
	LearningRate float64
	Beta1, Beta2 float64
	Epsilon      float64
	WeightDecay  float64
	L2           bool  // weight decay as an L2 penalty on the gradient (torch.optim.Adam), not decoupled (AdamW)
	Uncorrected  bool  // leave out the bias correction
	Step         int64 // counts from 1
	GradScale    float64
}

// Constants sets the constants of the step, and reports what binary32 cannot hold.
func (s AdamStep) Constants(c *Constants) error {
	bias1, bias2 := 1.0, 1.0
	if !s.Uncorrected {
		bias1 = 1 - math.Pow(s.Beta1, float64(s.Step))
		bias2 = 1 - math.Pow(s.Beta2, float64(s.Step))
	}
	penalty, decoupled := 0.0, s.WeightDecay
	if s.L2 {
		penalty, decoupled = s.WeightDecay, 0
	}
	return c.set(s.Step, [abi.Rows]float64{
		abi.GradScale:        s.GradScale,
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
	LearningRate float64
	Beta1, Beta2 float64
	WeightDecay  float64
	Step         int64 // only the dither of masters of 24 bits depends on it
	GradScale    float64
}

// Constants sets the constants of the step, and reports what binary32 cannot hold.
func (s LionStep) Constants(c *Constants) error {
	return c.set(s.Step, [abi.Rows]float64{
		abi.GradScale:     s.GradScale,
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
	GradScale         float64
}

// Constants sets the constants of the step, and reports what binary32 cannot hold.
func (s AdagradStep) Constants(c *Constants) error {
	return c.set(s.Step, [abi.Rows]float64{
		abi.GradScale: s.GradScale,
		abi.L2Penalty: s.WeightDecay,
		abi.Epsilon:   s.Epsilon,
		abi.StepSize:  -s.LearningRate / (1 + float64(s.Step-1)*s.LearningRateDecay),
	})
}

// SGDStep are the hyperparameters of a step of [SGD], as torch.optim.SGD names
// them.
type SGDStep struct {
	LearningRate float64
	Momentum     float64
	Dampening    float64
	Nesterov     bool
	WeightDecay  float64 // an L2 penalty
	Step         int64   // counts from 1: the first step is not dampened
	GradScale    float64
}

// Constants sets the constants of the step, and reports what binary32 cannot hold.
func (s SGDStep) Constants(c *Constants) error {
	rows := [abi.Rows]float64{
		abi.GradScale:     s.GradScale,
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
	case s.Momentum == 0: // the momentum does not change: later steps may use it
		rows[abi.Beta1], rows[abi.OneMinusBeta1] = 1, 0
		rows[abi.MomentumShare], rows[abi.GradientShare] = 0, 1
	}
	return c.set(s.Step, rows)
}

// SetGradScale replaces the factor of gradients: on nothing else of the constants does it have an effect. It reports
// what binary32 cannot hold.
func (c *Constants) SetGradScale(scale float64) error {
	for lane := range c.table[abi.GradScale] {
		c.table[abi.GradScale][lane] = float32(scale)
	}
	if !fits(abi.GradScale, scale) {
		return fmt.Errorf("%s is %.4g: %s", meanings[abi.GradScale], scale, expected(abi.GradScale))
	}
	return nil
}

// GradScale returns the factor of gradients.
func (c *Constants) GradScale() float32 { return c.table[abi.GradScale][0] }
