package kernel

import "math"

// The functions below are the arithmetic of the package's contract in plain Go:
// binary32 operations, rounded to nearest even, with denormal results as zeros.
// Their operands are never denormal: they are results of these functions or of flush.

// smallest is the least result that rounds to the smallest normal number, if 24 bits
// are kept and the exponent has no limit. A smaller result counts as zero.
const smallest = 0x1p-126 * (1 - 0x1p-25)

// round rounds a result of float64 arithmetic to binary32. That it was rounded to 53
// bits first makes no difference for a sum, a product, a quotient or a root of 24-bit
// numbers. fma prepares its result.
func round(x float64) float32 {
	if math.Abs(x) < smallest {
		return float32(math.Copysign(0, x))
	}
	return float32(x)
}

// flush returns an operand as the arithmetic sees it: a denormal number as zero.
func flush(x float32) float32 {
	bits := math.Float32bits(x)
	if bits&exponents == 0 {
		bits &= sign
	}
	return math.Float32frombits(bits)
}

//go:noinline
func mul(a, b float32) float32 { return round(float64(a) * float64(b)) }

//go:noinline
func add(a, b float32) float32 { return round(float64(a) + float64(b)) }

//go:noinline
func div(a, b float32) float32 { return round(float64(a) / float64(b)) }

// sqrt returns √a. The root of a normal number is never denormal.
func sqrt(a float32) float32 { return float32(math.Sqrt(float64(a))) }

// fma returns a·b + c with one rounding. The product of two 24-bit numbers is exact
// in float64.
func fma(a, b, c float32) float32 {
	return round(roundToOdd(float64(a)*float64(b), float64(c)))
}

// roundToOdd returns a sum. An inexact result whose last bit is even moves to its odd
// neighbour on the side of the exact value. The odd bit says "not exact" to a second
// rounding, which then cannot take the sum for a tie (S. Boldo and G. Melquiond,
// "Emulation of a FMA and correctly rounded sums", IEEE Transactions on Computers
// 57(4), 2008).
func roundToOdd(a, b float64) float64 {
	sum := float64(a + b)
	// The error of the sum, exactly (Knuth's two-sum).
	part := float64(sum - a)
	lost := float64(a-float64(sum-part)) + float64(b-part)
	bits := math.Float64bits(sum)
	if lost == 0 || bits&1 == 1 || math.IsInf(sum, 0) || math.IsNaN(sum) {
		return sum
	}
	if (lost > 0) == (sum > 0) {
		return math.Float64frombits(bits + 1)
	}
	return math.Float64frombits(bits - 1)
}

// BF16ToFloat32 converts a bf16 number. It is exact.
func BF16ToFloat32(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// Float32ToBF16 rounds a number to bf16, to nearest even. A NaN becomes 0x7fc0.
func Float32ToBF16(x float32) uint16 {
	bits := math.Float32bits(x)
	if x != x {
		return 0x7fc0
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// FP16ToFloat32 converts an fp16 number. It is exact.
func FP16ToFloat32(h uint16) float32 {
	bits := uint32(h&0x7fff)<<13 + 112<<23
	switch exponent := h & 0x7c00; exponent {
	case 0: // zero or denormal: its fraction counts from 2^-14
		bits = math.Float32bits(math.Float32frombits(bits+1<<23) - 0x1p-14)
	case 0x7c00:
		bits += 112 << 23
		if bits > exponents {
			bits |= 1 << 22 // a quiet NaN
		}
	}
	return math.Float32frombits(bits | uint32(h)<<16&sign)
}

// Float32ToFP16 rounds a number to fp16, to nearest even, denormal results included.
func Float32ToFP16(x float32) uint16 {
	bits := math.Float32bits(x)
	magnitude := bits &^ sign
	h := (magnitude + 0xfff + magnitude>>13&1 - 112<<23) >> 13
	if magnitude < 0x38800000 { // below 2^-14: denormal in fp16
		// Adding 0.5 puts the last bit of the result at 2^-24: the addition
		// itself rounds to nearest even.
		h = math.Float32bits(math.Float32frombits(magnitude)+0.5) - 0x3f000000
	} else if magnitude >= 0x477ff000 { // rounds to 65536 or more
		h = 0x7c00
		if magnitude > exponents { // NaN
			h = 0x7e00 | magnitude>>13&0x3ff
		}
	}
	return uint16(h | bits>>16&0x8000)
}

// Merge returns the fp32 master of a parameter and its low 16 bits in split state.
func Merge(parameter, low uint16) float32 {
	return math.Float32frombits(uint32(parameter)<<16 + uint32(int32(int16(low))))
}

// Separate splits an fp32 master into a bf16 parameter, rounded half away from zero,
// and the low 16 bits. Merge restores the master for each of the 2^32 patterns.
// (Rounding to nearest even could not be undone at ties.)
func Separate(master float32) (parameter, low uint16) {
	bits := math.Float32bits(master)
	return uint16((bits + 0x8000) >> 16), uint16(bits)
}

// Merge24 returns the master of a parameter and its low 8 bits in split24 state.
func Merge24(parameter uint16, low byte) float32 {
	return Merge(parameter, uint16(low)<<8)
}

// Separate24 splits the upper 24 bits of a master into a bf16 parameter, rounded half away
// from zero, and the low 8 bits. The lowest 8 bits of the master are lost: round before.
func Separate24(master float32) (parameter uint16, low byte) {
	parameter, bits := Separate(master)
	return parameter, byte(bits >> 8)
}

// lost are the bits of a master that split24 state does not hold.
const lost = 1<<8 - 1

// RoundTo24 rounds a master to 24 bits, half away from zero.
func RoundTo24(master float32) float32 {
	return math.Float32frombits((math.Float32bits(master) + (lost+1)/2) &^ lost)
}

// ditherTo24 rounds a master to 24 bits at random. The part that is cut off is the
// probability of rounding away from zero.
func ditherTo24(master float32, dither uint32) float32 {
	return math.Float32frombits((math.Float32bits(master) + dither*dither>>24) &^ lost)
}
