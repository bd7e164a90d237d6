package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// encode encodes the tile before index, in the previous block, from the rings.
func (b *blocks) encode() {
	least := b.vector()
	VMOVDQA(b.at(encodeLeast), least)
	var seconds, firsts, signs vectors // words, of a group each
	for group := range 2 {
		var codes, quotients, m vectors
		for i := range 2 {
			code, quotient, first := b.quotients(group, i, least)
			codes, quotients, m = append(codes, code), append(quotients, quotient), append(m, first)
			b.nextDither(i)
		}
		second, first := b.joinCodes(codes), b.joinQuotients(quotients) // second is below 0 where the root is 0
		VPSUBW(words(quotientOffset), first, first)
		VPMINUW(words(127), first, first)
		VPSRLD(U8(16), m[0], m[0])
		b.blend(b.inRing(firstsRing, group, 1), m[0], oddWords)
		seconds, firsts, signs = append(seconds, second), append(firsts, first), append(signs, m[0])
	}
	zero := b.vector()
	second, first, sign := seconds[0], firsts[0], signs[0]
	VPACKUSWB(seconds[1], second, second)
	VPACKUSWB(firsts[1], first, first)
	VPACKSSWB(signs[1], sign, sign)
	VPAND(integer(0x80808080), sign, sign)
	VPOR(sign, first, first)
	b.clear(zero)
	VPCMPEQB(zero, second, zero)
	VPANDN(first, zero, first)
	VPERMQ(U8(inQuarters), second, second)
	VPERMQ(U8(inQuarters), first, first)
	VMOVDQU(second, b.encoded(b.second))
	VMOVDQU(first, b.encoded(b.first))
}

// joinCodes packs the codes of even and odd elements into 16-bit words.
func (b *blocks) joinCodes(codes vectors) reg.VecVirtual {
	VPSRLD(b.at(encodeShift), codes[0], codes[0])
	VPSRLD(b.at(encodeOdd), codes[1], codes[1])
	b.blend(codes[1], codes[0], oddWords)
	VPSUBW(b.at(encodeBase), codes[0], codes[0])
	return codes[0]
}

// joinQuotients packs the quotients of even and odd elements into 16-bit words.
func (b *blocks) joinQuotients(quotients vectors) reg.VecVirtual {
	VPSRLD(U8(abi.FirstShift), quotients[0], quotients[0])
	VPSRLD(U8(abi.FirstShift-16), quotients[1], quotients[1])
	b.blend(quotients[1], quotients[0], oddWords)
	return quotients[0]
}

// encoded returns the address that codes of the tile go to.
func (b *blocks) encoded(to stream) Mem { return to.at(b.index, -b.tile()-abi.Block) }

// quotientOffset is the offset of 1/16 in the upper digits of a quotient of twice the size.
const quotientOffset = (abi.FirstOffset + 1<<23) >> abi.FirstShift

// quotients prepares vector i of a group for both codes: code · 2^shift and quotient · 2^FirstShift. Both have the
// random bits added, and undefined bits below. The exponents of a number and its complement add up to 255, not 254,
// so the quotient is doubled, and its offset with it.
func (b *blocks) quotients(group, i int, least reg.VecVirtual) (code, quotient, first reg.VecVirtual) {
	root := b.inRing(rootsRing, group, i)
	code, quotient, first = b.vector(), b.vector(), b.vector()
	random, reciprocal := b.vector(), b.vector()
	VPMAXSD(root, least, code)
	VPSRLD(b.at(ditherShift), b.dither, random)
	VPADDD(random, code, code)
	VPSIGND(root, code, code) // 0 where the root is 0
	VPANDN(b.integer(exponents), code, reciprocal)
	VMOVUPS(b.inRing(firstsRing, group, i), first)
	VPANDN(first, b.held[sign], quotient)
	VFMADD213PS(integer(abi.FirstOffset+1<<23), reciprocal, quotient)
	VPAND(integer(1<<abi.FirstShift-1), b.dither, random)
	VPADDD(random, quotient, quotient)
	return code, quotient, first
}

// nextDither advances from the dither of vector i of a group to that of the next vector.
func (b *blocks) nextDither(i int) {
	VPADDD(b.integer(b.ditherStep(i)), b.dither, b.dither)
}

// ditherStep returns what nextDither adds.
func (b *blocks) ditherStep(i int) uint32 {
	here, next := b.elementOf(i, 0), b.group()
	if i == 0 {
		next = b.elementOf(1, 0)
	}
	return blockDither(next - here)
}

// blockDither returns the dither of an element of a block, relative to the block's first element.
func blockDither(element int) uint32 { return uint32(element * abi.ElementStride & 0xffffffff) }

// words returns a 16-bit number twice in every lane.
func words(x uint32) Mem { return integer(x<<16 | x) }

// endBlock chooses the layout of the block whose elements were just updated, stores its header, and prepares its
// encoding.
func (b *blocks) endBlock() {
	least, largest := b.extremes()
	floor, shift, candidate, other := GP32(), GP32(), GP32(), GP32()
	for digits := abi.FewestDigits; digits <= abi.MostDigits; digits++ {
		MOVL(largest, candidate)
		ADDL(U32(1<<(23-digits)-1), candidate)
		SHRL(U8(23), candidate)
		SUBL(U32(1<<(8-digits)-1), candidate)
		CMPL(candidate, U8(abi.LeastFloor))
		MOVL(U32(abi.LeastFloor), other)
		CMOVLLT(other, candidate)
		if digits == abi.FewestDigits {
			MOVL(candidate, floor)
			MOVL(U32(23-digits), shift)
			continue
		}
		MOVL(candidate, other)
		SHLL(U8(23), other)
		ADDL(U32(1<<(23-digits)), other)
		CMPL(least, other)
		MOVL(U32(23-digits), other)
		CMOVLCC(candidate, floor)
		CMOVLCC(other, shift)
	}
	// The header is 0 for a block of zeros.
	header, zero := GP32(), GP32()
	MOVL(shift, header)
	SHLL(U8(8), header)
	ORL(floor, header)
	XORL(zero, zero)
	TESTL(largest, largest)
	CMOVLEQ(zero, header)
	place, headers := GP64(), argument("Headers")
	MOVQ(b.index, place)
	SHRQ(U8(7), place)
	MOVW(header.As16(), Mem{Base: headers, Index: place, Scale: 1, Disp: -2})

	if b.extended {
		b.placeFields(shift)
	}
	b.count(shift, encodeShift)
	MOVL(U32(32), other)
	SUBL(shift, other)
	b.count(other, ditherShift)
	MOVL(shift, other)
	SUBL(U8(16), other)
	b.count(other, encodeOdd)
	MOVL(shift, reg.ECX)
	SHLL(U8(23), floor)
	MOVL(U32(1), other)
	SHLL(reg.CL, other)
	ADDL(floor, other)
	if b.lanes == 16 {
		VPBROADCASTD(other, b.leastEncoded)
	} else {
		b.broadcast(other, encodeLeast)
	}
	SHRL(reg.CL, floor)
	if b.extended {
		MOVBLZX(floor.As8L(), floor)
		IMUL3L(U32(everyByte), floor, floor)
	} else {
		IMUL3L(U32(0x10001), floor, floor)
	}
	b.broadcast(floor, encodeBase)
	b.setDither()
}

// setDither sets the dither of the first vector of the block that was just updated.
func (b *blocks) setDither() {
	x, shifted, number := GP32(), GP32(), GP64()
	MOVQ(b.index, number)
	SUBQ(U32(abi.Block), number)
	SHRQ(U8(8), number)
	Load(Dereference(Param("a")).Field("Block"), x)
	ADDL(number.As32(), x)
	for _, step := range []struct {
		shift  uint64
		factor uint32
	}{{16, 0x85ebca6b}, {13, 0xc2b2ae35}, {16, 1}} {
		MOVL(x, shifted)
		SHRL(U8(step.shift), shifted)
		XORL(shifted, x)
		if step.factor != 1 {
			IMUL3L(U32(step.factor), x, x)
		}
	}
	Load(Dereference(Param("a")).Field("Dither"), shifted)
	ADDL(shifted, x)
	VMOVD(x, b.dither.AsX())
	VPBROADCASTD(b.dither.AsX(), b.dither)
	var dithers []uint32
	for lane := range b.lanes {
		dithers = append(dithers, blockDither(b.elementOf(0, lane)))
	}
	VPADDD(table("blockDither"+b.name, dithers), b.dither, b.dither)
}

// reduce returns the extreme of all lanes.
func (b *blocks) reduce(x reg.VecVirtual, extreme func(...Op)) reg.GPVirtual {
	if b.lanes == 16 {
		upper := YMM()
		VEXTRACTI64X4(U8(1), x, upper)
		extreme(upper, x.AsY(), x.AsY())
	}
	other := XMM()
	VEXTRACTI128(U8(1), x.AsY(), other)
	extreme(other, x.AsX(), x.AsX())
	for _, order := range []uint64{0b01_00_11_10, 0b10_11_00_01} {
		VPSHUFD(U8(order), x.AsX(), other)
		extreme(other, x.AsX(), x.AsX())
	}
	result := GP32()
	VMOVD(x.AsX(), result)
	return result
}
