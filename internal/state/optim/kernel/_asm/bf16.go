package main

import (
	"fmt"
	"os"
	"regexp"
	"strconv"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// bf16 returns a group rounded to bf16, to nearest even, in memory order. A NaN becomes 0x7fc0. The group is given in
// the order of the kernel and in memory order.
//
// The processor's own rounding differs from the contract in NaN alone, whose sign and payload it keeps. It takes
// denormal numbers for zeros, and arithmetic under flushDenormals makes none. So one comparison for all of the group
// leads NaN to the slow path.
func (s instructionSet) bf16(x, consecutive vectors) reg.VecVirtual {
	if !s.extended {
		return s.packUpperHalves(s.roundToBF16(x))
	}
	const unordered = 3
	packed, nan, usual := s.words(), K(), label("usual")
	last := consecutive[len(consecutive)-1]
	VCMPPS(U8(unordered), consecutive[0], last, nan)
	s.roundInOne(consecutive, packed)
	KORTESTW(nan, nan)
	JEQ(LabelRef(usual))
	s.move(s.packUpperHalves(s.roundToBF16(x)), packed)
	Label(usual)
	return packed
}

// Go's assembler and avo lack these instructions: encodeBF16 writes them as numbers. Operands are in the order of Go's
// assembler: the destination is last, and the words of the first operand are its lower half.
const (
	oneToBF16 = "VCVTNEPS2BF16"
	twoToBF16 = "VCVTNE2PS2BF16"
)

// roundInOne rounds one or two registers to bf16.
func (s instructionSet) roundInOne(x vectors, to reg.VecVirtual) {
	i := &ir.Instruction{Opcode: oneToBF16, Operands: []Op{x[0], to}, Inputs: []Op{x[0]}, Outputs: []Op{to},
		ISA: []string{"AVX512_BF16"}}
	if len(x) == 2 {
		i.Opcode, i.Operands, i.Inputs = twoToBF16, []Op{x[0], x[1], to}, []Op{x[0], x[1]}
	}
	Instruction(i)
}

var bf16Line = regexp.MustCompile(`(?m)^\t(VCVTNE2?PS2BF16) +Z([0-9]+), (?:Z([0-9]+), )?[YZ]([0-9]+)$`)

// encodeBF16 replaces the instructions of a written file by their encodings.
func encodeBF16(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text = bf16Line.ReplaceAllFunc(text, func(line []byte) []byte {
		parts := bf16Line.FindSubmatch(line)
		number := func(i int) int {
			n, _ := strconv.Atoi(string(parts[i])) // 0 where there is no such operand
			return n
		}
		code := evex(string(parts[1]) == twoToBF16, number(2), number(3), number(4))
		return fmt.Appendf(nil, "\tLONG $0x%02x%02x%02x%02x; WORD $0x%02x%02x // %s", code[3], code[2], code[1], code[0],
			code[5], code[4], line[1:])
	})
	return os.WriteFile(file, text, 0o644)
}

// evex encodes EVEX.512.F2.0F38.W0 72 /r, or with one source EVEX.512.F3.0F38.W0 72 /r. The first operand is in the
// field r/m, the second in vvvv and the destination in reg. Their upper bits are in the prefix, inverted.
func evex(two bool, first, second, destination int) [6]byte {
	inverted := func(register, bit, place int) byte { return byte((register>>bit&1 ^ 1) << place) }
	prefix := byte(0b10) // F3
	if two {
		prefix = 0b11 // F2
	}
	return [6]byte{
		0x62,
		inverted(destination, 3, 7) | inverted(first, 4, 6) | inverted(first, 3, 5) | inverted(destination, 4, 4) | 0b010,
		byte(^second&15)<<3 | 0b100 | prefix,
		0b10<<5 | inverted(second, 4, 3),
		0x72,
		0b11<<6 | byte(destination&7)<<3 | byte(first&7),
	}
}
