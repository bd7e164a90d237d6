package kernel

import (
	"math"

	"plimsoll/internal/state/optim/kernel/abi"
)

// vector is a range of fp32 numbers. Its methods set each number to the result of one
// operation of the contract. Operands may be the vector itself.
//
// The methods are loops of the processor's own operations. In rare cases a result
// shows that it may differ from the contract's: the exact function then makes it
// again. All other iterations make no call, take no branch, and do not wait for the
// iteration before. That is why constants are converted outside of the loops: on
// x86-64 a conversion waits for the old value of its register.
type vector []float32

// tiny reports whether a result is so small that it may have to be a zero, and is none.
func tiny(x float32) bool {
	bits := math.Float32bits(x)
	return bits&0x7f000000 == 0 && bits<<1 != 0
}

// suspect reports whether x is tiny, or the sum lies halfway between two binary32
// numbers, so that rounding it to x may have gone wrong.
func suspect(sum float64, x float32) bool {
	wide, bits := math.Float64bits(sum), math.Float32bits(x)
	return uint32(wide)<<3 == 1<<31 || bits&0x7f000000 == 0 && bits<<1 != 0
}

// mul is a·b.
func (to vector) mul(a float32, b vector) {
	b = b[:len(to)]
	for i := range to {
		x := a * b[i]
		if tiny(x) {
			x = mul(a, b[i])
		}
		to[i] = x
	}
}

// square is a·a.
func (to vector) square(a vector) {
	a = a[:len(to)]
	for i := range to {
		x := a[i] * a[i]
		if tiny(x) {
			x = mul(a[i], a[i])
		}
		to[i] = x
	}
}

// add is a + b.
func (to vector) add(a, b vector) {
	a, b = a[:len(to)], b[:len(to)]
	for i := range to {
		x := a[i] + b[i]
		if tiny(x) {
			x = add(a[i], b[i])
		}
		to[i] = x
	}
}

// div is a/b.
func (to vector) div(a, b vector) {
	a, b = a[:len(to)], b[:len(to)]
	for i := range to {
		x := a[i] / b[i]
		if tiny(x) {
			x = div(a[i], b[i])
		}
		to[i] = x
	}
}

// sqrt is √a.
func (to vector) sqrt(a vector) {
	a = a[:len(to)]
	for i := range to {
		to[i] = sqrt(a[i])
	}
}

// The product of two 24-bit numbers is exact in float64. So in the methods below it
// makes no difference whether the compiler fuses multiplication and addition. Rounding
// the sum to 53 bits before rounding it to 24 goes wrong only if the first result lies
// halfway between two binary32 numbers.

// fma is a·b + c.
func (to vector) fma(a float32, b, c vector) {
	b, c = b[:len(to)], c[:len(to)]
	wide := float64(a)
	for i := range to {
		sum := wide*float64(b[i]) + float64(c[i])
		x := float32(sum)
		if suspect(sum, x) {
			x = fma(a, b[i], c[i])
		}
		to[i] = x
	}
}

// fmaPlus is a·b + c, with the same c for all.
func (to vector) fmaPlus(a float32, b vector, c float32) {
	b = b[:len(to)]
	wide, addend := float64(a), float64(c)
	for i := range to {
		sum := wide*float64(b[i]) + addend
		x := float32(sum)
		if suspect(sum, x) {
			x = fma(a, b[i], c)
		}
		to[i] = x
	}
}

// fmaSquare is a·a + c.
func (to vector) fmaSquare(a, c vector) {
	a, c = a[:len(to)], c[:len(to)]
	for i := range to {
		wide := float64(a[i])
		sum := wide*wide + float64(c[i])
		x := float32(sum)
		if suspect(sum, x) {
			x = fma(a[i], a[i], c[i])
		}
		to[i] = x
	}
}

// withSign is magnitude with the sign of a, and 0 if a is 0. A NaN stays.
func (to vector) withSign(magnitude float32, a vector) {
	a = a[:len(to)]
	bits := math.Float32bits(magnitude)
	for i, x := range a {
		to[i] = math.Float32frombits(bits ^ math.Float32bits(x)&sign)
		if x == 0 {
			to[i] = 0
		} else if x != x {
			to[i] = x
		}
	}
}

// addSquares adds the squares of a run to the sums of their lanes.
func (run vector) addSquares(sums *[abi.Group]float32) {
	for len(run) > 0 {
		group := run[:min(abi.Group, len(run))]
		vector(sums[:len(group)]).fmaSquare(group, sums[:])
		run = run[len(group):]
	}
}
