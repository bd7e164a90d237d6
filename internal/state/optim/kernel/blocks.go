package kernel

import (
	"math"

	"plimsoll/internal/state/optim/kernel/abi"
)

// The code of int8 moments in plain Go. The package comment has its formulas.

const (
	exponents = uint32(0x7f800000) // the exponent bits of a binary32 number
	sign      = uint32(1 << 31)    // its sign bit
	firstMask = uint32(1)<<abi.FirstShift - 1

	firstOffset = 1.0 / 16 // abi.FirstOffset
	mostRoot    = 0x1p63   // abi.MostRoot
)

// block is a header and the codes of up to [Block] elements.
type block struct {
	header        *uint16
	first, second []byte
}

// block returns a block of int8 moments of the chunk.
func (c *Chunk) block(number int) block {
	from := number * Block
	end := min(from+Block, len(c.Moments[0].Data)) // a byte each
	return block{&c.Headers[number], c.Moments[0].Data[from:end], c.Moments[1].Data[from:end]}
}

// Moment returns element i of the first moment (number 0) or the second (1), as an
// update would see it.
func (c *Chunk) Moment(number, i int) float32 {
	if c.Headers == nil {
		return c.Moments[number].At(i)
	}
	floor, shift := layout(c.Headers[i/Block])
	m, s := decode(c.Moments[0].Data[i], c.Moments[1].Data[i], floor, shift)
	if number == 0 {
		return m
	}
	return s * s
}

// PutMoment writes values of the first moment (number 0) or the second (1), beginning
// at an element of the chunk. Writing them twice, or again after the first attempt was
// broken off, gives the same bits as writing them once. With int8 moments this needs
// an undo log, as a block is encoded as a whole: the log restores the block that was
// being changed. The zero Undo keeps nothing.
func (c Chunk) PutMoment(f Format, number, from int, values []float32, u Undo) {
	if c.Headers == nil {
		for i, x := range values {
			c.Moments[number].Put(from+i, x)
		}
		return
	}
	for first := from / Block * Block; first < from+len(values); first += Block {
		if u.bytes != nil {
			u.keepMoments(f, c, first)
		}
		n := min(Block, c.Len()-first)
		// The rest of the block is encoded again, in steps that depend on the
		// largest number of the block. That number may be in the rest and be
		// rounded down over a power of two. Then the second time has other steps,
		// which stay from then on.
		for range 2 {
			var both [2][Block]float32
			for i := range n {
				both[0][i], both[1][i] = c.Moment(0, first+i), c.Moment(1, first+i)
				if j := first + i - from; j >= 0 && j < len(values) {
					both[number][i] = values[j]
				}
			}
			c.PutBlock(first/Block, both[0][:n], both[1][:n])
			if from <= first && first+n <= from+len(values) {
				break
			}
		}
	}
}

// PutBlock encodes the moments of a block in int8, rounded to nearest. They come from
// another format and are rounded once, not step by step.
func (c *Chunk) PutBlock(number int, firsts, seconds []float32) {
	var roots [Block]float32
	for i, v := range seconds {
		roots[i] = sqrt(flush(v))
	}
	Generic.encode(c.block(number), firsts, roots[:len(seconds)], toNearest)
}

// scramble is the finalizer of MurmurHash3.
func scramble(x uint32) uint32 {
	x ^= x >> 16
	x *= 0x85ebca6b
	x ^= x >> 13
	x *= 0xc2b2ae35
	return x ^ x>>16
}

// load reads all elements.
func (b block) load(firsts, roots vector) {
	floor, shift := layout(*b.header)
	first, second := b.first[:len(firsts)], b.second[:len(firsts)]
	roots = roots[:len(firsts)]
	for i := range firsts {
		firsts[i], roots[i] = decode(first[i], second[i], floor, shift)
	}
}

// layout returns the floor and the shift of a header.
func layout(header uint16) (floor, shift uint32) { return uint32(header & 0xff), uint32(header >> 8) }

// decode returns an element of the first moment, and the root of the second.
func decode(first, second byte, floor, shift uint32) (m, s float32) {
	if second == 0 {
		return 0, 0
	}
	bits := uint32(second)<<shift + floor<<23
	x := math.Float32frombits(uint32(first&127)<<abi.FirstShift + abi.FirstOffset)
	m = float32((x - firstOffset) * math.Float32frombits(bits&exponents))
	return math.Float32frombits(math.Float32bits(m) | uint32(first)<<24&sign), math.Float32frombits(bits)
}

// rounding is added to numbers before their last digits are cut off: the upper digits
// of second to the second moment, the lower digits of first to the first. Both grow by
// a stride from element to element.
type rounding struct{ second, first, stride uint32 }

// atRandom rounds up or down at random. The dither depends on the block and the step.
func atRandom(dither uint32) rounding { return rounding{dither, dither, abi.ElementStride} }

// toNearest adds half.
var toNearest = rounding{1 << 31, 1 << (abi.FirstShift - 1), 0}

// encode encodes a block from its first moments and the roots of the second.
func (s Set) encode(b block, firsts, roots vector, added rounding) {
	least, largest := s.bound(roots)
	if largest == 0 {
		*b.header = 0
		clear(b.first)
		clear(b.second)
		return
	}
	floor, shift := chooseLayout(least+1, largest)
	*b.header = uint16(floor | shift<<8)
	s.codes(b, firsts, roots, added)
}

// bound bounds roots. It returns, as bits, the least root that is not 0, minus 1, and
// the largest.
func (roots vector) bound() (least, largest uint32) {
	least = ^uint32(0)
	for i, s := range roots {
		if !(s <= mostRoot) {
			roots[i] = mostRoot
		}
		bits := math.Float32bits(roots[i])
		least, largest = min(least, bits-1), max(largest, bits) // zeros wrap around
	}
	return least, largest
}

// codes encodes elements with the floor and the shift of the header.
func (b block) codes(firsts, roots vector, added rounding) {
	floor, shift := layout(*b.header)
	base, shift := floor<<23, shift&31 // the mask tells the compiler that no shift exceeds 31
	first, second, firsts := b.first[:len(roots)], b.second[:len(roots)], firsts[:len(roots)]
	for i, s := range roots {
		var q, k uint32
		if bits := math.Float32bits(s); bits != 0 {
			above := max(int32(bits-base), 1<<shift) // a root below the floor gets code 1, never 0
			k = (uint32(above) + added.second>>(-shift&31)) >> shift
			q = encodeFirst(firsts[i], (k<<shift+base)&exponents, added.first&firstMask)
		}
		first[i], second[i] = uint8(q), uint8(k)
		added.second += added.stride
		added.first += added.stride
	}
}

// chooseLayout takes as many digits as leave enough octaves for all of the block. The
// largest number must still fit when it is rounded up.
func chooseLayout(least, largest uint32) (floor, shift uint32) {
	for digits := uint32(abi.MostDigits); ; digits-- {
		shift = 23 - digits
		top := (largest + 1<<shift - 1) >> 23
		floor = max(top+1-1<<(8-digits), abi.LeastFloor)
		if digits == abi.FewestDigits || least >= floor<<23+1<<shift {
			return floor, shift
		}
	}
}

// encodeFirst returns the code of a first moment in units of the reference. The product
// is exact, or so small that the sum does not change: a fused multiply-add gives the
// same bits.
func encodeFirst(m float32, reference, added uint32) uint32 {
	bits := math.Float32bits(m)
	x := float32(math.Float32frombits(bits&^sign)*math.Float32frombits(254<<23-reference)) + firstOffset
	q := min((math.Float32bits(x)-abi.FirstOffset+added)>>abi.FirstShift, 127)
	return bits&sign>>24 | q
}
