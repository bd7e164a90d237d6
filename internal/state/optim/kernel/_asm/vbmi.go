package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"plimsoll/internal/state/optim/kernel/abi"
)

// With VBMI, AVX-512 looks first moments up in tables of bytes, and picks the codes of second moments out of their
// numbers.

// bytes is what the kernel holds in registers for that.
type bytes struct {
	lower, upper reg.VecVirtual // the first 64 entries of both tables
	even, odd    reg.OpmaskVirtual
	places       [2][2]reg.OpmaskVirtual // of the codes of a group's even and odd elements; none for the first
}

// everyByte repeats a byte in every byte of 32 bits.
const everyByte = 0x01010101

// holdTables loads the tables and masks.
func (b *blocks) holdTables() {
	b.bytes = bytes{
		lower: b.load(b.firstsTable(0, 0)), upper: b.load(b.firstsTable(1, 0)),
		even: mask(0x5555_5555_5555_5555), odd: mask(0xaaaa_aaaa_aaaa_aaaa),
	}
	b.bytes.places[0][1] = mask(0x0a0a_0a0a_0a0a_0a0a)
	b.bytes.places[1][0] = mask(0x5050_5050_5050_5050)
	b.bytes.places[1][1] = mask(0xa0a0_a0a0_a0a0_a0a0)
}

func mask(bits uint64) reg.OpmaskVirtual {
	x, k := GP64(), K()
	MOVQ(U64(bits), x)
	KMOVQ(x, k)
	return k
}

// firstsTable returns one byte of the first moment with the unit 1, for half of the 128 codes without a sign. A first
// moment has at most eight digits: the two upper bytes hold all of it.
func (b *blocks) firstsTable(place, half int) Mem {
	var entries []byte
	for code := uint32(64 * half); code < uint32(64*half+64); code++ {
		x := math.Float32bits(math.Float32frombits(code<<abi.FirstShift+abi.FirstOffset) - 1.0/16)
		if x&0xffff != 0 {
			panic("a first moment has more digits than two bytes hold")
		}
		entries = append(entries, byte(x>>(16+8*place)))
	}
	return shuffle("firsts"+string(rune('0'+place))+string(rune('0'+half)), entries)
}

// lookUpFirsts returns the first moments of a group of the tile: the table's number of a code, times the unit R of its
// element. The unit is a power of two, so the product is exact.
func (b *blocks) lookUpFirsts(roots vectors, group int) vectors {
	// Each code is in both bytes of a word. The tables replace them one after the other.
	var order []byte
	for i := range b.group() {
		order = append(order, byte(group*b.group()+i), byte(group*b.group()+i))
	}
	codes, words, m := b.load(shuffle("codes"+string(rune('0'+group)), order)), b.vector(), b.vectors()
	VPERMB(b.first.at(b.index, -group*b.group()), codes, codes)
	VMOVDQA32(codes, words)
	VPERMI2B(b.firstsTable(0, 1), b.bytes.lower, b.bytes.even, words)
	VPERMI2B(b.firstsTable(1, 1), b.bytes.upper, b.bytes.odd, words)
	VPTERNLOGD(U8(orAnd), integer(0x80008000), codes, words)
	VPSLLD(U8(16), words, m[0])
	b.and(b.integer(0xffff0000), words, m[1])
	for i := range m {
		unit := b.vector()
		b.and(b.integer(exponents), roots[i], unit)
		VMULPS(unit, m[i], m[i])
	}
	return m
}

// placeFields keeps where a code begins in its number: at bit shift of each of the two numbers of 64 bits.
func (b *blocks) placeFields(shift reg.GPVirtual) {
	bytes, v := GP32(), b.vector()
	IMUL3L(U32(everyByte), shift, bytes)
	VPBROADCASTD(bytes, v)
	VPADDB(integer(0x20200000), v, v)
	b.move(v, b.at(encodeLeast))
}

// collect adds the codes of a group to those of the tile. Bytes 0 to 3 of 64 bits are of the first group, in order, and
// bytes 4 to 7 of the second.
func (b *blocks) collect(codes vectors, group int) reg.VecVirtual {
	tile, fields := b.pending.second, b.load(b.at(encodeLeast))
	for i, code := range codes {
		if group == 0 && i == 0 {
			tile = b.vector()
			VPMULTISHIFTQB(code, fields, tile)
			continue
		}
		VPMULTISHIFTQB(code, fields, b.bytes.places[group][i], tile)
	}
	return tile
}

// ordered4 returns the collected codes of a tile in the order of memory.
func (b *blocks) ordered4(tile reg.VecVirtual) reg.VecVirtual {
	order := b.load(table("groups", []uint32{0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15}))
	VPERMD(tile, order, tile)
	VPSUBB(b.at(encodeBase), tile, tile)
	return tile
}
