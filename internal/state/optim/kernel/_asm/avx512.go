package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// AVX-512 encodes blocks of int8 moments differently. Roots that are 0, too large or NaN are rare. The kernel encodes
// every block as if it had none, and corrects a block that has some.

// doubled is the offset of 1/16 in a quotient of twice the size.
const doubled = abi.FirstOffset + 1<<23

// randomDigits selects the bits of a random number that are added to a quotient.
const randomDigits = 1<<abi.FirstShift - 1

// holdConstants loads as many constants as there are registers for. It also sets where codes go. While the kernel
// updates the first block there is none to encode, and codes go where nobody reads them.
func (b *blocks) holdConstants() {
	b.hold(0x8000, 0xffff0000, randomDigits)
	if b.extended {
		b.holdTables()
	} else {
		b.hold(digits, sixteenth)
	}
	b.rows = registers{}
	for _, row := range []int{abi.Beta1, abi.OneMinusBeta1, abi.Beta2, abi.OneMinusBeta2, abi.InverseRootBias2} {
		b.rows[row] = b.load(b.row(row))
	}
	b.leastEncoded = b.vector()
	b.clear(b.leastEncoded)
	b.clear(b.dither)
	MOVL(U32(0), b.at(holdsZeros))
	nowhere := GP64()
	LEAQ(b.at(noCodes), nowhere)
	SUBQ(argument("Start"), nowhere)
	MOVQ(nowhere, b.at(firstCodes))
	MOVQ(nowhere, b.at(secondCodes))
}

// placeCodes directs the codes that are encoded next to the block that was just updated.
func (b *blocks) placeCodes() {
	place := GP64()
	LEAQ(Mem{Base: b.first.base, Disp: -abi.Block}, place)
	MOVQ(place, b.at(firstCodes))
	LEAQ(Mem{Base: b.second.base, Disp: -abi.Block}, place)
	MOVQ(place, b.at(secondCodes))
}

// pending holds the codes of the first group of a tile, as 16-bit words, until the second group is encoded.
type pending struct{ second, first, sign reg.VecVirtual }

// encodeGroup encodes the group that lies one block before index. It is the first or second of a tile; with the
// second the kernel stores the codes of both.
func (b *blocks) encodeGroup(group int) {
	from := *b
	from.ring = GP64()
	MOVQ(b.ring, from.ring)
	XORQ(U32(abi.Block), from.ring)
	var codes, quotients vectors
	for i := range 2 {
		code, quotient := from.codes(group, i)
		codes, quotients = append(codes, code), append(quotients, quotient)
	}
	var second reg.VecVirtual
	if b.extended {
		second = b.collect(codes, group)
	} else {
		second = b.joinCodes(codes)
	}
	first := b.joinQuotients(quotients)
	sign := b.vector()
	VPSRLD(U8(16), from.inRing(firstsRing, group, 0), sign)
	b.blend(from.inRing(firstsRing, group, 1), sign, oddWords)
	if group == 0 {
		b.pending = pending{second, first, sign}
		return
	}
	// Codes fit their bytes; quotients are at most 127 in theirs, and signs are kept.
	before := b.pending
	VPACKSSWB(first, before.first, first)
	VPACKSSWB(sign, before.sign, sign)
	VPTERNLOGD(U8(orAnd), integer(0x80808080), sign, first)
	order := b.load(table("inOrder", []uint32{0, 0, 2, 0, 4, 0, 6, 0, 1, 0, 3, 0, 5, 0, 7, 0}))
	if b.extended {
		second = b.ordered4(second)
	} else {
		VPACKUSWB(second, before.second, second)
		VPERMQ(second, order, second)
	}
	VPERMQ(first, order, first)
	place := GP64()
	MOVQ(b.at(secondCodes), place)
	VMOVDQU32(second, stream{place, 1}.at(b.index, -b.group()))
	place = GP64()
	MOVQ(b.at(firstCodes), place)
	VMOVDQU32(first, stream{place, 1}.at(b.index, -b.group()))
}

// codes is the AVX-512 form of quotients. It returns code and quotient of vector i of a group, in upper bits. They
// are valid where roots are not 0.
func (b *blocks) codes(group, i int) (code, quotient reg.VecVirtual) {
	code, quotient = b.vector(), b.vector()
	random, reciprocal := b.vector(), b.vector()
	VPMAXSD(b.inRing(rootsRing, group, i), b.leastEncoded, code)
	VPSRLD(b.at(ditherShift), b.dither, random)
	VPADDD(random, code, code)
	VPANDND(b.integer(exponents), code, reciprocal)
	VPANDND(b.inRing(firstsRing, group, i), b.held[sign], quotient)
	VFMADD213PS(b.integer(doubled), reciprocal, quotient)
	random = b.vector()
	VMOVDQA32(b.dither, random)
	VPTERNLOGD(U8(andOr), b.integer(1<<32-doubled), b.integer(randomDigits), random)
	VPADDD(random, quotient, quotient)
	b.nextDither(i)
	return code, quotient
}

// extremes returns the least nonzero root and the largest root of the block that was just updated.
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
	// Subtracting 1 makes zeros the largest, so that the minimum is a nonzero root.
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

// clearZeros sets the codes in the block before index to 0 where the root is 0.
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
