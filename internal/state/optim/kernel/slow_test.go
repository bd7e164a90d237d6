//go:build linux

package kernel

import (
	"math"
	"math/rand/v2"
	"testing"

	"plimsoll/internal/base/dtype"
)

// TestSlowMomentsMove compares exp_avg_sq in bf16 and int8 with fp32, with gradients that
// shrink tenfold on the way. Rounded to nearest, exp_avg_sq would stay at its first size,
// and steps would be ten times too small. Its average over elements must be right.
//
// Each element is off by the noise of stochastic rounding. In bf16, with beta2 = 0.999 and
// units in the last place of 1/256 to 1/128, its variance settles between 1/512 and 1/256.
// In int8 the elements of a block, of one size here, have units of 1/64 to 1/32 in v.
func TestSlowMomentsMove(t *testing.T) {
	if testing.Short() {
		t.Skip("every set has the bits of the reference, and one is enough")
	}
	const n, steps = 4096, 6000
	formats := []Format{
		{Adam, Split, MomentsFP32, dtype.BF16, dtype.F32},
		{Adam, Split, MomentsBF16, dtype.BF16, dtype.F32},
		{Adam, Split, MomentsInt8, dtype.BF16, dtype.F32},
	}
	most := map[MomentType]struct{ mean, worst float64 }{MomentsBF16: {0.005, 0.4}, MomentsInt8: {0.03, 0.6}}
	set := Available()[len(Available())-1]
	var chunks []Chunk
	for _, f := range formats {
		c := newChunk(t, f, n, 0)
		c.First = 0
		chunks = append(chunks, c)
	}
	r := rand.New(rand.NewPCG(8, 8))
	for step := int64(1); step <= steps; step++ {
		scale := 1e-2
		if step > 1500 {
			scale = 1e-3
		}
		for i := range n {
			g := float32(scale * (2*r.Float64() - 1))
			for _, c := range chunks {
				c.Gradient.Put(i, g)
			}
		}
		var constants Constants
		AdamStep{LearningRate: 1e-4, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, Step: step,
			GradScale: 1}.Constants(&constants)
		for i, c := range chunks {
			set.Update(formats[i], &constants, c)
		}
		if step != 1500 && step != 3000 && step != steps {
			continue
		}
		for f, bound := range most {
			mean, worst := 0.0, 0.0
			for i := range n {
				off := float64(chunks[f].Moment(1, i))/float64(chunks[MomentsFP32].Moment(1, i)) - 1
				mean += off / n
				worst = max(worst, math.Abs(off))
			}
			t.Logf("step %d: exp_avg_sq in %v is %+.3f %% off on the average, %.1f %% at worst",
				step, f, 100*mean, 100*worst)
			if math.Abs(mean) > bound.mean || worst > bound.worst {
				t.Errorf("step %d: exp_avg_sq in %v is %+.3f %% off on the average, %.1f %% at worst",
					step, f, 100*mean, 100*worst)
			}
		}
	}
}
