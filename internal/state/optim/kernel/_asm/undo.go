package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// undoLog emits code that copies a tile to the undo log, if there is one, before the kernel changes it.
type undoLog struct {
	instructionSet
	log     reg.Register
	streams []stream
	rings   []int        // of the streams
	headers int          // the ring of the headers
	first   reg.Register // the element of the chunk at which the streams begin; nil for 0
}

func (s instructionSet) undoLog(state abi.State, moments abi.MomentType, arrays []array) undoLog {
	tile, ring, _ := abi.UndoLayout(state, moments, len(arrays)-1)
	u := undoLog{instructionSet: s, log: argument("Undo"), headers: ring[abi.UndoHeaders]}
	for _, array := range arrays {
		u.streams = append(u.streams, array.changed()...)
	}
	for i, place := range ring[:abi.UndoHeaders] {
		if tile[i] > 0 {
			u.rings = append(u.rings, place)
		}
	}
	return u
}

// keep logs elements from index on, in rings with room for UndoTiles tiles.
func (u undoLog) keep(index reg.Register, elements, tile int) {
	kept, place, end := label("kept"), GP64(), GP64()
	TESTQ(u.log, u.log)
	JEQ(LabelRef(kept))
	MOVQ(index, place)
	ANDQ(U32(abi.UndoTiles*tile-1), place)
	u.copy(index, place, elements)
	if u.first == nil {
		LEAQ(Mem{Base: index, Disp: elements}, end)
	} else {
		LEAQ(Mem{Base: index, Index: u.first, Scale: 1, Disp: elements}, end)
	}
	MOVQ(end, Mem{Base: u.log})
	Label(kept)
}

// keepHeader logs the header of the block of int8 moments that begins at index. It must precede everything else of
// the block.
func (u undoLog) keepHeader(index reg.Register) {
	kept, place, header := label("kept"), GP64(), GP32()
	TESTQ(u.log, u.log)
	JEQ(LabelRef(kept))
	MOVQ(index, place)
	SHRQ(U8(7), place) // two bytes for 256 elements
	MOVWLZX(Mem{Base: argument("Headers"), Index: place, Scale: 1}, header)
	ANDQ(U8(2*abi.UndoTiles-1), place)
	MOVW(header.As16(), Mem{Base: u.log, Index: place, Scale: 1, Disp: u.headers})
	Label(kept)
}

// copy copies elements of every stream to their places in the rings.
func (u undoLog) copy(index, place reg.Register, elements int) {
	for i, from := range u.streams {
		to, left := stream{u.log, from.size}, elements
		for left > 0 {
			source, target := from.at(index, elements-left), to.at(place, elements-left).Offset(u.rings[i])
			var x Op
			size := 16
			switch bytes := left * from.size; {
			case u.lanes == 16 && bytes >= 64:
				x, size = ZMM(), 64
			case bytes >= 32:
				x, size = YMM(), 32
			default:
				x = XMM()
			}
			u.move(source, x)
			u.move(x, target)
			left -= size / from.size
		}
	}
}
