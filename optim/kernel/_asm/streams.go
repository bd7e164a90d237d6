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

// array is a stream of numbers that a kernel reads as fp32, and writes back.
type array interface {
	prefetch(index reg.Register)
	load(index reg.Register, offset int) reg.VecVirtual
	// store may change the register.
	store(x reg.VecVirtual, index reg.Register, offset int)
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

func (m fp32Moment) load(index reg.Register, offset int) reg.VecVirtual {
	x := m.vector()
	VMOVUPS(m.at(index, offset), x)
	return x
}

func (m fp32Moment) store(x reg.VecVirtual, index reg.Register, offset int) {
	VMOVUPS(x, m.at(index, offset))
}

func (fp32Moment) finish() {}

type bf16Moment struct {
	instructionSet
	stream
}

func (m bf16Moment) prefetch(index reg.Register) { PREFETCHT0(m.at(index, prefetchAhead)) }

func (m bf16Moment) load(index reg.Register, offset int) reg.VecVirtual {
	x := m.vector()
	VPMOVZXWD(m.at(index, offset), x)
	VPSLLD(U8(16), x, x)
	return x
}

func (m bf16Moment) store(x reg.VecVirtual, index reg.Register, offset int) {
	packed := m.half()
	m.packLowHalves(m.roundToBF16(x), packed)
	VMOVDQU(packed, m.at(index, offset))
}

func (bf16Moment) finish() {}

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

// load undoes the rounding: (upper << 16) + signed low.
func (m splitMaster) load(index reg.Register, offset int) reg.VecVirtual {
	p, t := m.vector(), m.vector()
	VPMOVZXWD(m.parameter.at(index, offset), p)
	VPMOVSXWD(m.low.at(index, offset), t)
	VPSLLD(U8(16), p, p)
	VPADDD(t, p, p)
	return p
}

func (m splitMaster) store(p reg.VecVirtual, index reg.Register, offset int) {
	upper, packed := m.vector(), m.half()
	VPADDD(integer(0x8000), p, upper)
	VPSRLD(U8(16), upper, upper)
	m.packLowHalves(upper, packed)
	VMOVDQU(packed, m.parameter.at(index, offset))
	if m.lanes != 16 {
		VPAND(integer(0xffff), p, p)
	}
	m.packLowHalves(p, packed)
	VMOVDQU(packed, m.low.at(index, offset))
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

func (m fp32Master) load(index reg.Register, offset int) reg.VecVirtual {
	p := m.vector()
	VMOVUPS(m.weights.at(index, offset), p)
	return p
}

func (m fp32Master) store(p reg.VecVirtual, index reg.Register, offset int) {
	label := func(name string) string { return fmt.Sprintf("%s%d", name, offset) }
	VMOVUPS(p, m.weights.at(index, offset))
	packed := m.half()
	CMPQ(m.copyKind, U8(abi.FP16))
	JE(LabelRef(label("copyFP16")))
	JA(LabelRef(label("copyStored")))
	m.packLowHalves(m.roundToBF16(p), packed)
	JMP(LabelRef(label("copyRounded")))
	Label(label("copyFP16"))
	VCVTPS2PH(U8(0), p, packed)
	Label(label("copyRounded"))

	TESTQ(U32(uint32(2*m.lanes-1)), m.parameter.base)
	JNE(LabelRef(label("copyUnaligned")))
	VMOVNTDQ(packed, m.parameter.at(index, offset))
	JMP(LabelRef(label("copyStored")))
	Label(label("copyUnaligned"))
	VMOVDQU(packed, m.parameter.at(index, offset))
	Label(label("copyStored"))
}

// finish orders the stores past the caches before whatever the caller does
// next.
func (fp32Master) finish() { SFENCE() }

// loadGradients fills one register for each vector of the group, whatever type
// the gradients have. The branch is the same in every turn, so it costs
// nothing beside the memory that the loop waits for.
func (s instructionSet) loadGradients(kind, base, index reg.Register) []reg.VecVirtual {
	var g []reg.VecVirtual
	for range abi.Group / s.lanes {
		g = append(g, s.vector())
	}
	halves, words := stream{base, 2}, stream{base, 4}
	CMPQ(kind, U8(abi.FP16))
	JE(LabelRef("gradientFP16"))
	JA(LabelRef("gradientFP32"))
	PREFETCHT0(halves.at(index, prefetchAhead))
	for i := range g {
		VPMOVZXWD(halves.at(index, i*s.lanes), g[i])
		VPSLLD(U8(16), g[i], g[i])
	}
	JMP(LabelRef("gradientLoaded"))
	Label("gradientFP16")
	PREFETCHT0(halves.at(index, prefetchAhead))
	for i := range g {
		VCVTPH2PS(halves.at(index, i*s.lanes), g[i])
	}
	JMP(LabelRef("gradientLoaded"))
	Label("gradientFP32")
	PREFETCHT0(words.at(index, prefetchAhead))
	for i := range g {
		VMOVUPS(words.at(index, i*s.lanes), g[i])
	}
	Label("gradientLoaded")
	return g
}

// packLowHalves packs the low 16 bits of every lane. For AVX2 the lanes must be
// below 2^16 already.
func (s instructionSet) packLowHalves(x, packed reg.VecVirtual) {
	if s.lanes == 16 {
		VPMOVDW(x, packed)
		return
	}
	VEXTRACTI128(U8(1), x, packed)
	VPACKUSDW(packed, x.AsX(), packed)
}

// roundToBF16 rounds to nearest even in integer arithmetic; a NaN becomes
// 0x7fc0. The result is in the low half of each lane.
func (s instructionSet) roundToBF16(x reg.VecVirtual) reg.VecVirtual {
	const unordered = 3
	t := s.vector()
	VPSRLD(U8(16), x, t)
	if s.lanes == 16 {
		VPANDD(integer(1), t, t)
	} else {
		VPAND(integer(1), t, t)
	}
	VPADDD(integer(0x7fff), t, t)
	VPADDD(x, t, t)
	VPSRLD(U8(16), t, t)
	if s.lanes == 16 {
		nan := K()
		VCMPPS(U8(unordered), x, x, nan)
		VMOVDQA32(integer(0x7fc0), nan, t)
	} else {
		nan := s.vector()
		VCMPPS(U8(unordered), x, x, nan)
		VBLENDVPS(nan, integer(0x7fc0), t, t)
	}
	return t
}
