// Command _asm writes the vector kernels of package kernel. Run it through
// "make generate"; the test suite proves that the checked-in files are what it
// writes.
//
// Every kernel handles whole groups of 16 elements; the callers hand the rest
// to the plain Go reference, which gives the same bits.
package main

import (
	"flag"
	"fmt"
	"log"
	"maps"
	"os"
	"slices"
	"strings"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/optim/kernel/abi"
)

var stubs = flag.String("dispatch", "", "write stubs and dispatch to this file")

func main() {
	flag.Parse()
	Package("plimsoll/optim/kernel/abi")
	ConstraintExpr("amd64,!purego")
	for _, s := range instructionSets {
		for state := range abi.States {
			for moments := range abi.MomentTypes {
				if s.shares(state, moments) {
					continue
				}
				for _, algorithm := range algorithmsWith(moments) {
					assign(updateName(algorithm, state, moments, s), state, s)
					if moments == abi.MomentsInt8 {
						s.updateBlocks(state)
					} else {
						s.update(algorithm, state, moments)
					}
				}
				if s.extended {
					continue
				}
				for _, count := range countsWith(moments) {
					assign(trafficName(state, moments, count, s), state, s)
					s.traffic(state, moments, count)
				}
			}
		}
		if !s.extended {
			s.sumSquares()
			s.sumPairs()
			s.sumWideSquares()
			s.accumulate()
		}
	}
	vendor()
	if *stubs != "" {
		if err := os.WriteFile(*stubs, []byte(dispatch()), 0o644); err != nil {
			log.Fatal(err)
		}
	}
	Generate()
	out := flag.Lookup("out").Value.String()
	if err := encodeBF16(out); err != nil {
		log.Fatal(err)
	}
	if err := divide(out); err != nil {
		log.Fatal(err)
	}
}

// vendor writes a function that returns the end of the name of the processor's maker.
func vendor() {
	TEXT("vendor", 4, "func() uint32")
	XORL(reg.EAX, reg.EAX)
	CPUID()
	Store(reg.ECX, ReturnIndex(0))
	RET()
}

// algorithmsWith returns the algorithms whose moments can be of a type.
func algorithmsWith(moments abi.MomentType) []abi.Algorithm {
	var suited []abi.Algorithm
	for algorithm := range abi.Algorithms {
		if moments.Suits(algorithm) {
			suited = append(suited, algorithm)
		}
	}
	return suited
}

// countsWith returns the numbers of moments that these algorithms have.
func countsWith(moments abi.MomentType) []int {
	var counts []int
	for _, algorithm := range algorithmsWith(moments) {
		counts = append(counts, algorithm.Moments())
	}
	slices.Sort(counts)
	return slices.Compact(counts)
}

// updateName returns the name of an update kernel, such as adamSplitFP32AVX2: the algorithm, the formats of master
// weights and moments, the instruction set.
func updateName(a abi.Algorithm, state abi.State, moments abi.MomentType, s instructionSet) string {
	return strings.ToLower(a.String()) + stateName(state) + strings.ToUpper(moments.String()) + s.name
}

func trafficName(state abi.State, moments abi.MomentType, count int, s instructionSet) string {
	return fmt.Sprintf("traffic%s%dx%s%s", stateName(state), count, strings.ToUpper(moments.String()), s.name)
}

func stateName(s abi.State) string {
	return [...]string{abi.Split: "Split", abi.FP32: "FP32", abi.Split24: "Split24"}[s]
}

// dispatch returns the Go side of the kernels. It writes out every call, because the compiler keeps arguments on the
// stack only where it sees the callee.
func dispatch() string {
	var declarations, updates, traffics strings.Builder
	declare := func(name string) {
		fmt.Fprintf(&declarations, "//go:noescape\nfunc %s(a *abi.Arguments)\n\n", name)
	}
	for _, s := range instructionSets {
		for state := range abi.States {
			for moments := range abi.MomentTypes {
				for _, algorithm := range algorithmsWith(moments) {
					name := updateName(algorithm, state, moments, s)
					if s.shares(state, moments) {
						name = updateName(algorithm, state, moments, avx512)
					} else {
						declare(name)
					}
					fmt.Fprintf(&updates, "\tcase kernelKey{%s, %d, %d, %d}:\n\t\t%s(a)\n", s.name, algorithm, state, moments, name)
				}
				for _, count := range countsWith(moments) {
					if s.extended {
						continue
					}
					name := trafficName(state, moments, count, s)
					declare(name)
					fmt.Fprintf(&traffics, "\tcase trafficKey{%s, %d, %d, %d}:\n\t\t%s(a)\n", s.name, state, moments, count, name)
				}
			}
		}
		if s.extended {
			continue
		}
		fmt.Fprintf(&declarations, "//go:noescape\nfunc sumSquares%s(n int, apart int, gradientKind int, gradient *byte, sums *[4][16]float64)\n\n", s.name)
		fmt.Fprintf(&declarations, "//go:noescape\nfunc sumPairs%s(n int, prefetching int, gradient *byte, sums *[2][16]float64)\n\n", s.name)
		fmt.Fprintf(&declarations, "//go:noescape\nfunc sumWideSquares%s(n int, prefetching int, gradientKind int, gradient *byte, lanes *[16]float64)\n\n", s.name)
		fmt.Fprintf(&declarations, "//go:noescape\nfunc accumulate%s(n int, prefetching int, sumKind int, sum *byte, kind int, gradient *byte)\n\n", s.name)
	}
	return `// Code generated by _asm. DO NOT EDIT.

//go:build amd64 && !purego

package kernel

import "plimsoll/optim/kernel/abi"

// vendor returns the end of the name of the processor's maker.
func vendor() uint32

` + declarations.String() + `// update calls the kernel of an algorithm for how master and moments are held.
func update(key kernelKey, a *abi.Arguments) {
	switch key {
` + updates.String() + `	default:
		panic("kernel: no such update")
	}
}

// traffic calls the traffic kernel for the streams of a format.
func traffic(key trafficKey, a *abi.Arguments) {
	switch key {
` + traffics.String() + `	default:
		panic("kernel: no such traffic")
	}
}
`
}

// instructionSet is a vector width with the registers of that width.
type instructionSet struct {
	name  string
	lanes int
	// With this set, each group of elements takes two registers: one for even elements, one for odd ones. 16-bit
	// streams then unpack and pack in fewer instructions, and 32-bit ones in more.
	interleaved bool
	// With VBMI and BF16, AVX-512 permutes bytes and rounds to bf16 in one instruction each.
	extended bool
	held     map[uint32]reg.VecVirtual // constants in registers
}

var (
	avx2       = instructionSet{name: "AVX2", lanes: 8}
	avx512     = instructionSet{name: "AVX512", lanes: 16}
	avx512BF16 = instructionSet{name: "AVX512BF16", lanes: 16, extended: true}

	instructionSets = []instructionSet{avx2, avx512, avx512BF16}
)

// shares reports whether the kernels of a format are those of AVX-512 alone: they round no copy to bf16 and have no
// int8 moments.
func (s instructionSet) shares(state abi.State, moments abi.MomentType) bool {
	return s.extended && state != abi.FP32 && moments != abi.MomentsInt8
}

// forMoments returns the instruction set with the order of elements that suits the streams of a kernel.
func (s instructionSet) forMoments(t abi.MomentType) instructionSet {
	s.interleaved = t != abi.MomentsFP32
	return s
}

// group returns the number of elements in a group: 16, in one 512-bit register or two 256-bit ones, or 32 in two
// 512-bit registers.
func (s instructionSet) group() int {
	if s.interleaved {
		return 2 * s.lanes
	}
	return abi.Group
}

// hold loads constants into registers. AVX-512 has twice as many registers, and its constants in memory are twice as
// large.
func (s *instructionSet) hold(patterns ...uint32) {
	held := map[uint32]reg.VecVirtual{}
	maps.Copy(held, s.held)
	for _, pattern := range patterns {
		held[pattern] = s.vector()
		s.move(integer(pattern), held[pattern])
	}
	s.held = held
}

// integer returns a 32-bit pattern for every lane, in a register if it is held.
func (s instructionSet) integer(pattern uint32) Op {
	if x, ok := s.held[pattern]; ok {
		return x
	}
	return integer(pattern)
}

func (s instructionSet) vector() reg.VecVirtual {
	if s.lanes == 16 {
		return ZMM()
	}
	return YMM()
}

// stream is an array that a kernel walks: a base address and the bytes of an
// element.
type stream struct {
	base reg.Register
	size int
}

// at returns the address of element index+offset.
func (s stream) at(index reg.Register, offset int) Mem {
	return Mem{Base: s.base, Index: index, Scale: uint8(s.size), Disp: offset * s.size}
}

// argument loads a field of the arguments.
func argument(field string) reg.Register {
	return Load(Dereference(Param("a")).Field(field), GP64())
}

// readOnlyWithoutPointers are the assembler's flags RODATA and NOPTR.
const readOnlyWithoutPointers = 8 | 16

// tables holds constants in memory, by name.
var tables = map[string]Mem{}

func table(name string, words []uint32) Mem {
	m, ok := tables[name]
	if !ok {
		m = GLOBL(name, readOnlyWithoutPointers)
		for i, word := range words {
			DATA(4*i, U32(word))
		}
		tables[name] = m
	}
	return m
}

// integer returns a 32-bit pattern for every lane.
func integer(pattern uint32) Mem {
	return table(fmt.Sprintf("pattern%08x", pattern), slices.Repeat([]uint32{pattern}, abi.Group))
}

// flushDenormals emits code that sets flush-to-zero and denormals-are-zero for the rest of the kernel. It returns a
// function that emits code to restore the caller's setting. Each kernel does so itself, not once per thread, so that
// its result depends on its arguments alone.
func flushDenormals() (restore func()) {
	const flushToZero, denormalsAreZero = 0x8000, 0x0040
	saved := AllocLocal(8)
	flushing := saved.Offset(4)
	STMXCSR(saved)
	word := GP32()
	MOVL(saved, word)
	ORL(U32(flushToZero|denormalsAreZero), word)
	MOVL(word, flushing)
	LDMXCSR(flushing)
	return func() { LDMXCSR(saved) }
}

// label returns a unique label.
func label(name string) string {
	labels++
	return fmt.Sprint(name, labels)
}

var labels int

// eachKind emits code for each kind of elements, and the branch to the right one.
func eachKind(kind reg.Register, code func(kind int)) {
	bf16, fp16, wide, done := label("bf16"), label("fp16"), label("fp32"), label("done")
	CMPQ(kind, U8(abi.FP16))
	JE(LabelRef(fp16))
	JA(LabelRef(wide))
	for kind, name := range []string{abi.BF16: bf16, abi.FP16: fp16, abi.Wide: wide} {
		Label(name)
		code(kind)
		JMP(LabelRef(done))
	}
	Label(done)
}

// length is the number of elements that a loop walks, and for how many of them it prefetches. Both are multiples of a
// group.
type length struct {
	elements, prefetching reg.Register
	start                 reg.Register // nil for 0
	ahead                 bool         // whether the distance is one of the arguments
}

// loop emits a loop in steps of step elements. The body prefetches at index ahead; towards the end of memory, ahead
// equals index.
func loop(n length, distance, step int, body func(index, ahead reg.Register)) {
	next, check := label("next"), label("check")
	index, ahead, end := GP64(), GP64(), GP64()
	if n.start == nil {
		XORQ(index, index)
	} else {
		MOVQ(n.start, index)
	}
	if n.ahead {
		Load(Dereference(Param("a")).Field("Ahead"), ahead)
		ADDQ(index, ahead)
	} else {
		LEAQ(Mem{Base: index, Disp: distance}, ahead)
	}
	MOVQ(n.prefetching, end)
	JMP(LabelRef(check))
	Label(next)
	body(index, ahead)
	ADDQ(U32(step), index)
	ADDQ(U32(step), ahead)
	Label(check)
	CMPQ(index, end)
	JB(LabelRef(next))
	MOVQ(index, ahead)
	CMPQ(end, n.elements)
	MOVQ(n.elements, end)
	JB(LabelRef(next))
}

// loopOfKind emits a loop for each kind.
func loopOfKind(kind reg.Register, n length, distance, step int, body func(kind int, index, ahead reg.Register)) {
	eachKind(kind, func(kind int) {
		loop(n, distance, step, func(index, ahead reg.Register) { body(kind, index, ahead) })
	})
}
