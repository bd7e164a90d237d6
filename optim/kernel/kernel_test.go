package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/dtype"
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
	for _, state := range []State{Split, FP32} {
		for _, parameter := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
			for _, gradient := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32, dtype.I8} {
				if f := (Format{state, parameter, gradient}); f.Validate() == nil {
					all = append(all, f)
				}
			}
		}
	}
	return all
}

func (f Format) String() string {
	return fmt.Sprintf("%v/parameter=%v/gradient=%v", f.State, f.Parameter, f.Gradient)
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

func view[T any](b []byte) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(t)))
}

// newChunk is a chunk between guard pages. Elements stay naturally aligned, but
// vectors do not when shift is odd.
func newChunk(t testing.TB, f Format, n, shift int) Chunk {
	stream := func(size int) []byte { return guarded(t, n*size, 64, shift*size) }
	c := Chunk{
		ExpAvg:   view[float32](stream(4)),
		ExpAvgSq: view[float32](stream(4)),
		Gradient: Gradient{f.Gradient, stream(int(f.Gradient.Size()))},
	}
	if f.hasParameter() {
		c.Parameter = view[uint16](stream(2))
	}
	if f.State == FP32 {
		c.Master = view[float32](stream(4))
	} else {
		c.Low = view[uint16](stream(2))
	}
	return c
}

func copyChunk(to, from Chunk) {
	copy(to.Parameter, from.Parameter)
	copy(to.Low, from.Low)
	copy(to.Master, from.Master)
	copy(to.ExpAvg, from.ExpAvg)
	copy(to.ExpAvgSq, from.ExpAvgSq)
	copy(to.Gradient.Data, from.Gradient.Data)
}

// fill sets a chunk to values as training has them, with the strange ones
// mixed in: zeros of both signs, denormals, the largest and smallest numbers,
// infinities and NaN.
func fill(r *rand.Rand, f Format, c Chunk, strange bool) {
	number := func(scale float64) float32 {
		if strange && r.IntN(8) == 0 {
			return math.Float32frombits([]uint32{
				0, 0x80000000, 1, 0x80000001, 0x007fffff, 0x00800000, 0x80800000, 0x7f7fffff,
				0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x3f800000, 0x00ffffff,
				r.Uint32(), r.Uint32() & 0x80ffffff,
			}[r.IntN(16)])
		}
		return float32(r.NormFloat64() * scale * math.Exp2(float64(r.IntN(12)-6)))
	}
	for i := range c.ExpAvg {
		p := number(0.02)
		if f.State == FP32 {
			c.Master[i] = p
		} else {
			c.Parameter[i], c.Low[i] = Separate(p)
		}
		c.ExpAvg[i] = number(1e-3)
		c.ExpAvgSq[i] = float32(math.Abs(float64(number(1e-6))))
		g := number(1e-2)
		switch f.Gradient {
		case dtype.BF16:
			view[uint16](c.Gradient.Data)[i] = uint16(math.Float32bits(g) >> 16)
		case dtype.F16:
			view[uint16](c.Gradient.Data)[i] = Float32ToFP16(g)
		default:
			view[float32](c.Gradient.Data)[i] = g
		}
	}
}

// differ names the first element in which two chunks differ. All NaN are one.
func differ(f Format, a, b Chunk) string {
	same := func(x, y float32) bool {
		return math.Float32bits(x) == math.Float32bits(y) || x != x && y != y
	}
	for i := range a.ExpAvg {
		pa, pb := !f.hasParameter() || a.Parameter[i] == b.Parameter[i], true
		if f.State == FP32 {
			pb = same(a.Master[i], b.Master[i])
			if a.Master[i] != a.Master[i] {
				pa = true // the copy of a NaN
			}
		} else {
			x, y := Merge(a.Parameter[i], a.Low[i]), Merge(b.Parameter[i], b.Low[i])
			pb = same(x, y)
			pa = pa || x != x
		}
		if !pa || !pb || !same(a.ExpAvg[i], b.ExpAvg[i]) || !same(a.ExpAvgSq[i], b.ExpAvgSq[i]) {
			dump := func(c Chunk) string {
				master := float32(0)
				if f.State == FP32 {
					master = c.Master[i]
				} else {
					master = Merge(c.Parameter[i], c.Low[i])
				}
				return fmt.Sprintf("master %#08x exp_avg %#08x exp_avg_sq %#08x", math.Float32bits(master), math.Float32bits(c.ExpAvg[i]), math.Float32bits(c.ExpAvgSq[i]))
			}
			return fmt.Sprintf("element %d (gradient %g):\n  %s\n  %s", i, a.Gradient.at(i), dump(a), dump(b))
		}
	}
	return ""
}

func steps(r *rand.Rand) []AdamStep {
	return []AdamStep{
		{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, WeightDecay: 0.01, Step: 1, GradientScale: 1},
		{LearningRate: 3e-4, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1, Step: 1000, GradientScale: 1.0 / 65536},
		{LearningRate: 1e-2, Beta1: 0.8, Beta2: 0.99, Epsilon: 1e-6, WeightDecay: 0.01, L2: true, Step: 7, GradientScale: 0.3},
		{LearningRate: 1, Beta1: 0, Beta2: 0, Epsilon: 0, Uncorrected: true, Step: 3, GradientScale: 1e30},
		{LearningRate: 1e-42, Beta1: r.Float64(), Beta2: r.Float64(), Epsilon: 1e-40, WeightDecay: r.Float64(), Step: 2, GradientScale: 1e-30},
	}
}

// TestSetsAgree holds every vector kernel against the reference, to the bit,
// for every length up to a few turns of its loop, off alignment, next to guard
// pages, and for values that no training should see.
func TestSetsAgree(t *testing.T) {
	for _, set := range Available()[1:] {
		for _, f := range formats() {
			t.Run(fmt.Sprintf("%v/%v", set, f), func(t *testing.T) {
				r := rand.New(rand.NewPCG(1, uint64(set)))
				lengths := []int{1023, 4096}
				for n := range 83 {
					lengths = append(lengths, n)
				}
				for _, n := range lengths {
					for _, shift := range []int{0, 1 + r.IntN(15)} {
						got, want := newChunk(t, f, n, shift), newChunk(t, f, n, 0)
						fill(r, f, want, n%2 == 0)
						copyChunk(got, want)
						for _, s := range steps(r) {
							var a Adam
							a.Set(s)
							set.Adam(f, &a, got)
							adamReference(f, &a, want)
							if d := differ(f, got, want); d != "" {
								t.Fatalf("n=%d shift=%d %+v: %s", n, shift, s, d)
							}
						}
						sum, reference := set.SumSquares(got.Gradient), Generic.SumSquares(got.Gradient)
						if sum != reference && !(math.IsNaN(sum) && math.IsNaN(reference)) {
							t.Fatalf("n=%d shift=%d: sum of squares %g, reference %g", n, shift, sum, reference)
						}
					}
				}
			})
		}
	}
}

// TestTrafficChangesNothing holds for every stream but a write-only one.
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
	f := Format{Split, dtype.BF16, dtype.BF16}
	c := newChunk(t, f, 32, 0)
	c.ExpAvg = c.ExpAvg[:31]
	defer func() {
		if recover() == nil {
			t.Error("a chunk whose streams differ in length was walked")
		}
	}()
	Generic.Adam(f, &Adam{}, c)
}

func TestBytesPerParameter(t *testing.T) {
	for _, test := range []struct {
		format            Format
		resident, traffic int64
	}{
		{Format{Split, dtype.BF16, dtype.BF16}, 14, 26},
		{Format{Split, dtype.BF16, dtype.F32}, 16, 28},
		{Format{FP32, dtype.BF16, dtype.F32}, 18, 30},
		{Format{FP32, dtype.F16, dtype.F16}, 16, 28},
		{Format{FP32, dtype.F32, dtype.F32}, 16, 28},
	} {
		if got := test.format.ResidentBytes(); got != test.resident {
			t.Errorf("%v: %d bytes a parameter resident, want %d", test.format, got, test.resident)
		}
		if got := test.format.TrafficBytes(); got != test.traffic {
			t.Errorf("%v: %d bytes a parameter moved, want %d", test.format, got, test.traffic)
		}
	}
}

// TestSumSquaresSeesEveryInfinity puts one infinity or NaN at every place.
func TestSumSquaresSeesEveryInfinity(t *testing.T) {
	for _, set := range Available() {
		for i := range 77 {
			for _, bad := range []float32{float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())} {
				data := make([]byte, 4*77)
				view[float32](data)[i] = bad
				if s := set.SumSquares(Gradient{dtype.F32, data}); !math.IsInf(s, 0) && !math.IsNaN(s) {
					t.Fatalf("%v: %g at %d gives the sum %g", set, bad, i, s)
				}
			}
		}
		data := make([]byte, 4*32)
		for i := range 32 {
			view[float32](data)[i] = math.MaxFloat32
		}
		if s := set.SumSquares(Gradient{dtype.F32, data}); math.IsInf(s, 0) {
			t.Errorf("%v: finite gradients have the sum of squares %g", set, s)
		}
	}
}

func TestAdamAllocatesNothing(t *testing.T) {
	f := Format{Split, dtype.BF16, dtype.BF16}
	c := newChunk(t, f, 1000, 0)
	var a Adam
	for _, set := range Available() {
		if n := testing.AllocsPerRun(10, func() {
			a.Set(steps(rand.New(rand.NewPCG(1, 1)))[0])
			set.Adam(f, &a, c)
			set.SumSquares(c.Gradient)
			set.Traffic(f, c)
		}); n > 2 { // the generator and the slice of the test itself
			t.Errorf("%v: %v allocations a step", set, n)
		}
	}
}
