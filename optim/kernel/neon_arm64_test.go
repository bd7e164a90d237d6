//go:build !purego

package kernel

import (
	"math"
	"testing"
)

// TestZerosAreNotTiny: gradients have many of them, of either sign, and plain Go is
// slow.
func TestZerosAreNotTiny(t *testing.T) {
	var zeros [48]float32
	for i := range zeros {
		zeros[i] = math.Float32frombits(uint32(i) << 31)
	}
	if done := mulNEON(&zeros[0], len(zeros), 3, &zeros[0]); done != len(zeros) {
		t.Errorf("%d of %d zeros are multiplied", done, len(zeros))
	}
}
