package simulate

import (
	"slices"
	"testing"

	"plimsoll/internal/plan/job"
)

func TestSubGroups(t *testing.T) {
	for _, c := range []struct {
		shards []int64
		size   int64
		want   []int64
	}{
		{[]int64{3, 3, 3}, 6, []int64{6, 3}}, // full to the last element
		{[]int64{3, 3, 3}, 7, []int64{9}},
		{[]int64{9, 1}, 5, []int64{9, 1}}, // one parameter is not cut
		{nil, 5, nil},
	} {
		if got := subGroups(c.shards, c.size); !slices.Equal(got, c.want) {
			t.Errorf("%v in sub-groups of %d: %v, want %v", c.shards, c.size, got, c.want)
		}
	}
}

// TestShardsAreRoundedUp: DeepSpeed pads a parameter, so that all ranks have as much of it.
func TestShardsAreRoundedUp(t *testing.T) {
	e := &deepSpeed{simulation: &simulation{Job: &job.Job{}}}
	e.Parallel.Shard = 8
	for elements, want := range map[int64]int64{1: 1, 8: 1, 9: 2, 16: 2} {
		if got := e.shardOf(elements); got != want {
			t.Errorf("a rank of 8 has %d of %d elements, want %d", got, elements, want)
		}
	}
}
