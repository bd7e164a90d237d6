//go:build linux && !purego

package kernel

import (
	"bytes"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// TestZerosAreNotTiny: gradients have many zeros, of either sign, and plain Go is slow.
func TestZerosAreNotTiny(t *testing.T) {
	var zeros [48]float32
	for i := range zeros {
		zeros[i] = math.Float32frombits(uint32(i) << 31)
	}
	if done := mulNEON(&zeros[0], len(zeros), 3, &zeros[0]); done != len(zeros) {
		t.Errorf("%d of %d zeros are multiplied", done, len(zeros))
	}
}

// pair is two numbers. A tiny result may be their sum, their quotient, or the square of the
// first plus the second.
func pair(r *rand.Rand) (a, b float32) {
	number := func(exponent, exponents int) float32 {
		return math.Float32frombits(r.Uint32()&0x807fffff | uint32(exponent+r.IntN(exponents))<<23)
	}
	// Half of 0x00ffffff rounds to the smallest normal number if its last place is the
	// last place of denormal numbers. By the contract it counts as 0.
	special := func() float32 {
		bits := []uint32{0, 0x00800000, 0x00ffffff, 0x3f7fffff, 0x40000000, exponents, 0x7fc00000}[r.IntN(7)]
		return math.Float32frombits(r.Uint32()&sign | bits)
	}
	switch r.IntN(6) {
	case 0:
		return number(0, 3), number(0, 3)
	case 1:
		return number(60, 6), number(1, 4)
	case 2:
		return number(1, 20), number(125, 22)
	case 3:
		return strangeNumber(r), strangeNumber(r)
	case 4:
		return special(), special()
	}
	return math.Float32frombits(r.Uint32()), math.Float32frombits(r.Uint32())
}

// streams are the operands of operations.
type streams struct {
	a, b, c         vector
	upper, lower    []uint16
	first, second   []byte
	header          uint16
	sums            [abi.Group]float32
	constant, other float32
	dither          uint32
}

func newStreams(t *testing.T, n, shift int) *streams {
	numbers := func() vector { return view[float32](guarded(t, 4*n, 64, 4*shift)) }
	halves := func() []uint16 { return view[uint16](guarded(t, 2*n, 64, 2*shift)) }
	return &streams{a: numbers(), b: numbers(), c: numbers(), upper: halves(), lower: halves(),
		first: guarded(t, n, 64, shift), second: guarded(t, n, 64, shift)}
}

// fill gives one of some elements a tiny result.
func (x *streams) fill(r *rand.Rand, some int) {
	for i := range x.a {
		x.a[i], x.b[i] = 1+r.Float32(), 1+r.Float32()
		if r.IntN(some) == 0 {
			x.a[i], x.b[i] = pair(r)
		}
		if r.IntN(8) == 0 { // halfway between two numbers of bf16 or of fp16
			half := uint32(1) << (15 - r.IntN(2)*3)
			x.a[i] = math.Float32frombits(math.Float32bits(x.a[i])&^(2*half-1) | half)
		}
		x.c[i] = float32(math.Abs(float64(x.a[i]))) // a root
		x.upper[i], x.lower[i] = uint16(r.Uint32()), uint16(r.Uint32())
		if r.IntN(some) == 0 {
			x.upper[i] &= 0x81ff
		}
		x.first[i], x.second[i] = byte(r.Uint32()), byte(r.Uint32()>>r.IntN(32))
	}
	x.header = uint16(abi.LeastFloor+r.IntN(120)) | uint16(17+r.IntN(4))<<8
	for lane := range x.sums {
		x.sums[lane], _ = pair(r)
	}
	x.constant = []float32{1, 0.5, 0, 0.375, -0x1.8p-3, 0x1.234568p-62, strangeNumber(r)}[r.IntN(7)]
	x.other = []float32{0, 0x1.234568p-126, -0x1.8p-125, 1, strangeNumber(r)}[r.IntN(5)]
	x.dither = r.Uint32()
}

func (x *streams) copy(from *streams) {
	old := *x
	*x = *from
	x.a, x.b, x.c, x.upper, x.lower, x.first, x.second = old.a, old.b, old.c, old.upper, old.lower, old.first,
		old.second
	for i, to := range x.numbers() {
		copy(to, from.numbers()[i])
	}
	for i, to := range x.bytes() {
		copy(to, from.bytes()[i])
	}
}

func (x *streams) numbers() []vector { return []vector{x.a, x.b, x.c, x.sums[:]} }

func (x *streams) bytes() [][]byte {
	return [][]byte{bytesOf(x.upper), bytesOf(x.lower), x.first, x.second, {byte(x.header), byte(x.header >> 8)}}
}

func (x *streams) block() block { return block{&x.header, x.first, x.second} }

// TestNEONAgrees compares the operations in assembly with plain Go, to the bit. The
// numbers are of every kind; many, few or none have a tiny result. It tries every length
// up to some groups, off alignment, next to guard pages, and results in operands.
func TestNEONAgrees(t *testing.T) {
	operations := map[string]func(Set, *streams){
		"mul":                 func(s Set, x *streams) { s.mul(x.c, x.constant, x.a) },
		"mul in place":        func(s Set, x *streams) { s.mul(x.a, x.constant, x.a) },
		"square":              func(s Set, x *streams) { s.square(x.c, x.a) },
		"square in place":     func(s Set, x *streams) { s.square(x.a, x.a) },
		"add":                 func(s Set, x *streams) { s.add(x.c, x.a, x.b) },
		"add to first":        func(s Set, x *streams) { s.add(x.a, x.a, x.b) },
		"add to second":       func(s Set, x *streams) { s.add(x.b, x.a, x.b) },
		"div":                 func(s Set, x *streams) { s.div(x.c, x.a, x.b) },
		"div to first":        func(s Set, x *streams) { s.div(x.a, x.a, x.b) },
		"div to second":       func(s Set, x *streams) { s.div(x.b, x.a, x.b) },
		"sqrt":                func(s Set, x *streams) { s.sqrt(x.c, x.a) },
		"sqrt in place":       func(s Set, x *streams) { s.sqrt(x.a, x.a) },
		"fma":                 func(s Set, x *streams) { s.fma(x.c, x.constant, x.a, x.b) },
		"fma to first":        func(s Set, x *streams) { s.fma(x.a, x.constant, x.a, x.b) },
		"fma to second":       func(s Set, x *streams) { s.fma(x.b, x.constant, x.a, x.b) },
		"fmaPlus":             func(s Set, x *streams) { s.fmaPlus(x.c, x.constant, x.a, x.other) },
		"fmaPlus in place":    func(s Set, x *streams) { s.fmaPlus(x.a, x.constant, x.a, x.other) },
		"fmaSquare":           func(s Set, x *streams) { s.fmaSquare(x.c, x.a, x.b) },
		"fmaSquare to first":  func(s Set, x *streams) { s.fmaSquare(x.a, x.a, x.b) },
		"fmaSquare to second": func(s Set, x *streams) { s.fmaSquare(x.b, x.a, x.b) },
		"withSign":            func(s Set, x *streams) { s.withSign(x.c, x.constant, x.a) },
		"withSign in place":   func(s Set, x *streams) { s.withSign(x.a, x.constant, x.a) },
		"addSquares":          func(s Set, x *streams) { s.addSquares(&x.sums, x.a) },
		"load bf16":           func(s Set, x *streams) { s.load(x.c, Array{dtype.BF16, bytesOf(x.upper)}) },
		"load fp16":           func(s Set, x *streams) { s.load(x.c, Array{dtype.F16, bytesOf(x.upper)}) },
		"load fp32":           func(s Set, x *streams) { s.load(x.c, Array{dtype.F32, bytesOf(x.a)}) },
		"store bf16":          func(s Set, x *streams) { s.store(Array{dtype.BF16, bytesOf(x.upper)}, x.a) },
		"store fp16":          func(s Set, x *streams) { s.store(Array{dtype.F16, bytesOf(x.upper)}, x.a) },
		"store fp32":          func(s Set, x *streams) { s.store(Array{dtype.F32, bytesOf(x.c)}, x.a) },
		"away":                func(s Set, x *streams) { s.away(x.upper, x.a) },
		"dithered":            func(s Set, x *streams) { s.dithered(x.upper, x.a, x.dither) },
		"merge":               func(s Set, x *streams) { s.merge(x.c, x.upper, x.lower) },
		"separate":            func(s Set, x *streams) { s.separate(x.upper, x.lower, x.a) },
		"loadBlock":           func(s Set, x *streams) { s.loadBlock(x.block(), x.a, x.b) },
		"encode at random":    func(s Set, x *streams) { s.encode(x.block(), x.a, x.c, atRandom(x.dither)) },
		"encode to nearest":   func(s Set, x *streams) { s.encode(x.block(), x.a, x.c, toNearest) },
	}
	same := func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) || x != x && y != y }
	r := rand.New(rand.NewPCG(12, uint64(NEON)))
	for n := range 101 {
		shift := r.IntN(16)
		before, got, want := newStreams(t, n, shift), newStreams(t, n, shift), newStreams(t, n, shift)
		for _, some := range []int{1, 10, 10, 50, 50, 1000} {
			for _, name := range slices.Sorted(maps.Keys(operations)) {
				before.fill(r, some)
				got.copy(before)
				want.copy(before)
				operations[name](NEON, got)
				operations[name](Generic, want)
				for number, x := range got.numbers() {
					for i, y := range want.numbers()[number] {
						if !same(x[i], y) {
							t.Fatalf("%s of %d elements: number %d of stream %d is %#08x, want %#08x",
								name, n, i, number,
								math.Float32bits(x[i]), math.Float32bits(y))
						}
					}
				}
				for number, x := range got.bytes() {
					if y := want.bytes()[number]; !bytes.Equal(x, y) {
						t.Fatalf("%s of %d elements: bytes %d are\n%x, want\n%x", name, n, number, x, y)
					}
				}
			}
		}
	}
}
