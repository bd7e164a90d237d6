package kernel

import (
	"encoding/binary"
	"math"
	"runtime"

	"plimsoll/dtype"
)

// at is element i as an fp32 number.
func (g Gradient) at(i int) float32 {
	switch g.Type {
	case dtype.BF16:
		return BF16ToFloat32(binary.LittleEndian.Uint16(g.Data[2*i:]))
	case dtype.F16:
		return FP16ToFloat32(binary.LittleEndian.Uint16(g.Data[2*i:]))
	default:
		return math.Float32frombits(binary.LittleEndian.Uint32(g.Data[4*i:]))
	}
}

// adamReference is the specification of the Adam kernels.
func adamReference(f Format, a *Adam, c Chunk) {
	constant := func(row int) float32 { return flush(a.table[row][0]) }
	scale, penalty := constant(gradientScale), constant(l2Penalty)
	b1, c1, b2, c2 := constant(beta1), constant(oneMinusBeta1), constant(beta2), constant(oneMinusBeta2)
	rootBias, eps := constant(inverseRootBias2), constant(epsilon)
	shrink, step := constant(decay), constant(stepSize)
	for i := range c.ExpAvg {
		var p float32
		if f.State == FP32 {
			p = c.Master[i]
		} else {
			p = Merge(c.Parameter[i], c.Low[i])
		}
		p = flush(p)
		g := mul(flush(c.Gradient.at(i)), scale)
		g = fma(penalty, p, g)
		m := fma(c1, g, mul(b1, flush(c.ExpAvg[i])))
		v := fma(c2, mul(g, g), mul(b2, flush(c.ExpAvgSq[i])))
		d := fma(sqrt(v), rootBias, eps)
		p = fma(shrink, p, p)
		p = fma(step, div(m, d), p)

		c.ExpAvg[i], c.ExpAvgSq[i] = m, v
		switch {
		case f.State == Split:
			c.Parameter[i], c.Low[i] = Separate(p)
		case f.Parameter == dtype.F32:
			c.Master[i] = p
		case f.Parameter == dtype.F16:
			c.Master[i], c.Parameter[i] = p, Float32ToFP16(p)
		default:
			c.Master[i], c.Parameter[i] = p, Float32ToBF16(p)
		}
	}
}

// zero is or-ed into streams that are to be moved and not changed. The compiler
// cannot know that it stays 0.
var zero uint32

func trafficReference(f Format, c Chunk) {
	touch16 := func(s []uint16) {
		for i := range s {
			s[i] |= uint16(zero)
		}
	}
	touch32 := func(s []float32) {
		for i := range s {
			s[i] = math.Float32frombits(math.Float32bits(s[i]) | zero)
		}
	}
	if f.State == Split {
		touch16(c.Parameter)
		touch16(c.Low)
	} else {
		clear(c.Parameter)
		touch32(c.Master)
	}
	touch32(c.ExpAvg)
	touch32(c.ExpAvgSq)
	var all byte
	for _, b := range c.Gradient.Data {
		all |= b
	}
	runtime.KeepAlive(all)
}

func sumSquaresReference(g Gradient, lanes *[16]float64) {
	for i := range g.Len() {
		x := float64(flush(g.at(i)))
		lanes[i%16] += float64(x * x)
	}
}
