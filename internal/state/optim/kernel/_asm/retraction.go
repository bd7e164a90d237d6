package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// foreseeName returns the name of a kernel such as foreseeSplitAVX2.
func foreseeName(state abi.State, s instructionSet) string {
	return "foresee" + stateName(state) + s.name
}

// foresee writes the kernel that prepares the retraction of an update of a part of a block: the update of Adam in
// registers, what its inverse makes of the result, and the codes of the differences. It changes no state.
func (s instructionSet) foresee(state abi.State) {
	f, restore := s.beginRetraction(foreseeName(state, s), state)
	f.planes = argument("Planes")
	f.holdConstants(abi.GradScale, abi.L2Penalty, abi.Beta1, abi.OneMinusBeta1, abi.Beta2, abi.OneMinusBeta2,
		abi.InverseRootBias2, abi.Epsilon, abi.Decay, abi.StepSize)
	kind, gradient := argument("GradientKind"), argument("Gradient")
	n := f.length()
	loopOfKind(kind, n, abi.PrefetchAhead(abi.MomentsBF16), abi.Group, func(kind int, index, ahead reg.Register) {
		f.prefetch(kind, gradient, ahead)
		place := f.place(index)
		g, p := s.loadKind(kind, gradient, index, 0), f.load(index)
		for i := range g {
			f.update(i, p[i], g[i], index, place)
		}
	})
	restore()
	VZEROUPPER()
	RET()
}

// beginRetraction begins a kernel that works on a block before it is updated, or after.
func (s instructionSet) beginRetraction(name string, state abi.State) (f foresight, restore func()) {
	TEXT(name, 4, "func(a *RetractionArguments)")
	parts[name] = "retraction"
	restore = flushDenormals()
	f = foresight{instructionSet: s, table: argument("Table"), inverses: argument("Inverses"), numbers: argument("Numbers"),
		moments: [2]stream{{argument("Moment1"), 4}, {argument("Moment2"), 4}}}
	if state == abi.Split {
		f.split = splitMaster{s, stream{argument("Parameter"), 2}, stream{argument("Low"), 2}}
	} else {
		f.master = stream{argument("Master"), 4}
	}
	return f, restore
}

func (f foresight) length() length {
	elements := argument("Elements")
	return length{elements: elements, prefetching: elements}
}

func restoreMasterName(state abi.State, s instructionSet) string {
	return "restoreMaster" + stateName(state) + s.name
}

// restoreMaster writes the kernel that sets what master weights of a block were before an update. Where a code says that
// there is an escape, the number is off by it.
func (s instructionSet) restoreMaster(state abi.State) {
	f, restore := s.beginRetraction(restoreMasterName(state, s), state)
	f.planes = argument("Planes")
	f.holdConstants(abi.InverseRootBias2, abi.Epsilon, abi.StepSize)
	loop(f.length(), abi.PrefetchAhead(abi.MomentsBF16), abi.Group, func(index, ahead reg.Register) {
		f.prefetchState(ahead)
		place := f.place(index)
		for i, p := range f.load(index) {
			m, v := f.vector(), f.vector()
			VMOVUPS(f.moments[0].at(index, i*f.lanes), m)
			VMOVUPS(f.moments[1].at(index, i*f.lanes), v)
			hat := f.invert(p, abi.StepSize, f.direction(m, v), abi.HatOfMaster)
			f.storeNumber(i, f.decode(i, hat, abi.HatOfMaster, place), abi.HatOfMaster, index)
		}
	})
	restore()
	VZEROUPPER()
	RET()
}

// restoreMoments writes the kernel that sets what moments of a block were before an update. The argument for masters are
// the weights before the update.
func (s instructionSet) restoreMoments() {
	f, restore := s.beginRetraction("restoreMoments"+s.name, abi.FP32)
	f.planes = argument("Planes")
	f.holdConstants(abi.GradScale, abi.L2Penalty, abi.OneMinusBeta1, abi.OneMinusBeta2)
	kind, gradient := argument("GradientKind"), argument("Gradient")
	loopOfKind(kind, f.length(), abi.PrefetchAhead(abi.MomentsBF16), abi.Group, func(kind int, index, ahead reg.Register) {
		f.prefetchKind(kind, gradient, ahead)
		place := f.place(index)
		g, p := s.loadKind(kind, gradient, index, 0), f.load(index)
		for i := range g {
			f.scale(p[i], g[i])
			m, v, squares := f.vector(), f.vector(), f.vector()
			VMULPS(g[i], g[i], squares)
			VMOVUPS(f.moments[0].at(index, i*f.lanes), m)
			hat := f.invert(m, abi.OneMinusBeta1, g[i], abi.HatOfFirst)
			f.storeNumber(i, f.decode(i, hat, abi.HatOfFirst, place), abi.HatOfFirst, index)
			VMOVUPS(f.moments[1].at(index, i*f.lanes), v)
			hat = f.invert(v, abi.OneMinusBeta2, squares, abi.HatOfSecond)
			f.storeNumber(i, f.decode(i, hat, abi.HatOfSecond, place), abi.HatOfSecond, index)
		}
	})
	restore()
	VZEROUPPER()
	RET()
}

func putBackName(state abi.State, s instructionSet) string {
	return "putBack" + stateName(state) + s.name
}

// putBack writes the kernel that stores the numbers of a part of a block, with an undo log.
func (s instructionSet) putBack(state abi.State) {
	name := putBackName(state, s)
	TEXT(name, 4, "func(a *RetractionArguments)")
	parts[name] = "retraction"
	restore := flushDenormals()
	s.restores = true
	arrays := []array{s.master(state), s.moment(1, abi.MomentsFP32), s.moment(2, abi.MomentsFP32)}
	log := s.undoLog(state, abi.MomentsFP32, arrays)
	log.first = argument("First")
	n := length{elements: argument("Elements"), start: argument("Start")}
	n.prefetching = n.elements
	numbers := argument("Numbers")
	loop(n, abi.PrefetchAhead(abi.MomentsBF16), abi.Group, func(index, ahead reg.Register) {
		for _, array := range arrays {
			array.prefetch(ahead)
		}
		log.keep(index, abi.Group, abi.Group)
		for i, of := range []int{abi.HatOfMaster, abi.HatOfFirst, abi.HatOfSecond} {
			was := stream{numbers, 4}
			arrays[i].store(s.registers(s.wide(was, index, of*abi.Block)), index)
		}
	})
	for _, array := range arrays {
		array.finish()
	}
	restore()
	VZEROUPPER()
	RET()
}

// scale gives gradients their scale and penalty.
func (f foresight) scale(p, g reg.VecVirtual) {
	VMULPS(f.row(abi.GradScale), g, g)
	VFMADD231PS(f.row(abi.L2Penalty), p, g)
}

// direction returns m/d of the update.
func (f foresight) direction(m, v reg.VecVirtual) reg.VecVirtual {
	u, root := f.vector(), f.vector()
	VSQRTPS(v, u)
	VMOVUPS(f.row(abi.InverseRootBias2), root)
	VFMADD213PS(f.row(abi.Epsilon), root, u)
	VDIVPS(u, m, u)
	return u
}

func (f foresight) storeNumber(i int, number reg.VecVirtual, of int, index reg.Register) {
	f.move(number, stream{f.numbers, 4}.at(index, of*abi.Block+i*f.lanes))
}

// place returns where the codes of a group are in each plane: the byte.
func (foresight) place(index reg.Register) reg.Register {
	place := GP64()
	MOVQ(index, place)
	SHRQ(U8(3), place)
	return place
}

// plane returns the codes of a vector in a plane.
func (f foresight) plane(plane, i int, place reg.Register) Mem {
	return Mem{Base: f.planes, Index: place, Scale: 1, Disp: plane*abi.Block/8 + i}
}

// decode returns what numbers were, from what the inverse makes of them.
func (f foresight) decode(i int, hat reg.VecVirtual, hatOf int, place reg.Register) reg.VecVirtual {
	of := abi.RetractionCodes[hatOf]
	was := f.vector()
	f.move(f.integer(1<<(of.Bits-1)-1), was)
	VPSUBD(was, hat, was)
	for bit := range of.Bits {
		from := f.plane(of.Plane+bit, i, place)
		if f.lanes == 16 {
			mask := K()
			KMOVW(from, mask)
			VPADDD(f.integer(1<<bit), was, mask, was)
			continue
		}
		ones := f.vector()
		VPBROADCASTB(from, ones)
		VPAND(bitOfLanes(), ones, ones)
		VPCMPEQD(bitOfLanes(), ones, ones)
		VPSLLD(U8(bit), ones, ones) // -1 or 0, times the bit
		VPSUBD(ones, was, was)
	}
	return was
}

// bitOfLanes has the bit of each of eight lanes.
func bitOfLanes() Mem { return table("bitOfLanes", []uint32{1, 2, 4, 8, 16, 32, 64, 128}) }

// foresight is what the kernel works with.
type foresight struct {
	instructionSet
	table, inverses, planes, numbers reg.Register
	split                            splitMaster
	master                           stream
	moments                          [2]stream
	rows                             registers // rows of the table that are held
}

// row returns a constant of the update, in a register if it is held.
func (f foresight) row(i int) Op {
	if held, ok := f.rows[i]; ok {
		return held
	}
	return Mem{Base: f.table, Disp: 4 * abi.Group * i}
}

// inverse returns what the inverse of a number multiplies by.
func (f foresight) inverse(of int) Mem { return Mem{Base: f.inverses, Disp: 4 * abi.Group * of} }

// holdConstants loads the constants of some rows, and those that all codes need, into registers. Only AVX-512 has enough
// of them. Without it they are operands in memory, as loads would be what the loop waits for.
func (f *foresight) holdConstants(rows ...int) {
	if f.lanes < 16 {
		return
	}
	f.hold(1, 2, 3, 4, 7, zeroUnlessFinite)
	f.rows = map[int]reg.VecVirtual{}
	for _, row := range rows {
		held := f.vector()
		f.move(Mem{Base: f.table, Disp: 4 * abi.Group * row}, held)
		f.rows[row] = held
	}
}

// zeroUnlessFinite is the table of VFIXUPIMMPS that makes NaN and infinite numbers 0, and leaves others as they are: a
// response of four bits for a quiet NaN, a signaling one, zero, one, minus infinity, infinity, and other numbers.
const zeroUnlessFinite = 0x00880088

func (f foresight) prefetch(kind int, gradient, ahead reg.Register) {
	f.prefetchKind(kind, gradient, ahead)
	f.prefetchState(ahead)
}

func (f foresight) prefetchState(ahead reg.Register) {
	for _, moment := range f.moments {
		f.prefetchGroup(moment, ahead)
	}
	if f.master.base != nil {
		f.prefetchGroup(f.master, ahead)
		return
	}
	f.split.prefetch(ahead)
}

// load loads a group of master weights.
func (f foresight) load(index reg.Register) vectors {
	if f.master.base != nil {
		return f.registers(f.wideNumbers(f.master, index))
	}
	return f.registers(f.split.load(index))
}

func (f foresight) wideNumbers(from stream, index reg.Register) operands {
	return f.instructionSet.wide(from, index, 0)
}

// update makes the update of a vector, and notes what its inverse needs.
func (f foresight) update(i int, p, g reg.VecVirtual, index, place reg.Register) {
	f.scale(p, g)
	squares, m, v, after := f.vector(), f.vector(), f.vector(), f.vector()
	VMULPS(g, g, squares)
	was := [2]reg.VecVirtual{f.vector(), f.vector()}
	VMOVUPS(f.moments[0].at(index, i*f.lanes), was[0])
	VMULPS(f.row(abi.Beta1), was[0], m)
	VFMADD231PS(f.row(abi.OneMinusBeta1), g, m)
	f.note(i, m, abi.OneMinusBeta1, g, was[0], abi.HatOfFirst, index, place)
	VMOVUPS(f.moments[1].at(index, i*f.lanes), was[1])
	VMULPS(f.row(abi.Beta2), was[1], v)
	VFMADD231PS(f.row(abi.OneMinusBeta2), squares, v)
	f.note(i, v, abi.OneMinusBeta2, squares, was[1], abi.HatOfSecond, index, place)
	u := f.direction(m, v)
	VMOVAPS(p, after)
	VFMADD231PS(f.row(abi.Decay), p, after)
	VFMADD231PS(f.row(abi.StepSize), u, after)
	f.note(i, after, abi.StepSize, u, p, abi.HatOfMaster, index, place)
}

// note stores what the inverse makes of numbers after an update, and the codes of the differences from what was there.
func (f foresight) note(
	i int, after reg.VecVirtual, row int, added, was reg.VecVirtual, hatOf int, index, place reg.Register,
) {
	hat := f.invert(after, row, added, hatOf)
	f.storeNumber(i, hat, hatOf, index)
	code := f.vector()
	VPSUBD(hat, was, code)
	of := abi.RetractionCodes[hatOf]
	VPADDD(f.integer(1<<(of.Bits-1)-1), code, code)
	VPMINUD(f.integer(1<<of.Bits-1), code, code)
	for bit := range of.Bits {
		to := f.plane(of.Plane+bit, i, place)
		if f.lanes == 16 {
			mask := K()
			VPTESTMD(f.integer(1<<bit), code, mask)
			KMOVW(mask, to)
			continue
		}
		shifted, mask := f.vector(), GP32()
		VPSLLD(U8(31-bit), code, shifted)
		VMOVMSKPS(shifted, mask)
		MOVB(mask.As8(), to)
	}
}

// invert returns after - row·added, divided by the factor of an update, and 0 where after is row·added, or where the
// result is not finite.
func (f foresight) invert(after reg.VecVirtual, row int, added reg.VecVirtual, hatOf int) reg.VecVirtual {
	factor, rest, hat, product := f.row(row), f.vector(), f.vector(), f.vector()
	VMULPS(factor, added, product)
	VMOVAPS(after, rest)
	VFNMADD231PS(factor, added, rest)
	f.move(f.inverse(hatOf), hat)
	if f.lanes == 16 {
		const differ = 4
		others := K()
		VCMPPS(U8(differ), product, after, others)
		VFMADD213PS_Z(rest, rest, others, hat)
		VFIXUPIMMPS(U8(0), f.integer(zeroUnlessFinite), hat, hat)
		return hat
	}
	const equal = 0
	VFMADD213PS(rest, rest, hat)
	VCMPPS(U8(equal), product, after, product)
	VPANDN(hat, product, hat)
	f.move(integer(exponents), product)
	VPAND(product, hat, rest)
	VPCMPEQD(product, rest, rest)
	VPANDN(hat, rest, hat)
	return hat
}
