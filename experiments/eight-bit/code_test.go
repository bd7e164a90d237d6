package main

import (
	"hash/crc32"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// moments draws the first moments and roots of second moments of a block, some of them zero.
func moments(t *rapid.T) (m, s vector) {
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	middle := rapid.Float64Range(-25, 40).Draw(t, "octave")
	spread := rapid.Float64Range(0, 45).Draw(t, "octaves")
	full := rapid.Float64Range(0, 1).Draw(t, "share that is not 0")
	for i := range s {
		if r.Float64() < full {
			s[i] = float32(math.Max(0x1p-63, math.Exp2(middle+spread*(r.Float64()-0.5))))
			m[i] = s[i] * float32(3*r.NormFloat64()*r.Float64())
		}
	}
	return m, s
}

func TestRootsAreWithinAStepAndNeverVanish(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, s := moments(t)
		var b block
		var heldM, heldS vector
		chosen.encode(&b, rapid.Uint32().Draw(t, "block"), rapid.Uint32().Draw(t, "step"), &m, &s)
		b.decode(&heldM, &heldS)
		ulp := math.Ldexp(1, int(b.shift)-23)
		floor := float64(math.Float32frombits(uint32(b.floor)<<23)) * (1 + ulp)
		for i := range s {
			held, is := float64(heldS[i]), float64(s[i])
			switch {
			case is == 0:
				if held != 0 || heldM[i] != 0 {
					t.Fatalf("element %d: 0 became %g, %g", i, heldM[i], held)
				}
			case is < floor:
				if held != floor {
					t.Fatalf("element %d: %g is below the floor %g and became %g", i, is, floor, held)
				}
			case math.Abs(held/is-1) >= ulp:
				t.Fatalf("element %d: %g became %g, steps are %g", i, is, held, ulp)
			}
		}
	})
}

func TestFirstMomentsAreWithinAStep(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, s := moments(t)
		var b block
		var heldM, heldS vector
		chosen.encode(&b, rapid.Uint32().Draw(t, "block"), rapid.Uint32().Draw(t, "step"), &m, &s)
		b.decode(&heldM, &heldS)
		for i := range m {
			if s[i] == 0 {
				continue
			}
			reference := math.Exp2(math.Floor(math.Log2(float64(heldS[i]))))
			is := float64(m[i]) / reference
			step := (math.Abs(is) + offset) / 16 // at most
			if distance := math.Abs(float64(heldM[i])/reference - is); math.Abs(is) < 15 && distance > step {
				t.Fatalf("element %d: %g became %g, in units of %g", i, m[i], heldM[i], reference)
			} else if math.Abs(float64(heldM[i])) > 15.5*reference {
				t.Fatalf("element %d: %g is out of range", i, heldM[i])
			}
		}
	})
}

// TestHeldNumbersStay: dither does not move values on the grid, and the grid does not move with the largest element
// of the block.
func TestHeldNumbersStay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, s := moments(t)
		var b block
		chosen.encode(&b, 3, 1, &m, &s)
		b.decode(&m, &s)
		var againM, againS vector
		chosen.encode(&b, 3, rapid.Uint32().Draw(t, "step"), &m, &s)
		b.decode(&againM, &againS)
		if againM != m || againS != s {
			t.Fatal("a block changed that was held already")
		}
		first := s[0]
		s[0] = 2 * largest(&s)
		wide := code{sequence, 3, 3} // as few digits as a wider block would get
		narrow := block{}
		wide.encode(&b, 3, 2, &m, &s)
		b.decode(&m, &s)
		s[0] = first
		wide.encode(&narrow, 3, 3, &m, &s)
		narrow.decode(&againM, &againS)
		if s[0] != 0 {
			s[0], againS[0] = 0, 0
		}
		if againS != s {
			t.Fatal("elements moved because another one did")
		}
	})
}

// TestRoundingIsUnbiased averages over the steps.
func TestRoundingIsUnbiased(t *testing.T) {
	const steps = 4096
	var m, s, sumM, sumS, heldM, heldS vector
	for i := range s {
		s[i] = float32(math.Exp2(-5 * float64(i) / blockElements))
		m[i] = s[i] * float32(i-128) / 128
	}
	var b block
	for step := range uint32(steps) {
		chosen.encode(&b, 5, step, &m, &s)
		b.decode(&heldM, &heldS)
		for i := range s {
			sumM[i] += (heldM[i] - m[i]) / steps
			sumS[i] += (heldS[i] - s[i]) / steps
		}
	}
	for i := range s {
		if math.Abs(float64(sumS[i]/s[i])) > 1e-4 {
			t.Errorf("root %d: %g is off by %g", i, s[i], sumS[i])
		}
		// The reference changes with s where s is rounded over a power of two.
		if math.Abs(float64(sumM[i]/s[i])) > 1e-3 {
			t.Errorf("first moment %d: %g is off by %g", i, m[i], sumM[i])
		}
	}
}

// TestBits pins the bits of 100 steps, for kernels to match.
func TestBits(t *testing.T) {
	o := &ours{code: chosen}
	r := runner{states: []state{o}}
	source := newGradients(scenarios[3], blockElements, usualSeed)
	g := make([]float32, blockElements)
	for step := range 100 {
		for i := range g {
			g[i] = source.next(step, i)
		}
		r.step(0, step, g, 0.999)
	}
	sum := crc32.NewIEEE()
	sum.Write([]byte{o.floor, o.shift})
	sum.Write(o.first[:])
	sum.Write(o.second[:])
	if got, want := sum.Sum32(), uint32(0xa34c7462); got != want {
		t.Errorf("checksum %#x, expected %#x", got, want)
	}
}
