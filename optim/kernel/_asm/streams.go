package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/optim/kernel/abi"
)

// prefetchAhead is how far ahead of the loop streams are prefetched, in
// elements.
const prefetchAhead = 512

// vectors hold one group of numbers: one 512-bit register or two 256-bit ones.
type vectors []reg.VecVirtual

func (s instructionSet) vectors() vectors {
	var v vectors
	for range abi.Group / s.lanes {
		v = append(v, s.vector())
	}
	return v
}

// array is a stream of numbers that a kernel reads as fp32, and writes back, a
// group at a time.
type array interface {
	prefetch(index reg.Register)
	load(index reg.Register) vectors
	store(x vectors, index reg.Register)
	// finish is emitted after the loop.
	finish()
}

// master is the array of master weights, with its arguments loaded.
func (s instructionSet) master(state abi.State) array {
	if state == abi.Split {
		return splitMaster{s, stream{argument("Parameter"), 2}, stream{argument("Low"), 2}}
	}
	return fp32Master{s, stream{argument("Master"), 4}, stream{argument("Parameter"), 2}, argument("CopyKind")}
}

// moment is the first or second moment.
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

func (m fp32Moment) prefetch(index reg.Register) { PREFETCHT0(m.at(index, prefetchAhead)) }

func (m fp32Moment) load(index reg.Register) vectors { return m.loadWide(m.stream, index) }

func (m fp32Moment) store(x vectors, index reg.Register) { m.storeWide(x, m.stream, index) }

func (fp32Moment) finish() {}

type bf16Moment struct {
	instructionSet
	stream
}

func (m bf16Moment) prefetch(index reg.Register) { PREFETCHT0(m.at(index, prefetchAhead)) }

func (m bf16Moment) load(index reg.Register) vectors { return m.loadUpperHalves(m.at(index, 0)) }

func (m bf16Moment) store(x vectors, index reg.Register) {
	VMOVDQU(m.packLowHalves(m.upperHalves(x)), m.at(index, 0))
}

func (bf16Moment) finish() {}

// ditheredMoment is a bf16 moment that is rounded stochastically: up with the
// probability of the part that is cut off.
type ditheredMoment struct {
	bf16Moment
	dither reg.Register // of the first element of the group
}

func (m ditheredMoment) store(x vectors, index reg.Register) {
	first := m.vector()
	VMOVD(m.dither, first.AsX())
	VPBROADCASTD(first.AsX(), first)
	rounded := m.vectors()
	for i, t := range rounded {
		high := m.vector()
		VPADDD(ditherOfLanes(4*i*m.lanes), first, t)
		VPSRLD(U8(16), t, high)
		m.xor(high, t, t)
		VPMULLD(integer(abi.DitherFactor), t, t)
		VPSRLD(U8(16), t, t)
		VPADDD(x[i], t, t)
		VPSRLD(U8(16), t, t)
	}
	VMOVDQU(m.packLowHalves(rounded), m.at(index, 0))
	ADDL(I32(groupDither), m.dither)
}

// groupDither is the dither of a group of elements over that of the one before,
// as a signed number.
const groupDither = abi.Group*abi.DitherStep&0xffffffff - 1<<32*(abi.Group*abi.DitherStep>>31&1)

var ditherTable Mem

// ditherOfLanes is the dither of each lane of a group over that of its first
// element, from a byte offset on.
func ditherOfLanes(offset int) Mem {
	if ditherTable.Symbol.Name == "" {
		ditherTable = GLOBL("ditherOfLanes", readOnlyWithoutPointers)
		for i := range abi.Group {
			DATA(4*i, U32(uint32(i*abi.DitherStep)))
		}
	}
	return ditherTable.Offset(offset)
}

// splitMaster holds the upper half, a bf16 parameter rounded half away from
// zero, and the low 16 bits in two streams.
type splitMaster struct {
	instructionSet
	parameter, low stream
}

func (m splitMaster) prefetch(index reg.Register) {
	PREFETCHT0(m.parameter.at(index, prefetchAhead))
	PREFETCHT0(m.low.at(index, prefetchAhead))
}

// load undoes the rounding: (upper << 16) + signed low. In 16-bit arithmetic,
// the upper half is one less where the low half is negative.
func (m splitMaster) load(index reg.Register) vectors {
	p := m.vectors()
	if m.lanes == 16 {
		t := m.vector()
		VPMOVZXWD(m.parameter.at(index, 0), p[0])
		VPMOVSXWD(m.low.at(index, 0), t)
		VPSLLD(U8(16), p[0], p[0])
		VPADDD(t, p[0], p[0])
		return p
	}
	upper, low, negative := m.vector(), m.vector(), m.vector()
	VPERMQ(U8(inQuarters), m.parameter.at(index, 0), upper)
	VPERMQ(U8(inQuarters), m.low.at(index, 0), low)
	VPSRAW(U8(15), low, negative)
	VPADDW(negative, upper, upper)
	VPUNPCKLWD(upper, low, p[0])
	VPUNPCKHWD(upper, low, p[1])
	return p
}

// store changes the registers.
func (m splitMaster) store(p vectors, index reg.Register) {
	VMOVDQU(m.packLowHalves(m.upperHalves(p)), m.parameter.at(index, 0))
	if m.lanes != 16 {
		for i := range p {
			VPAND(integer(0xffff), p[i], p[i])
		}
	}
	VMOVDQU(m.packLowHalves(p), m.low.at(index, 0))
}

func (splitMaster) finish() {}

// fp32Master holds whole fp32 weights, and writes a 16-bit copy past the
// caches: nothing reads it here, and an ordinary store would first read the
// line from memory.
type fp32Master struct {
	instructionSet
	weights, parameter stream
	copyKind           reg.Register
}

func (m fp32Master) prefetch(index reg.Register) { PREFETCHT0(m.weights.at(index, prefetchAhead)) }

func (m fp32Master) load(index reg.Register) vectors { return m.loadWide(m.weights, index) }

func (m fp32Master) store(p vectors, index reg.Register) {
	m.storeWide(p, m.weights, index)
	packed := YMM()
	CMPQ(m.copyKind, U8(abi.FP16))
	JE(LabelRef("copyFP16"))
	JA(LabelRef("copyStored"))
	VMOVDQA(m.packLowHalves(m.roundToBF16(p)), packed)
	JMP(LabelRef("copyRounded"))
	Label("copyFP16")
	m.roundToFP16(p, packed)
	Label("copyRounded")

	TESTQ(U32(31), m.parameter.base)
	JNE(LabelRef("copyUnaligned"))
	VMOVNTDQ(packed, m.parameter.at(index, 0))
	JMP(LabelRef("copyStored"))
	Label("copyUnaligned")
	VMOVDQU(packed, m.parameter.at(index, 0))
	Label("copyStored")
}

// finish orders the stores past the caches before whatever the caller does
// next.
func (fp32Master) finish() { SFENCE() }

// loadAny loads a group of numbers whose type is known only at run time. The
// branch is the same in every turn, so it costs nothing beside the memory that
// the loop waits for. The name tells its labels from those of other loads.
func (s instructionSet) loadAny(name string, kind, base, index reg.Register) vectors {
	x := s.vectors()
	halves, words := stream{base, 2}, stream{base, 4}
	CMPQ(kind, U8(abi.FP16))
	JE(LabelRef(name + "FP16"))
	JA(LabelRef(name + "FP32"))
	PREFETCHT0(halves.at(index, prefetchAhead))
	for i, upper := range s.loadUpperHalves(halves.at(index, 0)) {
		VMOVAPS(upper, x[i])
	}
	JMP(LabelRef(name + "Loaded"))
	Label(name + "FP16")
	PREFETCHT0(halves.at(index, prefetchAhead))
	for i := range x {
		VCVTPH2PS(halves.at(index, i*s.lanes), x[i])
	}
	JMP(LabelRef(name + "Loaded"))
	Label(name + "FP32")
	PREFETCHT0(words.at(index, prefetchAhead))
	for i := range x {
		VMOVUPS(words.at(index, i*s.lanes), x[i])
	}
	Label(name + "Loaded")
	return x
}

func (s instructionSet) loadWide(from stream, index reg.Register) vectors {
	x := s.vectors()
	for i := range x {
		VMOVUPS(from.at(index, i*s.lanes), x[i])
	}
	return x
}

func (s instructionSet) storeWide(x vectors, to stream, index reg.Register) {
	for i := range x {
		VMOVUPS(x[i], to.at(index, i*s.lanes))
	}
}

// inQuarters swaps the middle quarters of a 256-bit register. Instructions that
// interleave or pack work within 128 bits; with the middle quarters swapped
// before the one, or after the other, the elements are in order.
const inQuarters = 0b11_01_10_00

// loadUpperHalves loads a group of 16-bit numbers as the upper halves of 32-bit
// ones: bf16 as fp32.
func (s instructionSet) loadUpperHalves(from Mem) vectors {
	x := s.vectors()
	if s.lanes == 16 {
		VPMOVZXWD(from, x[0])
		VPSLLD(U8(16), x[0], x[0])
		return x
	}
	zero, halves := s.vector(), s.vector()
	VPERMQ(U8(inQuarters), from, halves)
	VPXOR(zero, zero, zero)
	VPUNPCKLWD(halves, zero, x[0])
	VPUNPCKHWD(halves, zero, x[1])
	return x
}

// packLowHalves packs the low 16 bits of every lane. For AVX2 the lanes must be
// below 2^16 already.
func (s instructionSet) packLowHalves(x vectors) reg.VecVirtual {
	packed := YMM()
	if s.lanes == 16 {
		VPMOVDW(x[0], packed)
		return packed
	}
	VPACKUSDW(x[1], x[0], packed)
	VPERMQ(U8(inQuarters), packed, packed)
	return packed
}

// roundToFP16 rounds to nearest even.
func (s instructionSet) roundToFP16(x vectors, packed reg.VecVirtual) {
	const toNearest = 0
	if s.lanes == 16 {
		VCVTPS2PH(U8(toNearest), x[0], packed)
		return
	}
	upper := XMM()
	VCVTPS2PH(U8(toNearest), x[0], packed.AsX())
	VCVTPS2PH(U8(toNearest), x[1], upper)
	VINSERTI128(U8(1), upper, packed, packed)
}

// upperHalves rounds to bf16 half away from zero, in integer arithmetic. The
// result is in the low half of each lane.
func (s instructionSet) upperHalves(x vectors) vectors {
	upper := s.vectors()
	for i := range x {
		VPADDD(integer(0x8000), x[i], upper[i])
		VPSRLD(U8(16), upper[i], upper[i])
	}
	return upper
}

// roundToBF16 rounds to nearest even in integer arithmetic; a NaN becomes
// 0x7fc0. The result is in the low half of each lane.
func (s instructionSet) roundToBF16(x vectors) vectors {
	const unordered = 3
	rounded := s.vectors()
	for i, t := range rounded {
		VPSRLD(U8(16), x[i], t)
		if s.lanes == 16 {
			VPANDD(integer(1), t, t)
		} else {
			VPAND(integer(1), t, t)
		}
		VPADDD(integer(0x7fff), t, t)
		VPADDD(x[i], t, t)
		VPSRLD(U8(16), t, t)
		if s.lanes == 16 {
			nan := K()
			VCMPPS(U8(unordered), x[i], x[i], nan)
			VMOVDQU32(integer(0x7fc0), nan, t)
		} else {
			nan := s.vector()
			VCMPPS(U8(unordered), x[i], x[i], nan)
			VBLENDVPS(nan, integer(0x7fc0), t, t)
		}
	}
	return rounded
}
