package synthetic

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel"
)

// TestGradients are finite, of the stated size, different in each step, and
// independent of how a shard is cut into chunks.
func TestGradients(t *testing.T) {
	for _, typ := range []dtype.Type{dtype.BF16, dtype.F16, dtype.F32} {
		const n = 1003
		size := int(typ.Size())
		whole, parts := make([]byte, n*size), make([]byte, n*size)
		Gradients(0, 1, 0, kernel.Array{Type: typ, Data: whole})
		for _, cut := range [][2]int{{0, 400}, {400, n}} { // 400: whole words
			Gradients(0, 1, int64(cut[0]), kernel.Array{Type: typ, Data: parts[cut[0]*size : cut[1]*size]})
		}
		if !bytes.Equal(whole, parts) {
			t.Errorf("%v: gradients depend on the chunks", typ)
		}
		Gradients(0, 2, 0, kernel.Array{Type: typ, Data: parts})
		if bytes.Equal(whole, parts) {
			t.Errorf("%v: two steps have the same gradients", typ)
		}
		// The root mean square of numbers of that range lies within it.
		rms := math.Sqrt(kernel.Generic.SumSquares(kernel.Array{Type: typ, Data: whole}) / n)
		if !(rms > 0x1p-11 && rms < 0x1p-7) {
			t.Errorf("%v: root mean square %g", typ, rms)
		}
	}
}

// TestWeights are different, in the stated range, and independent of how a shard is cut into
// chunks and of how it holds its master weights.
func TestWeights(t *testing.T) {
	const n = 1003
	whole, masters := make([]float32, n), make([]float32, n)
	parameters, lows := make([]uint16, n), make([]uint16, n)
	write := func(first, end int, c kernel.Chunk) {
		c.Gradient = kernel.Array{Type: dtype.BF16, Data: make([]byte, 2*(end-first))}
		Weights(0, 4+int64(first), c)
	}
	write(0, n, kernel.Chunk{Master: whole})
	for _, cut := range [][2]int{{0, 401}, {401, 402}, {402, n}} {
		first, end := cut[0], cut[1]
		write(first, end, kernel.Chunk{Parameter: parameters[first:end], Low: lows[first:end]})
		write(first, end, kernel.Chunk{Master: masters[first:end]})
	}
	seen := map[float32]bool{}
	for i, w := range whole {
		upper, low := kernel.Separate(w)
		if masters[i] != w || parameters[i] != upper || lows[i] != low {
			t.Fatalf("weight %d depends on the chunks", i)
		}
		if size := math.Abs(float64(w)); size < 0x1p-11 || size >= 0x1p-7 || seen[w] {
			t.Fatalf("weight %d is %g, or was there before", i, w)
		}
		seen[w] = true
	}
}

// numbers returns the elements of an array.
func numbers(g kernel.Array) []float64 {
	var found []float64
	for i := range g.Len() {
		switch g.Type {
		case dtype.F16:
			found = append(found, float64(kernel.FP16ToFloat32(binary.LittleEndian.Uint16(g.Data[2*i:]))))
		case dtype.BF16:
			found = append(found, float64(kernel.BF16ToFloat32(binary.LittleEndian.Uint16(g.Data[2*i:]))))
		default:
			found = append(found, float64(math.Float32frombits(binary.LittleEndian.Uint32(g.Data[4*i:]))))
		}
	}
	return found
}

// TestScaledGradients: scaled gradients are the gradients of scale 1, multiplied, as far as
// fp16 goes. The type that stores them and the cuts of the shard make no difference.
func TestScaledGradients(t *testing.T) {
	const n = 400_003
	write := func(typ dtype.Type, scale float64, cut int) []float64 {
		size := int(typ.Size())
		g := kernel.Array{Type: typ, Data: make([]byte, n*size)}
		s := NewScaledGradients(typ)
		s.SetScale(scale)
		s.Write(0, 1, 0, g.Slice(0, cut))
		s.Write(0, 1, int64(cut), g.Slice(cut, n))
		return numbers(g)
	}
	plain := write(dtype.F16, 1, n)
	var squares float64
	outliers, signs := 0, 0
	for _, x := range plain {
		switch {
		case math.Abs(x) == Outlier:
			outliers++
		case !(math.Abs(x) >= 0x1p-11 && math.Abs(x) < 0x1p-7):
			t.Fatalf("a gradient is %g", x)
		default:
			squares += x * x
		}
		if math.Signbit(x) {
			signs++
		}
	}
	if rms := math.Sqrt(squares / n); !(rms > 0x1p-11 && rms < 0x1p-7) || outliers < n/32768/2 ||
		outliers > n/32768*2 || math.Abs(float64(signs)/n-0.5) > 0.01 {
		t.Errorf("root mean square %g, %d outliers, %d negative of %d", rms, outliers, signs, n)
	}
	for _, typ := range []dtype.Type{dtype.F16, dtype.BF16, dtype.F32} {
		// 2^15 is too much for the outliers and 2^23 for others; 2^-16 leaves
		// nothing of the smallest. 1000 rounds.
		for _, scale := range []float64{1, 1024, 1000, 0x1p15, 0x1p23, 0x1p-16} {
			infinite, zero := 0, 0
			for i, x := range write(typ, scale, 1200) {
				want := float64(kernel.FP16ToFloat32(kernel.Float32ToFP16(float32(plain[i] * scale))))
				if typ == dtype.BF16 {
					want = float64(kernel.BF16ToFloat32(kernel.Float32ToBF16(float32(want))))
				}
				if x != want {
					t.Fatalf("%v, scale %g: gradient %d is %g, want %g", typ, scale, i, x, want)
				}
				if math.IsInf(x, 0) {
					infinite++
				}
				if x == 0 {
					zero++
				}
			}
			if (infinite > 0) != (scale >= 0x1p15) || scale == 0x1p15 && infinite != outliers ||
				(zero > 0) != (scale == 0x1p-16) {
				t.Errorf("%v, scale %g: %d are infinite and %d zero, %d outliers", typ, scale, infinite, zero, outliers)
			}
		}
	}
}
