package kernel

import (
	"encoding/binary"
	"math"
	"runtime"

	"plimsoll/dtype"
	"plimsoll/optim/kernel/abi"
)

// At is element i as an fp32 number.
func (a Array) At(i int) float32 {
	switch a.Type {
	case dtype.BF16:
		return BF16ToFloat32(binary.LittleEndian.Uint16(a.Data[2*i:]))
	case dtype.F16:
		return FP16ToFloat32(binary.LittleEndian.Uint16(a.Data[2*i:]))
	default:
		return math.Float32frombits(binary.LittleEndian.Uint32(a.Data[4*i:]))
	}
}

// Put rounds x to the array's type, to nearest even, and stores it as element
// i.
func (a Array) Put(i int, x float32) {
	switch a.Type {
	case dtype.BF16:
		binary.LittleEndian.PutUint16(a.Data[2*i:], Float32ToBF16(x))
	case dtype.F16:
		binary.LittleEndian.PutUint16(a.Data[2*i:], Float32ToFP16(x))
	default:
		binary.LittleEndian.PutUint32(a.Data[4*i:], math.Float32bits(x))
	}
}

// MasterWeight is master weight i of a chunk.
func (c Chunk) MasterWeight(f Format, i int) float32 {
	if f.State == FP32 {
		return c.Master[i]
	}
	return Merge(c.Parameter[i], c.Low[i])
}

// PutMasterWeight stores master weight i, and what the trainer reads of it.
func (c Chunk) PutMasterWeight(f Format, i int, p float32) {
	if f.State == Split {
		c.Parameter[i], c.Low[i] = Separate(p)
		return
	}
	c.Master[i] = p
	switch f.Parameter {
	case dtype.BF16:
		c.Parameter[i] = Float32ToBF16(p)
	case dtype.F16:
		c.Parameter[i] = Float32ToFP16(p)
	}
}

// updateReference is the specification of the update kernels.
func updateReference(f Format, constants *Constants, c Chunk) {
	var k scalars
	for row := range k {
		k[row] = flush(constants.table[row][0])
	}
	if f.Moments == MomentsInt8 {
		k.updateBlocks(f, constants.stride, c)
		return
	}
	for i := range c.Len() {
		p, g := k.operands(f, c, i)
		first, dither := flush(c.Moments[0].At(i)), constants.ditherOf(c.First+int64(i))
		switch f.Algorithm {
		case Adam:
			var second float32
			p, first, second = k.adam(p, g, first, flush(c.Moments[1].At(i)))
			c.Moments[0].putMoment(i, first)
			c.Moments[1].putSlowMoment(i, second, dither)
		case Lion:
			p, first = k.lion(p, g, first)
			c.Moments[0].putMoment(i, first)
		case Adagrad:
			p, first = k.adagrad(p, g, first)
			c.Moments[0].putSlowMoment(i, first, dither)
		case SGD:
			p, first = k.sgd(p, g, first)
			c.Moments[0].putMoment(i, first)
		}
		c.PutMasterWeight(f, i, p)
	}
}

// operands are master weight i and its scaled gradient.
func (k *scalars) operands(f Format, c Chunk, i int) (p, g float32) {
	p = flush(c.MasterWeight(f, i))
	g = mul(flush(c.Gradient.At(i)), k[abi.GradientScale])
	return p, fma(k[abi.L2Penalty], p, g)
}

// putMoment stores element i of a moment. In bf16, it is rounded half away from
// zero, as the parameters of split state are: that takes a third of the
// instructions of rounding to even, and ties are rare.
func (a Array) putMoment(i int, x float32) {
	if a.Type == dtype.BF16 {
		upper, _ := Separate(x)
		binary.LittleEndian.PutUint16(a.Data[2*i:], upper)
		return
	}
	a.Put(i, x)
}

// putSlowMoment stores element i of a moment that hardly changes. In bf16, it
// is rounded up with the probability of the part that is cut off.
func (a Array) putSlowMoment(i int, x float32, dither uint32) {
	if a.Type == dtype.BF16 {
		random := dither * dither >> 16
		binary.LittleEndian.PutUint16(a.Data[2*i:], uint16((math.Float32bits(x)+random)>>16))
		return
	}
	a.Put(i, x)
}

// ditherOf is the dither of an element of a shard.
func (c *Constants) ditherOf(element int64) uint32 {
	return c.dither + uint32(element)*abi.DitherStep
}

// scalars are the constants of a step, once each.
type scalars [abi.Rows]float32

func (k *scalars) adam(p, g, m, v float32) (newP, newM, newV float32) {
	m = fma(k[abi.OneMinusBeta1], g, mul(k[abi.Beta1], m))
	v = fma(k[abi.OneMinusBeta2], mul(g, g), mul(k[abi.Beta2], v))
	d := fma(sqrt(v), k[abi.InverseRootBias2], k[abi.Epsilon])
	p = fma(k[abi.Decay], p, p)
	return fma(k[abi.StepSize], div(m, d), p), m, v
}

func (k *scalars) lion(p, g, m float32) (newP, newM float32) {
	u := fma(k[abi.OneMinusBeta1], g, mul(k[abi.Beta1], m))
	m = fma(k[abi.OneMinusBeta2], g, mul(k[abi.Beta2], m))
	p = fma(k[abi.Decay], p, p)
	switch {
	case u > 0:
		u = k[abi.StepSize]
	case u < 0:
		u = -k[abi.StepSize]
	case u == 0:
		u = 0 // of either sign
	} // NaN stays
	return add(p, u), m
}

func (k *scalars) adagrad(p, g, sum float32) (newP, newSum float32) {
	sum = fma(g, g, sum)
	return fma(k[abi.StepSize], div(g, add(sqrt(sum), k[abi.Epsilon])), p), sum
}

func (k *scalars) sgd(p, g, b float32) (newP, newB float32) {
	b = fma(k[abi.OneMinusBeta1], g, mul(k[abi.Beta1], b))
	u := fma(k[abi.MomentumShare], b, mul(k[abi.GradientShare], g))
	p = fma(k[abi.Decay], p, p)
	return fma(k[abi.StepSize], u, p), b
}

// zero is or-ed into streams that are to be moved and not changed. The compiler
// cannot know that it stays 0.
var zero uint32

func trafficReference(f Format, c Chunk) {
	touch8 := func(s []byte) {
		for i := range s {
			s[i] |= byte(zero)
		}
	}
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
	for _, m := range c.Moments {
		touch8(m.Data)
	}
	touch16(c.Headers)
	var all byte
	for _, b := range c.Gradient.Data {
		all |= b
	}
	runtime.KeepAlive(all)
}

// sumSquaresReference adds up runs, of which the last may be short.
func sumSquaresReference(g Array, lanes *[abi.Group]float64) {
	for from := 0; from < g.Len(); from += abi.Run {
		var run [abi.Group]float32
		for i := from; i < min(from+abi.Run, g.Len()); i++ {
			x := flush(g.At(i))
			run[i%abi.Group] = fma(x, x, run[i%abi.Group])
		}
		for lane, x := range run {
			lanes[lane] += float64(x)
		}
	}
}

func sumWideSquaresReference(g Array, lanes *[abi.Group]float64) {
	for i := range g.Len() {
		x := float64(flush(g.At(i)))
		lanes[i%abi.Group] += float64(x * x)
	}
}
