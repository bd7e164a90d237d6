//go:build linux

package kernel

import (
	"math"
	"math/big"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// TestSplitIsLosslessForEveryPattern covers all 2^32 masters.
func TestSplitIsLosslessForEveryPattern(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds of every core")
	}
	var wrong atomic.Int64
	var workers sync.WaitGroup
	parts := uint64(runtime.NumCPU())
	for part := range parts {
		workers.Go(func() {
			for bits := part << 32 / parts; bits < (part+1)<<32/parts; bits++ {
				if math.Float32bits(Merge(Separate(math.Float32frombits(uint32(bits))))) != uint32(bits) {
					wrong.Add(1)
				}
			}
		})
	}
	workers.Wait()
	if n := wrong.Load(); n != 0 {
		t.Errorf("%d of 2^32 masters are not restored", n)
	}
}

// TestSplitParameterIsRounded compares the bf16 half with rounding half away from zero in
// float64.
func TestSplitParameterIsRounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := math.Float32frombits(rapid.Uint32().Filter(func(b uint32) bool {
			return b&0x7f800000 != 0x7f800000
		}).Draw(t, "bits"))
		parameter, _ := Separate(x)
		lower := math.Float32frombits(math.Float32bits(x) &^ 0xffff)
		upper := math.Float32frombits(math.Float32bits(x)&^0xffff + 0x10000)
		want := upper
		if math.Abs(float64(x)-float64(lower)) < math.Abs(float64(upper)-float64(x)) {
			want = lower
		}
		if got := BF16ToFloat32(parameter); got != want && !math.IsInf(float64(upper), 0) {
			t.Fatalf("%g becomes %g, want %g", x, got, want)
		}
	})
}

// TestHalfConversions covers all 2^16 patterns of both 16-bit types, and the
// numbers between them.
func TestHalfConversions(t *testing.T) {
	for h := range 1 << 16 {
		if x := BF16ToFloat32(uint16(h)); x == x && Float32ToBF16(x) != uint16(h) {
			t.Fatalf("bf16 %#04x is %g and comes back as %#04x", h, x, Float32ToBF16(x))
		}
		x := FP16ToFloat32(uint16(h))
		if x == x && Float32ToFP16(x) != uint16(h) {
			t.Fatalf("fp16 %#04x is %g and comes back as %#04x", h, x, Float32ToFP16(x))
		}
		if x != x && Float32ToFP16(x) != uint16(h)|0x200 {
			t.Fatalf("fp16 %#04x is NaN and comes back as %#04x, want %#04x", h, Float32ToFP16(x), h|0x200)
		}
		// Halfway to the next number the even one wins; beside it the nearer.
		if next := FP16ToFloat32(uint16(h + 1)); h&0x7fff < 0x7bff {
			half := float32((float64(x) + float64(next)) / 2)
			even := uint16(h + h&1)
			nearer := math.Nextafter32(half, x)
			if Float32ToFP16(half) != even || Float32ToFP16(nearer) != uint16(h) {
				t.Fatalf("fp16 between %#04x and the next: %#04x, %#04x", h, Float32ToFP16(half), Float32ToFP16(nearer))
			}
		}
	}
	for x, want := range map[float32]uint16{65504: 0x7bff, 65519: 0x7bff, 65520: 0x7c00, 1e30: 0x7c00, 0x1p-25: 0,
		0x1.8p-25: 1, -0x1p-26: 0x8000} {
		if got := Float32ToFP16(x); got != want {
			t.Errorf("fp16 of %g is %#04x, want %#04x", x, got, want)
		}
	}
}

// exact rounds an exact value as the contract says.
func exact(x *big.Float, negativeZero bool) float32 {
	if x.Sign() == 0 {
		if negativeZero {
			return float32(math.Copysign(0, -1))
		}
		return 0
	}
	rounded := new(big.Float).SetPrec(24).SetMode(big.ToNearestEven).Set(x)
	if rounded.MantExp(nil) < -125 { // below 2^-126
		return float32(math.Copysign(0, float64(x.Sign())))
	}
	f, _ := rounded.Float32()
	return f
}

// drawFloat favours numbers whose sums and products nearly cancel, or lie at
// the edges of the format.
func drawFloat(t *rapid.T, name string) float32 {
	bits := rapid.OneOf(
		rapid.Uint32(),
		rapid.Map(rapid.Uint32Range(0, 1<<12), func(x uint32) uint32 { return x<<20 | x&3 }),
		rapid.Map(rapid.Uint32Range(0, 1<<25), func(x uint32) uint32 { return 0x3f000000 + x }),
		rapid.Map(rapid.Uint32Range(0, 1<<25), func(x uint32) uint32 { return 0x80000000 + x }),
	).Filter(func(b uint32) bool { return b&0x7f800000 != 0x7f800000 }).Draw(t, name)
	return flush(math.Float32frombits(bits))
}

// TestArithmeticIsExactlyRounded compares the software operations with exact rational
// arithmetic.
func TestArithmeticIsExactlyRounded(t *testing.T) {
	check := func(t *rapid.T, name string, got, want float32) {
		if math.Float32bits(got) != math.Float32bits(want) {
			t.Fatalf("%s is %g (%#08x), want %g (%#08x)",
				name, got, math.Float32bits(got), want, math.Float32bits(want))
		}
	}
	wide := func(x float32) *big.Float { return new(big.Float).SetPrec(1024).SetFloat64(float64(x)) }
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := drawFloat(t, "a"), drawFloat(t, "b"), drawFloat(t, "c")
		if rapid.Bool().Draw(t, "cancel") {
			// A sum that is all rounding error of the product.
			c = -mul(a, b)
			if math.IsInf(float64(c), 0) {
				c = 1
			}
		}
		product := new(big.Float).SetPrec(1024).Mul(wide(a), wide(b))
		negative := math.Signbit(float64(a)) != math.Signbit(float64(b))
		check(t, "mul", mul(a, b), exact(product, negative))
		sum := new(big.Float).SetPrec(1024).Add(product, wide(c))
		check(t, "fma", fma(a, b, c), exact(sum, negative && math.Signbit(float64(c)) && product.Sign() == 0))
		if b != 0 {
			quotient := new(big.Float).SetPrec(1024).Quo(wide(a), wide(b))
			check(t, "div", div(a, b), exact(quotient, negative))
		}
		if a > 0 {
			check(t, "sqrt", sqrt(a), exact(new(big.Float).SetPrec(1024).Sqrt(wide(a)), false))
		}
	})
}

// TestRoundingToOddIsNeeded keeps a case in which rounding a fused multiply-add twice goes
// wrong. It shows that the test above can fail.
func TestRoundingToOddIsNeeded(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for range 1 << 22 {
		a, b, c := 1+float32(r.IntN(1<<12))/(1<<12), 1+float32(r.IntN(1<<11))/(1<<12),
			float32(math.Exp2(float64(-60+r.IntN(4))))
		if twice := float32(math.FMA(float64(a), float64(b), float64(c))); twice != fma(a, b, c) {
			return
		}
	}
	t.Error("no case found")
}
