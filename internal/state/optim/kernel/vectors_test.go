//go:build linux

package kernel

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// strangeNumber returns a number whose sums and products are halfway between two numbers,
// too small, too large, or cancel.
func strangeNumber(r *rand.Rand) float32 {
	negative := r.Uint32() & sign
	switch r.IntN(10) {
	case 0:
		return math.Float32frombits(negative | []uint32{
			0, 0x00800000, 0x00800001, 0x3f7fffff, 0x3f800000, 0x7f7fffff, exponents, 0x7fc00000,
		}[r.IntN(8)])
	case 1, 2: // products of half as many digits often are halfway,
		return math.Float32frombits(negative | 127<<23 | r.Uint32N(1<<13)<<10)
	case 3: // but for a part that float64 does not hold
		return math.Float32frombits(negative | uint32(60+r.IntN(10))<<23)
	case 4: // the root of the smallest normal number, about
		return math.Float32frombits(negative | uint32(60+r.IntN(8))<<23 | r.Uint32N(1<<23))
	case 5: // nearly the smallest normal numbers
		return math.Float32frombits(negative | uint32(1+r.IntN(30))<<23 | r.Uint32N(1<<23))
	}
	return math.Float32frombits(negative | uint32(110+r.IntN(20))<<23 | r.Uint32N(1<<23))
}

// TestVectorsAgree compares the operations on many numbers with those on one number, to the
// bit. Results go into a vector of their own and into operands.
func TestVectorsAgree(t *testing.T) {
	const n = 250 // not all of a vector
	type numbers [3][n]float32
	rounds := 2000
	if testing.Short() {
		rounds = 500
	}
	for name, operation := range map[string]struct {
		many func(s Set, to, a, b vector, constant, other float32)
		one  func(a, b, constant, other float32) float32
	}{
		"mul": {func(s Set, to, a, _ vector, constant, _ float32) { s.mul(to, constant, a) },
			func(a, _, constant, _ float32) float32 { return mul(constant, a) }},
		"square": {func(s Set, to, a, _ vector, _, _ float32) { s.square(to, a) },
			func(a, _, _, _ float32) float32 { return mul(a, a) }},
		"add": {func(s Set, to, a, b vector, _, _ float32) { s.add(to, a, b) },
			func(a, b, _, _ float32) float32 { return add(a, b) }},
		"div": {func(s Set, to, a, b vector, _, _ float32) { s.div(to, a, b) },
			func(a, b, _, _ float32) float32 { return div(a, b) }},
		"sqrt": {func(s Set, to, a, _ vector, _, _ float32) { s.sqrt(to, a) },
			func(a, _, _, _ float32) float32 { return sqrt(a) }},
		"fma": {func(s Set, to, a, b vector, constant, _ float32) { s.fma(to, constant, a, b) },
			func(a, b, constant, _ float32) float32 { return fma(constant, a, b) }},
		"fmaPlus": {func(s Set, to, a, _ vector, constant, other float32) { s.fmaPlus(to, constant, a, other) },
			func(a, _, constant, other float32) float32 { return fma(constant, a, other) }},
		"fmaSquare": {func(s Set, to, a, b vector, _, _ float32) { s.fmaSquare(to, a, b) },
			func(a, b, _, _ float32) float32 { return fma(a, a, b) }},
		"withSign": {func(s Set, to, a, _ vector, constant, _ float32) { s.withSign(to, constant, a) },
			func(a, _, constant, _ float32) float32 {
				switch {
				case a > 0:
					return constant
				case a < 0:
					return -constant
				}
				return a * a // 0, or NaN
			}},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(11, 11))
			for range rounds {
				var x numbers
				constant, other := strangeNumber(r), strangeNumber(r)
				for i := range n {
					a, b := strangeNumber(r), strangeNumber(r)
					if r.IntN(8) == 0 { // what is left is the error of a product
						b = -mul(constant, a)
					}
					x[1][i], x[2][i] = a, b
				}
				for to := range x {
					for _, s := range vectorSets(t) {
						got := x
						operation.many(s, got[to][:], got[1][:], got[2][:], constant, other)
						for i := range n {
							a, b := x[1][i], x[2][i]
							want := operation.one(a, b, constant, other)
							if math.Float32bits(got[to][i]) != math.Float32bits(want) &&
								(got[to][i] == got[to][i] || want == want) {
								t.Fatalf("%v: of %#08x and %#08x, constants %#08x and %#08x: %#08x, want %#08x",
									s, math.Float32bits(a), math.Float32bits(b),
									math.Float32bits(constant), math.Float32bits(other), math.Float32bits(got[to][i]),
									math.Float32bits(want))
							}
						}
					}
				}
			}
		})
	}
}

// vectorSets returns the tested sets that have their own operations on many numbers.
func vectorSets(t *testing.T) []Set {
	return slices.DeleteFunc(testedSets(t), Set.inRegisters)
}
