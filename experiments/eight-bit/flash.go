package main

import "math"

// flashGroup is how many elements share a pair of scales.
const flashGroup = 32

// flash holds moments in the code of J. J. Gonzalez Ortiz et al., "FlashOptim: Optimizers for Memory Efficient
// Training" (arXiv 2602.23349). A group has two scales in fp16: its largest |m| and its largest s = √v. With
// x = m/scale, the code of m is 127 · 2x/(1 + |x|), with a sign. The code of s is 255 · s/scale.
type flash struct {
	dither        dither
	first, second [blockElements]float32    // codes, whole numbers
	scales        [2][blockElements]float32 // of every element's group
}

func (f *flash) decode(m, v *vector) {
	for i := range m {
		y := f.first[i] / 127
		m[i] = y / (2 - magnitude(y)) * f.scales[0][i]
		s := f.second[i] / 255 * f.scales[1][i]
		v[i] = s * s
	}
}

func (f *flash) encode(number, step uint32, m, v *vector) {
	for from := 0; from < blockElements; from += flashGroup {
		var most [2]float32
		for i := from; i < from+flashGroup; i++ {
			most[0], most[1] = max(most[0], magnitude(m[i])), max(most[1], root(v[i]))
		}
		for i := from; i < from+flashGroup; i++ {
			upper, lower := halves(f.dither(number, uint32(i), step))
			for k := range most {
				f.scales[k][i] = half(max(most[k], 1e-12))
			}
			x := m[i] / max(most[0], 1e-12)
			f.first[i] = whole(2*x/(1+magnitude(x))*127, lower)
			f.second[i] = min(whole(root(v[i])/max(most[1], 1e-12)*255, upper), 255)
		}
	}
}

// whole rounds up where the fraction and the threshold add up to 1.
func whole(x, threshold float32) float32 { return float32(math.Floor(float64(x) + float64(threshold))) }

// half rounds a number to fp16, denormal numbers included. Scales here are far from its largest number.
func half(x float32) float32 {
	_, exponent := math.Frexp(float64(x))
	unit := math.Ldexp(1, max(exponent-11, -24))
	return float32(math.RoundToEven(float64(x)/unit) * unit)
}
