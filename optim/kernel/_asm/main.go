// Command _asm writes the vector kernels of package kernel. Run it through
// "make generate"; the test suite proves that the checked-in assembly is what
// it writes.
//
// Every kernel handles whole groups of 16 elements; the callers hand the rest
// to the plain Go reference, which gives the same bits.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// group is the number of elements that one turn of a loop handles.
const group = 16

// prefetchAhead is how far ahead of the loop streams are prefetched, in
// elements. Between 128 and 256 is best on the machines measured; from 512 on
// it no longer helps.
const prefetchAhead = 512

// The gradient types, as package kernel numbers them.
const (
	gradientBF16 = iota
	gradientFP16
	gradientFP32
)

// The types of the parameter copy, as package kernel numbers them.
const (
	copyBF16 = iota
	copyFP16
	copyNone
)

// Rows of the table of constants, in the order of kernel.constants: each row
// is one value repeated 16 times.
const (
	gradientScale = iota
	beta1
	oneMinusBeta1
	beta2
	oneMinusBeta2
	l2Penalty
	epsilon
	inverseRootBias2
	decay
	stepSize
)

// instructionSet is a vector width with the registers of that width.
type instructionSet struct {
	name  string
	lanes int
}

var instructionSets = []instructionSet{{"AVX2", 8}, {"AVX512", 16}}

func (s instructionSet) vector() reg.VecVirtual {
	if s.lanes == 16 {
		return ZMM()
	}
	return YMM()
}

// half is a register of half the width, for 16-bit elements.
func (s instructionSet) half() reg.VecVirtual {
	if s.lanes == 16 {
		return YMM()
	}
	return XMM()
}

// stream is an array that a kernel walks: a base address and the bytes of an
// element.
type stream struct {
	base reg.Register
	size int
}

// at is the address of element index+offset.
func (s stream) at(index reg.Register, offset int) Mem {
	return Mem{Base: s.base, Index: index, Scale: uint8(s.size), Disp: offset * s.size}
}

func loadStream(param string, size int) stream {
	return stream{Load(Param(param), GP64()), size}
}

// integers are the 32-bit patterns that conversions use, 16 of each.
var integers = map[uint32]Mem{}

func integer(pattern uint32) Mem {
	if m, ok := integers[pattern]; ok {
		return m
	}
	m := GLOBL(fmt.Sprintf("pattern%08x", pattern), 8|16) // RODATA|NOPTR
	for i := range 16 {
		DATA(4*i, U32(pattern))
	}
	integers[pattern] = m
	return m
}

func main() {
	ConstraintExpr("amd64,!purego")
	for _, s := range instructionSets {
		s.adam("Split", &splitMaster{instructionSet: s})
		s.adam("FP32", &fp32Master{instructionSet: s})
		s.traffic("Split", true)
		s.traffic("FP32", false)
		s.sumSquares()
	}
	Generate()
}

// flushDenormals sets flush-to-zero and denormals-are-zero for the rest of the
// kernel and returns what puts the caller's setting back. Doing it here, and
// not once per thread, makes the kernels functions of their arguments alone.
func flushDenormals() (restore func()) {
	saved := AllocLocal(8)
	flushing := saved.Offset(4)
	STMXCSR(saved)
	word := GP32()
	MOVL(saved, word)
	ORL(U32(0x8040), word)
	MOVL(word, flushing)
	LDMXCSR(flushing)
	return func() { LDMXCSR(saved) }
}

// loop emits a loop over n elements in groups of 16; n is a multiple of 16.
func loop(body func(index reg.Register)) {
	n := Load(Param("n"), GP64())
	index := GP64()
	XORQ(index, index)
	JMP(LabelRef("check"))
	Label("next")
	body(index)
	ADDQ(U8(group), index)
	Label("check")
	CMPQ(index, n)
	JB(LabelRef("next"))
}

// loadGradients fills one register for each vector of the group, whatever type
// the gradients have. The branch is the same in every turn, so it costs
// nothing beside the memory that the loop waits for.
func (s instructionSet) loadGradients(kind reg.Register, base reg.Register, index reg.Register) []reg.VecVirtual {
	var g []reg.VecVirtual
	for range group / s.lanes {
		g = append(g, s.vector())
	}
	halves, words := stream{base, 2}, stream{base, 4}
	CMPQ(kind, U8(gradientFP16))
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

// master is how the fp32 master weights are held.
type master interface {
	parameters() // loads its streams from the kernel's parameters
	prefetch(index reg.Register)
	load(index reg.Register, offset int) reg.VecVirtual
	store(p reg.VecVirtual, index reg.Register, offset int)
	signature() string
	finish()
}

// splitMaster holds the upper half, a bf16 parameter rounded half away from
// zero, and the low 16 bits in two streams.
type splitMaster struct {
	instructionSet
	parameter, low stream
}

func (*splitMaster) signature() string { return "param, low *uint16" }

func (m *splitMaster) parameters() {
	m.parameter, m.low = loadStream("param", 2), loadStream("low", 2)
}

func (m *splitMaster) prefetch(index reg.Register) {
	PREFETCHT0(m.parameter.at(index, prefetchAhead))
	PREFETCHT0(m.low.at(index, prefetchAhead))
}

// load undoes the rounding: (upper << 16) + signed low.
func (m *splitMaster) load(index reg.Register, offset int) reg.VecVirtual {
	p, t := m.vector(), m.vector()
	VPMOVZXWD(m.parameter.at(index, offset), p)
	VPMOVSXWD(m.low.at(index, offset), t)
	VPSLLD(U8(16), p, p)
	VPADDD(t, p, p)
	return p
}

func (m *splitMaster) store(p reg.VecVirtual, index reg.Register, offset int) {
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

func (*splitMaster) finish() {}

// fp32Master holds whole fp32 weights, and writes a 16-bit copy past the
// caches: nothing reads it here, and an ordinary store would first read the
// line from memory.
type fp32Master struct {
	instructionSet
	parameter, weights stream
	copyKind           reg.Register
}

func (*fp32Master) signature() string { return "copyKind int, param *uint16, weights *float32" }

func (m *fp32Master) parameters() {
	m.copyKind = Load(Param("copyKind"), GP64())
	m.parameter, m.weights = loadStream("param", 2), loadStream("weights", 4)
}

func (m *fp32Master) prefetch(index reg.Register) { PREFETCHT0(m.weights.at(index, prefetchAhead)) }

func (m *fp32Master) load(index reg.Register, offset int) reg.VecVirtual {
	p := m.vector()
	VMOVUPS(m.weights.at(index, offset), p)
	return p
}

func (m *fp32Master) store(p reg.VecVirtual, index reg.Register, offset int) {
	label := func(name string) string { return fmt.Sprintf("%s%d", name, offset) }
	VMOVUPS(p, m.weights.at(index, offset))
	packed := m.half()
	CMPQ(m.copyKind, U8(copyFP16))
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
func (*fp32Master) finish() { SFENCE() }

// roundToBF16 rounds to nearest even in integer arithmetic; a NaN becomes
// 0x7fc0. The result is in the low half of each lane.
func (s instructionSet) roundToBF16(x reg.VecVirtual) reg.VecVirtual {
	t := s.vector()
	VPSRLD(U8(16), x, t)
	if s.lanes == 16 {
		VPANDD(integer(1), t, t)
		VPADDD(integer(0x7fff), t, t)
		VPADDD(x, t, t)
		VPSRLD(U8(16), t, t)
		unordered := K()
		VCMPPS(U8(3), x, x, unordered)
		VMOVDQA32(integer(0x7fc0), unordered, t)
		return t
	}
	VPAND(integer(1), t, t)
	VPADDD(integer(0x7fff), t, t)
	VPADDD(x, t, t)
	VPSRLD(U8(16), t, t)
	unordered := s.vector()
	VCMPPS(U8(3), x, x, unordered)
	VBLENDVPS(unordered, integer(0x7fc0), t, t)
	return t
}

// adam writes the Adam and AdamW update; kernel.AdamReference is its
// specification.
func (s instructionSet) adam(name string, m master) {
	TEXT("adam"+name+s.name, 4, fmt.Sprintf(
		"func(n int, table *[10][16]float32, gradientKind int, %s, expAvg, expAvgSq *float32, gradient *byte)", m.signature()))
	Pragma("noescape")
	restore := flushDenormals()
	table := Load(Param("table"), GP64())
	row := func(i int) Mem { return Mem{Base: table, Disp: 64 * i} }
	resident := func(i int) reg.VecVirtual {
		r := s.vector()
		VMOVUPS(row(i), r)
		return r
	}
	kind := Load(Param("gradientKind"), GP64())
	m.parameters()
	expAvg, expAvgSq := loadStream("expAvg", 4), loadStream("expAvgSq", 4)
	gradient := Load(Param("gradient"), GP64())
	b1, c1, b2, c2 := resident(beta1), resident(oneMinusBeta1), resident(beta2), resident(oneMinusBeta2)
	rootBias, step := resident(inverseRootBias2), resident(stepSize)

	loop(func(index reg.Register) {
		m.prefetch(index)
		PREFETCHT0(expAvg.at(index, prefetchAhead))
		PREFETCHT0(expAvgSq.at(index, prefetchAhead))
		for i, g := range s.loadGradients(kind, gradient, index) {
			at := i * s.lanes
			p := m.load(index, at)
			VMULPS(row(gradientScale), g, g)
			VFMADD231PS(row(l2Penalty), p, g)

			first := s.vector()
			VMULPS(expAvg.at(index, at), b1, first)
			VFMADD231PS(c1, g, first)
			VMOVUPS(first, expAvg.at(index, at))

			second := s.vector()
			VMULPS(expAvgSq.at(index, at), b2, second)
			VMULPS(g, g, g)
			VFMADD231PS(c2, g, second)
			VMOVUPS(second, expAvgSq.at(index, at))

			VSQRTPS(second, second)
			VFMADD213PS(row(epsilon), rootBias, second)
			VDIVPS(second, first, first)
			decayed := s.vector()
			VMOVUPS(row(decay), decayed)
			VFMADD213PS(p, p, decayed)
			VFMADD231PS(step, first, decayed)
			m.store(decayed, index, at)
		}
	})
	m.finish()
	restore()
	VZEROUPPER()
	RET()
}

// traffic writes the limit that the update is measured against: the same
// streams in the same order with the same prefetch, and one integer
// instruction where the update has its arithmetic. A nil param is left out.
func (s instructionSet) traffic(name string, split bool) {
	signature := "param *uint16, weights *float32"
	if split {
		signature = "param, low *uint16"
	}
	TEXT("traffic"+name+s.name, 4, fmt.Sprintf(
		"func(n int, gradientBytes int, %s, expAvg, expAvgSq *float32, gradient *byte)", signature))
	Pragma("noescape")
	size := Load(Param("gradientBytes"), GP64())
	param := loadStream("param", 2)
	var inPlace []stream
	if split {
		inPlace = []stream{param, loadStream("low", 2)}
	} else {
		inPlace = []stream{loadStream("weights", 4)}
	}
	inPlace = append(inPlace, loadStream("expAvg", 4), loadStream("expAvgSq", 4))
	base := Load(Param("gradient"), GP64())
	halves, words := stream{base, 2}, stream{base, 4}
	zero, sink, x := s.vector(), s.vector(), s.vector()
	or := func(a, b, to Op) { VPOR(a, b, to) }
	if s.lanes == 16 {
		or = func(a, b, to Op) { VPORD(a, b, to) }
		VPXORD(zero, zero, zero)
		VPXORD(sink, sink, sink)
	} else {
		VPXOR(zero, zero, zero)
		VPXOR(sink, sink, sink)
	}
	// A group is 32 bytes of a 16-bit stream and 64 of a 32-bit one: with
	// 512-bit registers the former take the lower half of one.
	touch := func(st stream, index reg.Register) {
		for offset := 0; offset < group; {
			if s.lanes == 16 && st.size == 2 {
				VMOVDQU(st.at(index, offset), x.AsY())
				VPOR(zero.AsY(), x.AsY(), x.AsY())
				VMOVDQU(x.AsY(), st.at(index, offset))
				offset += 16
				continue
			}
			if s.lanes == 16 {
				VMOVDQU32(st.at(index, offset), x)
				or(zero, x, x)
				VMOVDQU32(x, st.at(index, offset))
			} else {
				VMOVDQU(st.at(index, offset), x)
				or(zero, x, x)
				VMOVDQU(x, st.at(index, offset))
			}
			offset += 4 * s.lanes / st.size
		}
	}
	loop(func(index reg.Register) {
		for _, st := range inPlace {
			PREFETCHT0(st.at(index, prefetchAhead))
			touch(st, index)
		}
		CMPQ(size, U8(4))
		JE(LabelRef("wide"))
		PREFETCHT0(halves.at(index, prefetchAhead))
		VPOR(halves.at(index, 0), sink.AsY(), sink.AsY())
		JMP(LabelRef("read"))
		Label("wide")
		PREFETCHT0(words.at(index, prefetchAhead))
		for offset := 0; offset < group; offset += s.lanes {
			or(words.at(index, offset), sink, sink)
		}
		Label("read")
		if !split {
			TESTQ(param.base, param.base)
			JEQ(LabelRef("written"))
			TESTQ(U32(31), param.base)
			JNE(LabelRef("unaligned"))
			VMOVNTDQ(zero.AsY(), param.at(index, 0))
			JMP(LabelRef("written"))
			Label("unaligned")
			VMOVDQU(zero.AsY(), param.at(index, 0))
			Label("written")
		}
	})
	if !split {
		SFENCE()
	}
	VZEROUPPER()
	RET()
}

// sumSquares writes the sum of the squares of gradients in float64, in 16
// lanes: lane j adds up the elements whose index is j modulo 16, in order. The
// square of an fp32 number is exact in float64, so a fused multiply-add rounds
// just as a multiplication and an addition do.
func (s instructionSet) sumSquares() {
	TEXT("sumSquares"+s.name, 4, "func(n int, gradientKind int, gradient *byte, lanes *[16]float64)")
	Pragma("noescape")
	restore := flushDenormals()
	kind := Load(Param("gradientKind"), GP64())
	gradient := Load(Param("gradient"), GP64())
	lanes := Load(Param("lanes"), GP64())
	doubles := s.lanes / 2
	var sums []reg.VecVirtual
	at := func(i int) Mem { return Mem{Base: lanes, Disp: 8 * doubles * i} }
	for i := range group / doubles {
		sum := s.vector()
		VMOVUPD(at(i), sum)
		sums = append(sums, sum)
	}
	loop(func(index reg.Register) {
		for i, g := range s.loadGradients(kind, gradient, index) {
			lower, upper := s.vector(), s.vector()
			if s.lanes == 16 {
				VCVTPS2PD(g.AsY(), lower)
				VEXTRACTF64X4(U8(1), g, upper.AsY())
				VCVTPS2PD(upper.AsY(), upper)
			} else {
				VCVTPS2PD(g.AsX(), lower)
				VEXTRACTF128(U8(1), g, upper.AsX())
				VCVTPS2PD(upper.AsX(), upper)
			}
			VFMADD231PD(lower, lower, sums[2*i])
			VFMADD231PD(upper, upper, sums[2*i+1])
		}
	})
	for i, sum := range sums {
		VMOVUPD(sum, at(i))
	}
	restore()
	VZEROUPPER()
	RET()
}
