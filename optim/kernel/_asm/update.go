package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/optim/kernel/abi"
)

// registers are the constants of a step that an algorithm uses most; the others
// are operands in memory.
type registers map[int]reg.VecVirtual

// algorithm writes the arithmetic of an update.
type algorithm struct {
	resident []int // constants that are kept in registers
	// update changes master weight p with scaled gradient g, and the moments.
	// The arithmetic is that of the function of the same name in
	// reference.go, operation by operation. It returns the new weight.
	update func(s instructionSet, c func(row int) Op, p, g reg.VecVirtual, moments []reg.VecVirtual, keep func(number int)) reg.VecVirtual
}

var algorithms = [abi.Algorithms]algorithm{
	abi.Adam: {
		[]int{abi.Beta1, abi.OneMinusBeta1, abi.Beta2, abi.OneMinusBeta2, abi.InverseRootBias2, abi.StepSize},
		instructionSet.adam,
	},
	abi.Lion: {
		[]int{abi.Beta1, abi.OneMinusBeta1, abi.Beta2, abi.OneMinusBeta2, abi.StepSize},
		instructionSet.lion,
	},
	abi.Adagrad: {
		[]int{abi.Epsilon, abi.StepSize},
		instructionSet.adagrad,
	},
	abi.SGD: {
		[]int{abi.Beta1, abi.OneMinusBeta1, abi.MomentumShare, abi.GradientShare, abi.StepSize},
		instructionSet.sgd,
	},
}

// update writes one update kernel.
func (s instructionSet) update(a abi.Algorithm, state abi.State, moments abi.MomentType) {
	TEXT(updateName(a, state, moments, s), 4, "func(a *Arguments)")
	restore := flushDenormals()
	table, kind, gradient := argument("Table"), argument("GradientKind"), argument("Gradient")
	arrays := []array{s.master(state)}
	for number := range a.Moments() {
		arrays = append(arrays, s.moment(number+1, moments))
	}
	row := func(i int) Mem { return Mem{Base: table, Disp: 4 * abi.Group * i} }
	kept := registers{}
	for _, i := range algorithms[a].resident {
		kept[i] = s.vector()
		VMOVUPS(row(i), kept[i])
	}
	constant := func(i int) Op {
		if r, ok := kept[i]; ok {
			return r
		}
		return row(i)
	}
	loop(argument("Elements"), func(index reg.Register) {
		for _, array := range arrays {
			array.prefetch(index)
		}
		for i, g := range s.loadGradients(kind, gradient, index) {
			at := i * s.lanes
			p := arrays[0].load(index, at)
			VMULPS(constant(abi.GradientScale), g, g)
			VFMADD231PS(constant(abi.L2Penalty), p, g)
			var m []reg.VecVirtual
			for _, array := range arrays[1:] {
				m = append(m, array.load(index, at))
			}
			// The sooner a moment is stored, the sooner its register is free.
			keep := func(number int) { arrays[1+number].store(m[number], index, at) }
			p = algorithms[a].update(s, constant, p, g, m, keep)
			arrays[0].store(p, index, at)
		}
	})
	for _, array := range arrays {
		array.finish()
	}
	restore()
	VZEROUPPER()
	RET()
}

func (s instructionSet) adam(c func(int) Op, p, g reg.VecVirtual, moments []reg.VecVirtual, keep func(int)) reg.VecVirtual {
	m, v := moments[0], moments[1]
	VMULPS(c(abi.Beta1), m, m)
	VFMADD231PS(c(abi.OneMinusBeta1), g, m)
	keep(0)

	VMULPS(c(abi.Beta2), v, v)
	VMULPS(g, g, g)
	VFMADD231PS(c(abi.OneMinusBeta2), g, v)
	keep(1)

	VSQRTPS(v, v)
	VFMADD213PS(c(abi.Epsilon), c(abi.InverseRootBias2), v)
	VDIVPS(v, m, m)
	p = s.decayed(c, p)
	VFMADD231PS(c(abi.StepSize), m, p)
	return p
}

func (s instructionSet) lion(c func(int) Op, p, g reg.VecVirtual, moments []reg.VecVirtual, keep func(int)) reg.VecVirtual {
	m, direction := moments[0], s.vector()
	VMULPS(c(abi.Beta1), m, direction)
	VFMADD231PS(c(abi.OneMinusBeta1), g, direction)

	VMULPS(c(abi.Beta2), m, m)
	VFMADD231PS(c(abi.OneMinusBeta2), g, m)
	keep(0)

	p = s.decayed(c, p)
	VADDPS(s.signed(c(abi.StepSize), direction), p, p)
	return p
}

// signed is x with the sign of direction flipped in: 0 where direction is 0,
// and NaN where it is NaN.
func (s instructionSet) signed(x Op, direction reg.VecVirtual) reg.VecVirtual {
	const equal, unordered = 0, 3
	result := s.vector()
	if s.lanes == 16 {
		none, nan := K(), K()
		VPXORD(result, result, result)
		VCMPPS(U8(equal), result, direction, none)
		VCMPPS(U8(unordered), direction, direction, nan)
		VANDPS(integer(0x80000000), direction, result)
		VXORPS(x, result, result)
		zero := s.vector()
		VPXORD(zero, zero, zero)
		VMOVDQA32(zero, none, result)
		VMOVDQA32(direction, nan, result)
		return result
	}
	zero, mask := s.vector(), s.vector()
	VXORPS(zero, zero, zero)
	VANDPS(integer(0x80000000), direction, result)
	VXORPS(x, result, result)
	VCMPPS(U8(equal), zero, direction, mask)
	VANDNPS(result, mask, result)
	VCMPPS(U8(unordered), direction, direction, mask)
	VORPS(mask, result, result)
	return result
}

func (s instructionSet) adagrad(c func(int) Op, p, g reg.VecVirtual, moments []reg.VecVirtual, keep func(int)) reg.VecVirtual {
	sum := moments[0]
	VFMADD231PS(g, g, sum)
	keep(0)

	VSQRTPS(sum, sum)
	VADDPS(c(abi.Epsilon), sum, sum)
	VDIVPS(sum, g, g)
	VFMADD231PS(c(abi.StepSize), g, p)
	return p
}

func (s instructionSet) sgd(c func(int) Op, p, g reg.VecVirtual, moments []reg.VecVirtual, keep func(int)) reg.VecVirtual {
	m := moments[0]
	VMULPS(c(abi.Beta1), m, m)
	VFMADD231PS(c(abi.OneMinusBeta1), g, m)
	keep(0)

	VMULPS(c(abi.GradientShare), g, g)
	VFMADD231PS(c(abi.MomentumShare), m, g)
	p = s.decayed(c, p)
	VFMADD231PS(c(abi.StepSize), g, p)
	return p
}

// decayed is fma(decay, p, p).
func (s instructionSet) decayed(c func(int) Op, p reg.VecVirtual) reg.VecVirtual {
	result := s.vector()
	VMOVUPS(c(abi.Decay), result)
	VFMADD213PS(p, p, result)
	return result
}
