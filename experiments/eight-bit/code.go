package main

import "math"

// blockElements is how many consecutive elements share a header.
const blockElements = 256

// vector is one number for each element of a block.
type vector [blockElements]float32

// block holds both moments of 256 elements in 514 bytes.
type block struct {
	floor  uint8 // binary32 exponent of the lowest octave of second
	shift  uint8 // 23 minus the digits of second; 0 in a block of zeros
	first  [blockElements]uint8
	second [blockElements]uint8
}

// code holds Adam's moments in one byte each. The second moment is stored as its square root s, an unsigned float of
// 8 bits. The exponent of s counts from the block's floor, so the grid of possible values does not move with the
// scale of the block. The first moment is in units of the power of two just below s of the same element.
//
// The arithmetic below is the specification, for kernels to match bit for bit.
type code struct {
	dither       dither
	fewest, most uint32 // binary digits of second after the leading one
}

// dither returns the random bits for rounding an element in a step.
type dither func(block, element, step uint32) uint32

// chosen is the code that README.md proposes.
var chosen = code{dither: sequence, fewest: 3, most: 6}

const (
	leastFloor = 64                 // the exponent of 2^-63, the root of the smallest normal number
	offset     = 1.0 / 16           // of first; makes its steps even around zero
	firstShift = 19                 // 23 minus the digits of first
	exponents  = uint32(0x7f800000) // the exponent bits of a binary32 number
	sign       = uint32(1 << 31)    // its sign bit
	stepStride = uint32(0xc13c8f09) // see sequence
	nextStride = uint32(0x9e3779b1) // a prime near 2^32 times the golden section
	firstMask  = uint32(1)<<firstShift - 1
)

// sequence gives each element a sequence over the steps that fills the interval evenly. In each step, the upper 13
// bits advance by 0.7548 of their range and the lower 19 bits by 0.5698 of theirs: the strides of the two-dimensional
// R2 sequence. The elements of a block are evenly spread in the same way, and blocks start at random places.
func sequence(block, element, step uint32) uint32 {
	return scramble(block) + step*stepStride + element*nextStride
}

// scramble is the finalizer of MurmurHash3.
func scramble(x uint32) uint32 {
	x ^= x >> 16
	x *= 0x85ebca6b
	x ^= x >> 13
	x *= 0xc2b2ae35
	return x ^ x>>16
}

// decode returns the first moments and the roots of the second moments.
func (b *block) decode(m, s *vector) {
	base, shift := uint32(b.floor)<<23, uint32(b.shift)
	for i := range b.second {
		m[i], s[i] = 0, 0
		if b.second[i] != 0 {
			bits := uint32(b.second[i])<<shift + base
			s[i] = math.Float32frombits(bits)
			m[i] = decodeFirst(b.first[i], bits&exponents)
		}
	}
}

// encode rounds the moments up or down at random. Second moments must be normal numbers or zeros.
func (c code) encode(b *block, number, step uint32, m, s *vector) {
	least, largest := ^uint32(0), uint32(0)
	for _, x := range s {
		bits := math.Float32bits(x)
		least, largest = min(least, bits-1), max(largest, bits) // zeros wrap around
	}
	if largest == 0 {
		*b = block{}
		return
	}
	floor, shift := c.layout(least+1, largest)
	b.floor, b.shift = uint8(floor), uint8(shift)
	base := floor << 23
	for i, x := range s {
		b.first[i], b.second[i] = 0, 0
		if bits := math.Float32bits(x); bits != 0 {
			random := c.dither(number, uint32(i), step)
			above := max(int32(bits-base), 1<<shift) // a value below the floor becomes code 1, never 0
			k := (uint32(above) + random>>(32-shift)) >> shift
			b.second[i] = uint8(k)
			b.first[i] = encodeFirst(m[i], (k<<shift+base)&exponents, random&firstMask)
		}
	}
}

// layout takes as many digits as leave enough octaves for the whole block. The largest number must fit even when it
// is rounded up.
func (c code) layout(least, largest uint32) (floor, shift uint32) {
	for digits := c.most; ; digits-- {
		shift = 23 - digits
		top := (largest + 1<<shift - 1) >> 23
		floor = max(top+1-1<<(8-digits), leastFloor)
		if digits == c.fewest || least >= floor<<23+1<<shift {
			return floor, shift
		}
	}
}

// decodeFirst multiplies by the reference, a power of two.
func decodeFirst(q uint8, reference uint32) float32 {
	x := math.Float32frombits(uint32(q&127)<<firstShift + math.Float32bits(offset))
	x = float32((x - offset) * math.Float32frombits(reference))
	return math.Float32frombits(math.Float32bits(x) | uint32(q)<<24&sign)
}

// encodeFirst divides by the reference. The product is exact, so a fused multiply-add gives the same bits.
func encodeFirst(m float32, reference, random uint32) uint8 {
	bits := math.Float32bits(m)
	x := float32(math.Float32frombits(bits&^sign)*math.Float32frombits(254<<23-reference)) + offset
	q := min((math.Float32bits(x)-math.Float32bits(offset)+random)>>firstShift, 127)
	return uint8(bits&sign>>24 | q)
}
