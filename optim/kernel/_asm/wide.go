package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/optim/kernel/abi"
)

// What AVX-512 does differently with blocks of int8 moments. Roots that are 0,
// too large or NaN are rare: a block is encoded as if it had none, and put right
// where it has.

// encoder is what a block is encoded with, in registers.
type encoder struct {
	least, base       reg.VecVirtual
	even, odd, dither reg.VecVirtual // counts of shifts
	inOrder           reg.VecVirtual // of quarters of two packed registers
}

// doubled is 1/16 in a quotient of twice the size.
const doubled = abi.FirstOffset + 1<<23

// forEncoding holds what the encoding of a block needs.
func (b *blocks) forEncoding() *blocks {
	held := *b
	if b.lanes != 16 {
		return &held
	}
	held.hold(exponents, ^uint32(sign), doubled, 1<<32-doubled, 1<<abi.FirstShift-1, 0x80808080, b.ditherStep(0), b.ditherStep(1))
	count := func(offset int) reg.VecVirtual {
		x := XMM()
		VMOVDQU32(b.at(offset), x)
		return x
	}
	held.encoder = encoder{
		b.load(b.at(encodeLeast)), b.load(b.at(encodeBase)),
		count(encodeShift), count(encodeOdd), count(ditherShift),
		b.load(table("inOrder", []uint32{0, 0, 2, 0, 4, 0, 6, 0, 1, 0, 3, 0, 5, 0, 7, 0})),
	}
	return &held
}

// encodeWide is encode for AVX-512.
func (b *blocks) encodeWide() {
	var seconds, firsts, signs vectors // words, of a group each
	for group := range 2 {
		var codes, quotients vectors
		for i := range 2 {
			code, quotient := b.codes(group, i)
			codes, quotients = append(codes, code), append(quotients, quotient)
		}
		VPSRLD(b.encoder.even, codes[0], codes[0])
		VPSRLD(b.encoder.odd, codes[1], codes[1])
		b.blend(codes[1], codes[0], oddWords)
		VPSUBW(b.encoder.base, codes[0], codes[0])
		VPSRLD(U8(abi.FirstShift), quotients[0], quotients[0])
		VPSRLD(U8(abi.FirstShift-16), quotients[1], quotients[1])
		b.blend(quotients[1], quotients[0], oddWords)
		words := b.vector()
		VPSRLD(U8(16), b.inRing(firstsRing, group, 0), words)
		VPTERNLOGD(U8(orAnd), b.inRing(firstsRing, group, 1), b.held[0xffff0000], words)
		seconds, firsts, signs = append(seconds, codes[0]), append(firsts, quotients[0]), append(signs, words)
	}
	// Codes fit their bytes; quotients are at most 127 in theirs, and signs are kept.
	VPACKUSWB(seconds[1], seconds[0], seconds[0])
	VPACKSSWB(firsts[1], firsts[0], firsts[0])
	VPACKSSWB(signs[1], signs[0], signs[0])
	VPTERNLOGD(U8(orAnd), b.held[0x80808080], signs[0], firsts[0])
	for _, x := range []struct {
		codes reg.VecVirtual
		to    stream
	}{{seconds[0], b.second}, {firsts[0], b.first}} {
		VPERMQ(x.codes, b.encoder.inOrder, x.codes)
		VMOVDQU32(x.codes, b.encoded(x.to, 0))
	}
}

// codes is quotients for AVX-512: code and quotient of vector i of a group, in
// upper bits, where roots are not 0.
func (b *blocks) codes(group, i int) (code, quotient reg.VecVirtual) {
	code, quotient = b.vector(), b.vector()
	random, reciprocal, dither := b.vector(), b.vector(), b.dither
	VPMAXSD(b.inRing(rootsRing, group, i), b.encoder.least, code)
	VPSRLD(b.encoder.dither, dither, random)
	VPADDD(random, code, code)
	VPANDND(b.integer(exponents), code, reciprocal)
	VPANDD(b.inRing(firstsRing, group, i), b.held[^uint32(sign)], quotient)
	VFMADD213PS(b.integer(doubled), reciprocal, quotient)
	random = b.vector()
	VMOVDQA32(dither, random)
	VPTERNLOGD(U8(andOr), b.integer(1<<32-doubled), b.integer(1<<abi.FirstShift-1), random)
	VPADDD(random, quotient, quotient)
	b.nextDither(i)
	return code, quotient
}

// extremes are the least root of the block that has just been updated that is
// not 0, and the largest.
func (b *blocks) extremes() (least, largest reg.GPVirtual) {
	least, largest = b.reduce(b.least, VPMINUD), b.reduce(b.largest, VPMAXUD)
	if b.lanes != 16 {
		INCL(least)
		return least, largest
	}
	unusual, usual, next, from, end := label("unusual"), label("usual"), label("next"), GP64(), GP64()
	MOVL(U32(0), b.at(holdsZeros))
	TESTL(least, least)
	JEQ(LabelRef(unusual))
	CMPL(largest, U32(abi.MostRoot))
	JBE(LabelRef(usual))
	Label(unusual)
	// With zeros as the largest, which makes others the least.
	b.noExtremes()
	MOVL(U32(1), b.at(holdsZeros))
	MOVQ(b.index, from)
	SUBQ(U32(abi.Block), from)
	ANDQ(U32(2*abi.Block-1), from)
	LEAQ(Mem{Base: from, Disp: abi.Block}, end)
	Label(next)
	root := Mem{Base: b.space, Index: from, Scale: 4, Disp: rootsRing}
	x := b.vector()
	VMOVDQU32(root, x)
	VPMINUD(integer(abi.MostRoot), x, x)
	VMOVDQU32(x, root)
	VPMAXUD(x, b.largest, b.largest)
	VPADDD(integer(0xffffffff), x, x)
	VPMINUD(x, b.least, b.least)
	ADDQ(U8(b.lanes), from)
	CMPQ(from, end)
	JB(LabelRef(next))
	MOVL(b.reduce(b.least, VPMINUD), least)
	INCL(least)
	MOVL(b.reduce(b.largest, VPMAXUD), largest)
	Label(usual)
	return least, largest
}

// clearZeros makes the codes 0 where the root is 0, in the block before index.
func (b *blocks) clearZeros() {
	next, done := label("next"), label("done")
	CMPL(b.at(holdsZeros), U8(0))
	JEQ(LabelRef(done))
	SUBQ(U32(abi.Block), b.index)
	Label(next)
	b.enterRings()
	XORQ(U32(abi.Block), b.ring)
	var zeros vectors
	for i := range 2 {
		x, none := b.vector(), K()
		VMOVDQU32(b.inRing(rootsRing, 0, i), x)
		VPTESTNMD(x, x, none)
		VPMOVM2D(none, x)
		zeros = append(zeros, x)
	}
	VPSRLD(U8(16), zeros[0], zeros[0])
	b.blend(zeros[1], zeros[0], oddWords)
	VPMOVWB(zeros[0], zeros[0].AsY())
	for _, of := range []stream{b.first, b.second} {
		codes, place := YMM(), of.at(b.index, -abi.Block)
		VPANDND(place, zeros[0].AsY(), codes)
		VMOVDQU32(codes, place)
	}
	ADDQ(U8(b.group()), b.index)
	TESTQ(U32(abi.Block-1), b.index)
	JNE(LabelRef(next))
	Label(done)
}
