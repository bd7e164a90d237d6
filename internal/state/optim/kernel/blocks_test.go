//go:build linux

package kernel

import (
	"hash/crc32"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
)

func newBlock(n int) block { return block{new(uint16), make([]byte, n), make([]byte, n)} }

// decodeBlock returns element i of the first moment, and the root of the second.
func decodeBlock(b block, i int) (m, s float32) {
	floor, shift := layout(*b.header)
	return decode(b.first[i], b.second[i], floor, shift)
}

// held returns the moments of a block as it holds them.
func held(b block) (firsts, roots []float32) {
	for i := range b.first {
		m, s := decodeBlock(b, i)
		firsts, roots = append(firsts, m), append(roots, s)
	}
	return firsts, roots
}

// drawMoments draws the first moments and roots of second moments of a block,
// some of them zero.
func drawMoments(t *rapid.T) (firsts, roots []float32) {
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	middle := rapid.Float64Range(-25, 40).Draw(t, "octave")
	spread := rapid.Float64Range(0, 45).Draw(t, "octaves")
	full := rapid.Float64Range(0, 1).Draw(t, "share that is not 0")
	n := rapid.IntRange(1, Block).Draw(t, "elements")
	firsts, roots = make([]float32, n), make([]float32, n)
	for i := range roots {
		if r.Float64() < full {
			roots[i] = float32(min(max(0x1p-63, math.Exp2(middle+spread*(r.Float64()-0.5))), 0x1p63))
			firsts[i] = roots[i] * float32(3*r.NormFloat64()*r.Float64())
		}
	}
	return firsts, roots
}

// TestBlocksHoldMomentsToAStep: no moment vanishes, and none is further off than a step of
// its code.
func TestBlocksHoldMomentsToAStep(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		firsts, roots := drawMoments(t)
		b := newBlock(len(roots))
		Generic.encode(b, firsts, roots, atRandom(rapid.Uint32().Draw(t, "dither")))
		heldFirsts, heldRoots := held(b)
		step := math.Ldexp(1, int(*b.header>>8)-23)
		floor := float64(math.Float32frombits(uint32(*b.header&0xff)<<23)) * (1 + step)
		for i := range roots {
			m, s, heldM, heldS := float64(firsts[i]), float64(roots[i]), float64(heldFirsts[i]), float64(heldRoots[i])
			switch {
			case s == 0:
				if heldS != 0 || heldM != 0 {
					t.Fatalf("element %d: 0 became %g, %g", i, heldM, heldS)
				}
				continue
			case s < floor:
				if heldS != floor {
					t.Fatalf("element %d: root %g is below the floor %g and became %g", i, s, floor, heldS)
				}
			case math.Abs(heldS/s-1) >= step:
				t.Fatalf("element %d: root %g became %g, steps are %g", i, s, heldS, step)
			}
			unit := math.Exp2(math.Floor(math.Log2(heldS)))
			if math.Abs(m) < 15*unit && math.Abs(heldM-m) > (math.Abs(m)+unit/16)/16 || math.Abs(heldM) > 15.5*unit {
				t.Fatalf("element %d: first moment %g became %g, in units of %g", i, m, heldM, unit)
			}
		}
		// Numbers on the grid do not change, whatever the dither.
		Generic.encode(b, heldFirsts, heldRoots, atRandom(rapid.Uint32().Draw(t, "other dither")))
		againFirsts, againRoots := held(b)
		for i := range roots {
			if againFirsts[i] != heldFirsts[i] || againRoots[i] != heldRoots[i] {
				t.Fatalf("element %d was held, and changed", i)
			}
		}
	})
}

// TestBlocksRoundWithoutBias averages over the steps.
func TestBlocksRoundWithoutBias(t *testing.T) {
	const steps = 4096
	var sumFirsts, sumRoots [Block]float64
	firsts, roots := make([]float32, Block), make([]float32, Block)
	for i := range roots {
		roots[i] = float32(math.Exp2(-5 * float64(i) / Block))
		firsts[i] = roots[i] * float32(i-128) / 128
	}
	b := newBlock(Block)
	for step := range int64(steps) {
		var c Constants
		AdamStep{Step: step}.Constants(&c)
		Generic.encode(b, firsts, roots, atRandom(scramble(5)+c.stride))
		for i := range roots {
			m, s := decodeBlock(b, i)
			sumFirsts[i] += float64(m-firsts[i]) / steps
			sumRoots[i] += float64(s-roots[i]) / steps
		}
	}
	for i, s := range roots {
		// The unit of m changes with s where s is rounded over a power of two.
		if math.Abs(sumRoots[i]/float64(s)) > 1e-4 || math.Abs(sumFirsts[i]/float64(s)) > 1e-3 {
			t.Errorf("element %d: root %g is off by %g, first moment %g by %g",
				i, s, sumRoots[i], firsts[i], sumFirsts[i])
		}
	}
}

// TestBlocksHaveTheBitsOfTheStudy pins the codes of made-up moments. The same
// moments give the same checksum in experiments/eight-bit.
func TestBlocksHaveTheBitsOfTheStudy(t *testing.T) {
	sum := crc32.NewIEEE()
	for step := range uint32(64) {
		r := rand.New(rand.NewPCG(9, uint64(step)))
		firsts, roots := make([]float32, Block), make([]float32, Block)
		for i := range roots {
			if r.IntN(8) > 0 {
				roots[i] = math.Float32frombits(r.Uint32()&0x7fffff | uint32(64+step+r.Uint32N(step/2+1))<<23)
				firsts[i] = math.Float32frombits(r.Uint32()&0x807fffff | uint32(60+step+r.Uint32N(step+8))<<23)
			}
		}
		b := newBlock(Block)
		Generic.encode(b, firsts, roots, atRandom(scramble(step%3)+step*0xc13c8f09))
		sum.Write([]byte{byte(*b.header), byte(*b.header >> 8)})
		sum.Write(b.first)
		sum.Write(b.second)
	}
	if got, want := sum.Sum32(), uint32(0x94deea3e); got != want {
		t.Errorf("checksum %#x, expected %#x", got, want)
	}
}

// TestBlocksHoldWhatIsTooLarge: one element that overflowed does not spoil the header.
func TestBlocksHoldWhatIsTooLarge(t *testing.T) {
	for _, bad := range []float32{float32(math.Inf(1)), float32(math.NaN()), -float32(math.NaN()), 0x1.8p63} {
		b := newBlock(3)
		Generic.encode(b, []float32{bad, 1, 0}, []float32{bad, 1, 0}, atRandom(0xffffffff))
		if m, s := decodeBlock(b, 0); s != 0x1p63 || !(math.Abs(float64(m)) <= 15.5*0x1p63) {
			t.Errorf("%g is held as %g, %g", bad, m, s)
		}
		if _, s := decodeBlock(b, 2); s != 0 {
			t.Errorf("beside %g, 0 is held as %g", bad, s)
		}
	}
}

// TestChunksBeginWithABlock: otherwise headers would belong to other elements.
func TestChunksBeginWithABlock(t *testing.T) {
	f := Format{Moments: MomentsInt8, Gradient: dtype.BF16, Parameter: dtype.BF16}
	c := newChunk(t, f, 1000, 0)
	for name, spoilt := range map[string]Chunk{
		"in the middle of a block": func(c Chunk) Chunk { c.First++; return c }(c),
		"with a header too few":    func(c Chunk) Chunk { c.Headers = c.Headers[1:]; return c }(c),
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a chunk %s was walked", name)
				}
			}()
			Generic.Update(f, &Constants{}, spoilt)
		}()
	}
	last := c.Slice(768, 1000)
	if last.First != c.First+768 || len(last.Headers) != 1 || &last.Headers[0] != &c.Headers[3] {
		t.Errorf("the last block is %d headers from %d on", len(last.Headers), last.First)
	}
}

// TestPutBlockRoundsToNearest: no other code of an element is nearer, and decoded moments
// get their old codes.
func TestPutBlockRoundsToNearest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, Block).Draw(t, "elements")
		c := Chunk{Moments: [2]Array{{dtype.U8, make([]byte, n)}, {dtype.U8, make([]byte, n)}},
			Headers: make([]uint16, 1)}
		firsts, seconds := make([]float32, n), make([]float32, n)
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		for i := range firsts {
			root := math.Exp2(-4 * random.Float64())
			firsts[i], seconds[i] = float32(root*(2*random.Float64()-1)), float32(root*root)
		}
		c.PutBlock(0, firsts, seconds)
		b := c.block(0)
		for i := range firsts {
			m, s := decodeBlock(b, i)
			// The root is rounded to 32 bits before it is encoded. That may move it over the middle
			// between two codes, so the nearest code is that of the rounded root.
			root := sqrt(seconds[i])
			offM, offS := math.Abs(float64(m-firsts[i])), math.Abs(float64(s)-float64(root))
			first, second := b.first[i], b.second[i]
			for _, by := range []byte{1, 255} {
				if b.second[i] = second + by; b.second[i] != 0 {
					if _, other := decodeBlock(b, i); math.Abs(float64(other)-float64(root)) < offS {
						t.Fatalf("element %d: root %g is held as %g, and %g is nearer", i, root, s, other)
					}
				}
				b.second[i], b.first[i] = second, first+by
				// The units of m grow with m: m is half way where m+R is half way between two
				// floats of 4 digits.
				if other, _ := decodeBlock(b, i); first&127 < 127 && first&127 > 0 &&
					math.Abs(float64(other-firsts[i])) < offM*(1-1e-5) {
					t.Fatalf("element %d: first moment %g is held as %g, and %g is nearer", i, firsts[i], m, other)
				}
				b.first[i] = first
			}
			firsts[i], seconds[i] = m, s*s
		}
		c.PutBlock(0, firsts, seconds)
		for i := range firsts {
			if m, s := decodeBlock(b, i); m != firsts[i] || s*s != seconds[i] {
				t.Fatalf("element %d was held, and changed", i)
			}
		}
	})
}
