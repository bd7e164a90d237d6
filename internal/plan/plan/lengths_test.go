package plan

import (
	"testing"

	"plimsoll/internal/base/ledger"
)

// TestVaryingLengths: where lengths vary, no more is allocated than for the longest, and more is reserved beyond.
// Blocks for shorter sequences stay beside those for longer ones. The interval holds what other orders reserve.
// A step takes tokens of the mean length.
func TestVaryingLengths(t *testing.T) {
	q := adaptedByLitgpt(t, "llama", 2, `"q_proj"`)
	q.Sequence, q.Accumulation = 2048, 4
	alike := planned(t, q)
	q.ShortestSequence = 64
	varied := planned(t, q)
	peaks := func(p *Plan) (allocated, reserved ledger.Bytes) {
		for _, phase := range p.Devices[0].Phases {
			allocated, reserved = max(allocated, phase.PeakAllocated), max(reserved, phase.PeakReserved)
		}
		return allocated, reserved
	}
	allocated, reserved := peaks(alike)
	allocatedOfVaried, reservedOfVaried := peaks(varied)
	if allocatedOfVaried > allocated || allocatedOfVaried < allocated*4/5 {
		t.Errorf("%v is allocated, and %v where all sequences are as long", allocatedOfVaried, allocated)
	}
	if left := reservedOfVaried - allocatedOfVaried; left <= (reserved-allocated)*6/5 {
		t.Errorf("%v is reserved beyond, and %v where all sequences are as long", left, reserved-allocated)
	}
	if again, _ := peaks(planned(t, q)); again != allocatedOfVaried {
		t.Errorf("the same job takes %v and then %v", allocatedOfVaried, again)
	}
	d := &varied.Devices[0]
	if i := varied.Spread.Reserved(d.Kind, reservedOfVaried, d.Phases); i.Lower > allocatedOfVaried ||
		i.Upper < reservedOfVaried+(reservedOfVaried-allocatedOfVaried)/2 {
		t.Errorf("%v is reserved, %v to %v", reservedOfVaried, i.Lower, i.Upper)
	}
	for _, wrong := range []func(){
		func() { q.ShortestSequence = 2049 },
		func() { q.ShortestSequence, q.UsualSequence = 64, 64 },
		func() { q.UsualSequence, q.PipelineParallel = 0, 2 },
	} {
		wrong()
		if _, err := q.Resolve(); err == nil {
			t.Errorf("lengths from %d, usually %d, with %d stages are planned", q.ShortestSequence, q.UsualSequence,
				q.PipelineParallel)
		}
	}
}
