package main

import (
	"encoding/binary"
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// vectors are one or two registers that hold the numbers of a group.
type vectors []reg.VecVirtual

func (s instructionSet) vectors() vectors {
	var v vectors
	for range s.group() / s.lanes {
		v = append(v, s.vector())
	}
	return v
}

// operands are a group of numbers in registers, or in memory as instruction operands.
type operands []Op

func (v vectors) operands() operands {
	var o operands
	for _, x := range v {
		o = append(o, x)
	}
	return o
}

// registers loads operands that are not in registers yet.
func (s instructionSet) registers(o operands) vectors {
	var v vectors
	for _, x := range o {
		r, ok := x.(reg.VecVirtual)
		if !ok {
			r = s.vector()
			VMOVUPS(x, r)
		}
		v = append(v, r)
	}
	return v
}

// array is a stream of numbers that a kernel reads as fp32 and writes back, one group at a time.
type array interface {
	prefetch(ahead reg.Register)
	load(index reg.Register) operands
	store(x vectors, index reg.Register)
	// finish emits code after the loop.
	finish()
	// changed returns the streams that the array reads and writes.
	changed() []stream
}

// master returns the array of master weights, with its arguments loaded.
func (s instructionSet) master(state abi.State) array {
	switch state {
	case abi.Split:
		return splitMaster{s, stream{argument("Parameter"), 2}, stream{argument("Low"), 2}}
	case abi.Split24:
		low := stream{argument("Low"), 1}
		return split24Master{splitMaster{s, stream{argument("Parameter"), 2}, low}, s.ditherOfMasters()}
	}
	parameter := argument("Parameter")
	return fp32Master{s, stream{argument("Master"), 4}, stream{parameter, 2}, s.loadCopyKind(parameter)}
}

// moment returns the array of the first or second moment.
func (s instructionSet) moment(number int, t abi.MomentType) array {
	base := argument(fmt.Sprintf("Moment%d", number))
	if t == abi.MomentsBF16 {
		return bf16Moment{s, stream{base, 2}}
	}
	return fp32Moment{s, stream{base, 4}}
}

type fp32Moment struct {
	instructionSet
	stream
}

func (m fp32Moment) prefetch(ahead reg.Register) { m.prefetchGroup(m.stream, ahead) }

func (m fp32Moment) load(index reg.Register) operands { return m.wide(m.stream, index, 0) }

func (m fp32Moment) store(x vectors, index reg.Register) { m.storeWide(x, m.stream, index) }

func (fp32Moment) finish() {}

func (m fp32Moment) changed() []stream { return []stream{m.stream} }

type bf16Moment struct {
	instructionSet
	stream
}

func (m bf16Moment) prefetch(ahead reg.Register) { m.prefetchGroup(m.stream, ahead) }

func (m bf16Moment) load(index reg.Register) operands {
	return m.loadUpperHalves(m.at(index, 0)).operands()
}

func (m bf16Moment) store(x vectors, index reg.Register) {
	m.store16(m.packUpperHalves(m.halfAway(x)), m.stream, index)
}

func (bf16Moment) finish() {}

func (m bf16Moment) changed() []stream { return []stream{m.stream} }

// ditheredMoment is a bf16 moment that is rounded stochastically: the probability of rounding up is the part that is
// cut off.
type ditheredMoment struct {
	bf16Moment
	dither reg.VecVirtual // of the first lanes of the group
}

func (m bf16Moment) dithers() ditheredMoment { return ditheredMoment{m, m.spreadDither("Dither")} }

// spreadDither loads the dither of the first element and spreads it.
func (s instructionSet) spreadDither(field string) reg.VecVirtual {
	dither := s.vector()
	first, err := Dereference(Param("a")).Field(field).Resolve()
	if err != nil {
		panic(err)
	}
	VPBROADCASTD(first.Addr, dither)
	VPADDD(s.ditherOfLanes(), dither, dither)
	return dither
}

func (m ditheredMoment) store(x vectors, index reg.Register) {
	rounded := m.random(m.dither, 16)
	for i, t := range rounded {
		VPADDD(x[i], t, t)
	}
	m.store16(m.packUpperHalves(rounded), m.stream, index)
	VPADDD(m.integer(m.ditherOf(m.group())), m.dither, m.dither)
}

// random returns random numbers of so many bits for a group.
func (s instructionSet) random(dither reg.VecVirtual, bits uint8) vectors {
	random := s.vectors()
	for i, t := range random {
		d := dither
		if i > 0 {
			VPADDD(s.integer(s.ditherOf(s.elementOf(i, 0))), dither, t)
			d = t
		}
		VPMULLD(d, d, t)
		VPSRLD(U8(32-bits), t, t)
	}
	return random
}

// ditherOf returns the dither of an element, relative to element 0.
func (instructionSet) ditherOf(element int) uint32 {
	return uint32(element * abi.DitherStep & 0xffffffff)
}

// elementOf returns the element of a group in a lane of vector i.
func (s instructionSet) elementOf(i, lane int) int {
	if s.interleaved {
		return 2*lane + i
	}
	return i*s.lanes + lane
}

// ditherOfLanes returns the dither of each lane, relative to the first.
func (s instructionSet) ditherOfLanes() Mem {
	var dithers []uint32
	for lane := range s.lanes {
		dithers = append(dithers, s.ditherOf(s.elementOf(0, lane)))
	}
	name := "ditherOfLanes" + s.name
	if !s.interleaved {
		name += "Consecutive"
	}
	return table(name, dithers)
}

// splitMaster is a master weight in two streams: the upper half, a bf16 parameter rounded half away from zero, and
// the low 16 bits.
type splitMaster struct {
	instructionSet
	parameter, low stream
}

func (m splitMaster) prefetch(ahead reg.Register) {
	m.prefetchGroup(m.parameter, ahead)
	m.prefetchGroup(m.low, ahead)
}

// load undoes the rounding: (upper << 16) + signed low.
func (m splitMaster) load(index reg.Register) operands {
	if m.interleaved {
		low := m.vector()
		m.move(m.low.at(index, 0), low)
		return m.join(low, index)
	}
	p := m.loadUpperHalves(m.parameter.at(index, 0))
	for i := range p {
		low := m.vector()
		VPMOVSXWD(m.low.at(index, i*m.lanes), low)
		VPADDD(low, p[i], p[i])
	}
	return p.operands()
}

// join joins parameters and low 16 bits, of even elements and of odd ones. In 16-bit arithmetic, the upper half is one
// less where the low half is negative.
func (m splitMaster) join(low reg.VecVirtual, index reg.Register) operands {
	upper, p := m.vector(), m.vectors()
	VPSRAW(U8(15), low, upper)
	VPADDW(m.parameter.at(index, 0), upper, upper)
	VPSLLD(U8(16), upper, p[0])
	m.blend(low, p[0], evenWords)
	VPSRLD(U8(16), low, p[1])
	m.blend(upper, p[1], oddWords)
	return p.operands()
}

func (m splitMaster) store(p vectors, index reg.Register) {
	var upper, low reg.VecVirtual
	switch {
	case m.interleaved:
		upper, low = m.packUpperHalves(m.halfAway(p)), m.lowWords(p)
	case m.lanes == 16:
		upper, low = m.packUpperHalves(m.halfAway(p)), YMM()
		VPMOVDW(p[0], low)
	default:
		upper, low = m.vector(), m.vector()
		// Both outputs come from one pair of shuffles. In 16-bit arithmetic,
		// half away from zero is one more where the low half is negative.
		first, last, negative := m.vector(), m.vector(), m.vector()
		VPERM2I128(U8(lowerHalves), p[1], p[0], first)
		VPERM2I128(U8(upperHalves), p[1], p[0], last)
		VPSHUFB(separated(), first, first)
		VPSHUFB(separated(), last, last)
		VPUNPCKLQDQ(last, first, low)
		VPUNPCKHQDQ(last, first, upper)
		VPSRLW(U8(15), low, negative)
		VPADDW(negative, upper, upper)
	}
	m.note(upper, m.parameter, index)
	m.move(upper, m.parameter.at(index, 0))
	m.store16(low, m.low, index)
}

// lowWords packs the low 16 bits of even and odd elements.
func (m splitMaster) lowWords(p vectors) reg.VecVirtual {
	low := m.vector()
	VPSLLD(U8(16), p[1], low)
	m.blend(p[0], low, evenWords)
	return low
}

func (splitMaster) finish() {}

func (m splitMaster) changed() []stream { return []stream{m.parameter, m.low} }

// split24Master is a split master that lacks its lowest 8 bits. It is rounded stochastically: the probability of
// rounding away from zero is the part that is cut off.
type split24Master struct {
	splitMaster
	dither masterDither
}

func (m split24Master) load(index reg.Register) operands {
	if m.interleaved {
		low := m.vector()
		VPMOVZXBW(m.low.at(index, 0), low)
		VPSLLW(U8(8), low, low)
		return m.join(low, index)
	}
	p := m.loadUpperHalves(m.parameter.at(index, 0))
	for i := range p {
		low := m.vector()
		VPMOVSXBD(m.low.at(index, i*m.lanes), low)
		VPSLLD(U8(8), low, low)
		VPADDD(low, p[i], p[i])
	}
	return p.operands()
}

func (m split24Master) store(p vectors, index reg.Register) {
	dither := m.dither.load()
	rounded := m.random(dither, lostBits)
	for i, t := range rounded {
		VPADDD(p[i], t, t)
	}
	VPADDD(m.integer(m.ditherOf(m.group())), dither, dither)
	m.dither.store(dither)
	upper := m.packUpperHalves(m.halfAway(rounded))
	m.note(upper, m.parameter, index)
	m.move(upper, m.parameter.at(index, 0))
	m.storeBytes(rounded, m.low.at(index, 0))
}

// lostBits is how many bits of a master split24 state does not hold.
const lostBits = 8

// storeBytes stores bits 8 to 15 of every lane. It may change x.
func (m split24Master) storeBytes(x vectors, to Mem) {
	switch {
	case m.lanes == 16 && m.interleaved:
		low := m.lowWords(x)
		VPSRLW(U8(8), low, low)
		VPMOVWB(low, to)
	case m.lanes == 16:
		VPSRLD(U8(8), x[0], x[0])
		VPMOVDB(x[0], to)
	default:
		var low reg.VecVirtual
		if m.interleaved {
			low = m.lowWords(x)
		} else {
			low = m.vector()
			for i := range x {
				VPSLLD(U8(16), x[i], x[i])
				VPSRLD(U8(16), x[i], x[i])
			}
			VPACKUSDW(x[1], x[0], low)
			VPERMQ(U8(inQuarters), low, low)
		}
		VPSRLW(U8(8), low, low)
		VPACKUSWB(low, low, low)
		VPERMQ(U8(inQuarters), low, low)
		VMOVDQU(low.AsX(), to)
	}
}

// masterDither is the dither of masters of 24 bits: with AVX-512 in a register, with AVX2, which has few, in memory.
type masterDither struct {
	instructionSet
	held  reg.VecVirtual
	saved Mem
}

func (s instructionSet) ditherOfMasters() masterDither {
	d := masterDither{instructionSet: s, held: s.spreadDither("MasterDither")}
	if s.lanes == 8 {
		d.saved = AllocLocal(4 * s.lanes)
		d.store(d.held)
	}
	return d
}

func (d masterDither) load() reg.VecVirtual {
	if d.lanes == 16 {
		return d.held
	}
	x := d.vector()
	d.move(d.saved, x)
	return x
}

func (d masterDither) store(x reg.VecVirtual) {
	if d.lanes == 8 {
		d.move(x, d.saved)
	}
}

// fp32Master is a master weight in fp32, with a 16-bit copy. The kernel never reads the copy, so it writes it past
// the caches: an ordinary store would first read the line from memory.
type fp32Master struct {
	instructionSet
	weights, parameter stream
	copyKind           reg.Register
}

func (m fp32Master) prefetch(ahead reg.Register) { m.prefetchGroup(m.weights, ahead) }

func (m fp32Master) load(index reg.Register) operands { return m.wide(m.weights, index, 0) }

func (m fp32Master) store(p vectors, index reg.Register) {
	wide := m.consecutive(p)
	m.storeConsecutive(wide, m.weights, index)
	unusual, stored := label("unusual"), label("stored")
	to := m.parameter.at(index, 0)
	TESTQ(m.copyKind, m.copyKind)
	JNE(LabelRef(unusual))
	usual := m.bf16(p, wide)
	m.note(usual, m.parameter, index)
	VMOVNTDQ(usual, to)
	JMP(LabelRef(stored))
	Label(unusual)
	kind := GP64()
	MOVQ(m.copyKind, kind)
	ANDQ(U8(unaligned-1), kind)
	eachKind(kind, func(kind int) {
		var packed reg.VecVirtual
		switch kind {
		case abi.BF16:
			packed = m.bf16(p, wide)
		case abi.FP16:
			packed = m.roundToFP16(p)
		default:
			return
		}
		m.note(packed, m.parameter, index)
		stored, ordinary := label("stored"), label("ordinary")
		TESTQ(U32(unaligned), m.copyKind)
		JNE(LabelRef(ordinary))
		VMOVNTDQ(packed, to)
		JMP(LabelRef(stored))
		Label(ordinary)
		m.move(packed, to)
		Label(stored)
	})
	Label(stored)
}

// unaligned is set in the kind of a copy that stores past the caches cannot write to. The usual kind is 0.
const unaligned = 4

// loadCopyKind loads the kind of the parameter copy.
func (s instructionSet) loadCopyKind(parameter reg.Register) reg.Register {
	kind, aligned := argument("CopyKind"), label("aligned")
	TESTQ(U32(2*s.group()-1), parameter)
	JEQ(LabelRef(aligned))
	ORQ(U8(unaligned), kind)
	Label(aligned)
	return kind
}

// finish orders the stores past the caches before any later stores of the caller.
func (fp32Master) finish() { SFENCE() }

func (m fp32Master) changed() []stream { return []stream{m.weights} }

// prefetchKind prefetches a group of numbers of a kind.
func (s instructionSet) prefetchKind(kind int, base, ahead reg.Register) {
	s.prefetchGroup(streamOf(kind, base), ahead)
}

// prefetchGroup prefetches every line of a group: two where it has 32 numbers of 32 bits.
func (s instructionSet) prefetchGroup(from stream, ahead reg.Register) {
	const line = 64
	for offset := 0; offset < s.group(); offset += line / from.size {
		PREFETCHT0(from.at(ahead, offset))
	}
}

// streamOf returns a stream of numbers of a kind.
func streamOf(kind int, base reg.Register) stream {
	if kind == abi.Wide {
		return stream{base, 4}
	}
	return stream{base, 2}
}

// loadKind loads a group of numbers of a kind, a number of groups after index.
func (s instructionSet) loadKind(kind int, base, index reg.Register, group int) vectors {
	from, first := streamOf(kind, base), group*abi.Group
	switch kind {
	case abi.BF16:
		return s.loadUpperHalves(from.at(index, first))
	case abi.FP16:
		x := s.vectors()
		for i := range x {
			VCVTPH2PS(from.at(index, first+i*s.lanes), x[i])
		}
		return s.ordered(x)
	}
	return s.registers(s.wide(from, index, first))
}

// wide returns a group of fp32 numbers, first elements after index. It returns memory operands if the kernel keeps
// numbers in memory order.
func (s instructionSet) wide(from stream, index reg.Register, first int) operands {
	var o operands
	for i := range s.group() / s.lanes {
		o = append(o, from.at(index, first+i*s.lanes))
	}
	if s.interleaved {
		return s.ordered(s.registers(o)).operands()
	}
	return o
}

func (s instructionSet) storeWide(x vectors, to stream, index reg.Register) {
	s.storeConsecutive(s.consecutive(x), to, index)
}

func (s instructionSet) storeConsecutive(x vectors, to stream, index reg.Register) {
	for i, part := range x {
		VMOVUPS(part, to.at(index, i*s.lanes))
		s.stored(part, to)
	}
}

// store16 stores a group of 16-bit numbers.
func (s instructionSet) store16(x reg.VecVirtual, to stream, index reg.Register) {
	s.move(x, to.at(index, 0))
	s.stored(x, to)
}

// stored tells the tally of a register that is stored.
func (s instructionSet) stored(x reg.VecVirtual, to stream) {
	if s.adds != nil {
		(*s.adds).stored(x, to)
	}
}

// Operands of AVX2 shuffles. Most work within 128 bits; others move quarters or halves of a register.
const (
	inQuarters  = 0b11_01_10_00 // swaps the middle quarters
	lowerHalves = 0x20          // of two registers
	upperHalves = 0x31
	evens       = 0b10_00_10_00 // of two registers, 32-bit numbers
	odds        = 0b11_01_11_01
	evenWords   = 0x55 // 16-bit numbers
	oddWords    = 0xaa
)

// ordered returns consecutive numbers in the order of the kernel.
func (s instructionSet) ordered(x vectors) vectors {
	if !s.interleaved {
		return x
	}
	if s.lanes == 16 {
		return s.pick(x, func(i, lane int) int { return 2*lane + i })
	}
	first, last, y := s.vector(), s.vector(), s.vectors()
	VPERM2F128(U8(lowerHalves), x[1], x[0], first)
	VPERM2F128(U8(upperHalves), x[1], x[0], last)
	VSHUFPS(U8(evens), last, first, y[0])
	VSHUFPS(U8(odds), last, first, y[1])
	return y
}

// consecutive undoes ordered.
func (s instructionSet) consecutive(x vectors) vectors {
	if !s.interleaved {
		return x
	}
	if s.lanes == 16 {
		return s.pick(x, func(i, lane int) int { return (i*s.lanes+lane)/2 + lane%2*s.lanes })
	}
	first, last, y := s.vector(), s.vector(), s.vectors()
	VUNPCKLPS(x[1], x[0], first)
	VUNPCKHPS(x[1], x[0], last)
	VPERM2F128(U8(lowerHalves), last, first, y[0])
	VPERM2F128(U8(upperHalves), last, first, y[1])
	return y
}

// pick fills each lane of vector i from two 512-bit registers. The function number returns which of their lanes,
// counted through both.
func (s instructionSet) pick(x vectors, number func(i, lane int) int) vectors {
	y := s.vectors()
	for i := range y {
		var order []uint32
		name := "pick"
		for lane := range s.lanes {
			order = append(order, uint32(number(i, lane)))
			name += fmt.Sprintf("x%d", number(i, lane))
		}
		VMOVDQU32(table(name, order), y[i])
		VPERMI2PS(x[1], x[0], y[i])
	}
	return y
}

// move loads, stores or copies a vector of any size.
func (s instructionSet) move(from, to Op) {
	if s.lanes == 16 {
		VMOVDQU32(from, to)
		return
	}
	VMOVDQU(from, to)
}

// words returns a register for the 16-bit numbers of a group.
func (s instructionSet) words() reg.VecVirtual {
	if s.group() == 2*abi.Group {
		return ZMM()
	}
	return YMM()
}

// Operations on three operands: x | y & mask, x | y &^ mask, x & mask | y. The result replaces x.
const (
	orAnd    = 0xf8
	orAndNot = 0xf4
	andOr    = 0xea
)

// blend replaces the even 16-bit words of x with those of a register, or the odd ones with those of a register or
// memory. With AVX-512 the replaced words must be 0, and the mask must be held.
func (s instructionSet) blend(from Op, x reg.VecVirtual, which uint64) {
	if s.lanes == 8 {
		VPBLENDW(U8(which), from, x, x)
		return
	}
	mask := s.integer(0xffff0000)
	if which == oddWords {
		VPTERNLOGD(U8(orAnd), from, mask, x)
		return
	}
	VPTERNLOGD(U8(orAndNot), mask, from, x)
}

// loadUpperHalves loads a group of 16-bit numbers as the upper halves of 32-bit
// ones: bf16 as fp32.
func (s instructionSet) loadUpperHalves(from Mem) vectors {
	x := s.vectors()
	switch {
	case s.interleaved:
		s.move(from, x[1])
		VPSLLD(U8(16), x[1], x[0])
		s.and(s.integer(0xffff0000), x[1], x[1])
	case s.lanes == 16:
		VPMOVZXWD(from, x[0])
		VPSLLD(U8(16), x[0], x[0])
	default:
		for i := range x {
			VBROADCASTI128(from.Offset(2*i*s.lanes), x[i])
			VPSHUFB(spread(), x[i], x[i])
		}
	}
	return x
}

// packUpperHalves packs the upper 16 bits of every lane. It may change x.
func (s instructionSet) packUpperHalves(x vectors) reg.VecVirtual {
	VPSRLD(U8(16), x[0], x[0])
	if s.interleaved {
		s.blend(x[1], x[0], oddWords)
		return x[0]
	}
	packed := YMM()
	if s.lanes == 16 {
		VPMOVDW(x[0], packed)
		return packed
	}
	VPSRLD(U8(16), x[1], x[1])
	VPACKUSDW(x[1], x[0], packed)
	VPERMQ(U8(inQuarters), packed, packed)
	return packed
}

const zeroed = 0x80 // in a shuffle of bytes

// spread returns the byte shuffle that moves eight 16-bit numbers into the upper halves of 32-bit lanes. Both halves
// of the register must hold the numbers.
func spread() Mem {
	var order []byte
	for i := range byte(8) {
		order = append(order, zeroed, zeroed, 2*i, 2*i+1)
	}
	return shuffle("spread", order)
}

// separated returns the byte shuffle that puts the lower halves of 32-bit numbers first and their upper halves after
// them.
func separated() Mem {
	order := []byte{0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15}
	return shuffle("separated", append(order, order...))
}

func shuffle(name string, order []byte) Mem {
	var words []uint32
	for i := 0; i < len(order); i += 4 {
		words = append(words, binary.LittleEndian.Uint32(order[i:]))
	}
	return table(name, words)
}

// roundToFP16 rounds to nearest even.
func (s instructionSet) roundToFP16(x vectors) reg.VecVirtual {
	const toNearest = 0
	x = s.consecutive(x)
	packed := s.words()
	s.clear(packed) // else its upper half would count as live from before the loop
	if s.lanes == 16 {
		VCVTPS2PH(U8(toNearest), x[0], packed.AsY())
		if s.interleaved {
			upper := YMM()
			VCVTPS2PH(U8(toNearest), x[1], upper)
			VINSERTI64X4(U8(1), upper, packed, packed)
		}
		return packed
	}
	upper := XMM()
	VCVTPS2PH(U8(toNearest), x[0], packed.AsX())
	VCVTPS2PH(U8(toNearest), x[1], upper)
	VINSERTI128(U8(1), upper, packed, packed)
	return packed
}

// halfAway rounds to bf16 half away from zero, in integer arithmetic. The
// result is in the upper half of each lane.
func (s instructionSet) halfAway(x vectors) vectors {
	rounded := s.vectors()
	for i := range x {
		VPADDD(s.integer(0x8000), x[i], rounded[i])
	}
	return rounded
}

// roundToBF16 rounds to nearest even in integer arithmetic; a NaN becomes
// 0x7fc0. The result is in the upper half of each lane.
func (s instructionSet) roundToBF16(x vectors) vectors {
	const unordered = 3
	rounded := s.vectors()
	for i, t := range rounded {
		if s.lanes == 16 {
			odd, nan := K(), K()
			VPTESTMD(s.integer(0x10000), x[i], odd)
			VPADDD(s.integer(0x7fff), x[i], t)
			VCMPPS(U8(unordered), x[i], x[i], nan)
			VPADDD(s.integer(1), t, odd, t)
			VMOVDQU32(s.integer(0x7fc00000), nan, t)
			continue
		}
		VPSRLD(U8(16), x[i], t)
		VPAND(integer(1), t, t)
		VPADDD(integer(0x7fff), t, t)
		VPADDD(x[i], t, t)
		nan := s.vector()
		VCMPPS(U8(unordered), x[i], x[i], nan)
		VBLENDVPS(nan, integer(0x7fc00000), t, t)
	}
	return rounded
}
