package synthetic

import (
	"bytes"
	"math"
	"testing"

	"plimsoll/dtype"
	"plimsoll/optim/kernel"
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
