//go:build linux

package kernel

import (
	"math"
	"math/rand/v2"
	"testing"

	"plimsoll/internal/base/dtype"
)

// roundingUnit bounds the relative error of one binary32 operation.
const roundingUnit = 0x1p-24

// exactAdam follows one parameter in float64, and bounds its distance from the fp32
// computation of the package's formula.
type exactAdam struct {
	p, m, v                float64
	pError, mError, vError float64
	unit                   float64 // the largest unit in the last place of p so far
}

// step is torch.optim.AdamW's update. The bounds are a running error analysis
// (N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.3). An operation
// adds a rounding unit of its result to the error of its operands. A constant that was
// rounded to fp32 adds a rounding unit of its product.
func (x *exactAdam) step(s AdamStep, gradient float64) {
	const u = roundingUnit
	g := gradient * s.GradScale
	gError := 2 * u * math.Abs(g)

	mOld, vOld := x.m, x.v
	x.m = s.Beta1*mOld + (1-s.Beta1)*g
	x.mError = s.Beta1*x.mError + (1-s.Beta1)*gError +
		u*(2*math.Abs(s.Beta1*mOld)+math.Abs((1-s.Beta1)*g)+math.Abs(x.m))
	x.v = s.Beta2*vOld + (1-s.Beta2)*g*g
	x.vError = s.Beta2*x.vError + (1-s.Beta2)*(2*math.Abs(g)*gError+u*g*g) +
		u*(2*s.Beta2*vOld+(1-s.Beta2)*g*g+x.v)

	bias1, bias2 := 1-math.Pow(s.Beta1, float64(s.Step)), 1-math.Pow(s.Beta2, float64(s.Step))
	root := math.Sqrt(x.v)
	rootError := x.vError/root + u*root // twice the first order: v may be anywhere in its interval
	d := root/math.Sqrt(bias2) + s.Epsilon
	dError := rootError/math.Sqrt(bias2) + u*(root/math.Sqrt(bias2)+s.Epsilon+d)
	ratio := x.m / d
	ratioError := (x.mError+math.Abs(ratio)*dError)/(d-dError) + u*math.Abs(ratio)

	pOld := x.p
	x.unit = max(x.unit, unit(pOld))
	x.p = pOld*(1-s.LearningRate*s.WeightDecay) - s.LearningRate/bias1*ratio
	x.pError += u*math.Abs(s.LearningRate*s.WeightDecay*pOld) + unit(pOld)/2 + unit(x.p)/2 +
		s.LearningRate/bias1*(ratioError+u*math.Abs(ratio))
}

// unit returns a unit in the last place of a binary32 number of x's size.
func unit(x float64) float64 { return math.Exp2(math.Floor(math.Log2(math.Abs(x))) - 23) }

// TestTrajectoryStaysNearFloat64 runs 100 steps of AdamW on every set and
// format. The drift must stay within the bound derived above, and that bound
// within 2 units in the last place of the parameter a step.
func TestTrajectoryStaysNearFloat64(t *testing.T) {
	const n, count = 500, 100
	for _, set := range Available() {
		for _, state := range []State{Split, FP32} {
			f := Format{Adam, state, MomentsFP32, dtype.BF16, dtype.F32}
			r := rand.New(rand.NewPCG(4, 4))
			c := newChunk(t, f, n, 0)
			reference := make([]exactAdam, n)
			for i := range n {
				// Parameters of the size that trained weights have.
				p := float32(math.Copysign(0.02+0.02*r.Float64(), r.NormFloat64()))
				reference[i].p = float64(p)
				c.PutMasterWeight(f, i, p)
			}
			worst := 0.0
			for step := int64(1); step <= count; step++ {
				s := AdamStep{LearningRate: 1e-4, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, WeightDecay: 0.01,
					Step: step, GradScale: 0.37}
				gradient := view[float32](c.Gradient.Data)
				for i := range n {
					gradient[i] = float32(0.01 * r.NormFloat64())
					reference[i].step(s, float64(gradient[i]))
				}
				var constants Constants
				s.Constants(&constants)
				set.Update(f, &constants, c)
				for i, x := range reference {
					p := float64(c.MasterWeight(f, i))
					drift := math.Abs(p - x.p)
					if drift > x.pError {
						t.Fatalf("%v %v step %d element %d: %g is %g away from float64's %g, the bound is %g",
							set, f, step, i, p, drift, x.p, x.pError)
					}
					if x.pError > 2*x.unit*float64(step) {
						t.Fatalf("%v %v step %d element %d: the bound %g is above 2 units in the last place a step",
							set, f, step, i, x.pError)
					}
					worst = max(worst, drift/x.unit)
				}
			}
			t.Logf("%v %v: drift after %d steps at most %.2f units in the last place", set, f, count, worst)
		}
	}
}

// TestMastersOf24BitsFollow makes steps that are a third of the distance of two 24-bit numbers. Rounded to nearest, no
// weight would ever move. Rounded at random, weights move as far as the steps on average, and none goes astray.
func TestMastersOf24BitsFollow(t *testing.T) {
	const n, count, rate = 8192, 1000, 5e-6
	if p := RoundTo24(1 - rate); p != 1 {
		t.Fatalf("1 - %g is rounded to %g: steps are too large to show anything", rate, p)
	}
	for _, set := range testedSets(t) {
		for _, moments := range []MomentType{MomentsFP32, MomentsInt8} {
			f := Format{Adam, Split24, moments, dtype.BF16, dtype.BF16}
			c := newChunk(t, f, n, 0)
			c.First = 0
			for i := range n {
				c.PutMasterWeight(f, i, 1)
				c.Gradient.Put(i, 0.01)
			}
			for step := int64(1); step <= count; step++ {
				var constants Constants
				s := AdamStep{LearningRate: rate, Beta1: 0.9, Beta2: 0.95, Step: step, GradScale: 1}
				if err := s.Constants(&constants); err != nil {
					t.Fatal(err)
				}
				set.Update(f, &constants, c)
			}
			mean, worst := 0.0, 0.0
			for i := range n {
				moved := (1 - float64(c.MasterWeight(f, i))) / (rate * count)
				mean += moved / n
				worst = max(worst, math.Abs(moved-1))
			}
			// The 1000 roundings of a weight add up to 5 % of the way. Codes of a byte add 1 % for all.
			allowed := map[MomentType]float64{MomentsFP32: 0.002, MomentsInt8: 0.02}[moments]
			if math.Abs(mean-1) > allowed || worst > 0.25 {
				t.Errorf("%v %v: weights went %.4f of the way, one of them %.2f off", set, f, mean, worst)
			}
			t.Logf("%v %v: weights went %.4f of the way, none more than %.2f off", set, f, mean, worst)
		}
	}
}
