package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// compareWords writes the function that compares parameters with what they were. It goes through 32 of them at a time,
// and sets a bit for each that has changed, that became lower, and that moved by more than one. It returns 0 if none
// moved that far.
func (s instructionSet) compareWords() {
	TEXT("compareWords"+s.name, 4,
		"func(n int, old *uint16, now *uint16, changed *uint64, lower *uint64, far *uint64) uint32")
	n, index, place := Load(Param("n"), GP64()), GP64(), GP64()
	old := stream{Load(Param("old"), GP64()), 2}
	now := stream{Load(Param("now"), GP64()), 2}
	var masks [3]reg.Register
	for i, name := range []string{"changed", "lower", "far"} {
		masks[i] = Load(Param(name), GP64())
	}
	s.hold(0x00010001, 0x00020002)
	any := GP32()
	XORL(any, any)
	XORQ(index, index)
	next, check := label("next"), label("check")
	JMP(LabelRef(check))
	Label(next)
	MOVQ(index, place)
	SHRQ(U8(3), place) // a byte has bits for eight
	for i, mask := range s.compareGroup(old, now, index) {
		MOVL(mask, Mem{Base: masks[i], Index: place, Scale: 1})
		if i == 2 {
			ORL(mask, any)
		}
	}
	ADDQ(U8(32), index)
	Label(check)
	CMPQ(index, n)
	JB(LabelRef(next))
	Store(any, ReturnIndex(0))
	VZEROUPPER()
	RET()
}

// compareGroup returns masks of 32 parameters: changed, lower, and moved by more than one.
func (s instructionSet) compareGroup(old, now stream, index reg.Register) [3]reg.GPVirtual {
	masks := [3]reg.GPVirtual{GP32(), GP32(), GP32()}
	if s.lanes == 16 {
		by, more, x := ZMM(), ZMM(), [3]reg.OpmaskVirtual{K(), K(), K()}
		VMOVDQU16(now.at(index, 0), by)
		VPSUBW(old.at(index, 0), by, by)
		VPADDW(s.integer(0x00010001), by, more)
		VPTESTMW(by, by, x[0])
		VPMOVW2M(by, x[1])
		const greater = 6
		VPCMPUW(U8(greater), s.integer(0x00020002), more, x[2])
		for i := range x {
			KMOVD(x[i], masks[i])
		}
		return masks
	}
	zero, by, more := YMM(), [2]reg.VecVirtual{YMM(), YMM()}, [2]reg.VecVirtual{YMM(), YMM()}
	s.clear(zero)
	for half := range by {
		VMOVDQU(now.at(index, 16*half), by[half])
		VPSUBW(old.at(index, 16*half), by[half], by[half])
		VPADDW(s.integer(0x00010001), by[half], more[half])
		VPSUBUSW(s.integer(0x00020002), more[half], more[half]) // 0 unless it moved by more than one
		VPCMPEQW(zero, more[half], more[half])
	}
	s.signs(by, masks[1])
	s.signs(more, masks[2])
	for half := range by {
		VPCMPEQW(zero, by[half], by[half])
	}
	s.signs(by, masks[0])
	NOTL(masks[0])
	NOTL(masks[2])
	return masks
}

// signs sets a mask to the signs of 32 words.
func (s instructionSet) signs(words [2]reg.VecVirtual, mask reg.GPVirtual) {
	bytes := YMM()
	VPACKSSWB(words[1], words[0], bytes)
	VPERMQ(U8(0b11_01_10_00), bytes, bytes) // the instruction before took the halves of both by turns
	VPMOVMSKB(bytes, mask)
}
