package shard

import "fmt"

// Partition is one rank's share of the flat parameters.
type Partition struct {
	Range // the rank's own parameters
	// Padding is how many elements the rank holds beyond its own, so that all ranks hold the same number. The flat
	// parameters end before it.
	Padding int64
}

// Held returns the number of elements that the rank holds.
func (p Partition) Held() int64 { return p.Count + p.Padding }

// zeroAlignment is DeepSpeed's nccl_start_alignment_factor: every partition starts
// at a multiple of it, in elements (runtime/zero/stage_1_and_2.py).
const zeroAlignment = 2

// ZeRO splits parameters as DeepSpeed's ZeRO stages 1 and 2 do. It pads the flat
// parameters to a multiple of 2 x ranks elements and gives every rank an equal
// partition. The last ranks hold the padding.
func ZeRO(elements int64, ranks int) ([]Partition, error) {
	if elements <= 0 || ranks <= 0 {
		return nil, fmt.Errorf("%d parameters cannot be split among %d ranks", elements, ranks)
	}
	held := partitionSize(elements, int64(ranks))
	parts := make([]Partition, ranks)
	for i := range parts {
		own := Range{int64(i) * held, held}.Intersect(Range{0, elements})
		parts[i] = Partition{Range: own, Padding: held - own.Count}
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
