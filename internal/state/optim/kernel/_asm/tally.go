package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// tally emits code that sums the 64-bit words of streams, before and after an update ([abi.Sums]).
//
// With AVX-512 the sums are in registers, and what a kernel stores is added from the register that it is stored from.
// To load it again would take long: a processor mistakes the load for one of a later store to another array, where the
// lower 12 bits of their addresses are equal. AVX2 has too few registers: its sums are in memory, and it loads again.
type tally struct {
	instructionSet
	streams []summed
}

type summed struct {
	stream
	number        int // in the sums
	before, after reg.VecVirtual
	again         bool // what is stored is not in one register: it is loaded again
}

// tally returns the tally of the arrays. The sums of all streams are 0.
func (s instructionSet) tally(state abi.State, arrays []array) *tally {
	t := &tally{instructionSet: s}
	number := abi.UndoMoment1 - len(arrays[0].changed())
	if state == abi.FP32 {
		number = abi.UndoMaster
	}
	for i, array := range arrays {
		if i > 0 {
			number = abi.UndoMoment1 + i - 1
		}
		for _, stream := range array.changed() {
			if number != abi.UndoMaster || state == abi.FP32 { // the trainer may write parameters
				t.streams = append(t.streams, summed{stream: stream, number: number,
					again: s.lanes == 8 || stream.size == 1})
			}
			number++
		}
	}
	return t
}

// width returns a register for so many bytes, or for as many of them as one holds.
func (s instructionSet) width(bytes int) (x reg.VecVirtual, size int) {
	switch {
	case s.lanes == 16 && bytes >= 64:
		return ZMM(), 64
	case bytes >= 32:
		return YMM(), 32
	}
	return XMM(), 16
}

// begin sets the sums to 0. Those in memory are 0 already.
func (t *tally) begin() {
	if t.lanes == 8 {
		return
	}
	for i := range t.streams {
		s := &t.streams[i]
		s.before, _ = t.width(t.group() * s.size)
		s.after, _ = t.width(t.group() * s.size)
		VPXORQ(s.before, s.before, s.before)
		VPXORQ(s.after, s.after, s.after)
	}
}

// read adds a group of every stream before the kernel changes it.
func (t *tally) read(index reg.Register) {
	sums := t.inMemory()
	for _, s := range t.streams {
		t.add(s, sums, index, s.before, 0)
	}
}

// wrote adds a group of the streams whose stores were not added.
func (t *tally) wrote(index reg.Register) {
	sums := t.inMemory()
	for _, s := range t.streams {
		if s.again {
			t.add(s, sums, index, s.after, 1)
		}
	}
}

// inMemory loads where the sums are, if they are in memory.
func (t *tally) inMemory() reg.Register {
	if t.lanes == 8 {
		return argument("Sums")
	}
	return nil
}

// add adds a group of a stream in memory to a sum.
func (t *tally) add(s summed, sums, index reg.Register, sum reg.VecVirtual, instant int) {
	total := Mem{Base: sums, Disp: 64 * (2*s.number + instant)}
	x, size := t.width(t.group() * s.size)
	if t.lanes == 16 {
		x = sum
	} else {
		t.move(total, x)
	}
	for at := 0; at < t.group(); at += size / s.size {
		VPADDQ(s.at(index, at), x, x)
	}
	if t.lanes == 8 {
		t.move(x, total)
	}
}

// stored adds a register that is stored to a stream.
func (t *tally) stored(x reg.VecVirtual, to stream) {
	if t == nil {
		return
	}
	for _, s := range t.streams {
		if s.base == to.base && !s.again {
			VPADDQ(x, s.after, s.after)
		}
	}
}

// end stores the sums.
func (t *tally) end() {
	if t.lanes == 8 {
		return
	}
	sums := argument("Sums")
	for _, s := range t.streams {
		t.move(s.before, Mem{Base: sums, Disp: 128 * s.number})
		t.move(s.after, Mem{Base: sums, Disp: 128*s.number + 64})
	}
}
