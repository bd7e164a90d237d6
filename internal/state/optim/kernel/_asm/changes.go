package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// note emits code that compares parameters with those that they are about to replace, if anybody wants to know
// ([abi.Arguments.Moves]). They are still in memory, in a line that the kernel has in the first-level cache. No branch
// depends on what has changed: a processor would guess wrong for most parameters that change.
func (s instructionSet) note(now reg.VecVirtual, parameter stream, index reg.Register) {
	if s.restores {
		return
	}
	noted, asked := label("noted"), argument("Moves")
	TESTQ(asked, asked)
	JEQ(LabelRef(noted))
	for first := 0; first < s.group(); first += abi.Group {
		words, by := now.AsY(), YMM()
		if first > 0 {
			VEXTRACTI64X4(U8(1), now, by)
			words = by
		}
		VPSUBW(parameter.at(index, first), words, by)
		place := GP64()
		MOVQ(index, place)
		SHRQ(U8(2), place) // 4 bytes for 16 elements
		ADDQ(argument("Moves"), place)
		s.moves(by, Mem{Base: place, Disp: first / 4})
		s.keepFar(by, parameter.at(index, first))
	}
	Label(noted)
}

// keepFar stores 16 words where those of a group go that moved far. The next group overwrites them if none did: the zero
// flag says so. x is a register for them.
func (s instructionSet) keepFar(x reg.VecVirtual, old Mem) {
	place, err := Dereference(Param("a")).Field("Kept").Resolve()
	if err != nil {
		panic(err)
	}
	next, bytes := GP64(), GP64()
	MOVQ(place.Addr, next)
	if s.lanes == 16 { // has more registers, and other instructions for them
		VMOVDQU16(old, x)
		VMOVDQU16(x, Mem{Base: next})
	} else {
		VMOVDQU(old, x)
		VMOVDQU(x, Mem{Base: next})
	}
	SETNE(bytes.As8())
	MOVBLZX(bytes.As8(), bytes.As32())
	SHLQ(U8(5), bytes)
	ADDQ(bytes, place.Addr)
}

// moves stores how 16 words have moved, and changes by. The zero flag tells whether all moved by one at most.
func (s instructionSet) moves(by reg.VecVirtual, moves Mem) {
	if s.lanes == 16 {
		s.movesInMasks(by, moves)
	} else {
		s.movesInWords(by, moves)
	}
}

// movesInMasks is moves for AVX-512. Some kernels have two mask registers to spare, and two others.
func (s instructionSet) movesInMasks(by reg.VecVirtual, moves Mem) {
	const greater = 6
	one, mask, far := integer(0x00010001), K(), K()
	VPMOVW2M(by, mask)
	VPABSW(by, by)
	VPCMPUW(U8(greater), one, by, far)
	KORW(far, mask, mask)
	KMOVW(mask, moves.Offset(2))
	VPCMPEQW(one, by, mask)
	KMOVW(mask, moves)
	KORTESTW(far, far)
}

// movesInWords is moves for AVX2.
func (s instructionSet) movesInWords(by reg.VecVirtual, moves Mem) {
	near, within, moved := YMM(), YMM(), GP32()
	s.clear(near)
	VPADDW(integer(0x00010001), by, within)
	VPSUBUSW(integer(0x00020002), within, within) // 0 unless the word moved by more than one
	VPCMPEQW(near, within, within)
	VPCMPEQW(near, by, near)
	VPANDN(within, near, near)
	VPCMPGTW(integer(0xffffffff), by, by)
	VPAND(within, by, by) // neither lower nor far
	VPACKSSWB(by, near, near)
	VPERMQ(U8(inQuarters), near, near)
	VPMOVMSKB(near, moved)
	XORL(U32(0xffff0000), moved)
	MOVL(moved, moves)
	VPMOVMSKB(within, moved)
	CMPL(moved, I8(-1))
}
