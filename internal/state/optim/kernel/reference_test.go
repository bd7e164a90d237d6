//go:build linux

package kernel

import (
	"encoding/binary"
	"math"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// The reference: the formulas of the package comment, element by element, in the exact
// arithmetic of arithmetic.go.

func updateReference(f Format, constants *Constants, c Chunk) {
	k := constants.scalars()
	if f.Moments == MomentsInt8 {
		updateBlocks(&k, f, constants, c)
		return
	}
	for i := range c.Len() {
		p, g := operands(&k, f, c, i)
		first, dither := flush(c.Moments[0].At(i)), constants.ditherOf(c.First+int64(i))
		switch f.Algorithm {
		case Adam:
			var second float32
			p, first, second = adamOf(&k, p, g, first, flush(c.Moments[1].At(i)))
			putMoment(c.Moments[0], i, first)
			putSlowMoment(c.Moments[1], i, second, dither)
		case Lion:
			p, first = lionOf(&k, p, g, first)
			putMoment(c.Moments[0], i, first)
		case Adagrad:
			p, first = adagradOf(&k, p, g, first)
			putSlowMoment(c.Moments[0], i, first, dither)
		case SGD:
			p, first = sgdOf(&k, p, g, first)
			putMoment(c.Moments[0], i, first)
		}
		putMaster(f, c, i, p, constants)
	}
}

// putMaster stores a master weight after an update.
func putMaster(f Format, c Chunk, i int, p float32, constants *Constants) {
	if f.State == Split24 {
		dither := constants.masterDitherOf(c.First + int64(i))
		bits := uint64(math.Float32bits(p)) + uint64(dither*dither)/(1<<24)
		p = math.Float32frombits(uint32(bits / 256 * 256))
	}
	c.PutMasterWeight(f, i, p)
}

// updateBlocks is Adam for moments in int8.
func updateBlocks(k *scalars, f Format, constants *Constants, c Chunk) {
	for number := range c.Headers {
		b := c.block(number)
		var firsts, roots [Block]float32
		for i := range b.first {
			p, g := operands(k, f, c, number*Block+i)
			m, s := decodeBlock(b, i)
			p, m, v := adamOf(k, p, g, m, mul(s, s))
			firsts[i], roots[i] = m, sqrt(v)
			place := number*Block + i
			putMaster(f, c, place, p, constants)
		}
		dither := scramble(uint32(c.First/Block)+uint32(number)) + constants.stride
		Generic.encode(b, firsts[:len(b.first)], roots[:len(b.first)], atRandom(dither))
	}
}

// operands returns master weight i and its scaled gradient.
func operands(k *scalars, f Format, c Chunk, i int) (p, g float32) {
	p = flush(c.MasterWeight(f, i))
	g = mul(flush(c.Gradient.At(i)), k[abi.GradScale])
	return p, fma(k[abi.L2Penalty], p, g)
}

func putMoment(a Array, i int, x float32) {
	if a.Type == dtype.BF16 {
		upper, _ := Separate(x)
		binary.LittleEndian.PutUint16(a.Data[2*i:], upper)
		return
	}
	a.Put(i, x)
}

func putSlowMoment(a Array, i int, x float32, dither uint32) {
	if a.Type == dtype.BF16 {
		random := dither * dither >> 16
		binary.LittleEndian.PutUint16(a.Data[2*i:], uint16((math.Float32bits(x)+random)>>16))
		return
	}
	a.Put(i, x)
}

func adamOf(k *scalars, p, g, m, v float32) (newP, newM, newV float32) {
	m = fma(k[abi.OneMinusBeta1], g, mul(k[abi.Beta1], m))
	v = fma(k[abi.OneMinusBeta2], mul(g, g), mul(k[abi.Beta2], v))
	d := fma(sqrt(v), k[abi.InverseRootBias2], k[abi.Epsilon])
	p = fma(k[abi.Decay], p, p)
	return fma(k[abi.StepSize], div(m, d), p), m, v
}

func lionOf(k *scalars, p, g, m float32) (newP, newM float32) {
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

func adagradOf(k *scalars, p, g, sum float32) (newP, newSum float32) {
	sum = fma(g, g, sum)
	return fma(k[abi.StepSize], div(g, add(sqrt(sum), k[abi.Epsilon])), p), sum
}

func sgdOf(k *scalars, p, g, b float32) (newP, newB float32) {
	b = fma(k[abi.OneMinusBeta1], g, mul(k[abi.Beta1], b))
	u := fma(k[abi.MomentumShare], b, mul(k[abi.GradientShare], g))
	p = fma(k[abi.Decay], p, p)
	return fma(k[abi.StepSize], u, p), b
}

func accumulateReference(sum, gradient Array) {
	for i := range sum.Len() {
		sum.Put(i, add(flush(sum.At(i)), flush(gradient.At(i))))
	}
}

// sumSquaresOfPartsReference returns the sum in fp32, run by run, of four parts.
func sumSquaresOfPartsReference(g Array) float64 {
	var sums [abi.Parts][abi.Group]float64
	apart := (g.Len() + abi.Run*abi.Parts - 1) / (abi.Run * abi.Parts) * abi.Run
	for first := 0; first < g.Len(); first += abi.Run {
		var run [abi.Group]float32
		for i := first; i < min(first+abi.Run, g.Len()); i++ {
			x := flush(g.At(i))
			run[i%abi.Group] = fma(x, x, run[i%abi.Group])
		}
		for lane, x := range run {
			sums[first/apart][lane] += float64(x)
		}
	}
	for lane := range sums[0] {
		sums[0][lane] = (sums[0][lane] + sums[2][lane]) + (sums[1][lane] + sums[3][lane])
	}
	return addUp(&sums[0])
}

// sumSquaresOfPairsReference returns the sum in fp32, run by run, of even and odd elements.
func sumSquaresOfPairsReference(g Array) float64 {
	var sums [2][abi.Group]float64
	for first := 0; first < g.Len(); first += abi.PairRun {
		var run [2][abi.Group]float32
		for i := first; i < min(first+abi.PairRun, g.Len()); i++ {
			x, to := flush(g.At(i)), &run[i%2][i/2%abi.Group]
			*to = fma(x, x, *to)
		}
		for parity := range run {
			for lane, x := range run[parity] {
				sums[parity][lane] += float64(x)
			}
		}
	}
	for lane := range sums[0] {
		sums[0][lane] += sums[1][lane]
	}
	return addUp(&sums[0])
}

func sumSquaresInRunsReference(g Array) float64 {
	if g.Type == dtype.BF16 {
		return sumSquaresOfPairsReference(g)
	}
	return sumSquaresOfPartsReference(g)
}

func sumSquaresReference(g Array) float64 {
	if sum := sumSquaresInRunsReference(g); 0x1p-64 <= sum && sum <= math.MaxFloat64 {
		return sum
	}
	var lanes [abi.Group]float64
	for i := range g.Len() {
		x := float64(flush(g.At(i)))
		lanes[i%abi.Group] += float64(x * x)
	}
	return addUp(&lanes)
}
