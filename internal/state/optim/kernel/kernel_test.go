//go:build linux

package kernel

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// TestMain refuses to run the tests with other kernels than those asked for.
func TestMain(m *testing.M) {
	set, err := Select()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("kernels: selected %v of %v\n", set, Available())
	os.Exit(m.Run())
}

func TestSelect(t *testing.T) {
	for _, test := range []struct {
		name string
		want Set
		ok   bool
	}{
		{"", Available()[len(Available())-1], true},
		{"generic", Generic, true},
		{"avx2", AVX2, supported(AVX2)},
		{"avx512", AVX512, supported(AVX512)},
		{"avx512bf16", AVX512BF16, supported(AVX512BF16)},
		{"neon", NEON, supported(NEON)},
		{"sse9", Generic, false},
	} {
		t.Setenv(EnvironmentVariable, test.name)
		got, err := Select()
		if (err == nil) != test.ok || test.ok && got != test.want {
			t.Errorf("%s=%q selects %v, %v", EnvironmentVariable, test.name, got, err)
		}
	}
}

// formats are all formats that there are kernels for.
func formats() []Format {
	var all []Format
	for algorithm := range abi.Algorithms {
		for state := range abi.States {
			for moments := range abi.MomentTypes {
				for _, parameter := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
					for _, gradient := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
						if f := (Format{algorithm, state, moments, parameter, gradient}); f.Validate() == nil {
							all = append(all, f)
						}
					}
				}
			}
		}
	}
	return all
}

// testedSets returns the sets to compare with the reference: the one that the environment
// names, or all.
func testedSets(t *testing.T) []Set {
	if os.Getenv(EnvironmentVariable) == "" {
		return Available()
	}
	set, err := Select()
	if err != nil {
		t.Fatal(err)
	}
	return []Set{set}
}

// guarded returns size bytes between two pages that must not be touched, as
// close to the second as an alignment of align bytes plus shift allows.
func guarded(t testing.TB, size, align, shift int) []byte {
	page := os.Getpagesize()
	body := (size + align + page - 1) / page * page
	whole, err := unix.Mmap(-1, 0, body+2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(whole) })
	for _, guard := range [][]byte{whole[:page], whole[page+body:]} {
		if err := unix.Mprotect(guard, unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	start := (page + body - size - shift) / align * align
	return whole[start+shift : start+shift+size : start+shift+size]
}

// newChunk returns a chunk between guard pages. Elements stay naturally aligned. Vectors do
// not if shift is odd.
func newChunk(t testing.TB, f Format, n, shift int) Chunk {
	stream := func(size int) []byte { return guarded(t, n*size, 64, shift*size) }
	c := Chunk{First: int64(n+shift) << 30, Gradient: Array{f.Gradient, stream(int(f.Gradient.Size()))}}
	for i := range f.Algorithm.Moments() {
		c.Moments[i] = Array{f.momentType(), stream(int(f.momentType().Size()))}
	}
	if f.Moments == MomentsInt8 {
		c.Headers = view[uint16](guarded(t, (n+Block-1)/Block*2, 64, 2*shift))
	}
	if f.hasParameter() {
		c.Parameter = view[uint16](stream(2))
	}
	switch f.State {
	case FP32:
		c.Master = view[float32](stream(4))
	case Split:
		c.Low = view[uint16](stream(2))
	case Split24:
		c.LowBytes = stream(1)
	}
	return c
}

func copyChunk(to, from Chunk) {
	copy(to.Parameter, from.Parameter)
	copy(to.Low, from.Low)
	copy(to.LowBytes, from.LowBytes)
	copy(to.Master, from.Master)
	for i := range to.Moments {
		copy(to.Moments[i].Data, from.Moments[i].Data)
	}
	copy(to.Headers, from.Headers)
	copy(to.Gradient.Data, from.Gradient.Data)
}

// putMoments rounds moments and stores them. It ignores moments that the algorithm does not
// have.
func putMoments(c Chunk, first, second []float32) {
	for number := range c.Headers {
		b := c.block(number)
		from := number * Block
		firsts, roots := make([]float32, len(b.first)), make([]float32, len(b.first))
		for i := range roots {
			firsts[i], roots[i] = flush(first[from+i]), sqrt(flush(second[from+i]))
		}
		Generic.encode(b, firsts, roots, atRandom(0))
	}
	if c.Headers != nil {
		return
	}
	for i := range c.Len() {
		for m, values := range [][]float32{first, second} {
			if c.Moments[m].Data != nil {
				c.Moments[m].Put(i, values[i])
			}
		}
	}
}

// fill sets a chunk to values as training has them, mixed with strange ones: zeros of both
// signs, denormals, the largest and smallest numbers, infinities and NaN.
func fill(r *rand.Rand, f Format, c Chunk, strange bool) {
	number := func(scale float64) float32 {
		if strange && r.IntN(8) == 0 {
			x := math.Float32frombits([]uint32{
				0, 0x80000000, 1, 0x80000001, 0x007fffff, 0x00800000, 0x80800000, 0x7f7fffff,
				0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x3f800000, 0x00ffffff,
				r.Uint32(), r.Uint32() & 0x80ffffff,
			}[r.IntN(16)])
			if x != x {
				return float32(math.NaN()) // as arithmetic makes them
			}
			return x
		}
		return float32(r.NormFloat64() * scale * math.Exp2(float64(r.IntN(12)-6)))
	}
	first, second := make([]float32, c.Len()), make([]float32, c.Len())
	for i := range c.Len() {
		c.PutMasterWeight(f, i, number(0.02))
		first[i], second[i] = number(1e-3), float32(math.Abs(float64(number(1e-6))))
		if f.Algorithm == Adagrad { // a sum of squares
			first[i] = second[i]
		}
		c.Gradient.Put(i, number(1e-2))
	}
	putMoments(c, first, second)
}

// differ names the first element in which two chunks differ. All NaN are one.
func differ(f Format, a, b Chunk) string {
	same := func(x, y float32) bool {
		return math.Float32bits(x) == math.Float32bits(y) || x != x && y != y
	}
	for i := range a.Len() {
		x, y := a.MasterWeight(f, i), b.MasterWeight(f, i)
		ok := same(x, y)
		if f.hasParameter() && x == x {
			ok = ok && a.Parameter[i] == b.Parameter[i]
		}
		for m := range f.Algorithm.Moments() {
			ok = ok && (same(a.Moment(m, i), b.Moment(m, i)) ||
				f.Moments == MomentsInt8 && x != x && a.Moment(m, i) == -b.Moment(m, i)) // of a NaN
		}
		if ok {
			continue
		}
		dump := func(c Chunk) string {
			text := fmt.Sprintf("master %#08x", math.Float32bits(c.MasterWeight(f, i)))
			for m := range f.Algorithm.Moments() {
				text += fmt.Sprintf(" moment %#08x", math.Float32bits(c.Moment(m, i)))
			}
			return text
		}
		return fmt.Sprintf("element %d (gradient %g):\n  %s\n  %s", i, a.Gradient.At(i), dump(a), dump(b))
	}
	return ""
}

// steps returns the constants of some steps of an algorithm: usual and absurd ones.
func steps(a Algorithm) []Constants {
	var some []interface{ Constants(*Constants) error }
	switch a {
	case Adam:
		some = append(some,
			AdamStep{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, WeightDecay: 0.01, Step: 1,
				GradScale: 1},
			AdamStep{LearningRate: 3e-4, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1, Step: 1000,
				GradScale: 1.0 / 65536},
			AdamStep{LearningRate: 1e-2, Beta1: 0.8, Beta2: 0.99, Epsilon: 1e-6, WeightDecay: 0.01, L2: true, Step: 7,
				GradScale: 0.3},
			AdamStep{LearningRate: 1, Uncorrected: true, Step: 3, GradScale: 1e30},
			AdamStep{LearningRate: 1e-42, Beta1: 0.123, Beta2: 0.456, Epsilon: 1e-40, WeightDecay: 0.9, Step: 2,
				GradScale: 1e-30})
	case Lion:
		some = append(some,
			LionStep{LearningRate: 1e-4, Beta1: 0.9, Beta2: 0.99, WeightDecay: 0.1, GradScale: 1},
			LionStep{LearningRate: 1e-4, Beta1: 0.95, Beta2: 0.98, GradScale: 1e-30},
			LionStep{LearningRate: 1, WeightDecay: 1, GradScale: 1e30})
	case Adagrad:
		some = append(some,
			AdagradStep{LearningRate: 1e-2, Epsilon: 1e-10, Step: 1, GradScale: 1},
			AdagradStep{LearningRate: 1e-2, LearningRateDecay: 0.1, WeightDecay: 0.1, Step: 9, GradScale: 1e-20},
			AdagradStep{LearningRate: 1e-30, Epsilon: 1e-40, Step: 2, GradScale: 1e20})
	case SGD:
		some = append(some,
			SGDStep{LearningRate: 0.1, Momentum: 0.9, Step: 1, GradScale: 1},
			SGDStep{LearningRate: 0.1, Momentum: 0.9, Dampening: 0.1, WeightDecay: 1e-4, Step: 2, GradScale: 0.5},
			SGDStep{LearningRate: 0.1, Momentum: 0.9, Nesterov: true, Step: 3, GradScale: 1e-30})
	}
	var constants []Constants
	for _, s := range some {
		var c Constants
		_ = s.Constants(&c) // kernels agree also where an epsilon vanishes
		constants = append(constants, c)
	}
	return constants
}

// TestSetsAgree compares every kernel with the reference, to the bit. It tries every length
// up to a few turns of the loop, off alignment, next to guard pages, and values that no
// training should see.
func TestSetsAgree(t *testing.T) {
	sets := testedSets(t)
	for _, f := range formats() {
		t.Run(f.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 1))
			lengths := []int{0, 1, 15, 16, 17, 31, 32, 33, 50, 256, 511}
			if !testing.Short() {
				lengths = append(lengths, 1023, 1536)
				for n := range 51 {
					lengths = append(lengths, n)
				}
			}
			for _, n := range lengths {
				for _, shift := range []int{0, 1 + r.IntN(15)} {
					want := newChunk(t, f, n, shift)
					fill(r, f, want, n%2 == 0)
					var got []Chunk
					for range sets {
						c := newChunk(t, f, n, shift)
						copyChunk(c, want)
						got = append(got, c)
					}
					for step, constants := range steps(f.Algorithm) {
						updateReference(f, &constants, want)
						for i, set := range sets {
							set.Update(f, &constants, got[i])
							if d := differ(f, got[i], want); d != "" {
								t.Fatalf("%v, n=%d shift=%d step %d: %s", set, n, shift, step, d)
							}
						}
					}
				}
			}
		})
	}
}

// TestAccumulateAgrees compares the kernels with the reference, for all pairs of types.
func TestAccumulateAgrees(t *testing.T) {
	types := []dtype.Type{dtype.BF16, dtype.F16, dtype.F32}
	for _, set := range testedSets(t) {
		for _, to := range types {
			for _, from := range types {
				r := rand.New(rand.NewPCG(6, uint64(set)))
				for _, n := range []int{0, 1, 15, 16, 17, 33, 100, 1023} {
					// Gradients of chunks serve as arrays with strange numbers.
					sums := newChunk(t, Format{Parameter: dtype.BF16, Gradient: to}, n, n%16)
					gradients := newChunk(t, Format{Parameter: dtype.BF16, Gradient: from}, n, n%7)
					fill(r, Format{Gradient: to}, sums, true)
					fill(r, Format{Gradient: from}, gradients, true)
					want := Array{to, append([]byte{}, sums.Gradient.Data...)}
					for range 3 {
						set.Accumulate(sums.Gradient, gradients.Gradient)
						accumulateReference(want, gradients.Gradient)
					}
					for i := range n {
						x, y := sums.Gradient.At(i), want.At(i)
						if math.Float32bits(x) != math.Float32bits(y) && (x == x || y == y) {
							t.Fatalf("%v: %v += %v, n=%d: element %d is %g, want %g", set, to, from, n, i, x, y)
						}
					}
				}
			}
		}
	}
}

// TestAccumulateAddsExactly adds numbers whose sums every type can hold.
func TestAccumulateAddsExactly(t *testing.T) {
	for _, set := range Available() {
		for _, typ := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
			sum, gradient := Array{typ, make([]byte, 100*typ.Size())}, Array{dtype.BF16, make([]byte, 200)}
			for i := range 100 {
				sum.Put(i, float32(i))
				gradient.Put(i, -2)
			}
			set.Accumulate(sum, gradient)
			for i := range 100 {
				if sum.At(i) != float32(i-2) {
					t.Fatalf("%v %v: %d - 2 is %g", set, typ, i, sum.At(i))
				}
			}
		}
	}
}

// TestTrafficChangesNothing, except in a stream that an update only writes.
func TestTrafficChangesNothing(t *testing.T) {
	for _, set := range Available() {
		for _, f := range formats() {
			r := rand.New(rand.NewPCG(2, 2))
			for _, n := range []int{0, 1, 16, 77, 1000} {
				got, want := newChunk(t, f, n, 3), newChunk(t, f, n, 0)
				fill(r, f, want, false)
				copyChunk(got, want)
				set.Traffic(f, got)
				if f.State == FP32 {
					clear(want.Parameter)
				}
				if d := differ(f, got, want); d != "" {
					t.Errorf("%v %v n=%d: %s", set, f, n, d)
				}
			}
		}
	}
}

func TestChunkOfUnequalStreamsIsRefused(t *testing.T) {
	f := Format{Gradient: dtype.BF16, Parameter: dtype.BF16}
	for name, spoil := range map[string]func(*Chunk){
		"short moment":   func(c *Chunk) { c.Moments[1] = c.Moments[1].Slice(0, 31) },
		"no moment":      func(c *Chunk) { c.Moments[0] = Array{} },
		"wrong moment":   func(c *Chunk) { c.Moments[0].Type = dtype.BF16 },
		"long low":       func(c *Chunk) { c.Low = make([]uint16, 33) },
		"master too":     func(c *Chunk) { c.Master = make([]float32, 32) },
		"other gradient": func(c *Chunk) { c.Gradient.Type = dtype.F16 },
		"no parameter":   func(c *Chunk) { c.Parameter = nil },
		"headers":        func(c *Chunk) { c.Headers = make([]uint16, 1) },
	} {
		c := newChunk(t, f, 32, 0)
		spoil(&c)
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: the chunk was walked", name)
				}
			}()
			Generic.Update(f, &Constants{}, c)
		}()
	}
}

func TestBytesPerParameter(t *testing.T) {
	for _, test := range []struct {
		format            Format
		resident, traffic float64
	}{
		{Format{Adam, Split, MomentsFP32, dtype.BF16, dtype.BF16}, 14, 26},
		{Format{Adam, Split, MomentsFP32, dtype.BF16, dtype.F32}, 16, 28},
		{Format{Adam, Split, MomentsBF16, dtype.BF16, dtype.BF16}, 10, 18},
		{Format{Adam, FP32, MomentsFP32, dtype.BF16, dtype.F32}, 18, 30},
		{Format{Adam, FP32, MomentsFP32, dtype.F16, dtype.F16}, 16, 28},
		{Format{Adam, FP32, MomentsFP32, dtype.F32, dtype.F32}, 16, 28},
		{Format{Lion, Split, MomentsFP32, dtype.BF16, dtype.BF16}, 10, 18},
		{Format{Lion, Split, MomentsBF16, dtype.BF16, dtype.BF16}, 8, 14},
		{Format{Adam, Split, MomentsInt8, dtype.BF16, dtype.BF16}, 8 + 2./256, 14 + 4./256},
		{Format{Adam, FP32, MomentsInt8, dtype.F16, dtype.F16}, 10 + 2./256, 16 + 4./256},
	} {
		const n = 1 << 20
		if got := float64(test.format.ResidentBytes(n)) / n; got != test.resident {
			t.Errorf("%v: %v bytes a parameter resident, want %v", test.format, got, test.resident)
		}
		if got := float64(test.format.TrafficBytes(n)) / n; got != test.traffic {
			t.Errorf("%v: %v bytes a parameter moved, want %v", test.format, got, test.traffic)
		}
	}
	// A last block that is short has a header, too.
	if got := (Format{Adam, Split, MomentsInt8, dtype.BF16, dtype.BF16}).ResidentBytes(257); got != 257*8+4 {
		t.Errorf("257 parameters in 2 blocks take %d bytes", got)
	}
}

// TestSumSquaresAgrees compares the sums of the kernels with the reference's, to the bit,
// with squares in fp32 and in float64.
func TestSumSquaresAgrees(t *testing.T) {
	same := func(x, y float64) bool { return x == y || x != x && y != y }
	for _, set := range testedSets(t) {
		for _, typ := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
			f := Format{Parameter: dtype.BF16, Gradient: typ}
			r := rand.New(rand.NewPCG(10, uint64(set)))
			for _, n := range []int{0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513, 640, 1023, 1024,
				1152, 4000, 4096, 5000} {
				for _, shift := range []int{0, 1 + r.IntN(15)} {
					c := newChunk(t, f, n, shift)
					for _, strange := range []bool{false, true} {
						fill(r, f, c, strange)
						if got, want := set.sumSquaresInRuns(c.Gradient),
							sumSquaresInRunsReference(c.Gradient); !same(got, want) {
							t.Fatalf("%v %v n=%d: sum %g with squares in fp32, the reference's is %g",
								set, typ, n, got, want)
						}
						if got, want := set.SumSquares(c.Gradient), sumSquaresReference(c.Gradient); !same(got, want) {
							t.Fatalf("%v %v n=%d: sum %g, the reference's is %g", set, typ, n, got, want)
						}
					}
				}
			}
		}
	}
}

// TestSumSquaresIsAccurate compares sums with float64, for gradients of any size. The
// squares of some are not in the range of fp32.
func TestSumSquaresIsAccurate(t *testing.T) {
	for _, set := range Available() {
		rapid.Check(t, func(t *rapid.T) {
			r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
			octave := rapid.OneOf(rapid.IntRange(-125, 127), rapid.IntRange(-66, -30),
				rapid.IntRange(55, 65)).Draw(t, "octave")
			spread := rapid.IntRange(0, 80).Draw(t, "octaves")
			g := Array{dtype.F32, make([]byte, 4*rapid.IntRange(1, 3000).Draw(t, "elements"))}
			want := 0.0
			for i := range g.Len() {
				x := math.Ldexp(1+r.Float64(), max(-125, octave-r.IntN(1+spread)))
				g.Put(i, float32(x))
				want += float64(g.At(i)) * float64(g.At(i))
			}
			if got := set.SumSquares(g); math.Abs(got/want-1) > 0x1p-21 {
				t.Fatalf("%v: the sum of %d squares is %g, want %g", set, g.Len(), got, want)
			}
		})
	}
}

// TestCopiesOfNaN: the copy of a weight that is NaN is NaN, whatever the fraction. A
// fraction of all ones would overflow when it is rounded to bf16.
func TestCopiesOfNaN(t *testing.T) {
	for _, set := range testedSets(t) {
		for _, f := range formats() {
			if f.State != FP32 || !f.hasParameter() {
				continue
			}
			n := 2*f.granule() + 1
			c := newChunk(t, f, n, 0)
			fill(rand.New(rand.NewPCG(5, 5)), f, c, false)
			for i := range n {
				c.Master[i] = math.Float32frombits([]uint32{0x7fffffff, 0xffffffff, 0x7f800001, 0x7fc00000}[i%4])
			}
			set.Update(f, &steps(f.Algorithm)[0], c)
			for i, bits := range c.Parameter {
				if x := (Array{f.Parameter, binary.LittleEndian.AppendUint16(nil, bits)}).At(0); x == x {
					t.Errorf("%v, %v: the copy of weight %d, which is NaN, is %g (%#04x)", set, f, i, x, bits)
					break
				}
			}
		}
	}
}

// TestSumSquaresSeesEveryInfinity puts one infinity or NaN at every place.
func TestSumSquaresSeesEveryInfinity(t *testing.T) {
	for _, set := range Available() {
		const n = 1100
		g := Array{dtype.F32, make([]byte, 4*n)}
		for i := range n {
			for _, bad := range []float32{float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())} {
				g.Put(i, bad)
				if s := set.SumSquares(g); !math.IsInf(s, 0) && !math.IsNaN(s) {
					t.Fatalf("%v: %g at %d gives the sum %g", set, bad, i, s)
				}
			}
			g.Put(i, 0)
		}
		for i := range n {
			g.Put(i, math.MaxFloat32)
		}
		if s := set.SumSquares(g); math.IsInf(s, 0) {
			t.Errorf("%v: finite gradients have the sum of squares %g", set, s)
		}
	}
}

func TestUpdateAllocatesNothing(t *testing.T) {
	for _, f := range formats() {
		c := newChunk(t, f, 100, 0)
		var constants Constants
		for _, set := range Available() {
			if n := testing.AllocsPerRun(5, func() {
				AdamStep{Step: 1}.Constants(&constants)
				set.Update(f, &constants, c)
				set.SumSquares(c.Gradient)
				set.Traffic(f, c)
			}); n != 0 {
				t.Errorf("%v %v: %v allocations a step", set, f, n)
			}
		}
	}
}
