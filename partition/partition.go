// Package partition splits the flat parameters of a model among ranks.
package partition

import "fmt"

// Range is one rank's shard of the flat parameters, in elements.
type Range struct {
	First int64 // of the flat parameters
	Count int64 // the rank's own parameters
	// Padding is how many elements beyond Count the rank holds, so that all ranks
	// hold the same number. The flat parameters end before it.
	Padding int64
}

// Held returns the number of elements that the rank holds.
func (r Range) Held() int64 { return r.Count + r.Padding }

// zeroAlignment is DeepSpeed's nccl_start_alignment_factor: every partition starts
// at a multiple of it, in elements (runtime/zero/stage_1_and_2.py).
const zeroAlignment = 2

// ZeRO splits parameters as DeepSpeed's ZeRO stages 1 and 2 do. It pads the flat
// parameters to a multiple of 2 x ranks elements and gives every rank an equal
// shard. The last ranks hold the padding.
func ZeRO(elements int64, ranks int) ([]Range, error) {
	if elements <= 0 || ranks <= 0 {
		return nil, fmt.Errorf("%d parameters cannot be split among %d ranks", elements, ranks)
	}
	held := partitionSize(elements, int64(ranks))
	parts := make([]Range, ranks)
	for i := range parts {
		first := min(int64(i)*held, elements)
		count := min(held, elements-first)
		parts[i] = Range{First: first, Count: count, Padding: held - count}
	}
	return parts, nil
}

// partitionSize returns elements over ranks, rounded up to the alignment. It cannot
// overflow.
func partitionSize(elements, ranks int64) int64 {
	each := elements / ranks
	if elements%ranks != 0 {
		each++
	}
	return each + each%zeroAlignment
}
