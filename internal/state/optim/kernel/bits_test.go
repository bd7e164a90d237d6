//go:build linux

package kernel

import (
	"crypto/sha256"
	_ "embed"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/goldentest"
)

// goldenBits is in the binary, so that emulated machines need no files.
//
//go:embed testdata/bits.golden
var goldenBits string

// TestBitsAreTheSameEverywhere compares the results of every format with hashes that were
// made once, on x86-64. Every other processor, compiler and build must give the same.
func TestBitsAreTheSameEverywhere(t *testing.T) {
	golden := filepath.Join("testdata", "bits.golden")
	var lines strings.Builder
	for _, f := range formats() {
		var prints []string
		for _, set := range Available() {
			prints = append(prints, trajectoryHash(t, set, f))
		}
		for i, print := range prints {
			if print != prints[0] {
				t.Errorf("%v: %v gives %s, %v gives %s", f, Available()[i], print, Available()[0], prints[0])
			}
		}
		fmt.Fprintf(&lines, "%v %s\n", f, prints[0])
	}
	if *goldentest.Update {
		if err := os.WriteFile(golden, []byte(lines.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if lines.String() != goldenBits {
		t.Errorf("the bits are not those of %s:\n%s", golden, lines.String())
	}
}

// trajectoryHash runs some steps over numbers of all sizes, and hashes the final state.
func trajectoryHash(t *testing.T, set Set, f Format) string {
	const n = 1003
	r := rand.New(rand.NewPCG(7, 7))
	// Made of a mantissa and an exponent, without any library function. Some are
	// denormal.
	number := func(least, most int) float32 {
		bits := r.Uint32()&0x807fffff | uint32(least+r.IntN(most-least))<<23
		return math.Float32frombits(bits)
	}
	c := newChunk(t, f, n, 0)
	var moments [2][n]float32
	for i := range n {
		c.PutMasterWeight(f, i, number(100, 128))
		moments[0][i] = number(0, 120)
		if f.Algorithm != Lion && f.Algorithm != SGD {
			moments[f.Algorithm.Moments()-1][i] = float32(math.Abs(float64(number(0, 110))))
		}
	}
	putMoments(c, moments[0][:], moments[1][:])
	constants := steps(f.Algorithm)[:3] // the usual ones, which make few NaN
	for step := range 12 {
		for i := range n {
			c.Gradient.Put(i, number(90, 125))
			if r.IntN(4) == 0 {
				c.Gradient.Put(i, 0)
			}
		}
		set.Update(f, &constants[step%len(constants)], c)
	}
	finite := 0
	for i := range n {
		if p := c.MasterWeight(f, i); p == p {
			finite++
		}
	}
	if finite < n*9/10 {
		t.Fatalf("%v: only %d of %d numbers say something", f, finite, n)
	}
	h := sha256.New()
	word := func(x float32) {
		if x != x {
			x = float32(math.NaN()) // which one is not specified
		}
		h.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(x)))
	}
	for i := range n {
		word(c.MasterWeight(f, i))
		for m := range f.Algorithm.Moments() {
			word(c.Moment(m, i))
		}
		if f.hasParameter() && c.MasterWeight(f, i) == c.MasterWeight(f, i) {
			h.Write(binary.LittleEndian.AppendUint16(nil, c.Parameter[i]))
		}
	}
	sum := set.SumSquares(c.Gradient)
	h.Write(binary.LittleEndian.AppendUint64(nil, math.Float64bits(sum)))
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}
