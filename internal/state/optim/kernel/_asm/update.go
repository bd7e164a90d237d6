package main

import (
	"slices"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// registers holds the step's constants that an algorithm uses most. The others are operands in memory.
type registers map[int]reg.VecVirtual

// algorithm writes the arithmetic of an update.
type algorithm struct {
	resident []int // constants that are kept in registers
	others   []int // constants for which only AVX-512 has enough of them
	// update changes master weights p and the moments with scaled gradients g. The arithmetic is that of the function
	// of the same name in generic.go, operation by operation. Registers are few, so it loads moments late and stores
	// them early.
	update func(s instructionSet, c func(row int) Op, p, g vectors, load func(number int) operands, store func(number int, x vectors))
}

var algorithms = [abi.Algorithms]algorithm{
	abi.Adam: {
		[]int{abi.Beta1, abi.OneMinusBeta1, abi.Beta2, abi.OneMinusBeta2, abi.InverseRootBias2, abi.StepSize},
		[]int{abi.GradScale, abi.L2Penalty, abi.Epsilon, abi.Decay},
		instructionSet.adam,
	},
	abi.Lion: {
		[]int{abi.Beta1, abi.OneMinusBeta1, abi.Beta2, abi.OneMinusBeta2, abi.StepSize},
		[]int{abi.GradScale, abi.L2Penalty, abi.Decay},
		instructionSet.lion,
	},
	abi.Adagrad: {
		[]int{abi.Epsilon, abi.StepSize},
		[]int{abi.GradScale, abi.L2Penalty},
		instructionSet.adagrad,
	},
	abi.SGD: {
		[]int{abi.Beta1, abi.OneMinusBeta1, abi.MomentumShare, abi.GradientShare, abi.StepSize},
		[]int{abi.GradScale, abi.L2Penalty, abi.Decay},
		instructionSet.sgd,
	},
}

// rootOfSecond is the number under which Adam passes the root of its second moment to store.
const rootOfSecond = 2

// update writes one update kernel.
func (s instructionSet) update(a abi.Algorithm, state abi.State, moments abi.MomentType) {
	TEXT(updateName(a, state, moments, s), 4, "func(a *Arguments)")
	s = s.forMoments(moments)
	s.adds = new(*tally)
	restore := flushDenormals()
	if s.lanes == 16 {
		if state == abi.FP32 && !s.extended {
			s.hold(0x10000, 0x7fff, 1, 0x7fc00000)
		} else {
			s.hold(0x8000)
		}
		if s.interleaved {
			s.hold(0xffff0000, s.ditherOf(s.elementOf(1, 0)), s.ditherOf(s.group()))
		}
	}
	table, kind, gradient := argument("Table"), argument("GradientKind"), argument("Gradient")
	arrays := []array{s.master(state)}
	for number := range a.Moments() {
		moment := s.moment(number+1, moments)
		if rounded, ok := moment.(bf16Moment); ok && number == a.SlowMoment() {
			moment = rounded.dithers()
		}
		arrays = append(arrays, moment)
	}
	row := func(i int) Mem { return Mem{Base: table, Disp: 4 * abi.Group * i} }
	kept, resident := registers{}, algorithms[a].resident
	if rounds := state == abi.FP32 && s.interleaved && !s.extended; s.lanes == 16 && !rounds { // rounding takes registers
		resident = slices.Concat(resident, algorithms[a].others)
	}
	for _, i := range resident {
		kept[i] = s.vector()
		VMOVUPS(row(i), kept[i])
	}
	constant := func(i int) Op {
		if r, ok := kept[i]; ok {
			return r
		}
		return row(i)
	}
	log := s.undoLog(state, moments, arrays)
	n := length{elements: argument("Elements"), prefetching: argument("Prefetching"), start: argument("Start"), ahead: true}
	walk := func() {
		loopOfKind(kind, n, 0, s.group(), func(kind int, index, ahead reg.Register) {
			log.keep(index, moments.Tile(), moments.Tile())
			for first := 0; first < moments.Tile(); first += s.group() {
				if first > 0 {
					ADDQ(U8(s.group()), index)
					ADDQ(U8(s.group()), ahead)
				}
				s.updateGroup(a, constant, arrays, kind, gradient, index, ahead)
			}
		})
	}
	plain, done := label("plain"), label("updated")
	sums, asked := s.tally(state, arrays), argument("Sums")
	TESTQ(asked, asked)
	JEQ(LabelRef(plain))
	sums.begin()
	*s.adds = sums
	walk()
	*s.adds = nil
	sums.end()
	JMP(LabelRef(done))
	Label(plain)
	walk()
	Label(done)
	for _, array := range arrays {
		array.finish()
	}
	restore()
	VZEROUPPER()
	RET()
}

// updateGroup updates a group of elements.
func (s instructionSet) updateGroup(
	a abi.Algorithm, constant func(int) Op, arrays []array, kind int, gradient, index, ahead reg.Register,
) {
	for _, array := range arrays {
		array.prefetch(ahead)
	}
	if *s.adds != nil {
		(*s.adds).read(index)
	}
	s.prefetchKind(kind, gradient, ahead)
	g := s.loadKind(kind, gradient, index, 0)
	p := s.registers(arrays[0].load(index))
	for i := range g {
		VMULPS(constant(abi.GradScale), g[i], g[i])
		VFMADD231PS(constant(abi.L2Penalty), p[i], g[i])
	}
	load := func(number int) operands { return arrays[1+number].load(index) }
	store := func(number int, x vectors) {
		if number != rootOfSecond {
			arrays[1+number].store(x, index)
		}
	}
	algorithms[a].update(s, constant, p, g, load, store)
	arrays[0].store(p, index)
	if *s.adds != nil {
		(*s.adds).wrote(index)
	}
}

// adam reads everything before it writes anything. A processor mistakes a read for one of an earlier write, and
// delays it, when the lower 12 bits of their addresses are equal. Those of arrays are, because arrays begin at page
// boundaries.
func (s instructionSet) adam(c func(int) Op, p, g vectors, load func(int) operands, store func(int, vectors)) {
	m := s.average(c(abi.Beta1), load(0), c(abi.OneMinusBeta1), g)
	for i := range g {
		VMULPS(g[i], g[i], g[i])
	}
	v := s.average(c(abi.Beta2), load(1), c(abi.OneMinusBeta2), g)
	store(0, m)
	store(1, v)

	for i := range p {
		VSQRTPS(v[i], v[i])
	}
	store(rootOfSecond, v)
	for i := range p {
		VFMADD213PS(c(abi.Epsilon), c(abi.InverseRootBias2), v[i])
		VDIVPS(v[i], m[i], m[i])
		VFMADD231PS(c(abi.Decay), p[i], p[i])
		VFMADD231PS(c(abi.StepSize), m[i], p[i])
	}
}

// average returns a·x + b·y.
func (s instructionSet) average(a Op, x operands, b Op, y vectors) vectors {
	sum := s.vectors()
	for i := range sum {
		VMULPS(x[i], a, sum[i])
		VFMADD231PS(b, y[i], sum[i])
	}
	return sum
}

func (s instructionSet) lion(c func(int) Op, p, g vectors, load func(int) operands, store func(int, vectors)) {
	m := load(0)
	for i := range m {
		direction := s.vector()
		VMULPS(m[i], c(abi.Beta1), direction)
		VFMADD231PS(c(abi.OneMinusBeta1), g[i], direction)
		VFMADD231PS(c(abi.Decay), p[i], p[i])
		VADDPS(s.signed(c(abi.StepSize), direction), p[i], p[i])
	}
	store(0, s.average(c(abi.Beta2), m, c(abi.OneMinusBeta2), g))
}

// signed returns x with the sign of direction flipped in. It returns 0 where direction is 0, and NaN where it is NaN.
func (s instructionSet) signed(x Op, direction reg.VecVirtual) reg.VecVirtual {
	const equal, unordered = 0, 3
	result, zero := s.vector(), s.vector()
	s.clear(zero)
	VANDPS(integer(0x80000000), direction, result)
	VXORPS(x, result, result)
	if s.lanes == 16 {
		none, nan := K(), K()
		VCMPPS(U8(equal), zero, direction, none)
		VCMPPS(U8(unordered), direction, direction, nan)
		VMOVDQA32(zero, none, result)
		VMOVDQA32(direction, nan, result)
		return result
	}
	mask := s.vector()
	VCMPPS(U8(equal), zero, direction, mask)
	VANDNPS(result, mask, result)
	VCMPPS(U8(unordered), direction, direction, mask)
	VBLENDVPS(mask, direction, result, result)
	return result
}

func (s instructionSet) adagrad(c func(int) Op, p, g vectors, load func(int) operands, store func(int, vectors)) {
	sum := s.registers(load(0))
	for i := range sum {
		VFMADD231PS(g[i], g[i], sum[i])
	}
	store(0, sum)
	for i := range p {
		VSQRTPS(sum[i], sum[i])
		VADDPS(c(abi.Epsilon), sum[i], sum[i])
		VDIVPS(sum[i], g[i], g[i])
		VFMADD231PS(c(abi.StepSize), g[i], p[i])
	}
}

func (s instructionSet) sgd(c func(int) Op, p, g vectors, load func(int) operands, store func(int, vectors)) {
	m := s.average(c(abi.Beta1), load(0), c(abi.OneMinusBeta1), g)
	store(0, m)
	for i := range p {
		VMULPS(c(abi.GradientShare), g[i], g[i])
		VFMADD231PS(c(abi.MomentumShare), m[i], g[i])
		VFMADD231PS(c(abi.Decay), p[i], p[i])
		VFMADD231PS(c(abi.StepSize), g[i], p[i])
	}
}
