package main

import (
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// traffic writes the kernel that an update is measured against: the same streams in the same order with the same
// prefetch, and one integer instruction in place of the update's arithmetic. It skips a nil parameter copy.
func (s instructionSet) traffic(state abi.State, moments abi.MomentType, count int) {
	TEXT(trafficName(state, moments, count, s), 4, "func(a *Arguments)")
	parameter, gradient, kind := stream{argument("Parameter"), 2}, argument("Gradient"), argument("GradientKind")
	var inPlace []stream
	if low := state.LowSize(); low > 0 {
		inPlace = []stream{parameter, {argument("Low"), low}}
	} else {
		inPlace = []stream{{argument("Master"), 4}}
	}
	for _, field := range []string{"Moment1", "Moment2"}[:count] {
		inPlace = append(inPlace, stream{argument(field), int(moments.Size())})
	}
	halves, words := stream{gradient, 2}, stream{gradient, 4}
	var headers reg.Register
	if moments == abi.MomentsInt8 {
		headers = argument("Headers")
	}
	zero, sink := s.vector(), s.vector()
	s.clear(zero)
	s.clear(sink)
	n := length{elements: argument("Elements"), prefetching: argument("Prefetching"), ahead: true}
	loopOfKind(kind, n, 0, abi.Group, func(kind int, index, ahead reg.Register) {
		var writes []func()
		for _, st := range inPlace {
			PREFETCHT0(st.at(ahead, 0))
			writes = append(writes, s.touch(st, index, zero)...)
		}
		if kind == abi.Wide {
			PREFETCHT0(words.at(ahead, 0))
			for _, word := range s.wide(words, index, 0) {
				s.or(word, sink, sink)
			}
		} else {
			PREFETCHT0(halves.at(ahead, 0))
			VPOR(halves.at(index, 0), sink.AsY(), sink.AsY())
		}
		for _, write := range writes {
			write()
		}
		if moments == abi.MomentsInt8 {
			s.touchHeader(headers, index)
		}
		if state == abi.FP32 {
			written, unaligned := label("written"), label("unaligned")
			TESTQ(parameter.base, parameter.base)
			JEQ(LabelRef(written))
			TESTQ(U32(31), parameter.base)
			JNE(LabelRef(unaligned))
			VMOVNTDQ(zero.AsY(), parameter.at(index, 0))
			JMP(LabelRef(written))
			Label(unaligned)
			VMOVDQU(zero.AsY(), parameter.at(index, 0))
			Label(written)
		}
	})
	if state == abi.FP32 {
		SFENCE()
	}
	VZEROUPPER()
	RET()
}

// touch reads a group of a stream and changes nothing. It returns a function that emits the write: kernels write
// after all reads, see adam. A group is 16 bytes of an 8-bit stream, 32 of a 16-bit one and 64 of a 32-bit one. Only
// a 32-bit one fills a 512-bit register.
func (s instructionSet) touch(st stream, index reg.Register, zero reg.VecVirtual) (writes []func()) {
	if s.lanes == 16 && st.size == 4 {
		x := s.vector()
		VPORD(st.at(index, 0), zero, x)
		return []func(){func() { VMOVDQU32(x, st.at(index, 0)) }}
	}
	if st.size == 1 {
		x := XMM()
		VPOR(st.at(index, 0), zero.AsX(), x)
		return []func(){func() { VMOVDQU(x, st.at(index, 0)) }}
	}
	for offset := 0; offset < abi.Group; offset += 32 / st.size {
		x := YMM()
		VPOR(st.at(index, offset), zero.AsY(), x)
		writes = append(writes, func() { VMOVDQU(x, st.at(index, offset)) })
	}
	return writes
}

// touchHeader reads the header of a block and writes it.
func (s instructionSet) touchHeader(headers, index reg.Register) {
	within, place, header := label("within"), GP64(), GP32()
	TESTQ(U32(abi.Block-1), index)
	JNE(LabelRef(within))
	MOVQ(index, place)
	SHRQ(U8(7), place) // two bytes for 256 elements
	MOVWLZX(Mem{Base: headers, Index: place, Scale: 1}, header)
	MOVW(header.As16(), Mem{Base: headers, Index: place, Scale: 1})
	Label(within)
}

func (s instructionSet) or(a, b, to Op) {
	if s.lanes == 16 {
		VPORD(a, b, to)
		return
	}
	VPOR(a, b, to)
}

func (s instructionSet) xor(a, b, to Op) {
	if s.lanes == 16 {
		VPXORD(a, b, to)
		return
	}
	VPXOR(a, b, to)
}

func (s instructionSet) clear(x reg.VecVirtual) { s.xor(x, x, x) }

// accumulate writes the kernel that adds gradients to an accumulator of any type.
func (s instructionSet) accumulate() {
	TEXT("accumulate"+s.name, 4, "func(n int, prefetching int, sumKind int, sum *byte, kind int, gradient *byte)")
	restore := flushDenormals()
	sumKind, kind := Load(Param("sumKind"), GP64()), Load(Param("kind"), GP64())
	base, gradient := Load(Param("sum"), GP64()), Load(Param("gradient"), GP64())
	halves, words := stream{base, 2}, stream{base, 4}
	n := length{elements: Load(Param("n"), GP64()), prefetching: Load(Param("prefetching"), GP64())}
	eachKind(sumKind, func(sumKind int) {
		loopOfKind(kind, n, abi.PrefetchAhead(abi.MomentsBF16), abi.Group, func(kind int, index, ahead reg.Register) {
			s.prefetchKind(sumKind, base, ahead)
			s.prefetchKind(kind, gradient, ahead)
			sum := s.loadKind(sumKind, base, index, 0)
			for i, g := range s.loadKind(kind, gradient, index, 0) {
				VADDPS(g, sum[i], sum[i])
			}
			switch sumKind {
			case abi.BF16:
				VMOVDQU(s.packUpperHalves(s.roundToBF16(sum)), halves.at(index, 0))
			case abi.FP16:
				VMOVDQU(s.roundToFP16(sum), halves.at(index, 0))
			default:
				s.storeWide(sum, words, index)
			}
		})
	})
	restore()
	VZEROUPPER()
	RET()
}

// sumSquares writes the kernel that sums the squares of the parts of a gradient. Each part has n elements, in full
// runs, and begins apart elements after the last. A core fetches a third more in the same time when it reads in
// several places. It fetches less when it prefetches what it will read in order anyway.
func (s instructionSet) sumSquares() {
	TEXT("sumSquares"+s.name, 4, "func(n int, apart int, gradientKind int, gradient *byte, sums *[4][16]float64)")
	restore := flushDenormals()
	kind, gradient := Load(Param("gradientKind"), GP64()), Load(Param("gradient"), GP64())
	n, apart, sums := Load(Param("n"), GP64()), Load(Param("apart"), GP64()), Load(Param("sums"), GP64())
	eachKind(kind, func(kind int) {
		run, part := label("run"), label("part")
		index, base, lanes, left := GP64(), GP64(), GP64(), GP64()
		bytes := GP64()
		MOVQ(apart, bytes)
		SHLQ(U8(bits.TrailingZeros(uint(streamOf(kind, nil).size))), bytes)
		XORQ(index, index)
		Label(run)
		MOVQ(gradient, base)
		MOVQ(sums, lanes)
		MOVQ(U32(abi.Parts), left)
		Label(part)
		s.sumRun(kind, base, index, Mem{Base: lanes})
		ADDQ(bytes, base)
		ADDQ(U32(8*abi.Group), lanes)
		DECQ(left)
		JNE(LabelRef(part))
		ADDQ(U32(abi.Run), index)
		CMPQ(index, n)
		JB(LabelRef(run))
	})
	restore()
	VZEROUPPER()
	RET()
}

// sumRun adds up a run in fp32 and adds its lanes to those in float64.
func (s instructionSet) sumRun(kind int, base, index reg.Register, lanes Mem) {
	var run vectors
	for group := range abi.Run / abi.Group {
		x := s.loadKind(kind, base, index, group)
		if group == 0 {
			for i := range x {
				VMULPS(x[i], x[i], x[i])
			}
			run = x
			continue
		}
		for i := range x {
			VFMADD231PS(x[i], x[i], run[i])
		}
	}
	for i, x := range s.doubles(run) {
		to := lanes.Offset(8 * i * s.lanes / 2)
		VADDPD(to, x, x)
		VMOVUPD(x, to)
	}
}

// sumPairs writes the kernel that sums the squares of a bf16 gradient in full runs of pairs. A register of 16-bit
// numbers becomes one of even and one of odd elements, each in a sum of its own: one shift and one AND for both.
func (s instructionSet) sumPairs() {
	TEXT("sumPairs"+s.name, 4, "func(n int, prefetching int, gradient *byte, sums *[2][16]float64)")
	s.interleaved = true
	restore := flushDenormals()
	base, sums := Load(Param("gradient"), GP64()), Load(Param("sums"), GP64())
	n := length{elements: Load(Param("n"), GP64()), prefetching: Load(Param("prefetching"), GP64())}
	if s.lanes == 16 {
		s.hold(0xffff0000)
	}
	gradient := stream{base, 2}
	loop(n, abi.PrefetchAlone, abi.PairRun, func(index, ahead reg.Register) {
		var even, odd vectors // the sums of a run: of 16 lanes each
		for first := 0; first < abi.PairRun; first += s.group() {
			if first%(64/gradient.size) == 0 {
				PREFETCHT0(gradient.at(ahead, first))
			}
			x := s.loadUpperHalves(gradient.at(index, first))
			if first < 2*abi.Group {
				VMULPS(x[0], x[0], x[0])
				VMULPS(x[1], x[1], x[1])
				even, odd = append(even, x[0]), append(odd, x[1])
				continue
			}
			part := first / s.group() % len(even)
			VFMADD231PS(x[0], x[0], even[part])
			VFMADD231PS(x[1], x[1], odd[part])
		}
		for i, x := range s.doubles(append(even, odd...)) {
			to := Mem{Base: sums, Disp: 8 * i * s.lanes / 2}
			VADDPD(to, x, x)
			VMOVUPD(x, to)
		}
	})
	restore()
	VZEROUPPER()
	RET()
}

// sumWideSquares writes the kernel that sums the squares of gradients in float64, in 16 lanes. Lane j adds up the
// elements whose index is j modulo 16, in order. The square of an fp32 number is exact in float64, so a fused
// multiply-add rounds just as a multiplication and an addition do.
func (s instructionSet) sumWideSquares() {
	TEXT("sumWideSquares"+s.name, 4, "func(n int, prefetching int, gradientKind int, gradient *byte, lanes *[16]float64)")
	restore := flushDenormals()
	kind, gradient := Load(Param("gradientKind"), GP64()), Load(Param("gradient"), GP64())
	lanes := Load(Param("lanes"), GP64())
	n := length{elements: Load(Param("n"), GP64()), prefetching: Load(Param("prefetching"), GP64())}
	doubles := s.lanes / 2
	var sums []reg.VecVirtual
	at := func(i int) Mem { return Mem{Base: lanes, Disp: 8 * doubles * i} }
	for i := range abi.Group / doubles {
		sum := s.vector()
		VMOVUPD(at(i), sum)
		sums = append(sums, sum)
	}
	loopOfKind(kind, n, abi.PrefetchAlone, abi.Group, func(kind int, index, ahead reg.Register) {
		s.prefetchKind(kind, gradient, ahead)
		for i, x := range s.doubles(s.loadKind(kind, gradient, index, 0)) {
			VFMADD231PD(x, x, sums[i])
		}
	})
	for i, sum := range sums {
		VMOVUPD(sum, at(i))
	}
	restore()
	VZEROUPPER()
	RET()
}

// doubles converts a group to float64, in order.
func (s instructionSet) doubles(x vectors) (wide vectors) {
	for _, g := range x {
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
		wide = append(wide, lower, upper)
	}
	return wide
}
