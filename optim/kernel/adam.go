package kernel

import "math"

// AdamStep are the hyperparameters of one step, as torch.optim.AdamW names
// them. They are rounded to fp32 only after everything that depends on several
// of them has been computed in float64.
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

// Adam holds the constants of one step, each 16 times, so that a vector kernel
// can use them as operands in memory.
type Adam struct{ table [10][16]float32 }

// The rows of the table; _asm/main.go has the same list.
const (
	gradientScale = iota
	beta1
	oneMinusBeta1
	beta2
	oneMinusBeta2
	l2Penalty
	epsilon
	inverseRootBias2
	decay
	stepSize
)

// Set computes the constants of a step. It allocates nothing.
func (a *Adam) Set(s AdamStep) {
	bias1, bias2 := 1.0, 1.0
	if !s.Uncorrected {
		bias1 = 1 - math.Pow(s.Beta1, float64(s.Step))
		bias2 = 1 - math.Pow(s.Beta2, float64(s.Step))
	}
	penalty, decoupled := 0.0, s.WeightDecay
	if s.L2 {
		penalty, decoupled = s.WeightDecay, 0
	}
	for row, value := range [...]float64{
		gradientScale:    s.GradientScale,
		beta1:            s.Beta1,
		oneMinusBeta1:    1 - s.Beta1,
		beta2:            s.Beta2,
		oneMinusBeta2:    1 - s.Beta2,
		l2Penalty:        penalty,
		epsilon:          s.Epsilon,
		inverseRootBias2: 1 / math.Sqrt(bias2),
		decay:            -s.LearningRate * decoupled,
		stepSize:         -s.LearningRate / bias1,
	} {
		for lane := range a.table[row] {
			a.table[row][lane] = float32(value)
		}
	}
}
