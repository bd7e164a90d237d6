//go:build !purego

package kernel

import (
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// The operations for NEON take full groups of 16 elements. n is a number of elements;
// a rest that is no full group is not touched.
//
// Arithmetic is the processor's own, rounded to nearest even, with denormals as they
// are. It differs from the contract's only if a result is tiny. An operation stops
// before the first group with such a result and stores nothing of that group. It
// returns how many elements it did. So no operation changes the processor's modes, and
// a result may take the place of an operand.

const hasNEON = true

// mulNEON is a·b.
//
//go:noescape
func mulNEON(to *float32, n int, a float32, b *float32) (done int)

// squareNEON is a·a.
//
//go:noescape
func squareNEON(to *float32, n int, a *float32) (done int)

// addNEON is a + b.
//
//go:noescape
func addNEON(to *float32, n int, a, b *float32) (done int)

// divNEON is a/b.
//
//go:noescape
func divNEON(to *float32, n int, a, b *float32) (done int)

// fmaNEON is a·b + c.
//
//go:noescape
func fmaNEON(to *float32, n int, a float32, b, c *float32) (done int)

// fmaPlusNEON is a·b + c, with the same c for all.
//
//go:noescape
func fmaPlusNEON(to *float32, n int, a float32, b *float32, c float32) (done int)

// fmaSquareNEON is a·a + c.
//
//go:noescape
func fmaSquareNEON(to *float32, n int, a, c *float32) (done int)

// addSquaresNEON adds the squares of a run to the sums of their lanes.
//
//go:noescape
func addSquaresNEON(sums *[abi.Group]float32, n int, run *float32) (done int)

// sqrtNEON is √a. No root is tiny.
//
//go:noescape
func sqrtNEON(to *float32, n int, a *float32)

// withSignNEON is magnitude with the sign of a, and 0 if a is 0. A NaN stays.
//
//go:noescape
func withSignNEON(to *float32, n int, magnitude float32, a *float32)

// loadBF16NEON reads bf16 as the arithmetic sees it.
//
//go:noescape
func loadBF16NEON(to *float32, n int, from *byte)

// loadFP16NEON reads fp16.
//
//go:noescape
func loadFP16NEON(to *float32, n int, from *byte)

// loadFP32NEON reads fp32 as the arithmetic sees it.
//
//go:noescape
func loadFP32NEON(to *float32, n int, from *byte)

// mergeNEON reads master weights of split state as the arithmetic sees them.
//
//go:noescape
func mergeNEON(to *float32, n int, parameter, low *uint16)

// storeBF16NEON rounds to bf16, to nearest even.
//
//go:noescape
func storeBF16NEON(to *byte, n int, from *float32)

// storeFP16NEON rounds to fp16, to nearest even.
//
//go:noescape
func storeFP16NEON(to *byte, n int, from *float32)

// awayNEON rounds to bf16, half away from zero.
//
//go:noescape
func awayNEON(to *uint16, n int, from *float32)

// ditheredNEON rounds to bf16 at random. The dither belongs to the first element.
//
//go:noescape
func ditheredNEON(to *uint16, n int, from *float32, dither uint32)

// separateNEON stores master weights in split state.
//
//go:noescape
func separateNEON(parameter *uint16, n int, low *uint16, from *float32)

// loadBlockNEON reads int8 moments: the first, and the roots of the second.
//
//go:noescape
func loadBlockNEON(firsts *float32, n int, roots *float32, first, second *byte, base, shift uint32)

// boundNEON bounds roots. It returns, as bits, the least root that is not 0, minus 1,
// and the largest.
//
//go:noescape
func boundNEON(roots *float32, n int) (least, largest uint32)

// codesNEON encodes moments in int8. Before the last digits are cut off, it adds added
// to the first element's second moment and added + apart to its first moment. Both
// grow by stride from element to element.
//
//go:noescape
func codesNEON(first *byte, n int, second *byte, firsts, roots *float32, base, shift, added, apart, stride uint32)

// arithmetic takes n elements through an operation, in assembly from element i on, and
// in plain Go from element i to end.
func (s Set) arithmetic(n int, groups func(i int) (done int), exact func(i, end int)) {
	if s != NEON {
		exact(0, n)
		return
	}
	for i := 0; i < n; i = min(i+abi.Group, n) {
		i += groups(i)
		exact(i, min(i+abi.Group, n))
	}
}

func (s Set) mul(to vector, a float32, b vector) {
	s.arithmetic(len(to), func(i int) int { return mulNEON(&to[i], len(to)-i, a, &b[i]) },
		func(i, end int) { to[i:end].mul(a, b[i:end]) })
}

func (s Set) square(to, a vector) {
	s.arithmetic(len(to), func(i int) int { return squareNEON(&to[i], len(to)-i, &a[i]) },
		func(i, end int) { to[i:end].square(a[i:end]) })
}

func (s Set) add(to, a, b vector) {
	s.arithmetic(len(to), func(i int) int { return addNEON(&to[i], len(to)-i, &a[i], &b[i]) },
		func(i, end int) { to[i:end].add(a[i:end], b[i:end]) })
}

func (s Set) div(to, a, b vector) {
	s.arithmetic(len(to), func(i int) int { return divNEON(&to[i], len(to)-i, &a[i], &b[i]) },
		func(i, end int) { to[i:end].div(a[i:end], b[i:end]) })
}

func (s Set) fma(to vector, a float32, b, c vector) {
	s.arithmetic(len(to), func(i int) int { return fmaNEON(&to[i], len(to)-i, a, &b[i], &c[i]) },
		func(i, end int) { to[i:end].fma(a, b[i:end], c[i:end]) })
}

func (s Set) fmaPlus(to vector, a float32, b vector, c float32) {
	s.arithmetic(len(to), func(i int) int { return fmaPlusNEON(&to[i], len(to)-i, a, &b[i], c) },
		func(i, end int) { to[i:end].fmaPlus(a, b[i:end], c) })
}

func (s Set) fmaSquare(to, a, c vector) {
	s.arithmetic(len(to), func(i int) int { return fmaSquareNEON(&to[i], len(to)-i, &a[i], &c[i]) },
		func(i, end int) { to[i:end].fmaSquare(a[i:end], c[i:end]) })
}

func (s Set) addSquares(sums *[abi.Group]float32, run vector) {
	s.arithmetic(len(run), func(i int) int { return addSquaresNEON(sums, len(run)-i, &run[i]) },
		func(i, end int) { run[i:end].addSquares(sums) })
}

// whole returns how many of n elements the set's assembly takes.
func (s Set) whole(n int) int {
	if s != NEON {
		return 0
	}
	return n - n%abi.Group
}

func (s Set) sqrt(to, a vector) {
	n := s.whole(len(to))
	if n > 0 {
		sqrtNEON(&to[0], n, &a[0])
	}
	to[n:].sqrt(a[n:])
}

func (s Set) withSign(to vector, magnitude float32, a vector) {
	n := s.whole(len(to))
	if n > 0 {
		withSignNEON(&to[0], n, magnitude, &a[0])
	}
	to[n:].withSign(magnitude, a[n:])
}

func (s Set) load(to vector, from Array) {
	n := s.whole(len(to))
	if n > 0 {
		switch from.Type {
		case dtype.BF16:
			loadBF16NEON(&to[0], n, &from.Data[0])
		case dtype.F16:
			loadFP16NEON(&to[0], n, &from.Data[0])
		default:
			loadFP32NEON(&to[0], n, &from.Data[0])
		}
	}
	from.Slice(n, len(to)).load(to[n:])
}

func (s Set) store(to Array, from vector) {
	n := s.whole(len(from))
	if n > 0 {
		switch to.Type {
		case dtype.BF16:
			storeBF16NEON(&to.Data[0], n, &from[0])
		case dtype.F16:
			storeFP16NEON(&to.Data[0], n, &from[0])
		default:
			n = 0 // a copy
		}
	}
	to.Slice(n, len(from)).store(from[n:])
}

func (s Set) away(to []uint16, from vector) {
	n := s.whole(len(from))
	if n > 0 {
		awayNEON(&to[0], n, &from[0])
	}
	from[n:].away(to[n:])
}

func (s Set) dithered(to []uint16, from vector, dither uint32) {
	n := s.whole(len(from))
	if n > 0 {
		ditheredNEON(&to[0], n, &from[0], dither)
	}
	from[n:].dithered(to[n:], dither+uint32(n)*abi.DitherStep)
}

func (s Set) merge(to vector, parameter, low []uint16) {
	n := s.whole(len(to))
	if n > 0 {
		mergeNEON(&to[0], n, &parameter[0], &low[0])
	}
	to[n:].merge(parameter[n:], low[n:])
}

func (s Set) separate(parameter, low []uint16, from vector) {
	n := s.whole(len(from))
	if n > 0 {
		separateNEON(&parameter[0], n, &low[0], &from[0])
	}
	from[n:].separate(parameter[n:], low[n:])
}

// from returns the block from an element on.
func (b block) from(i int) block { return block{b.header, b.first[i:], b.second[i:]} }

func (s Set) loadBlock(b block, firsts, roots vector) {
	n := s.whole(len(firsts))
	if n > 0 {
		floor, shift := layout(*b.header)
		loadBlockNEON(&firsts[0], n, &roots[0], &b.first[0], &b.second[0], floor<<23, shift)
	}
	b.from(n).load(firsts[n:], roots[n:])
}

func (s Set) bound(roots vector) (least, largest uint32) {
	n := s.whole(len(roots))
	least, largest = roots[n:].bound()
	if n > 0 {
		low, high := boundNEON(&roots[0], n)
		least, largest = min(least, low), max(largest, high)
	}
	return least, largest
}

func (s Set) codes(b block, firsts, roots vector, added rounding) {
	n := s.whole(len(roots))
	if n > 0 {
		floor, shift := layout(*b.header)
		codesNEON(&b.first[0], n, &b.second[0], &firsts[0], &roots[0],
			floor<<23, shift, added.second, added.first-added.second, added.stride)
		added.first += uint32(n) * added.stride
		added.second += uint32(n) * added.stride
	}
	b.from(n).codes(firsts[n:], roots[n:], added)
}
