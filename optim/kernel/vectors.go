package kernel

import "math"

// vector is a stretch of numbers in fp32. Its methods set each of them to the
// result of one operation of the contract; operands may be the vector itself.
//
// They take the processor's own operations, which differ from the contract's in
// rare cases that the result betrays, and leave those to the exact functions.
// Nothing else in the loops is a call, and nothing depends on the turn before.
// That is why constants are converted outside of the loops: on x86-64 a
// conversion into a register waits for what the register held before.
type vector []float32

// suspect says that a result is so small that it may have to be a zero. A result
// that is a zero is right.
func suspect(x float32) bool { return math.Float32bits(x)<<1-1 < 0x00800000<<1 }

// halfway says that a float64 lies halfway between two binary32 numbers, so that
// rounding it again may go wrong, or that it is so small that it may have to be
// a zero.
func halfway(x float64) bool {
	const least = 0x3810_0000_0000_0000 // 2^-126
	bits := math.Float64bits(x)
	return bits<<35 == 1<<63 || bits<<1-1 < least<<1
}

// mul is a·b.
func (to vector) mul(a float32, b vector) {
	b = b[:len(to)]
	for i := range to {
		x := a * b[i]
		if suspect(x) {
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
		if suspect(x) {
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
		if suspect(x) {
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
		if suspect(x) {
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

// The product of two 24-bit numbers is exact in float64, so that in the methods
// below it makes no difference whether the compiler fuses multiplication and
// addition. Rounding the sum to 53 bits before rounding it to 24 goes wrong only
// where the first result lies halfway between two binary32 numbers.

// fma is a·b + c.
func (to vector) fma(a float32, b, c vector) {
	b, c = b[:len(to)], c[:len(to)]
	wide := float64(a)
	for i := range to {
		sum := wide*float64(b[i]) + float64(c[i])
		if halfway(sum) {
			to[i] = fma(a, b[i], c[i])
			continue
		}
		to[i] = float32(sum)
	}
}

// fmaPlus is a·b + c, with the same c for all.
func (to vector) fmaPlus(a float32, b vector, c float32) {
	b = b[:len(to)]
	wide, addend := float64(a), float64(c)
	for i := range to {
		sum := wide*float64(b[i]) + addend
		if halfway(sum) {
			to[i] = fma(a, b[i], c)
			continue
		}
		to[i] = float32(sum)
	}
}

// fmaSquare is a·a + c.
func (to vector) fmaSquare(a, c vector) {
	a, c = a[:len(to)], c[:len(to)]
	for i := range to {
		x := float64(a[i])
		sum := x*x + float64(c[i])
		if halfway(sum) {
			to[i] = fma(a[i], a[i], c[i])
			continue
		}
		to[i] = float32(sum)
	}
}

// withSign is magnitude with the sign of a, and 0 where a is 0. NaN stays.
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
