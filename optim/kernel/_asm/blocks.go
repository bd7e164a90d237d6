package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/optim/kernel/abi"
)

// The kernels for int8 moments walk each block twice: elements are updated, and
// first moments and roots wait for the extremes of the roots; then they are
// encoded. With AVX2 a block is encoded after the one behind it has been updated,
// so that the extremes have time to come in; with AVX-512 while that is updated,
// and waits for its roots.

// What a kernel keeps in memory of its own: rings of two blocks each, the
// constants of the step, and what blocks are decoded and encoded with. Offsets
// are in bytes. A vector takes 64, a count of a shift 16.
const (
	firstsRing = 0
	rootsRing  = firstsRing + 2*4*abi.Block
	constants  = rootsRing + 2*4*abi.Block

	decodeBase  = constants + 4*abi.Group*abi.Rows // floor << 23; with AVX-512 floor << 7 in each half
	encodeLeast = decodeBase + 64                  // the bits of code 1
	encodeBase  = encodeLeast + 64                 // the bits of code 0, shifted by shift
	decodeShift = encodeBase + 64
	encodeShift = decodeShift + 16
	encodeOdd   = encodeShift + 16
	ditherShift = encodeOdd + 16
	holdsZeros  = ditherShift + 16 // whether some roots are 0; AVX-512 only
	firstCodes  = holdsZeros + 8   // where codes go, less the index
	secondCodes = firstCodes + 8
	noCodes     = secondCodes + 8 // what is written before there is a block to encode
	workspace   = noCodes + abi.Block
)

// Bits of a binary32 number.
const (
	exponents = 0x7f800000
	sign      = 1 << 31
)

// What decoding adds and selects: a sixteenth less of a unit, and the digits of
// a first moment.
const (
	sixteenth = 1<<32 - 4<<23
	digits    = 127 << abi.FirstShift
)

// blocks is an update kernel for int8 moments while it is written.
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

	first    stream
	second   stream
	gradient reg.Register
	log      undoLog
}

func (b *blocks) at(offset int) Mem { return Mem{Base: b.space, Disp: offset} }

// load loads a vector that is used more than once.
func (b *blocks) load(from Mem) reg.VecVirtual {
	x := b.vector()
	VMOVUPS(from, x)
	return x
}

// tile is the number of elements of a tile.
func (b *blocks) tile() int { return 2 * b.group() }

// inRing is the place of vector i of a group of the tile.
func (b *blocks) inRing(base, group, i int) Mem {
	return Mem{Base: b.space, Index: b.ring, Scale: 4, Disp: base + 4*(group*b.group()+i*b.lanes)}
}

// updateBlocks writes the kernel of Adam for int8 moments. Elements are whole
// blocks.
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

// updateAll updates all blocks, for gradients of a kind, and encodes all but the
// last.
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
		prefetchKind(kind, b.gradient, ahead)
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

// encodeBlock encodes the block before the one that begins at index, and goes to
// the end of that.
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

// row is a constant of the step.
func (b *blocks) row(row int) Mem { return b.at(constants + 4*abi.Group*row) }

// enterRings finds the place of the tile in the rings.
func (b *blocks) enterRings() {
	b.ring = GP64()
	MOVQ(b.index, b.ring)
	ANDQ(U32(2*abi.Block-1), b.ring)
}

// copyConstants copies the constants of the step to the workspace, where no
// vector crosses a line of the cache.
func (b *blocks) copyConstants() {
	from, x := argument("Table"), b.vector()
	for offset := 0; offset < 4*abi.Group*abi.Rows; offset += 4 * b.lanes {
		VMOVUPS(Mem{Base: from, Disp: offset}, x)
		VMOVUPS(x, b.at(constants+offset))
	}
}

// beginBlock takes the header of the next block.
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

// noExtremes are those of no roots.
func (b *blocks) noExtremes() {
	b.clear(b.largest)
	if b.lanes == 16 {
		VPTERNLOGD(U8(0xff), b.least, b.least, b.least)
	} else {
		VPCMPEQD(b.least, b.least, b.least)
	}
}

// broadcast puts a number into every lane of a vector of the workspace.
func (b *blocks) broadcast(x reg.Register, offset int) {
	v := b.vector()
	VMOVD(x, v.AsX())
	VPBROADCASTD(v.AsX(), v)
	b.move(v, b.at(offset))
}

// count puts a number into the workspace as the count of a shift.
func (b *blocks) count(x reg.Register, offset int) {
	v := XMM()
	VMOVD(x, v)
	b.move(v, b.at(offset))
}

// update updates a group, and leaves first moments and roots in the rings.
func (b *blocks) update(group, kind int, weights array) {
	loaded := registers{}
	constant := func(row int) Op {
		if held, ok := b.rows[row]; ok {
			return held
		}
		at := b.row(row)
		if row != abi.Beta1 && row != abi.Beta2 && row != abi.InverseRootBias2 { // these meet others in memory
			return at
		}
		if _, ok := loaded[row]; !ok {
			loaded[row] = b.load(at)
		}
		return loaded[row]
	}
	roots := b.decodeRoots()
	firsts := b.decodeFirsts(roots)
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
			if b.lanes == 16 { // has time while roots are taken
				b.encodeGroup(group)
			}
			for i := range x {
				if b.lanes == 16 { // what is unusual waits for the end of the block
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

// everySecondByte is the shuffle that puts the even or the odd ones of 16 bytes
// into byte number place of 32-bit lanes.
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

// decodeRoots gives the roots of the second moments of a group.
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

// decodeFirsts gives the first moments of a group. With the unit R of an
// element, x · R - R/16 is (x - 1/16) · R; both products are additions to
// exponents, and the difference is exact. Where the code is 0, R is, too, and the
// difference of two equal numbers.
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

// firstDigits gives the codes of first moments with the sign in its place and,
// with AVX-512, the digits in theirs; there is more in other bits.
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
