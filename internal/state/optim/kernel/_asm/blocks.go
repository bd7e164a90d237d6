package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// The kernels for int8 moments walk each block twice. The first pass updates the elements; first moments and roots
// wait in rings for the extremes of the roots. The second pass encodes them. With AVX2 the kernel encodes a block
// after it has updated the next one, so that the extremes have time to arrive. With AVX-512 it encodes a block while
// it updates the next one, in the time that roots take.

// Layout of a kernel's workspace, in bytes: rings of two blocks each, the constants of the step, and the values that
// decode and encode blocks. A vector takes 64 bytes, a shift count 16.
const (
	firstsRing = 0
	rootsRing  = firstsRing + 2*4*abi.Block
	constants  = rootsRing + 2*4*abi.Block

	decodeBase  = constants + 4*abi.Group*abi.Rows // floor << 23; with AVX-512 floor << 7 in each half
	encodeLeast = decodeBase + 64                  // the bits of code 1; with VBMI where to find codes
	encodeBase  = encodeLeast + 64                 // the bits of code 0, shifted by shift
	decodeShift = encodeBase + 64
	encodeShift = decodeShift + 16
	encodeOdd   = encodeShift + 16
	ditherShift = encodeOdd + 16
	holdsZeros  = ditherShift + 16 // whether some roots are 0; AVX-512 only
	firstCodes  = holdsZeros + 8   // where codes go, less the index
	secondCodes = firstCodes + 8
	noCodes     = secondCodes + 8 // takes codes before there is a block to encode
	workspace   = noCodes + abi.Block
)

// Bits of a binary32 number.
const (
	exponents = 0x7f800000
	sign      = 1 << 31
)

// Values for decoding: added to a unit, sixteenth gives 1/16 of it; digits selects the digits of a first moment.
const (
	sixteenth = 1<<32 - 4<<23
	digits    = 127 << abi.FirstShift
)

// blocks is the state of writing an update kernel for int8 moments.
type blocks struct {
	instructionSet
	index   reg.Register // of the element that the tile begins with
	space   reg.Register // the workspace
	ring    reg.Register // index within the rings
	dither  reg.VecVirtual
	least   reg.VecVirtual // bits of the roots; with AVX2 less 1, so that zeros are the largest
	largest reg.VecVirtual
	rows    registers // constants of the step, those in registers

	// With AVX-512 only:
	leastEncoded reg.VecVirtual
	pending      pending
	bytes        bytes // with VBMI

	first    stream
	second   stream
	gradient reg.Register
	log      undoLog
}

func (b *blocks) at(offset int) Mem { return Mem{Base: b.space, Disp: offset} }

// load loads a vector into a register, for several uses.
func (b *blocks) load(from Mem) reg.VecVirtual {
	x := b.vector()
	VMOVUPS(from, x)
	return x
}

// tile returns the number of elements of a tile.
func (b *blocks) tile() int { return 2 * b.group() }

// inRing returns the address of vector i of a group of the tile in a ring.
func (b *blocks) inRing(base, group, i int) Mem {
	return Mem{Base: b.space, Index: b.ring, Scale: 4, Disp: base + 4*(group*b.group()+i*b.lanes)}
}

// updateBlocks writes the kernel of Adam for int8 moments. The kernel takes full blocks only.
func (s instructionSet) updateBlocks(state abi.State) {
	TEXT(updateName(abi.Adam, state, abi.MomentsInt8, s), 0, "func(a *Arguments)")
	s = s.forMoments(abi.MomentsInt8)
	restore := flushDenormals()
	b := &blocks{instructionSet: s, index: GP64(), space: GP64(), dither: s.vector(), least: s.vector(), largest: s.vector()}
	LEAQ(AllocLocal(workspace+64), b.space)
	ADDQ(U8(63), b.space)
	ANDQ(I8(-64), b.space)
	b.copyConstants()
	b.hold(exponents, sign)
	if s.lanes == 16 {
		b.holdConstants()
	}
	kind, weights := argument("GradientKind"), b.master(state)
	b.gradient, b.first, b.second = argument("Gradient"), stream{argument("Moment1"), 1}, stream{argument("Moment2"), 1}
	b.log = s.undoLog(state, abi.MomentsInt8, []array{weights, fp32Moment{s, b.first}, fp32Moment{s, b.second}})
	MOVQ(argument("Start"), b.index)
	eachKind(kind, func(kind int) { b.updateAll(kind, weights) })
	b.encodeBlock()
	if s.lanes == 16 {
		b.clearZeros()
	}
	weights.finish()
	restore()
	VZEROUPPER()
	RET()
}

// updateAll updates all blocks, for one kind of gradients, and encodes all but the last.
func (b *blocks) updateAll(kind int, weights array) {
	block, next, encoded := label("block"), label("tile"), label("encoded")
	Label(block)
	b.log.keepHeader(b.index)
	b.beginBlock()
	Label(next)
	b.log.keep(b.index, b.tile(), abi.Block)
	ahead := GP64()
	LEAQ(Mem{Base: b.index, Disp: abi.PrefetchAhead(abi.MomentsInt8)}, ahead)
	CMPQ(b.index, argument("Prefetching"))
	CMOVQCC(b.index, ahead)
	for _, moment := range []stream{b.first, b.second} {
		PREFETCHT0(moment.at(ahead, 0))
	}
	b.enterRings()
	for group := range 2 {
		weights.prefetch(ahead)
		b.prefetchKind(kind, b.gradient, ahead)
		b.update(group, kind, weights)
		ADDQ(U8(b.group()), b.index)
		ADDQ(U8(b.group()), ahead)
	}
	TESTQ(U32(abi.Block-1), b.index)
	JNE(LabelRef(next))
	if b.lanes == 16 {
		b.clearZeros()
		b.placeCodes()
	} else {
		done := GP64()
		MOVQ(b.index, done)
		SUBQ(argument("Start"), done)
		CMPQ(done, U32(abi.Block))
		JBE(LabelRef(encoded)) // there is no block before the first
		SUBQ(U32(abi.Block), b.index)
		b.encodeBlock()
		Label(encoded)
	}
	b.endBlock()
	CMPQ(b.index, argument("Elements"))
	JB(LabelRef(block))
}

// encodeBlock encodes the block before the one that begins at index. It advances index to the end of that later
// block.
func (b *blocks) encodeBlock() {
	next := label("tile")
	Label(next)
	b.enterRings()
	if b.lanes == 16 {
		for group := range 2 {
			b.encodeGroup(group)
			ADDQ(U8(b.group()), b.index)
		}
	} else {
		XORQ(U32(abi.Block), b.ring)
		ADDQ(U8(b.tile()), b.index)
		b.encode()
	}
	TESTQ(U32(abi.Block-1), b.index)
	JNE(LabelRef(next))
}

// row returns the address of a constant of the step.
func (b *blocks) row(row int) Mem { return b.at(constants + 4*abi.Group*row) }

// enterRings finds the place of the tile in the rings.
func (b *blocks) enterRings() {
	b.ring = GP64()
	MOVQ(b.index, b.ring)
	ANDQ(U32(2*abi.Block-1), b.ring)
}

// copyConstants copies the constants of the step to the workspace. There no vector crosses a cache line.
func (b *blocks) copyConstants() {
	from, x := argument("Table"), b.vector()
	for offset := 0; offset < 4*abi.Group*abi.Rows; offset += 4 * b.lanes {
		VMOVUPS(Mem{Base: from, Disp: offset}, x)
		VMOVUPS(x, b.at(constants+offset))
	}
}

// beginBlock reads the header of the next block.
func (b *blocks) beginBlock() {
	header, floor, place := GP32(), GP32(), GP64()
	headers := argument("Headers")
	MOVQ(b.index, place)
	SHRQ(U8(7), place) // two bytes for 256 elements
	MOVWLZX(Mem{Base: headers, Index: place, Scale: 1}, header)
	MOVBLZX(header.As8L(), floor)
	SHLL(U8(23), floor)
	if b.lanes == 16 {
		SHRL(U8(16), floor)
		IMUL3L(U32(0x10001), floor, floor)
	}
	b.broadcast(floor, decodeBase)
	SHRL(U8(8), header)
	SUBL(U8(16), header) // codes are in upper halves, or shifted there later
	b.count(header, decodeShift)
	b.noExtremes()
}

// noExtremes resets the extremes to those of no roots.
func (b *blocks) noExtremes() {
	b.clear(b.largest)
	if b.lanes == 16 {
		VPTERNLOGD(U8(0xff), b.least, b.least, b.least)
	} else {
		VPCMPEQD(b.least, b.least, b.least)
	}
}

// broadcast stores a number in every lane of a vector of the workspace.
func (b *blocks) broadcast(x reg.Register, offset int) {
	v := b.vector()
	VMOVD(x, v.AsX())
	VPBROADCASTD(v.AsX(), v)
	b.move(v, b.at(offset))
}

// count stores a number in the workspace as a shift count.
func (b *blocks) count(x reg.Register, offset int) {
	v := XMM()
	VMOVD(x, v)
	b.move(v, b.at(offset))
}

// update updates a group and leaves its first moments and roots in the rings.
func (b *blocks) update(group, kind int, weights array) {
	loaded := registers{}
	constant := func(row int) Op {
		if held, ok := b.rows[row]; ok {
			return held
		}
		at := b.row(row)
		if row != abi.Beta1 && row != abi.Beta2 && row != abi.InverseRootBias2 { // others are operands in memory
			return at
		}
		if _, ok := loaded[row]; !ok {
			loaded[row] = b.load(at)
		}
		return loaded[row]
	}
	roots := b.decodeRoots()
	firsts := b.firsts(roots, group)
	g := b.loadKind(kind, b.gradient, b.index, 0)
	p := b.registers(weights.load(b.index))
	for i := range g {
		VMULPS(constant(abi.GradScale), g[i], g[i])
		VFMADD231PS(constant(abi.L2Penalty), p[i], g[i])
	}
	load := func(number int) operands {
		if number == 0 {
			return firsts.operands()
		}
		for _, s := range roots {
			VMULPS(s, s, s)
		}
		return roots.operands()
	}
	store := func(number int, x vectors) {
		switch number {
		case 0:
			for i := range x {
				VMOVUPS(x[i], b.inRing(firstsRing, group, i))
			}
		case rootOfSecond:
			if b.lanes == 16 { // hidden behind the square roots
				b.encodeGroup(group)
			}
			for i := range x {
				if b.lanes == 16 { // unusual roots wait for the end of the block
					VMOVUPS(x[i], b.inRing(rootsRing, group, i))
					VPMAXUD(x[i], b.largest, b.largest)
					VPMINUD(x[i], b.least, b.least)
					continue
				}
				held := b.vector()
				VPMINUD(integer(abi.MostRoot), x[i], held)
				VMOVUPS(held, b.inRing(rootsRing, group, i))
				VPMAXUD(held, b.largest, b.largest)
				VPADDD(integer(0xffffffff), held, held)
				VPMINUD(held, b.least, b.least)
			}
		}
	}
	b.adam(constant, p, g, load, store)
	weights.store(p, b.index)
}

// everySecondByte returns the shuffle that puts every even or odd byte of 16 into byte number place of a 32-bit lane.
func everySecondByte(odd, place int) Mem {
	var order []byte
	for lane := range 8 {
		number := []byte{zeroed, zeroed, zeroed, zeroed}
		number[place] = byte(2*lane + odd)
		order = append(order, number...)
	}
	return shuffle(fmt.Sprintf("bytes%dto%d", odd, place), order)
}

// loadBytes loads a group of bytes, each into byte number place of a lane.
func (b *blocks) loadBytes(from stream, place int) vectors {
	x, all := b.vectors(), b.vector()
	VBROADCASTI128(from.at(b.index, 0), all)
	for i := range x {
		VPSHUFB(everySecondByte(i, place), all, x[i])
	}
	return x
}

// decodeRoots returns the roots of the second moments of a group.
func (b *blocks) decodeRoots() vectors {
	if b.lanes == 16 {
		// The lower 16 bits of a root are 0.
		s, some := b.vectors(), K()
		VPMOVZXBW(b.second.at(b.index, 0), s[1])
		VPTESTMW(s[1], s[1], some)
		VPSLLW(b.at(decodeShift), s[1], s[1])
		VPADDW_Z(b.at(decodeBase), s[1], some, s[1]) // 0 where the code is 0
		VPSLLD(U8(16), s[1], s[0])
		b.and(b.integer(0xffff0000), s[1], s[1])
		return s
	}
	s, base := b.loadBytes(b.second, 2), b.vector()
	VMOVDQA(b.at(decodeBase), base)
	for i := range s {
		own := b.vector()
		VPSLLD(b.at(decodeShift), s[i], s[i])
		VPSIGND(s[i], base, own) // 0 where the code is 0
		VPADDD(own, s[i], s[i])
	}
	return s
}

// firsts returns the first moments of a group of the tile.
func (b *blocks) firsts(roots vectors, group int) vectors {
	if b.extended {
		return b.lookUpFirsts(roots, group)
	}
	return b.decodeFirsts(roots)
}

// decodeFirsts returns the first moments of a group. With the unit R of an element, x · R - R/16 is (x - 1/16) · R.
// Both products are additions to exponents, and the difference is exact. Where the code is 0, R is 0 and so is the
// difference.
func (b *blocks) decodeFirsts(roots vectors) vectors {
	m, codes := b.vectors(), b.firstDigits()
	for i, q := range codes {
		unit := b.vector() // R/16
		b.and(b.integer(exponents), roots[i], unit)
		VPADDD(b.integer(sixteenth), unit, unit)
		if b.lanes == 16 {
			b.and(b.integer(digits), q, m[i])
		} else {
			VPSRLD(U8(5), q, m[i])
			VPAND(integer(digits), m[i], m[i])
		}
		VPADDD(unit, m[i], m[i])
		VSUBPS(unit, m[i], m[i])
		if b.lanes == 16 {
			VPTERNLOGD(U8(orAnd), b.integer(sign), q, m[i])
		} else {
			VPAND(b.integer(sign), q, q)
			VPOR(q, m[i], m[i])
		}
	}
	return m
}

// firstDigits returns the codes of first moments with the sign in its place. With AVX-512 the digits are in theirs,
// too. Other bits are undefined.
func (b *blocks) firstDigits() vectors {
	if b.lanes != 16 {
		return b.loadBytes(b.first, 3)
	}
	q := b.vectors()
	VPMOVSXBW(b.first.at(b.index, 0), q[1])
	VPSLLD(U8(abi.FirstShift), q[1], q[0])
	VPSLLD(U8(abi.FirstShift-16), q[1], q[1])
	return q
}

func (s instructionSet) and(a, b, to Op) {
	if s.lanes == 16 {
		VPANDD(a, b, to)
		return
	}
	VPAND(a, b, to)
}
